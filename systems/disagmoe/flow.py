"""What one micro-batch does on a placement, as columns: its parts, what each waits for, and whom it sends to.

It follows from the homes alone, whatever the ranks of a group, so placements that differ in these share it.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bench.action import Action, Kind, Pass, pack
from bench.edges import Edge, edges
from bench.models import Model
from bench.placement import Placement

Index = NDArray[np.int64]
NONE = -1
PASSES = (Pass.F, Pass.B, Pass.R)
"""Those that have a fixed order; see `systems.disagmoe.play.Queues`."""


def parts_of(placement: Placement, group: str) -> list[tuple[Kind, int]]:
    """What a group computes for one micro-batch, in the order of the model."""
    parts = [(Kind.EMBED, 0)] if placement.embed == group else []
    for layer in range(placement.num_layers):
        if placement.attention[layer] == group:
            parts.append((Kind.ATTENTION, layer))
        if placement.expert[layer] == group:
            parts.append((Kind.EXPERT, layer))
    return parts + ([(Kind.HEAD, 0)] if placement.head == group else [])


class Flow:
    """Columns over `actions`, the compute actions of micro-batch 0, and over what they feed.

    Attributes:
        code, group: of each action, and the number of its group.
        num_inputs: what it waits for. weight: number of the weight gradient behind a backward, `NONE` if none.
        after_again: 1 for a backward that needs its part computed again.
        feed_ptr, feed_to, feed_code: of action i, feeds are feed_ptr[i] .. feed_ptr[i + 1] - 1: the consumer, and the
            transfer's code, `NONE` where nothing is sent.
        orders: [groups][passes of `PASSES`]: numbers of the actions of one micro-batch, in the order of their pass.
    """

    def __init__(self, placement: Placement, graph: Sequence[Edge]) -> None:
        self.graph = graph
        self.actions = list(dict.fromkeys(end for edge in graph for end in (edge.src, edge.dst)))
        self._number = {action: i for i, action in enumerate(self.actions)}
        self._feeds()
        index = placement.index
        self.code = pack(self.actions)
        self.group = _whole(index[placement.home(a.kind, a.layer)] for a in self.actions)
        self.weight = _whole(self._of_backward(action, Pass.W) for action in self.actions)
        self.after_again = _whole(self._of_backward(action, Pass.R) != NONE for action in self.actions)
        parts = [parts_of(placement, group.name) for group in placement.groups]
        self.num_parts = [len(own) for own in parts]
        self.orders = [[self._order(own, pass_) for pass_ in PASSES] for own in parts]

    def _feeds(self) -> None:
        feeds: list[list[tuple[int, int]]] = [[] for _ in self.actions]
        num_inputs = [0] * len(self.actions)
        vias = [edge.via for edge in self.graph if edge.via is not None]
        code_of = dict(zip(vias, pack(vias).tolist(), strict=True))
        for edge in self.graph:
            if edge.dst.pass_ is not Pass.W:  # a weight gradient follows its own backward: no need to wait for it
                to = self._number[edge.dst]
                feeds[self._number[edge.src]].append((to, NONE if edge.via is None else code_of[edge.via]))
                num_inputs[to] += 1
        self.num_inputs = _whole(num_inputs)
        self.feed_ptr = _whole([0, *accumulate(map(len, feeds))])
        self.feed_to, self.feed_code = (
            _whole(column) for column in zip(*(f for own in feeds for f in own), strict=True)
        )

    def _of_backward(self, action: Action, pass_: Pass) -> int:
        """Number of another pass of a backward's part."""
        return self._number.get(action._replace(pass_=pass_), NONE) if action.pass_ is Pass.B else NONE

    def _order(self, parts: list[tuple[Kind, int]], pass_: Pass) -> Index:
        there = [self._number.get(Action(kind, pass_, layer), NONE) for kind, layer in parts]
        return _whole(number for number in (there if pass_ is Pass.F else there[::-1]) if number != NONE)


@lru_cache(maxsize=64)
def flow_of(model: Model, outline: Placement, recompute: str) -> Flow:
    """The flow on all placements of an outline (`bench.placement.Placement.outline`)."""
    return Flow(outline, list(edges(model, outline, recompute)))


def _whole(numbers: Iterable[int]) -> Index:
    return np.array(list(numbers), dtype=np.int64)
