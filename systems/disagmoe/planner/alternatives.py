"""More than one allocation: the next best splits, and the best of every number of groups or replicas."""

import math

import numpy as np
from numpy.typing import NDArray

from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, Allocation, Outcome, allocate, attempt
from systems.disagmoe.planner.fitting import Steps, attempt_fit
from systems.disagmoe.planner.problem import Problem


def alternatives(problem: Problem, num: int, *, time_limit_s: float = DEFAULT_LIMIT_S) -> list[Allocation]:
    """The best allocation and the next best ones, each with another (p, p_F, M, N); fewer where there are no more."""
    best = allocate(problem, time_limit_s=time_limit_s)
    others = next_best(problem, best, num - 1, time_limit_s=time_limit_s)
    return [best, *(each.allocation for each in others if each.allocation)]


def next_best(
    problem: Problem, best: Allocation, num: int, steps: Steps | None = None, *, time_limit_s: float = DEFAULT_LIMIT_S
) -> list[Outcome]:
    """The best allocations of other splits (p, p_F, M, N) than `best`, one of each, fastest first.

    Fewer where there are no more; where the solver found none in its time, that is the last. With `steps`, only those
    whose plans fit when they are simulated.
    """
    splits = _splits(problem)
    excluded = np.zeros(len(problem), dtype=bool)
    found: list[Outcome] = []
    last: Allocation | None = best
    while last is not None and len(found) < num:
        excluded |= (splits == splits[last.candidate]).all(axis=1)
        if steps is None:
            found.append(attempt(problem, time_limit_s=time_limit_s, excluded=excluded))
        else:
            problem, outcome, _ = attempt_fit(problem, steps, time_limit_s=time_limit_s, excluded=excluded)
            found.append(outcome)
        last = found[-1].allocation
    some = [each for each in found if each.allocation or each.timed_out or each.cuts]
    return sorted(some, key=lambda each: each.allocation.step_s if each.allocation else math.inf)


def by_groups(problem: Problem, *, time_limit_s: float = DEFAULT_LIMIT_S) -> list[Allocation]:
    """The best allocation of each number of groups that has one, fastest first."""
    return _each_best(problem, _splits(problem)[:, 0], time_limit_s)


def by_replicas(problem: Problem, *, time_limit_s: float = DEFAULT_LIMIT_S) -> list[Allocation]:
    """The best allocation of each number of replicas that has one, fastest first."""
    return _each_best(problem, problem.replicas, time_limit_s)


def _each_best(problem: Problem, column: NDArray[np.int64], time_limit_s: float) -> list[Allocation]:
    """The best allocation of each value of a column."""
    tried = (attempt(problem, time_limit_s=time_limit_s, excluded=column != value) for value in np.unique(column))
    return sorted((each.allocation for each in tried if each.allocation), key=lambda each: each.step_s)


def _splits(problem: Problem) -> NDArray[np.int64]:
    """[candidates, 4]: p, p_F, M, N."""
    depths = [problem.of_shape(lambda shape: shape.groups), problem.of_shape(lambda shape: shape.expert_groups)]
    return np.stack([*depths, problem.data_ranks, problem.expert_ranks], axis=1)
