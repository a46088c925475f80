"""A lower bound on the step time: the busiest resource, with everything else hidden. One function for all systems."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bench.action import COMPUTE, TRANSFERS
from bench.census import census
from bench.cost import Costs
from bench.edges import ends
from bench.placement import Placement
from bench.program import Program


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
    bare = costs.without_overheads()
    compute = {group.name: np.zeros(group.size) for group in placement.groups}
    ports = {group.name: np.zeros((4, group.size)) for group in placement.groups}
    counted = census(costs.case.model, placement, costs.recompute, costs.chunks, layers_alike=costs.routes.even)
    for action, times in counted.items():
        if action.kind in COMPUTE:
            compute[placement.home(action.kind, action.layer, action.microbatch)] += times * bare.seconds(action)
        elif action.kind in TRANSFERS:
            source, target = ends(placement, action)
            taken = bare.ports(action)
            ports[source][:2] += times * np.stack(taken[:2])
            ports[target][2:] += times * np.stack(taken[2:4])
    turns = num_microbatches / placement.directions
    busiest_s = max(turns * float(compute[name].max()) + bare.update_s(name) for name in compute)
    nic_s = max(float(each[[0, 2]].max()) for each in ports.values())
    nvlink_s = max(float(each[[1, 3]].max()) for each in ports.values())
    return Bound(busiest_s, turns * nic_s, turns * nvlink_s)
