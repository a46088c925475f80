"""AF-Pipe: the order in which every group works, found by list scheduling on expected durations and then frozen.

Each group has a fixed order of forwards and a fixed order of backwards: rounds of `round_length` micro-batches pass
layer after layer (backwards from the last layer up). How the two interleave is decided by playing the step through: a
free group takes its next backward if the input gradient has arrived, else what that backward or the next few need
computed again, else its next forward unless too many micro-batches are in flight, else a waiting weight gradient. The
result is an in-order plan; run time decides nothing.
The paper names the goal (one micro-batch's attention, another's experts and a third's transfer at the same time,
forward and backward interleaved) but gives no order; this construction is ours.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bench.action import MICROBATCH_STEP, Action, Kind, Pass, pack
from bench.edges import Edge
from bench.placement import Placement
from bench.plan import ActionColumn

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


def in_rounds(parts: list[tuple[Kind, int]], pass_: Pass, num_microbatches: int, round_length: int) -> Iterator[Action]:
    """Round by round, part by part, micro-batch by micro-batch; all but the forward take the parts from the last."""
    for first in range(0, num_microbatches, round_length):
        for kind, layer in parts if pass_ is Pass.F else reversed(parts):
            for m in range(first, min(first + round_length, num_microbatches)):
                yield Action(kind, pass_, layer, m)


class _Part(NamedTuple):
    """An action of micro-batch 0, by number: what it takes, what it waits for, whom it feeds."""

    action: Action
    code: int
    seconds: float
    num_inputs: int
    weight: int  # number of its weight gradient, -1 if none
    follows_again: bool  # a backward that needs its part computed again
    feeds: tuple[tuple[int, str, int, float], ...]  # consumer, its group, code of the transfer or -1, its seconds


@dataclass
class _Group:
    """One group while the step is played through. Work is (part number, micro-batch)."""

    forwards: deque[tuple[int, int]]
    backwards: deque[tuple[int, int]]
    again: deque[tuple[int, int]]
    in_flight_limit: int
    weights: deque[tuple[int, int]] = field(default_factory=deque)
    order: list[int] = field(default_factory=list)  # packed actions, as the sends
    sends: list[int] = field(default_factory=list)
    in_flight: int = 0
    ahead: int = 0  # computed again, backward not yet done
    busy: bool = False
    send_free_s: float = 0.0


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
        self.deferred = deferred
        self.lookahead = lookahead
        actions = list(dict.fromkeys(end for edge in graph for end in (edge.src, edge.dst)))
        number = {action: i for i, action in enumerate(actions)}
        self.parts = _parts(placement, graph, actions, number, duration)
        self.arrived = [[0] * num_microbatches for _ in actions]
        self.groups: dict[str, _Group] = {}
        for group in placement.groups:
            own = parts_of(placement, group.name)
            queues: dict[Pass, deque[tuple[int, int]]] = {}
            for pass_ in (Pass.F, Pass.B, Pass.R):
                actions_of_pass = in_rounds(own, pass_, num_microbatches, round_length)
                work = ((number.get(a._replace(microbatch=0), -1), a.microbatch) for a in actions_of_pass)
                queues[pass_] = deque(item for item in work if item[0] >= 0)
            self.groups[group.name] = _Group(
                queues[Pass.F], queues[Pass.B], queues[Pass.R], in_flight_limit=(len(own) + 1) * round_length
            )

    def run(self) -> dict[tuple[str, str], ActionColumn]:
        """Queues of the compute and the send stream of every group."""
        # (seconds, ticket, group, part, micro-batch, whether that part ends here or an input of it arrives)
        events: list[tuple[float, int, str, int, int, bool]] = []
        ticket = 0

        def at(seconds: float, group: str, part: int, microbatch: int, ends: bool) -> None:
            nonlocal ticket
            ticket += 1
            heapq.heappush(events, (seconds, ticket, group, part, microbatch, ends))

        def start(name: str, now: float) -> None:
            group = self.groups[name]
            chosen = None if group.busy else self._choose(group)
            if chosen is not None:
                part, m = chosen
                group.busy = True
                group.order.append(self.parts[part].code + MICROBATCH_STEP * m)
                at(now + self.parts[part].seconds, name, part, m, True)

        for name in self.groups:
            start(name, 0.0)
        while events:
            now, _, name, part, m, ends = heapq.heappop(events)
            if ends:
                self.groups[name].busy = False
                for target, there, arrival in self._send(self.groups[name], part, m, now):
                    at(arrival, there, target, m, False)
            else:
                self.arrived[part][m] += 1
            start(name, now)
        return self._queues()

    def _queues(self) -> dict[tuple[str, str], ActionColumn]:
        end = pack([Action(Kind.SYNC), Action(Kind.UPDATE)]).tolist()
        queues = {}
        for name, group in self.groups.items():
            queues[name, "compute"] = ActionColumn(np.array([*group.order, *end], dtype=np.int64))
            if group.sends:
                queues[name, "send"] = ActionColumn(np.array(group.sends, dtype=np.int64))
        return queues

    def _choose(self, group: _Group) -> tuple[int, int] | None:
        if len(group.weights) > self.deferred:
            return group.weights.popleft()
        if group.backwards and self._ready(group.backwards[0]):
            part, m = group.backwards.popleft()
            group.in_flight -= 1
            group.ahead -= self.parts[part].follows_again
            if self.parts[part].weight >= 0:
                group.weights.append((self.parts[part].weight, m))
            return part, m
        if group.again and group.ahead < self.lookahead and self._ready(group.again[0]):
            group.ahead += 1
            return group.again.popleft()
        if group.forwards and group.in_flight < group.in_flight_limit and self._ready(group.forwards[0]):
            group.in_flight += 1
            return group.forwards.popleft()
        return group.weights.popleft() if group.weights else None

    def _ready(self, work: tuple[int, int]) -> bool:
        part, m = work
        return self.arrived[part][m] == self.parts[part].num_inputs

    def _send(self, group: _Group, part: int, m: int, now: float) -> Iterator[tuple[int, str, float]]:
        """What the end of a part makes arrive: (consumer, its group, seconds). One send port a group, in order."""
        for target, there, via, seconds in self.parts[part].feeds:
            if via < 0:
                yield target, there, now
                continue
            group.send_free_s = max(now, group.send_free_s) + seconds
            group.sends.append(via + MICROBATCH_STEP * m)
            yield target, there, group.send_free_s


def _parts(
    placement: Placement, graph: list[Edge], actions: list[Action], number: dict[Action, int], duration: Duration
) -> list[_Part]:
    feeds: dict[Action, list[tuple[int, str, int, float]]] = {}
    num_inputs = dict.fromkeys(actions, 0)
    for edge in graph:
        if edge.dst.pass_ is not Pass.W:  # a weight gradient follows its own backward: no need to wait for it
            home = placement.home(edge.dst.kind, edge.dst.layer)
            seconds, via = (0.0, -1) if edge.via is None else (duration(edge.via), int(pack([edge.via])[0]))
            feeds.setdefault(edge.src, []).append((number[edge.dst], home, via, seconds))
            num_inputs[edge.dst] += 1
    return [
        _Part(
            action,
            int(pack([action])[0]),
            duration(action),
            num_inputs[action],
            number.get(action._replace(pass_=Pass.W), -1) if action.pass_ is Pass.B else -1,
            action.pass_ is Pass.B and action._replace(pass_=Pass.R) in number,
            tuple(feeds.get(action, ())),
        )
        for action in actions
    ]
