"""A lower bound on the step time that knows the pipeline's fill and the end of the step; sharper than `bench.bound`.

Whatever a group does waits for the forwards of one micro-batch through all layers before its first, on the ranks where
they take least. Its gradient sum comes behind everything that it does and takes its ports as well, and every update
waits for the gradient sums of all groups.
"""

import numpy as np
from numpy.typing import NDArray

from bench.action import Action, Kind, Pass
from bench.bound import most_taken
from bench.cost import Costs
from bench.placement import Placement
from bench.tally import COMPUTES_AT, Role, carries_between, times

Floats = NDArray[np.float64]
EXCHANGES = frozenset({Kind.DISPATCH, Kind.COMBINE})


def least_step_s(placement: Placement, costs: Costs, num_microbatches: int, *, serial: bool = False) -> float:
    """Seconds: the most over groups of fill, work and gradient sum, and the longest update. No order is shorter.

    As in `bench.bound`, without latency and fixed costs.

    Args:
        serial: whether exchanges stand in the queue of the computation, so that neither hides the other.
    """
    bare = costs.without_overheads()
    work = {name: max(each) for name, each in most_taken(bare).items()}
    if serial:
        in_line = bare.of_placement("in line", lambda: _in_line(bare))
        work = {name: max(seconds, in_line[name]) for name, seconds in work.items()}
    turns, like, fills = num_microbatches / placement.directions, bare.tally.like, fill_s(placement, bare)
    busy = {name: turns * seconds + bare.sync_s(name) for name, seconds in work.items()}
    until_summed = max(fills[group.name] + busy[like[group.name]] for group in placement.groups)
    return until_summed + max(bare.update_s(name) for name in busy)


def fill_s(placement: Placement, costs: Costs) -> dict[str, float]:
    """By group: seconds from the beginning of a step to the first action or transfer that it has a part in, at the
    least."""
    forwards = [
        costs.of_work("forward", each, lambda actions: _forward(costs, actions)) for each in costs.tally.likenesses
    ]
    found = {group.name: np.inf for group in placement.groups}

    def begins(name: str | None, second: float) -> None:
        if name is not None and second < found[name]:
            found[name] = second

    for direction, numbers in enumerate(costs.tally.of_layer.tolist()):
        seen = placement.seen_by(direction)
        begins(seen.embed, 0.0)
        begins(seen.pipeline_ends[0], 0.0)
        now = 0.0
        for layer, number in enumerate(numbers[1:]):
            forward = forwards[number]
            begins(seen.attention[layer], now)
            now += forward.get(Role.ATTENTION, 0.0)
            begins(seen.expert[layer], now)
            begins(seen.join[layer], now)
            now += forward.get(Role.EXPERT, 0.0)
            begins(seen.pipeline_ends[layer + 1], now)
        begins(seen.head, now)
    return {name: seconds if np.isfinite(seconds) else 0.0 for name, seconds in found.items()}  # some have no part


def _forward(costs: Costs, actions: list[Action]) -> dict[Role, float]:
    """Seconds of a layer's forwards on the rank where they take least, by role."""
    return {
        COMPUTES_AT[action.kind]: times(action, costs.chunks) * float(costs.seconds(action).min())
        for action in actions
        if action.pass_ is Pass.F and action.kind in (Kind.ATTENTION, Kind.EXPERT)
    }


def _in_line(costs: Costs) -> dict[str, float]:
    """By group: seconds that the computation and the exchanges of a micro-batch take one after the other, on the rank
    where it is most."""

    def seconds(actions: list[Action]) -> dict[Role, Floats]:
        found: dict[Role, Floats] = {}
        for action in actions:
            num = times(action, costs.chunks)
            if action.kind in COMPUTES_AT:
                role, taken = COMPUTES_AT[action.kind], costs.seconds(action)
            elif action.kind in EXCHANGES:
                ports = costs.ports(action)
                role, taken = carries_between(action)[0], np.maximum(*ports[:2])
            else:
                continue
            found[role] = found.get(role, 0.0) + num * taken
        return found

    taken = costs.tally.sums(lambda likeness: costs.of_likeness("in line", likeness, seconds), np.zeros(1))
    return {group: float(each.max()) for group, each in taken.items()}
