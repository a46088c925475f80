"""An allocation and a refinement as plain values, for JSON."""

from typing import Any

from bench.predict import QuickStep
from systems.disagmoe.orders import FIELDS
from systems.disagmoe.planner.allocation import Allocation, Cut, Outcome
from systems.disagmoe.planner.busy import PlannedStep
from systems.disagmoe.planner.refine import Refinement, Try
from systems.disagmoe.planner.what_ifs import WhatIf


def plain_allocation(each: Allocation) -> dict[str, Any]:
    """What was chosen, what proves it, what it keeps busy."""
    return {
        "layout": each.layout.model_dump(mode="json"),
        "step_s": each.step_s,
        "bound_s": 1.0 / each.most_steps_per_s,
        "gap": each.gap,
        "proven": each.proven,
        "settled": each.settled,
        "solve_s": each.solve_s,
        "binding": list(each.binding),
        "busy_s": dict(each.seconds),
        "num_gpus": each.num_gpus,
        "nics": {"attention": each.nics[0], "expert": each.nics[1]},
        "simulated_only": each.problem.choices.nics == "sets",
        "mfu_of_used": each.mfu(),
        "mfu_of_allocated": each.mfu(each.problem.spec.cluster.num_gpus),
        "memory_bytes": {"attention": each.memory_bytes[0], "expert": each.memory_bytes[1]},
    }


def plain_step(step: QuickStep | None) -> dict[str, Any] | None:
    """A simulated step: its seconds (None where it was not played to its end, as it cannot fit) and bytes."""
    return None if step is None else {"step_s": step.step_time_s, "peak_memory_bytes": step.peak_memory_bytes}


def plain_cut(each: Cut) -> dict[str, Any]:
    return {"layout": each.layout.model_dump(mode="json"), "peak_memory_bytes": each.peak_memory_bytes}


def plain_planned(each: PlannedStep) -> dict[str, Any]:
    return {"source": "simulated", **(plain_step(each.step) or {}), "busy_s": dict(each.busy_s)}


def plain_outcome(each: Outcome) -> dict[str, Any]:
    """An allocation with its plan's simulated step, or none and whether time was the reason."""
    found = None if each.allocation is None else plain_allocation(each.allocation)
    told = {"allocation": found, "timed_out": each.timed_out}
    return told | {"simulated": plain_step(each.step), "cut_off": [plain_cut(cut) for cut in each.cuts]}


def plain_what_if(each: WhatIf) -> dict[str, Any]:
    kept = each.kept
    plan: dict[str, Any] | None = None
    if kept is not None:
        plan = {"status": kept.status, "step_s": kept.step_time_s, "peak_memory_bytes": kept.peak_memory_bytes}
        plan["reason"] = kept.reason
        plan["order"] = each.order and {name: getattr(each.order, name) for name in FIELDS}
    return {"condition": each.condition, **plain_outcome(each.outcome), "plan": plan}


def plain_refinement(found: Refinement, source: str) -> dict[str, Any]:
    """The whole search: its path, and every layout that was looked at."""

    def plain(each: Try) -> dict[str, Any]:
        return {**vars(each), "layout": each.layout.model_dump(mode="json")}

    return {
        "source": source,
        "complete": found.complete,
        "start": None if found.start is None else plain(found.start),
        "path": [plain(each) for each in found.path],
        "tried": [plain(each) for each in found.tried],
    }
