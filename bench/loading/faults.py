"""What a plan of a file has to be, and its faults with the lines of the file."""

from typing import NoReturn

import numpy as np

from bench.action import BadAction, Kind, unpack
from bench.case import Case
from bench.check import PlanError
from bench.errors import BadInput
from bench.models import Model
from bench.placement import Placement
from bench.plan import Plan

FIXED_BY_PLAN = ("copies", "recompute", "chunks")
MAX_LINES_NAMED = 4


def require_placement(name: str, placement: Placement, model: Model) -> None:
    """Raises BadInput where the placement of a file cannot be, or is not of that model."""
    try:
        placement.validate()
    except BadInput as error:
        raise BadInput(f"{name}: {error.field}", error.value, error.allowed) from None
    dense = [expert is None for expert in placement.expert]
    if dense != [model.is_dense(layer) for layer in range(model.num_layers)]:
        what = f"a model of {len(dense)} layers, {sum(dense)} of them dense, as in {name}"
        raise BadInput("model", model.name, what)
    for group in {placement.by_name[expert] for expert in placement.expert if expert}:
        if model.num_experts % group.size:
            allowed = f"ranks that divide the {model.num_experts} experts of {model.name}"
            raise BadInput(f"{name}: placement", str(group), allowed)


def require_of_case(name: str, plan: Plan, case: Case, placement: Placement, num_microbatches: int) -> None:
    """Raises BadInput where a plan is not that of the case: of less work, or done in another way than it is charged."""
    if plan.placement != placement:
        raise BadInput(f"{name}: plan.placement", "another", "what placement(case) returns")
    for field in FIXED_BY_PLAN:
        if getattr(plan, field) != getattr(case.layout, field):
            allowed = f"{getattr(case.layout, field)}, as the layout says"
            raise BadInput(f"{name}: plan.{field}", getattr(plan, field), allowed)
    if plan.num_microbatches != num_microbatches:
        allowed = f"{num_microbatches}, which the batch makes in this layout"
        raise BadInput(f"{name}: plan.num_microbatches", plan.num_microbatches, allowed)
    for (group, stream), queue in plan.queues.items():
        strange = np.flatnonzero((queue.codes < 0) | (unpack(queue.codes).kind >= len(Kind)))
        if len(strange):
            at = f"{name}: plan: queue {group} {stream} [{strange[0]}]"
            raise BadInput(at, int(queue.codes[strange[0]]), "the code of an action, see bench.action.pack")


def with_lines(error: PlanError | BadAction, name: str, lines: list[int]) -> PlanError:
    """The same fault, with the lines of the file."""
    distinct = list(dict.fromkeys(lines))
    shown = ", ".join(map(str, distinct[:MAX_LINES_NAMED])) + (" ..." if len(distinct) > MAX_LINES_NAMED else "")
    where = f"{name}, line{'s' * (len(distinct) > 1)} {shown}" if distinct else name
    grid = error.grid if isinstance(error, PlanError) else ""
    return PlanError(f"{where}: {error.field}", error.value, error.allowed, grid, error.actions)


def raise_fault(error: BadInput) -> NoReturn:
    """Raises it as a fault, which no search passes over."""
    error.fault = True
    raise error from None
