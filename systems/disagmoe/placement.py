"""Where DisagMoE puts the parts: p attention groups of M ranks, p (or p_F) expert groups of N, layers dealt in turn."""

from functools import lru_cache
from operator import attrgetter

from bench.case import Layout
from bench.errors import BadInput
from bench.models import Model
from bench.placement import Group, Placement
from bench.system import require_divides
from systems.disagmoe.shift import turns


def expert_depth(layout: Layout) -> int:
    """p_F: number of expert groups."""
    return layout.groups if layout.expert_groups is None else layout.expert_groups


def replica_size(layout: Layout) -> int:
    """GPUs of one replica: p M + p_F N."""
    return layout.groups * layout.attention_ranks + expert_depth(layout) * layout.expert_ranks


def place(model: Model, layout: Layout) -> Placement:
    """Layers l, in chunks of `layers_per_chunk`, go to groups A_g and F_g with g = (l / chunk) mod p.

    With `expert_groups` p_F, g of the experts is (l / chunk) mod p_F. Layers from `shift_at` on have their attention,
    and what follows in turn the head, one group further (see `systems.disagmoe.shift`).

    x_{l+1} is formed where it is used: expert outputs of layer l go straight to the attention group of layer l+1. The
    embedding lives on A0; the head where the next chunk would, or on `head_group`. Raises BadInput.
    """
    return _place(model, *_choice(layout))


_choice = attrgetter(
    *("attention_ranks", "expert_ranks", "groups", "expert_groups"),
    *("layers_per_chunk", "shift_at", "head_group", "shared_on"),
)


@lru_cache(maxsize=1024)
def _place(
    model: Model,
    m: int,
    n: int,
    p: int,
    expert_groups: int | None,
    chunk: int,
    shift_at: int | None,
    head_group: int | None,
    shared_on: str,
) -> Placement:
    require_divides("layout.expert_ranks", n, model.num_experts, f"experts of {model.name}")
    p_f = p if expert_groups is None else expert_groups
    for field, depth in (("layout.groups", p), ("layout.expert_groups", p_f)):
        if depth * chunk > model.num_layers:
            allowed = f"groups x layers_per_chunk of at most {model.num_layers} layers of {model.name}"
            raise BadInput(field, depth, allowed)
    if shared_on == "expert" and not model.num_shared_experts:
        raise BadInput("layout.shared_on", "expert", f"attention for {model.name}, which has no shared experts")
    if shift_at is not None and (shift_at >= model.num_layers or shift_at % chunk):
        allowed = f"a multiple of layers_per_chunk={chunk} below the {model.num_layers} layers of {model.name}"
        raise BadInput("layout.shift_at", shift_at, allowed)
    turn = turns(model.num_layers, p, chunk, shift_at)
    head = turn[-1] if head_group is None else head_group
    if head >= p:
        raise BadInput("layout.head_group", head, f"0 to {p - 1}")
    experts = tuple((layer // chunk) % p_f for layer in range(model.num_layers))
    sizes = ((p, m), (p_f, n))
    return _placed(model, sizes, tuple(turn[:-1]), experts, head, shared_on)


@lru_cache(maxsize=256)
def _placed(
    model: Model,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    turn: tuple[int, ...],
    expert_turn: tuple[int, ...],
    head: int,
    shared: str,
) -> Placement:
    """With so many groups of so many ranks each, of attention and of experts."""
    (p, m), (p_f, n) = sizes
    attention = [Group(f"A{g}", g * m, m) for g in range(p)]
    experts = [Group(f"F{g}", p * m + g * n, n) for g in range(p_f)]
    homes = [attention[g].name for g in turn]
    ends = [*homes[1:], attention[head].name]
    dense = [model.is_dense(layer) for layer in range(model.num_layers)]
    return Placement(
        groups=(*attention, *experts),
        embed=attention[0].name,
        head=attention[head].name,
        attention=tuple(homes),
        expert=tuple(None if dense[layer] else experts[g].name for layer, g in enumerate(expert_turn)),
        # A dense layer makes x_{l+1} itself; it travels by a hop.
        join=tuple(homes[layer] if dense[layer] else ends[layer] for layer in range(model.num_layers)),
        shared_on=shared,
    )
