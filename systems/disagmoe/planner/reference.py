"""Where a token's costs are read off: bare costs of a placement of two groups of each kind, and what its layers do."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from bench.action import COMPUTE, TRANSFERS, Action, Kind, Pass
from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout
from bench.cost import Costs
from bench.edges import ends, layer_edges, outer_edges
from bench.models import Model
from bench.placement import Placement
from systems.disagmoe.placement import place


@dataclass(frozen=True)
class Option:
    """What changes a token's costs, next to the sequence length: N and how the layer is computed and dispatched.

    tp, cp: attention ranks that share a sequence. `offload` changes no token's costs, but what memory holds.
    """

    expert_ranks: int
    recompute: str = "none"
    shared_on: str = "attention"
    copies: str = "rank"
    tp: int = 1
    cp: int = 1
    offload: str = "none"


class Reference:
    """Bare costs of an option.

    Attributes:
        per_token: by side, of all tokens of a micro-batch what an attention rank spends on its own, and the fullest
            expert rank times N.
        like: [layers]: for each layer the first one of equal costs.
        num_slots: slot l is layer l, the last is the head.
        computed: compute actions of the layers that stand for others, and of none; each with the slots where it, or one
            that costs the same, belongs. moved: transfers with an end in these slots.
    """

    def __init__(self, spec: CaseSpec, option: Option, assumptions: Assumptions) -> None:
        self.costs = reference_costs(spec, option, assumptions)
        placement = self.costs.placement
        tokens = self.costs.case.layout.mbs * spec.workload.seq_len / self.costs.case.layout.sequence_ranks
        self.per_token = {"A": 1.0 / tokens, "F": option.expert_ranks / (tokens * placement.data_ranks)}
        self.like = _alike(spec.model, self.costs.routes.even)
        self.num_slots = spec.model.num_layers + 1
        alike = place(spec.model, Layout.make(groups=min(2, spec.model.num_layers), shared_on=option.shared_on))
        self.computed, self.moved = _actions(spec.model, alike, option.recompute, self.like)

    def side(self, action: Action) -> str:
        """A or F, of a compute action."""
        return self.costs.placement.home(action.kind, action.layer)[0]

    def sides(self, transfer: Action) -> tuple[str, str]:
        """Of the two ends of a transfer."""
        source, target = ends(self.costs.placement, transfer)
        return source[0], target[0]


def reference_costs(spec: CaseSpec, option: Option, assumptions: Assumptions) -> Costs:
    """Bare costs (no fixed ones) on two groups of each kind, attention and experts on nodes of their own.

    On a cluster of one node everything is one node. An attention group has as many ranks as an expert group, rounded
    up to whole nodes: a GEMM's share of reading weights is that of about as many tokens a rank on both sides.
    """
    cluster = spec.cluster
    per_node = cluster.gpus_per_node
    attention_ranks = -(-option.expert_ranks // per_node) * per_node
    groups = min(2, spec.model.num_layers)
    if cluster.num_nodes == 1:
        whole = -(-groups * (attention_ranks + option.expert_ranks) // per_node) * per_node
        cluster = cluster.model_copy(update={"gpus_per_node": whole, "nics_per_node": whole})
    layout = Layout.make(
        attention_ranks=attention_ranks,
        expert_ranks=option.expert_ranks,
        groups=groups,
        recompute=option.recompute,
        shared_on=option.shared_on,
        copies=option.copies,
        tp=option.tp,
        cp=option.cp,
    )
    case = spec.model_copy(update={"cluster": cluster}).with_layout(layout)
    placement = place(spec.model, layout)
    bare = assumptions.without_overheads()
    return Costs(case, placement, copies=option.copies, recompute=option.recompute, assumptions=bare)


def end_slots(action: Action) -> tuple[int, int]:
    """Slots of the group that sends a transfer and of the group that receives it."""
    layer = action.layer
    match action.kind:
        case Kind.DISPATCH:
            there = (layer, layer)
        case Kind.COMBINE | Kind.RESIDUAL:
            there = (layer, layer + 1)
        case _:  # HOP carries x of its layer from the layer before
            there = (max(layer - 1, 0), layer)
    return there[::-1] if action.pass_ is Pass.B else there


@lru_cache(maxsize=64)
def _alike(model: Model, even: bool) -> tuple[int, ...]:
    """[layers]: for each layer the first one of equal costs, which are those of equal neighbours too."""
    last = model.num_layers - 1
    if not even:
        return tuple(range(last + 1))
    first: dict[tuple[object, ...], int] = {}
    like = []
    for layer in range(last + 1):
        near = [n for n in (layer - 1, layer, layer + 1) if 0 <= n <= last]
        key = (layer == 0, layer == last, *((model.window(n), model.is_dense(n)) for n in near))
        like.append(first.setdefault(key, layer))
    return tuple(like)


@lru_cache(maxsize=256)
def _actions(
    model: Model, placement: Placement, recompute: str, like: Collection[int]
) -> tuple[tuple[tuple[Action, tuple[int, ...]], ...], tuple[Action, ...]]:
    """`Reference.computed` and `Reference.moved`, of micro-batch 0."""
    wanted = {*like, model.num_layers}
    near = sorted({n for layer in wanted for n in (layer - 1, layer, layer + 1) if 0 <= n < model.num_layers})
    of_layers = (layer_edges(model, placement, layer, recompute) for layer in near)
    all_ = (end for edge in chain(outer_edges(placement), *of_layers) for end in (edge.src, edge.dst, edge.via))
    found = list(dict.fromkeys(end for end in all_ if end is not None))
    moved = tuple(each for each in found if each.kind in TRANSFERS and wanted.intersection(end_slots(each)))
    every_layer = len(set(like)) == model.num_layers
    computed: dict[object, tuple[Action, list[int]]] = {}
    for each in found:
        outer = each.kind in (Kind.EMBED, Kind.HEAD)
        if each.kind in COMPUTE and (outer or each.layer in wanted):
            key = (each,) if outer or every_layer else _computes(model, each)
            computed.setdefault(key, (each, []))[1].append(-1 if outer else each.layer)
    return tuple((action, tuple(slots)) for action, slots in computed.values()), moved


def _computes(model: Model, action: Action) -> tuple[object, ...]:
    """Equal for actions that compute the same: that of their own layer, and what experts of the one before put out."""
    layer = action.layer
    own = (action.kind, action.pass_, model.is_dense(layer), model.window(layer))
    return (*own, layer > 0 and not model.is_dense(layer - 1))
