"""What a plan keeps busy: seconds of the busiest GPU of each kind, resource by resource, from the cost model."""

from collections.abc import Mapping
from typing import NamedTuple

from bench.assumptions import Assumptions
from bench.bound import bound_by_group
from bench.case import Case, batch_of
from bench.errors import BadInput
from bench.predict import QuickStep, costs_of
from systems.disagmoe.placement import place
from systems.disagmoe.planner.fitting import Steps

_SIDES = {"attention": "A", "expert": "F"}


class PlannedStep(NamedTuple):
    """A plan's simulated step, and what it keeps busy.

    Args:
        step: as simulated.
        busy_s: by resource, named as in `systems.disagmoe.planner.problem.RESOURCES`; with the optimizer step, without
            fixed costs of kernels and transfers.
    """

    step: QuickStep
    busy_s: Mapping[str, float]

    @property
    def busiest(self) -> str:
        return max(self.busy_s, key=lambda name: self.busy_s[name])


def planned_step(case: Case, steps: Steps) -> PlannedStep | None:
    """None for a case that is not simulated."""
    try:
        return PlannedStep(steps.quick(case), busy_of(case, steps.assumptions))
    except BadInput:
        return None


def busy_of(case: Case, assumptions: Assumptions) -> dict[str, float]:
    """Seconds of a step by resource, on the busiest GPU of the attention and of the expert groups."""
    placement = place(case.model, case.layout)
    costs = costs_of(case, placement, assumptions)
    groups = bound_by_group(placement, costs, batch_of(case, placement).num_microbatches)
    found: dict[str, float] = {}
    for resource in ("compute", "NICs", "NVLink"):
        for side, letter in _SIDES.items():
            own = (each for name, each in groups.items() if name.startswith(letter))
            field = {"compute": "compute_s", "NICs": "nic_s", "NVLink": "nvlink_s"}[resource]
            found[f"{side} {resource}"] = max(float(getattr(each, field)) for each in own)
    return found
