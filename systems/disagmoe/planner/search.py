"""The search of one workload, the same wherever a plan is asked for: the programme, its seeds, and their refinement."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from bench.assumptions import Assumptions
from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.timing import Evaluate
from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, TIME_LIMIT, Allocation, Outcome, allocate, attempt
from systems.disagmoe.planner.alternatives import by_groups, by_replicas
from systems.disagmoe.planner.choices import Choices
from systems.disagmoe.planner.problem import Problem, problem
from systems.disagmoe.planner.refine import DEFAULT_BUDGET, Refinement, refine
from systems.disagmoe.planner.words import short

NUM_SEEDS = 3
MOST_NODES_FACTOR = 64
Progress = Callable[[int, int, str], None]


class Effort(TypedDict, total=False):
    """How a search is done.

    Args:
        choices: what the programme may choose from; `Choices()` if not given.
        evaluate: how the refinement times a step (for example by running it); simulation if not given.
        budget: most evaluations of the refinement; None for no limit.
        time_limit_s: of each programme.
        progress: called with (evaluations done, budget, what is looked at).
    """

    choices: Choices | None
    evaluate: Evaluate | None
    budget: int | None
    time_limit_s: float
    progress: Progress | None


@dataclass(frozen=True, eq=False)
class Search:
    """What was found.

    Args:
        programme: of equal depth; `allocation` is its optimum, or its incumbent at the time limit.
        unequal: the optimum with different numbers of attention and expert groups.
        refinement: None if it was not asked for.
    """

    programme: Problem
    allocation: Allocation
    unequal: Outcome
    refinement: Refinement | None


def search(spec: CaseSpec, assumptions: Assumptions, *, refinement: bool = True, **effort: Unpack[Effort]) -> Search:
    """Plans a spec. Of a case, its layout is one more seed of the refinement.

    Raises BadInput: a cluster too small for the model, with what is missing and what would fit.
    """
    chosen = effort.get("choices") or Choices()
    time_limit_s = effort.get("time_limit_s", DEFAULT_LIMIT_S)
    programme = problem(spec, assumptions, chosen)
    try:
        best = allocate(programme, time_limit_s=time_limit_s)
    except BadInput as error:
        raise _with_what_fits(error, spec, assumptions, chosen, time_limit_s) from None
    unequal = best_of(spec, assumptions, replace(like(best), unequal=True), time_limit_s)
    found = None
    if refinement:
        seeds = [best.layout, *seeds_of(programme, time_limit_s=time_limit_s)]
        other = unequal.allocation
        seeds += [other.layout] if other is not None and other.step_s < best.step_s else []
        seeds += [spec.layout] if isinstance(spec, Case) else []
        found = refine(
            spec,
            seeds,
            assumptions,
            evaluate=effort.get("evaluate"),
            budget=effort.get("budget", DEFAULT_BUDGET),
            progress=effort.get("progress"),
        )
    return Search(programme, best, unequal, found)


def seeds_of(programme: Problem, *, time_limit_s: float = DEFAULT_LIMIT_S) -> list[Layout]:
    """Where a refinement begins: the optima of several numbers of groups and of replicas.

    Few large replicas and many small ones are nearly one to the programme, and far apart in what a step has in flight.
    """
    found = by_groups(programme, time_limit_s=time_limit_s)[:NUM_SEEDS]
    found += by_replicas(programme, time_limit_s=time_limit_s)
    return list(dict.fromkeys(each.layout for each in found))


def like(allocation: Allocation, *shares: tuple[int, int]) -> Choices:
    """The choices with sequences shared as in an allocation (or as given), and state where it has it."""
    layout = allocation.layout
    ways = tuple(dict.fromkeys(((layout.tp, layout.cp), *shares)))
    return replace(allocation.problem.choices, shares=ways, offload=(layout.offload,))


def best_of(spec: CaseSpec, assumptions: Assumptions, choices: Choices, time_limit_s: float) -> Outcome:
    """The optimum of other choices."""
    try:
        programme = problem(spec, assumptions, choices)
    except BadInput:  # no candidate at all
        return Outcome(None)
    return attempt(programme, time_limit_s=time_limit_s)


def _with_what_fits(
    error: BadInput, spec: CaseSpec, assumptions: Assumptions, choices: Choices, time_limit_s: float
) -> BadInput:
    """The error, with the first of twice, four times, ... the cluster that has an allocation."""
    if error.field != "cluster":
        return error
    factor = 2
    while factor <= MOST_NODES_FACTOR:
        cluster = spec.cluster.model_copy(update={"num_nodes": spec.cluster.num_nodes * factor})
        larger = spec.model_copy(update={"cluster": cluster})
        try:
            fits = allocate(problem(larger, assumptions, choices), time_limit_s=time_limit_s)
        except BadInput as other:
            if other.field == TIME_LIMIT:
                return BadInput(error.field, error.value, f"{error.allowed}; what would fit was not found in time")
            factor *= 2
            continue
        size = f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs"
        return BadInput(error.field, error.value, f"{error.allowed}; {size} would fit ({short(fits)})")
    most = f"{spec.cluster.num_nodes * MOST_NODES_FACTOR} nodes"
    return BadInput(error.field, error.value, f"{error.allowed}; even {most} would not do")
