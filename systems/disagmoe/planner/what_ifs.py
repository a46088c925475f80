"""What would change a plan: the plan simulated, and the programme solved again, under other conditions."""

from dataclasses import replace
from typing import NamedTuple

from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.timing import StepTime
from systems.disagmoe.planner.allocation import Allocation, Outcome
from systems.disagmoe.planner.busy import PlannedStep, planned_step
from systems.disagmoe.planner.fitting import Steps
from systems.disagmoe.planner.refine import refine, same_work
from systems.disagmoe.planner.search import best_of, like

ORDERS_BUDGET = 16
"""Most orders of a plan that are simulated under a condition in which its own does not fit."""


class WhatIf(NamedTuple):
    """What the programme finds under another condition; `kept`: how the plan does there.

    order: the plan in an order that fits there, where its own does not; None where it does, or none was found.
    split: the simulated step of the programme's split there.
    """

    condition: str
    outcome: Outcome
    kept: StepTime | None = None
    order: Layout | None = None
    split: PlannedStep | None = None


def what_ifs(chosen: Allocation, plan: Layout, steps: Steps, time_limit_s: float) -> list[WhatIf]:
    """Twice and half the sequence length at the same number of tokens; twice and half the NICs' speed.

    With other lengths, sequences may be shared by other numbers of ranks; with other NICs, by as many or none.
    """
    found, spec = [], chosen.problem.spec
    for condition, changed in _conditions(spec):
        choices = chosen.problem.choices if changed.cluster == spec.cluster else like(chosen, (1, 1))
        outcome = best_of(changed, steps, choices, time_limit_s)
        found.append(WhatIf(condition, outcome, *kept_plan(changed.with_layout(plan), steps), split_of(outcome, steps)))
    return found


def split_of(outcome: Outcome, steps: Steps) -> PlannedStep | None:
    """What an allocation's simulated step keeps busy; None where it was not simulated to its end."""
    chosen = outcome.allocation
    if chosen is None or outcome.step is None or outcome.step.step_time_s is None:
        return None
    return planned_step(chosen.problem.spec.with_layout(chosen.layout), steps)


def kept_plan(case: Case, steps: Steps) -> tuple[StepTime, Layout | None]:
    """A plan's step as it is, or in the fastest order of the same work that fits where its own does not, and that."""
    try:
        own = steps.timed(case)
    except BadInput as error:
        return StepTime("refused", reason=str(error)), None
    if own.status == "ok":
        return own, None
    found = refine(
        case,
        [case.layout],
        steps.assumptions,
        simulate=steps.timed,
        budget=ORDERS_BUDGET,
        within=lambda layout: same_work(layout, case.layout),
    )
    if found.best is None:
        return own, None
    return steps.timed(case.with_layout(found.best.layout)), found.best.layout


def _conditions(spec: CaseSpec) -> list[tuple[str, CaseSpec]]:
    workload, cluster = spec.workload, spec.cluster
    found = []
    for length in (workload.seq_len * 2, workload.seq_len // 2):
        if length >= 2 and workload.global_batch_tokens % length == 0:
            changed = workload.model_copy(update={"seq_len": length})
            found.append((f"sequences have {length} tokens", spec.model_copy(update={"workload": changed})))
    if cluster.num_nodes > 1:
        for word, factor in (("twice", 2.0), ("half", 0.5)):
            other = cluster.model_copy(update={"nic_bytes_per_s": cluster.nic_bytes_per_s * factor})
            found.append((f"NICs are {word} as fast", spec.model_copy(update={"cluster": other})))
    return found


def nic_sets(chosen: Allocation, steps: Steps, time_limit_s: float) -> Outcome:
    """With NIC sets, for sequences that are shared and state that lives where it does without."""
    spec = chosen.problem.spec
    if spec.cluster.num_nodes == 1:
        return Outcome(None)
    return best_of(spec, steps, replace(like(chosen), nics="sets"), time_limit_s)
