"""The actions of one micro-batch, counted: chunks, and layers that cost the same in one place, are looked at once."""

from collections.abc import Hashable

from bench.action import IN_CHUNKS, Action, Kind, Pass
from bench.edges import layer_edges
from bench.models import Model
from bench.placement import Placement


def census(
    model: Model, placement: Placement, recompute: str, chunks: int = 1, *, layers_alike: bool
) -> dict[Action, int]:
    """Every action of micro-batch 0 with its number; of actions alike, the first stands for all.

    Where a placement has two directions, those of micro-batch 1 follow.

    Args:
        layers_alike: layers differ in placement, window and FFN only (not in routing), so that many are alike.
    """
    counted = {Action(Kind.EMBED, pass_): 1 for pass_ in (Pass.F, Pass.B)}
    counted |= {Action(Kind.HEAD, pass_): 1 for pass_ in (Pass.F, Pass.B, Pass.W)}
    if placement.embed != placement.pipeline_ends[0]:
        counted |= {Action(Kind.HOP, pass_): 1 for pass_ in (Pass.F, Pass.B)}
    number: dict[Hashable, int] = {}
    first: dict[Hashable, int] = {}
    for layer in range(model.num_layers):
        likeness = _likeness(model, placement, layer) if layers_alike else layer
        number[likeness] = number.get(likeness, 0) + 1
        first.setdefault(likeness, layer)
    for likeness, layer in first.items():
        for action in _of_layer(model, placement, layer, recompute):
            counted[action] = number[likeness] * (chunks if action.kind in IN_CHUNKS else 1)
    # Mirrored, layers that are alike stay alike.
    return {action._replace(microbatch=m): n for m in range(placement.directions) for action, n in counted.items()}


def _of_layer(model: Model, placement: Placement, layer: int, recompute: str) -> list[Action]:
    """A layer's own actions, and the hop that carries its result on."""
    ends = (end for edge in layer_edges(model, placement, layer, recompute) for end in (edge.src, edge.dst, edge.via))
    own = (end for end in ends if end is not None and end.kind is not Kind.HEAD)
    return list(dict.fromkeys(end for end in own if end.layer == layer + (end.kind is Kind.HOP)))


def _likeness(model: Model, placement: Placement, layer: int) -> Hashable:
    """Equal for layers whose actions cost the same in the same places; what comes before is added up in a layer too."""
    before = None
    if layer:
        before = (placement.expert[layer - 1], placement.moves_on(layer - 1))
    homes = (placement.attention[layer], placement.expert[layer], placement.join[layer], placement.moves_on(layer))
    return (*homes, placement.pipeline_ends[layer + 1], model.window(layer), before)
