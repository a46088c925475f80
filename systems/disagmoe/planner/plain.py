"""An allocation and a refinement as plain values, for JSON."""

from typing import Any

from systems.disagmoe.planner.allocation import Allocation, Outcome
from systems.disagmoe.planner.refine import Refinement, Try


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


def plain_outcome(each: Outcome) -> dict[str, Any]:
    """An allocation, or none and whether time was the reason."""
    found = None if each.allocation is None else plain_allocation(each.allocation)
    return {"allocation": found, "timed_out": each.timed_out}


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
