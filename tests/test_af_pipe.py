"""AF-Pipe's order: rounds, limits on what is in flight and put off, and what a longer round buys."""

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.action import Action, Codes, Kind, Pass, view
from bench.case import Layout
from bench.edges import edges
from bench.models import get_model
from systems.disagmoe.af_pipe import AFPipe
from systems.disagmoe.flow import Flow, parts_of
from systems.disagmoe.placement import place

DURATIONS = {Kind.ATTENTION: 1.0, Kind.EXPERT: 1.0, Kind.DISPATCH: 0.9, Kind.COMBINE: 0.9, Kind.RESIDUAL: 0.2}


def seconds(action: Action) -> float:
    return DURATIONS.get(action.kind, 0.0)


def every_second(codes: Codes) -> NDArray[np.float64]:
    return np.array([seconds(view(code)) for code in codes.tolist()])


def in_rounds(parts: list[tuple[Kind, int]], pass_: Pass, num_microbatches: int, round_length: int) -> Iterator[Action]:
    """Round by round, part by part, micro-batch by micro-batch; all but the forward take the parts from the last."""
    for first in range(0, num_microbatches, round_length):
        for kind, layer in parts if pass_ is Pass.F else reversed(parts):
            for m in range(first, min(first + round_length, num_microbatches)):
                yield Action(kind, pass_, layer, m)


def pipe(num_microbatches: int, round_length: int, deferred: int = 0, layers: int = 12, **layout: int) -> AFPipe:
    model = get_model("qwen3-30b").model_copy(update={"num_layers": layers})
    placement = place(model, Layout.make(**layout))
    return AFPipe(
        placement,
        Flow(placement, list(edges(model, placement))),
        num_microbatches,
        every_second,
        round_length,
        deferred,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.integers(1, 3), st.integers(1, 2))
def test_passes_keep_their_order_and_their_limits(
    num_microbatches: int, round_length: int, deferred: int, groups: int, chunk: int
) -> None:
    af_pipe = pipe(num_microbatches, round_length, deferred, groups=groups, layers_per_chunk=chunk)
    placement = place(
        get_model("qwen3-30b").model_copy(update={"num_layers": 12}), Layout.make(groups=groups, layers_per_chunk=chunk)
    )
    for (name, stream), queue in af_pipe.run().items():
        if stream != "compute":
            continue
        work, parts = queue[:-2], parts_of(placement, name)
        for pass_ in (Pass.F, Pass.B):
            expected = list(in_rounds(parts, pass_, num_microbatches, round_length))
            assert [a for a in work if a.pass_ is pass_] == expected
        in_flight = put_off = 0
        for action in work:
            in_flight += {Pass.F: 1, Pass.B: -1, Pass.W: 0}[action.pass_]
            if action.kind is not Kind.EMBED:
                put_off += {Pass.F: 0, Pass.B: 1, Pass.W: -1}[action.pass_]
            assert in_flight <= af_pipe.in_flight_limits[name]
            assert 0 <= put_off <= deferred + 1


def test_forwards_go_in_rounds_through_the_layers_of_a_group() -> None:
    queue = pipe(4, 2, groups=2, layers=4).run()["A1", "compute"]
    order = [str(a) for a in queue if a.kind is Kind.ATTENTION and a.pass_ is Pass.F]
    assert order == "attn:F1.0 attn:F1.1 attn:F3.0 attn:F3.1 attn:F1.2 attn:F1.3 attn:F3.2 attn:F3.3".split()
    back = [str(a) for a in queue if a.kind is Kind.ATTENTION and a.pass_ is Pass.B]
    assert back == "attn:B3.0 attn:B3.1 attn:B1.0 attn:B1.1 attn:B3.2 attn:B3.3 attn:B1.2 attn:B1.3".split()


def test_sends_stand_in_the_order_in_which_they_are_made() -> None:
    queues = pipe(4, 4, groups=2, layers=4).run()
    made = [a for a in queues["A0", "compute"] if a.kind is Kind.ATTENTION and a.pass_ is Pass.F]
    sent = [a for a in queues["A0", "send"] if a.kind is Kind.DISPATCH]
    assert [(a.layer, a.microbatch) for a in made] == [(a.layer, a.microbatch) for a in sent]


def makespan(af_pipe: AFPipe) -> float:
    """Longest chain of the frozen order: in-order groups and ports, played through once more by plain relaxation."""
    queues = af_pipe.run()
    finish: dict[Action, float] = {}
    sent: dict[Action, float] = {}
    inputs: dict[Action, list[tuple[Action | None, Action]]] = {}
    for edge in af_pipe.flow.graph:
        if edge.dst.pass_ is not Pass.W:
            inputs.setdefault(edge.dst, []).append((edge.via, edge.src))
    todo = {key: list(queue) for key, queue in queues.items()}
    free = dict.fromkeys(todo, 0.0)
    while any(todo.values()):
        moved = False
        for key, queue in todo.items():
            while queue:
                start = _ready(queue[0], inputs, finish, sent)
                if start is None:
                    break
                action = queue.pop(0)
                end = max(start, free[key]) + seconds(action)
                free[key] = end
                (sent if key[1] == "send" else finish)[action] = end
                moved = True
        assert moved
    return max(finish.values())


def _ready(
    action: Action,
    inputs: dict[Action, list[tuple[Action | None, Action]]],
    finish: dict[Action, float],
    sent: dict[Action, float],
) -> float | None:
    m = action.microbatch
    if action.kind in (Kind.SYNC, Kind.UPDATE):
        return 0.0
    if action.kind in (Kind.DISPATCH, Kind.COMBINE, Kind.RESIDUAL, Kind.HOP):
        makers = [s for ts in inputs.values() for via, s in ts if via == action._replace(microbatch=0)]
        needed = [finish.get(s._replace(microbatch=m)) for s in makers]
    elif action.pass_ is Pass.W:
        needed = [finish.get(action._replace(pass_=Pass.B))]
    else:
        needed = [
            finish.get(s._replace(microbatch=m)) if via is None else sent.get(via._replace(microbatch=m))
            for via, s in inputs.get(action._replace(microbatch=0), [])
        ]
    return None if any(n is None for n in needed) else max((n for n in needed if n is not None), default=0.0)


def test_longer_rounds_fill_the_pipeline() -> None:
    """With A, F and transfers nearly balanced: rounds of p leave bubbles, rounds of 4p come near the bound."""
    microbatches, groups, layers = 16, 2, 8
    bound = microbatches * layers / groups * 3
    spans = [makespan(pipe(microbatches, groups * k, layers=layers, groups=groups)) for k in (1, 2, 4)]
    assert all(later < sooner for sooner, later in pairwise(spans))
    assert spans[0] > 1.3 * bound
    assert bound < spans[-1] < 1.25 * bound


def test_putting_weight_gradients_off_helps_short_rounds() -> None:
    spans = [makespan(pipe(16, 4, deferred, layers=8, groups=2)) for deferred in (0, 4, 16)]
    assert spans[0] > spans[1] > spans[2]


class Greedy(NamedTuple):
    """seconds of the step, None where it does not end; most forwards of a group without their backward."""

    seconds: float | None
    in_flight: int


def greedy(af_pipe: AFPipe, limit: float = math.inf) -> Greedy:
    """A free group takes what was ready first, but no forward where `limit` of them wait for their backward."""
    place, last = af_pipe.placement, range(af_pipe.num_microbatches)
    feeds: dict[Action, list[tuple[Action, Action | None]]] = {}
    for edge in af_pipe.flow.graph:
        feeds.setdefault(edge.src, []).append((edge.dst, edge.via))
    inputs = Counter(target for fed in feeds.values() for target, _ in fed)
    waiting = {(action, m): inputs[action] for action in af_pipe.flow.actions for m in last}
    arrived = dict.fromkeys(waiting, 0.0)
    names = [group.name for group in place.groups]
    ready: dict[str, list[tuple[float, int, Action, int]]] = {name: [] for name in names}
    idle, port, held, most, ticket, now = set(names), dict.fromkeys(names, 0.0), Counter(names), 1, count(), 0.0
    events = [
        (0.0, next(ticket), False, action, m) for m in last for action in af_pipe.flow.actions if not inputs[action]
    ]
    left = len(waiting)
    while events:
        now, _, over, action, m = heapq.heappop(events)
        name = place.home(action.kind, action.layer)
        if over:
            idle.add(name)
            left -= 1
            for target, via in feeds.get(action, []):
                if via is not None:
                    port[name] = max(now, port[name]) + seconds(via)
                waiting[target, m] -= 1
                arrived[target, m] = max(arrived[target, m], now if via is None else port[name])
                if not waiting[target, m]:
                    heapq.heappush(events, (arrived[target, m], next(ticket), False, target, m))
        else:
            ready[name].append((now, next(ticket), action, m))
        # Every group has a count of 1 to begin with.
        may = [each for each in ready[name] if each[2].pass_ is not Pass.F or held[name] <= limit]
        if name in idle and may:
            ready[name].remove(may[0])
            idle.remove(name)
            action, m = may[0][2:]
            held[name] += {Pass.F: 1, Pass.B: -1}.get(action.pass_, 0)
            most = max(most, held[name])
            heapq.heappush(events, (now + seconds(action), next(ticket), True, action, m))
    return Greedy(None if left else now, most - 1)


@pytest.mark.parametrize(("groups", "microbatches"), [(1, 16), (2, 32), (4, 32)])
def test_greedy_order_is_no_faster_and_needs_far_more_memory(groups: int, microbatches: int) -> None:
    """Rounds of 4p with weight gradients put off; greedy order with as little in flight comes to a stand."""
    made = pipe(microbatches, 4 * groups, 8 * groups, layers=8, groups=groups)
    limit = max(made.in_flight_limits.values())
    free, bounded = greedy(made), greedy(made, limit)
    assert free.seconds is not None
    assert makespan(made) < 1.01 * free.seconds
    assert limit < 0.75 * free.in_flight
    assert bounded.in_flight <= limit
    assert bounded.seconds is None


@pytest.mark.parametrize("round_length", [1, 3, 8])
def test_all_weight_gradients_are_done(round_length: int) -> None:
    queue = pipe(3, round_length, 8, layers=4, groups=1).run()["F0", "compute"]
    assert sum(a.pass_ is Pass.W for a in queue) == sum(a.pass_ is Pass.B for a in queue) == 12
