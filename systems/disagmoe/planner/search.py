"""The search of one workload, the same wherever a plan is asked for: the programme, its seeds, and their refinement."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.assumptions import Assumptions
from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.timing import Evaluate
from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, Allocation, allocate
from systems.disagmoe.planner.alternatives import by_groups, by_replicas
from systems.disagmoe.planner.problem import Choices, Problem, problem
from systems.disagmoe.planner.refine import DEFAULT_BUDGET, Refinement, refine
from systems.disagmoe.planner.words import short

NUM_SEEDS = 3
MOST_NODES_FACTOR = 64
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Search:
    """What was found.

    Args:
        programme: of equal depth; `allocation` is its optimum, or its incumbent at the time limit.
        unequal: the optimum with different numbers of attention and expert groups, None where there is none.
        refinement: None if it was not asked for.
    """

    programme: Problem
    allocation: Allocation
    unequal: Allocation | None
    refinement: Refinement | None


def search(
    spec: CaseSpec,
    assumptions: Assumptions,
    *,
    choices: Choices | None = None,
    refinement: bool = True,
    evaluate: Evaluate | None = None,
    budget: int | None = DEFAULT_BUDGET,
    time_limit_s: float = DEFAULT_LIMIT_S,
    progress: Progress | None = None,
) -> Search:
    """Plans a spec; options as of `systems.disagmoe.planner.explain.explain`.

    Raises BadInput: a cluster too small for the model, with what is missing and what would fit.
    """
    chosen = choices or Choices()
    programme = problem(spec, assumptions, chosen)
    try:
        best = allocate(programme, time_limit_s=time_limit_s)
    except BadInput as error:
        raise _with_what_fits(error, spec, assumptions, chosen, time_limit_s) from None
    unequal = best_of(spec, assumptions, replace(like(best), unequal=True), time_limit_s)
    found = None
    if refinement:
        seeds = [best.layout, *seeds_of(programme, time_limit_s=time_limit_s)]
        seeds += [unequal.layout] if unequal is not None and unequal.step_s < best.step_s else []
        seeds += [spec.layout] if isinstance(spec, Case) else []
        found = refine(spec, seeds, assumptions, evaluate=evaluate, budget=budget, progress=progress)
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


def best_of(spec: CaseSpec, assumptions: Assumptions, choices: Choices, time_limit_s: float) -> Allocation | None:
    """The optimum of other choices, None where nothing fits them, or nothing was found in time."""
    try:
        return allocate(problem(spec, assumptions, choices), time_limit_s=time_limit_s)
    except BadInput:
        return None


def _with_what_fits(
    error: BadInput, spec: CaseSpec, assumptions: Assumptions, choices: Choices, time_limit_s: float
) -> BadInput:
    """The error, with the smallest multiple of the cluster (by doubling) that has an allocation."""
    if error.field != "cluster":
        return error
    factor = 2
    while factor <= MOST_NODES_FACTOR:
        cluster = spec.cluster.model_copy(update={"num_nodes": spec.cluster.num_nodes * factor})
        larger = spec.model_copy(update={"cluster": cluster})
        try:
            fits = allocate(problem(larger, assumptions, choices), time_limit_s=time_limit_s)
        except BadInput:
            factor *= 2
            continue
        size = f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs"
        return BadInput(error.field, error.value, f"{error.allowed}; {size} would fit ({short(fits)})")
    return error
