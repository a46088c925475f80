"""AF-Pipe: the order in which every group works, found by list scheduling on expected durations and then frozen.

Each group has a fixed order of forwards and a fixed order of backwards: rounds of `round_length` micro-batches pass
layer after layer (backwards from the last layer up). How the two interleave is decided by playing the step through: a
free group takes its next backward if the input gradient has arrived, else what that backward or the next few need
computed again, else its next forward unless too many micro-batches are in flight, else a waiting weight gradient. The
result is an in-order plan; run time decides nothing.
The paper names the goal (one micro-batch's attention, another's experts and a third's transfer at the same time,
forward and backward interleaved) but gives no order; this construction is ours.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bench.action import MICROBATCH_STEP, Action, Kind, Pass, pack
from bench.edges import Edge
from bench.placement import Placement
from bench.plan import ActionColumn

if TYPE_CHECKING:
    from systems.disagmoe.play import Parts, Queues

Duration = Callable[[Action], float]
"""Expected seconds of an action of micro-batch 0."""


def parts_of(placement: Placement, group: str) -> list[tuple[Kind, int]]:
    """What a group computes for one micro-batch, in the order of the model."""
    parts = [(Kind.EMBED, 0)] if placement.embed == group else []
    for layer in range(placement.num_layers):
        if placement.attention[layer] == group:
            parts.append((Kind.ATTENTION, layer))
        if placement.expert[layer] == group:
            parts.append((Kind.EXPERT, layer))
    return parts + ([(Kind.HEAD, 0)] if placement.head == group else [])


class AFPipe:
    """Plays one step through; `run` returns the queues of every group.

    Args:
        graph: edges of one micro-batch.
        duration: expected seconds of compute and transfer actions.
        round_length: micro-batches that pass a layer together.
        deferred: weight gradients that a group may put off; beyond, they come before anything else.
        lookahead: attentions computed again (where the graph has them) before the first of them has its backward.
    """

    def __init__(
        self,
        placement: Placement,
        graph: list[Edge],
        num_microbatches: int,
        duration: Duration,
        round_length: int,
        deferred: int,
        lookahead: int = 1,
    ) -> None:
        self.placement, self.graph, self.duration = placement, graph, duration
        self.num_microbatches = num_microbatches
        self.round_length = round_length
        self.deferred = deferred
        self.lookahead = lookahead
        self.actions = list(dict.fromkeys(end for edge in graph for end in (edge.src, edge.dst)))
        self.number = {action: i for i, action in enumerate(self.actions)}

    @property
    def in_flight_limits(self) -> dict[str, int]:
        """Forwards of a group without their backward: a round of every part, and one more."""
        own = {group.name: len(parts_of(self.placement, group.name)) for group in self.placement.groups}
        return {name: (num + 1) * self.round_length for name, num in own.items()}

    def run(self) -> dict[tuple[str, str], ActionColumn]:
        """Queues of the compute and the send stream of every group."""
        from systems.disagmoe.play import play

        order, sends = play(
            self._parts(),
            self._fixed_orders(),
            _whole(self.in_flight_limits.values()),
            self.deferred,
            self.lookahead,
            self.num_microbatches,
            MICROBATCH_STEP,
        )
        end = pack([Action(Kind.SYNC), Action(Kind.UPDATE)])
        queues = {}
        for group, computed, sent in zip(self.placement.groups, order, sends, strict=True):
            queues[group.name, "compute"] = ActionColumn(np.concatenate([computed, end]))
            if len(sent):
                queues[group.name, "send"] = ActionColumn(sent)
        return queues

    def _parts(self) -> "Parts":
        from systems.disagmoe.play import Parts

        feeds: dict[Action, list[tuple[int, int, float]]] = {action: [] for action in self.actions}
        num_inputs = dict.fromkeys(self.actions, 0)
        vias = [edge.via for edge in self.graph if edge.via is not None]
        code_of = dict(zip(vias, pack(vias).tolist(), strict=True))
        for edge in self.graph:
            if edge.dst.pass_ is not Pass.W:  # a weight gradient follows its own backward: no need to wait for it
                seconds, via = (0.0, -1) if edge.via is None else (self.duration(edge.via), code_of[edge.via])
                feeds[edge.src].append((self.number[edge.dst], via, seconds))
                num_inputs[edge.dst] += 1
        index, homes = self.placement.index, [self.placement.home(a.kind, a.layer) for a in self.actions]
        targets, codes, seconds_of = zip(*(feed for action in self.actions for feed in feeds[action]), strict=True)

        def related(action: Action, pass_: Pass) -> int:
            return self.number.get(action._replace(pass_=pass_), -1) if action.pass_ is Pass.B else -1

        return Parts(
            group=_whole([index[name] for name in homes]),
            code=pack(self.actions),
            seconds=np.array([self.duration(action) for action in self.actions]),
            num_inputs=_whole([num_inputs[action] for action in self.actions]),
            weight=_whole([related(action, Pass.W) for action in self.actions]),
            after_again=_whole([related(action, Pass.R) >= 0 for action in self.actions]),
            feed_ptr=_whole([0, *accumulate(len(feeds[action]) for action in self.actions)]),
            feed_to=_whole(targets),
            feed_code=_whole(codes),
            feed_s=np.array(seconds_of, dtype=np.float64),
        )

    def _fixed_orders(self) -> "Queues":
        from systems.disagmoe.play import Queues

        rounds = [
            np.arange(first, min(first + self.round_length, self.num_microbatches))
            for first in range(0, self.num_microbatches, self.round_length)
        ]
        ptr, numbers, microbatches = [0], [], []
        for group in self.placement.groups:
            own = parts_of(self.placement, group.name)
            for pass_ in (Pass.F, Pass.B, Pass.R):
                parts = own if pass_ is Pass.F else own[::-1]
                there = [self.number.get(Action(kind, pass_, layer), -1) for kind, layer in parts]
                mine = _whole([number for number in there if number >= 0])
                for each in rounds:
                    numbers.append(np.repeat(mine, len(each)))
                    microbatches.append(np.tile(each, len(mine)))
                ptr.append(ptr[-1] + len(mine) * self.num_microbatches)
        starts = _whole(ptr)
        by_group = np.stack([starts[i * 3 : i * 3 + 4] for i in range(len(self.placement.groups))])
        return Queues(by_group, np.concatenate(numbers), np.concatenate(microbatches))


def _whole(numbers: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(numbers), dtype=np.int64)
