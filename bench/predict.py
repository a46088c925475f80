"""From a case to its simulated step: plan, check, lower, cost, simulate. Every simulated number takes this path."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.assumptions import Assumptions
from bench.bound import bound_s
from bench.case import Batch, Case, Layout, Workload, batch_of
from bench.check import PlanError, check
from bench.clusters import Cluster
from bench.cost import Costs
from bench.fusion import FusedCosts
from bench.lower import lower
from bench.metrics import Metrics, metrics, taxed_share
from bench.models import Model
from bench.placement import Placement
from bench.program import Program
from bench.system import plan_of
from bench.timeline import Timeline

GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """A simulated step and what it rests on.

    peak_memory_bytes: of the fullest rank; memory_parts: its bytes at that moment by what they are.
    """

    case: Case
    program: Program
    costs: Costs
    timeline: Timeline
    peak_memory_bytes: float
    memory_parts: dict[str, float]

    @property
    def step_time_s(self) -> float:
        return self.timeline.step_time_s

    @cached_property
    def metrics(self) -> Metrics:
        return metrics(self.timeline, self.case)

    @cached_property
    def bound_s(self) -> float:
        return bound_s(self.program, self.costs)

    @property
    def missing_bytes(self) -> float:
        """By how much the fullest rank exceeds its GPU; 0 where the layout fits."""
        return max(0.0, self.peak_memory_bytes - self.case.cluster.gpu.memory_bytes)

    @property
    def batch(self) -> Batch:
        return batch_of(self.case, self.program.plan.placement)

    def require_fits(self) -> None:
        """Raises PlanError with the missing GiB, the queues around the fullest moment and what fills the memory."""
        if self.missing_bytes:
            raise self.memory_fault()

    def memory_fault(self) -> PlanError:
        """What `require_fits` raises, for a layout that does not fit; of a schedule file with its lines."""
        from bench.loading import located
        from bench.simulate.peak import find_peak

        full = find_peak(self.program, self.costs, self.timeline)
        allowed = does_not_fit(self.case, self.peak_memory_bytes)
        shown = full.shown(self.case.cluster.gpu.memory_bytes)
        return located(
            PlanError("layout", str(self.case.layout) or "defaults", allowed, shown, full.actions), self.case
        )


def does_not_fit(case: Case, peak_bytes: float) -> str:
    """In words: ``needs 93.0 GiB, 80.0 GiB allowed: 13.0 GiB missing``."""
    capacity = case.cluster.gpu.memory_bytes
    missing = (peak_bytes - capacity) / GIB
    return f"{capacity / GIB:.1f} GiB per GPU; this needs {peak_bytes / GIB:.1f} GiB, {missing:.1f} GiB missing"


COST_FIELDS = (
    *("mbs", "tp", "cp", "offload", "ranks_over_nodes"),
    *("copies", "recompute", "shard_state", "chunks", "comm_sms"),
)
"""Layout fields that costs on a given placement depend on."""


def costs_of(case: Case, placement: Placement, assumptions: Assumptions) -> Costs:
    """What the actions of a case cost on its placement. Layouts that differ in order only share one object."""
    spec = (case.model, case.cluster, case.workload)
    num_replicas = batch_of(case, placement).num_replicas
    same_costs = Layout(**{field: getattr(case.layout, field) for field in COST_FIELDS})
    return _known_costs(*spec, same_costs, placement, num_replicas, assumptions)


def new_costs(case: Case, placement: Placement, num_replicas: int, assumptions: Assumptions) -> Costs:
    """`costs_of` of a case of which it is known that no other layout shares its costs."""
    return _costs(case, placement, num_replicas, assumptions)


@lru_cache(maxsize=256)
def _known_costs(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    layout: Layout,
    placement: Placement,
    num_replicas: int,
    assumptions: Assumptions,
) -> Costs:
    case = Case(model=model, cluster=cluster, workload=workload, system="any", layout=layout)
    return _costs(case, placement, num_replicas, assumptions)


def _costs(case: Case, placement: Placement, num_replicas: int, assumptions: Assumptions) -> Costs:
    layout = case.layout
    kind = partial(FusedCosts, comm_sms=layout.comm_sms) if layout.comm_sms else Costs
    return kind(
        case,
        placement,
        copies=layout.copies,
        recompute=layout.recompute,
        num_replicas=num_replicas,
        assumptions=assumptions,
        chunks=layout.chunks,
    )


TAX_PASSES = 2


def _taxed(program: Program, costs: Costs) -> Costs:
    """The costs with SMs given to communication in that share of the computing time in which transfers run.

    The share is that of the whole step, a mean over its ranks: found in a step without the tax, and again in one with
    the tax that came of it.
    """
    from bench.simulate import simulate

    charged = replace(costs, taxed_share=0.0)
    for _ in range(TAX_PASSES):
        charged = replace(costs, taxed_share=taxed_share(simulate(program, charged, allocations=False)))
    return charged


def predict(case: Case, assumptions: Assumptions, *, rough: bool = False) -> Prediction:
    """Simulates one optimizer step. Raises BadInput (PlanError) for a layout or a plan that cannot be.

    With `rough`, the rendezvous run and the timeline's allocations are left out: a search makes them for its winner
    alone.
    """
    from bench.simulate import simulate_with_peaks

    program = lower(plan_of(case), case.model)
    if not rough:
        check(program)
    costs = costs_of(case, program.plan.placement, assumptions)
    if assumptions.communication_sms:
        costs = _taxed(program, costs)
    timeline, peaks = simulate_with_peaks(program, costs, allocations=not rough)
    static = costs.static_parts(_fullest(program, peaks))
    peak = float(peaks.max())
    return Prediction(
        case=case,
        program=program,
        costs=costs,
        timeline=timeline,
        peak_memory_bytes=peak,
        memory_parts=static | {"activations and messages": peak - sum(static.values())},
    )


def _fullest(program: Program, peaks: NDArray[np.float64]) -> str:
    """Name of the group of the fullest of the timed ranks."""
    placement = program.plan.placement
    sizes = [group.size * len(peaks) // placement.size for group in placement.groups]
    return placement.groups[int(np.repeat(np.arange(len(sizes)), sizes)[peaks.argmax()])].name


class QuickStep(NamedTuple):
    """Of a step, what a search asks for: its time, its bound, bytes of the fullest rank, and the group of that rank.

    Where the step is sure to take longer than it may, its time is None, the bytes are what any order of its queues in
    time needs, and the group is not named.
    """

    step_time_s: float | None
    bound_s: float
    peak_memory_bytes: float
    fullest: str = ""


def quick_step(case: Case, assumptions: Assumptions, limit_s: float = inf) -> QuickStep:
    """The numbers of `predict` without its timeline, as long as the step may take no more than `limit_s`.

    Raises BadInput (PlanError) for a layout or a plan that cannot be.
    """
    from bench.simulate import least_peak_bytes, time_step

    program = lower(plan_of(case), case.model)
    costs = costs_of(case, program.plan.placement, assumptions)
    if assumptions.communication_sms:
        costs = _taxed(program, costs)
    found = time_step(program, costs, limit_s)
    if found is None:
        return QuickStep(None, bound_s(program, costs), least_peak_bytes(program, costs))
    peaks = found.peak_bytes
    return QuickStep(found.step_time_s, bound_s(program, costs), float(peaks.max()), _fullest(program, peaks))
