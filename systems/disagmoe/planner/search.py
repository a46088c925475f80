"""The search of one workload, the same wherever a plan is asked for: the programme, its seeds, and their refinement."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from bench.assumptions import Assumptions
from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.timing import Evaluate
from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, Allocation, Outcome
from systems.disagmoe.planner.alternatives import by_groups, by_replicas
from systems.disagmoe.planner.choices import Choices
from systems.disagmoe.planner.counting import counted
from systems.disagmoe.planner.fitting import Steps, attempt_fit, fit
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
        programme: of equal depth, without what was cut off, and `outcome` its optimum (its incumbent at the time limit)
            among splits whose plans fit. Where none was found that does, `refused` says why.
        unequal: the optimum with different numbers of attention and expert groups.
        refinement: None if it was not asked for.
        steps: what was simulated on the way.
    """

    programme: Problem
    outcome: Outcome
    refused: BadInput | None
    unequal: Outcome
    refinement: Refinement | None
    steps: Steps

    @property
    def allocation(self) -> Allocation:
        found = self.outcome.allocation
        assert found is not None
        return found


def search(spec: CaseSpec, assumptions: Assumptions, *, refinement: bool = True, **effort: Unpack[Effort]) -> Search:
    """Plans a spec. Of a case, its layout is one more seed of the refinement.

    Raises BadInput: a cluster too small for the model, with what is missing and what would fit.
    """
    chosen = effort.get("choices") or Choices()
    time_limit_s = effort.get("time_limit_s", DEFAULT_LIMIT_S)
    steps = Steps(assumptions)
    try:
        programme, outcome, refused = fit(problem(spec, assumptions, chosen), steps, time_limit_s=time_limit_s)
        if refused is not None and not refinement:
            raise refused
    except BadInput as error:
        raise _with_what_fits(error, spec, steps, chosen, time_limit_s) from None
    best = outcome.allocation
    assert best is not None
    unequal = best_of(spec, steps, replace(like(best), unequal=True), time_limit_s)
    found = None
    if refinement:
        found = refine(
            spec,
            _seeds(spec, programme, best, unequal, time_limit_s),
            assumptions,
            evaluate=effort.get("evaluate"),
            simulate=steps.timed,
            budget=effort.get("budget", DEFAULT_BUDGET),
            progress=effort.get("progress"),
        )
        if refused is not None and found.best is None:
            raise _with_what_fits(refused, spec, steps, chosen, time_limit_s)
    return Search(programme, outcome, refused, unequal, found, steps)


def _seeds(
    spec: CaseSpec, programme: Problem, best: Allocation, unequal: Outcome, time_limit_s: float
) -> dict[Layout, str]:
    """Where a refinement begins, each with what it is."""
    seeds = {best.layout: "the programme's split"}
    for layout, what in seeds_of(programme, time_limit_s=time_limit_s).items():
        seeds.setdefault(layout, what)
    other = unequal.allocation
    if other is not None and other.step_s < best.step_s:
        seeds.setdefault(other.layout, "the best of unequal depth")
    if isinstance(spec, Case):
        seeds.setdefault(spec.layout, "the layout that was given")
    return seeds


def seeds_of(programme: Problem, *, time_limit_s: float = DEFAULT_LIMIT_S) -> dict[Layout, str]:
    """The optima of several numbers of groups and of replicas, each with what it is the best of.

    Few large replicas and many small ones are nearly one to the programme, and far apart in what a step has in flight.
    """
    found: dict[Layout, str] = {}
    for each in by_groups(programme, time_limit_s=time_limit_s)[:NUM_SEEDS]:
        found.setdefault(each.layout, f"the best with p={each.layout.groups}")
    for each in by_replicas(programme, time_limit_s=time_limit_s):
        found.setdefault(each.layout, f"the best with {counted(each.layout.replicas or 1, 'replica')}")
    return found


def like(allocation: Allocation, *shares: tuple[int, int]) -> Choices:
    """The choices with sequences shared as in an allocation (or as given), and state where it has it."""
    layout = allocation.layout
    ways = tuple(dict.fromkeys(((layout.tp, layout.cp), *shares)))
    return replace(allocation.problem.choices, shares=ways, offload=(layout.offload,))


def best_of(spec: CaseSpec, steps: Steps, choices: Choices, time_limit_s: float) -> Outcome:
    """The optimum of other choices, of splits whose plans fit."""
    try:
        programme = problem(spec, steps.assumptions, choices)
    except BadInput:  # no candidate at all
        return Outcome(None)
    return attempt_fit(programme, steps, time_limit_s=time_limit_s).outcome


def _with_what_fits(error: BadInput, spec: CaseSpec, steps: Steps, choices: Choices, time_limit_s: float) -> BadInput:
    """The error, with the fewest nodes that have a split whose plan fits: among doublings, and between the last two."""
    if error.field != "cluster":
        return error

    def on(num_nodes: int) -> tuple[Outcome, str]:
        cluster = spec.cluster.model_copy(update={"num_nodes": num_nodes})
        outcome = best_of(spec.model_copy(update={"cluster": cluster}), steps, choices, time_limit_s)
        return outcome, f"{counted(num_nodes, 'node')} of {counted(cluster.gpus_per_node, 'GPU')}"

    def told(what: str) -> BadInput:
        return BadInput(error.field, error.value, f"{error.allowed}; {what}")

    too_few, enough = spec.cluster.num_nodes, 2 * spec.cluster.num_nodes
    while (found := on(enough))[0].allocation is None:
        if found[0].timed_out:
            return told("what would fit was not found in time")
        too_few, enough = enough, 2 * enough
        if enough > spec.cluster.num_nodes * MOST_NODES_FACTOR:
            return told(f"even {counted(too_few, 'node')} would not do")
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        fewer = on(middle)
        if fewer[0].allocation is None:
            too_few = middle
        else:
            enough, found = middle, fewer
    fits = found[0].allocation
    assert fits is not None
    return told(f"{found[1]} would fit ({short(fits)})")
