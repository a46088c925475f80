"""A lower bound on the step time: the busiest resource, with everything else hidden. One function for all systems."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Action
from bench.cost import Costs
from bench.placement import Placement
from bench.program import Program
from bench.tally import COMPUTES_AT, Likeness, Role, carries_between, times

Floats = NDArray[np.float64]


SMS, NIC_OUT, NVLINK_OUT, NIC_IN, NVLINK_IN = range(5)  # rows of `busy`


class Bound(NamedTuple):
    """Seconds of the busiest rank's SMs, and of the busiest NIC and NVLink port, each direction by itself."""

    compute_s: float
    nic_s: float
    nvlink_s: float

    @property
    def seconds(self) -> float:
        return max(self)


def bound(program: Program, costs: Costs) -> Bound:
    """No latency, no fixed cost of a kernel or a transfer, no SMs given to communication, no pipeline fill, no order.

    compute: sum over a rank's compute actions and its optimizer step. ports: bytes over the rate that is reached.
    """
    return placement_bound(program.plan.placement, costs, program.plan.num_microbatches)


def bound_s(program: Program, costs: Costs) -> float:
    """`bound` in seconds: no simulated step of the program is shorter."""
    return bound(program, costs).seconds


def placement_bound_s(placement: Placement, costs: Costs, num_microbatches: int) -> float:
    """The same without a schedule: work depends on where parts live, not on the order."""
    return placement_bound(placement, costs, num_microbatches).seconds


@lru_cache(maxsize=4096)
def placement_bound(placement: Placement, costs: Costs, num_microbatches: int) -> Bound:
    columns = zip(*bound_by_group(placement, costs, num_microbatches).values(), strict=True)
    return Bound(*(max(column) for column in columns))


def bound_by_group(placement: Placement, costs: Costs, num_microbatches: int) -> dict[str, Bound]:
    """`placement_bound` of the busiest rank of every group; of groups that are alike, of one."""
    bare = costs.without_overheads()
    most = most_taken(bare)
    turns = num_microbatches / placement.directions
    return {
        name: Bound(
            turns * each[SMS] + bare.update_s(name),
            turns * max(each[NIC_OUT], each[NIC_IN]),
            turns * max(each[NVLINK_OUT], each[NVLINK_IN]),
        )
        for name, each in most.items()
    }


def most_taken(costs: Costs) -> dict[str, list[float]]:
    """By group: seconds that a micro-batch takes of each resource, SMS .. NVLINK_IN, on the rank where it is most."""
    found: dict[str, list[float]] = costs.of_placement("most taken", lambda: _most_taken(costs))
    return found


def _most_taken(costs: Costs) -> dict[str, list[float]]:
    taken = costs.tally.sums(lambda likeness: busy(costs, likeness), np.zeros((5, 1)))
    return {group: each.max(axis=1).tolist() for group, each in taken.items()}


def busy(costs: Costs, likeness: Likeness) -> dict[Role, Floats]:
    """[SMS .. NVLINK_IN, ranks]: seconds that one micro-batch of a layer takes of each resource, by role."""

    def added(actions: list[Action]) -> dict[Role, Floats]:
        found: dict[Role, Floats] = {}
        for role, seconds in costs.of_work("computing", likeness, lambda actions: _computing(costs, actions)).items():
            found[role] = np.zeros((5, len(seconds)))
            found[role][SMS] = seconds
        for action in actions:
            if action.kind in COMPUTES_AT:
                continue
            num = times(action, costs.chunks)
            ports = costs.ports(action)
            source, target = carries_between(action)
            for role, first, rows in ((source, NIC_OUT, ports[:2]), (target, NIC_IN, ports[2:4])):
                if role not in found:
                    found[role] = np.zeros((5, len(rows[0])))
                for row, seconds in enumerate(rows, start=first):
                    found[role][row] += seconds if num == 1 else num * seconds
        return found

    return dict(costs.of_likeness("busy", likeness, added))


def _computing(costs: Costs, actions: list[Action]) -> dict[Role, Floats]:
    """[ranks]: seconds that one micro-batch of a layer takes of the SMs, by role."""
    found: dict[Role, Floats] = {}
    for action in actions:
        if action.kind in COMPUTES_AT:
            role, seconds = COMPUTES_AT[action.kind], times(action, costs.chunks) * costs.seconds(action)
            found[role] = found[role] + seconds if role in found else seconds
    return found
