"""AF-Pipe: the order in which every group works, found by list scheduling on expected durations and then frozen.

Each group has a fixed order of forwards and a fixed order of backwards: rounds of `round_length` micro-batches pass
layer after layer (backwards from the last layer up). How the two interleave is decided by playing the step through: a
free group takes its next backward if the input gradient has arrived, else its next forward unless too many
micro-batches are in flight, else a waiting weight gradient. The result is an in-order plan: run time decides nothing.
The paper names the goal (one micro-batch's attention, another's experts and a third's transfer at the same time,
forward and backward interleaved) but gives no order; this construction is ours.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.action import COMPUTE, Action, Kind, Pass
from bench.edges import Edge
from bench.placement import Placement

Duration = Callable[[Action], float]
"""Expected seconds of an action of micro-batch 0."""


def forward_order(placement: Placement, group: str, num_microbatches: int, round_length: int) -> Iterator[Action]:
    """Forwards of a group: round by round, layer by layer, micro-batch by micro-batch."""
    layers = _parts(placement, group)
    for first in range(0, num_microbatches, round_length):
        for kind, layer in layers:
            for m in range(first, min(first + round_length, num_microbatches)):
                yield Action(kind, Pass.F, layer, m)


def backward_order(placement: Placement, group: str, num_microbatches: int, round_length: int) -> Iterator[Action]:
    """Backwards of a group: as the forwards, layers from the last to the first."""
    layers = _parts(placement, group)[::-1]
    for first in range(0, num_microbatches, round_length):
        for kind, layer in layers:
            for m in range(first, min(first + round_length, num_microbatches)):
                yield Action(kind, Pass.B, layer, m)


def _parts(placement: Placement, group: str) -> list[tuple[Kind, int]]:
    """What a group computes for one micro-batch, in the order of the model."""
    parts = [(Kind.EMBED, 0)] if placement.embed == group else []
    for layer in range(placement.num_layers):
        if placement.attention[layer] == group:
            parts.append((Kind.ATTENTION, layer))
        if placement.expert[layer] == group:
            parts.append((Kind.EXPERT, layer))
    return parts + ([(Kind.HEAD, 0)] if placement.head == group else [])


@dataclass
class _GroupState:
    """One group while the step is played through."""

    forwards: deque[Action]
    backwards: deque[Action]
    in_flight_limit: int
    weights: deque[Action] = field(default_factory=deque)
    order: list[Action] = field(default_factory=list)
    sends: list[Action] = field(default_factory=list)
    in_flight: int = 0
    busy: bool = False
    send_free_s: float = 0.0


class AFPipe:
    """Plays one step through; `run` returns the queues of every group.

    Args:
        graph: edges of one micro-batch.
        duration: expected seconds of compute and transfer actions.
        round_length: micro-batches that pass a layer together.
        deferred: weight gradients that a group may put off; beyond, they come before anything else.
    """

    def __init__(
        self,
        placement: Placement,
        graph: list[Edge],
        num_microbatches: int,
        duration: Duration,
        round_length: int,
        deferred: int,
    ) -> None:
        self.duration = duration
        self.deferred = deferred
        self.home = {end: placement.home(end.kind, end.layer) for edge in graph for end in (edge.src, edge.dst)}
        self.consumers: dict[Action, list[tuple[Action | None, Action]]] = {}
        self.num_inputs: dict[Action, int] = {}
        for edge in graph:
            if edge.dst.pass_ is not Pass.W:
                self.consumers.setdefault(edge.src, []).append((edge.via, edge.dst))
                self.num_inputs[edge.dst] = self.num_inputs.get(edge.dst, 0) + 1
        self.has_weights = {edge.dst._replace(pass_=Pass.B) for edge in graph if edge.dst.pass_ is Pass.W}
        self.seconds = {action: duration(action) for action in self.home}
        self.arrived: dict[Action, int] = {}
        self.groups: dict[str, _GroupState] = {}
        for group in placement.groups:
            parts = len(_parts(placement, group.name))
            self.groups[group.name] = _GroupState(
                deque(forward_order(placement, group.name, num_microbatches, round_length)),
                deque(backward_order(placement, group.name, num_microbatches, round_length)),
                in_flight_limit=(parts + 1) * round_length,
            )

    def run(self) -> dict[tuple[str, str], list[Action]]:
        """Queues of the compute and the send stream of every group."""
        events: list[tuple[float, int, str, Action | None]] = [
            (0.0, i, name, None) for i, name in enumerate(self.groups)
        ]
        ticket = len(events)
        while events:
            now, _, name, finished = heapq.heappop(events)
            state = self.groups[name]
            if finished is not None and finished.kind in COMPUTE and finished in self._running(state):
                state.busy = False
                for at, target, action in self._send(name, finished, now):
                    ticket += 1
                    heapq.heappush(events, (at, ticket, target, action))
            elif finished is not None:
                self.arrived[finished] = self.arrived.get(finished, 0) + 1
            if not state.busy:
                chosen = self._choose(state)
                if chosen is not None:
                    state.busy = True
                    state.order.append(chosen)
                    ticket += 1
                    heapq.heappush(events, (now + self.seconds[chosen._replace(microbatch=0)], ticket, name, chosen))
        queues: dict[tuple[str, str], list[Action]] = {}
        for name, state in self.groups.items():
            queues[name, "compute"] = [*state.order, Action(Kind.SYNC), Action(Kind.UPDATE)]
            if state.sends:
                queues[name, "send"] = state.sends
        return queues

    def _running(self, state: _GroupState) -> tuple[Action, ...]:
        return (state.order[-1],) if state.busy else ()

    def _choose(self, state: _GroupState) -> Action | None:
        if len(state.weights) > self.deferred:
            return state.weights.popleft()
        if state.backwards and self._ready(state.backwards[0]):
            action = state.backwards.popleft()
            state.in_flight -= 1
            if action._replace(microbatch=0) in self.has_weights:
                state.weights.append(action._replace(pass_=Pass.W))
            return action
        if state.forwards and self._ready(state.forwards[0]) and state.in_flight < state.in_flight_limit:
            state.in_flight += 1
            return state.forwards.popleft()
        return state.weights.popleft() if state.weights else None

    def _ready(self, action: Action) -> bool:
        return self.arrived.get(action, 0) == self.num_inputs.get(action._replace(microbatch=0), 0)

    def _send(self, name: str, finished: Action, now: float) -> Iterator[tuple[float, str, Action]]:
        """Arrivals that the end of an action causes: (seconds, group, consumer)."""
        state = self.groups[name]
        for via, consumer in self.consumers.get(finished._replace(microbatch=0), ()):
            target = self.home[consumer]
            arrival = now
            if via is not None:
                arrival = max(now, state.send_free_s) + self.duration(via)
                state.send_free_s = arrival
                state.sends.append(via._replace(microbatch=finished.microbatch))
            yield arrival, target, consumer._replace(microbatch=finished.microbatch)
