"""More than one allocation: the next best splits, and the best of every number of groups or replicas."""

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput
from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, Allocation, allocate
from systems.disagmoe.planner.problem import Problem


def alternatives(problem: Problem, num: int, *, time_limit_s: float = DEFAULT_LIMIT_S) -> list[Allocation]:
    """The best allocation and the next best ones, each with another (p, p_F, M, N); fewer where there are no more."""
    best = allocate(problem, time_limit_s=time_limit_s)
    return [best, *next_best(problem, best, num - 1, time_limit_s=time_limit_s)]


def next_best(
    problem: Problem, best: Allocation, num: int, *, time_limit_s: float = DEFAULT_LIMIT_S
) -> list[Allocation]:
    """The best allocations of other splits (p, p_F, M, N) than `best`, one of each; fewer where there are no more."""
    splits = _splits(problem)
    excluded = np.zeros(len(problem), dtype=bool)
    found: list[Allocation] = []
    last = best
    while len(found) < num:
        excluded |= (splits == splits[last.candidate]).all(axis=1)
        try:
            last = allocate(problem, time_limit_s=time_limit_s, excluded=excluded)
        except BadInput:
            break
        found.append(last)
    return found


def by_groups(problem: Problem, *, time_limit_s: float = DEFAULT_LIMIT_S) -> list[Allocation]:
    """The best allocation of each number of groups that has one, fastest first."""
    return _each_best(problem, _splits(problem)[:, 0], time_limit_s)


def by_replicas(problem: Problem, *, time_limit_s: float = DEFAULT_LIMIT_S) -> list[Allocation]:
    """The best allocation of each number of replicas that has one, fastest first."""
    return _each_best(problem, np.array([shape.replicas for shape in problem.shapes])[problem.shape], time_limit_s)


def _each_best(problem: Problem, column: NDArray[np.int64], time_limit_s: float) -> list[Allocation]:
    """The best allocation of each value of a column."""
    found = []
    for value in np.unique(column):
        try:
            found.append(allocate(problem, time_limit_s=time_limit_s, excluded=column != value))
        except BadInput:
            continue
    return sorted(found, key=lambda each: each.step_s)


def _splits(problem: Problem) -> NDArray[np.int64]:
    """[candidates, 4]: p, p_F, M, N."""
    shapes = [(shape.groups, shape.expert_groups, shape.option.expert_ranks) for shape in problem.shapes]
    of_shape = np.array(shapes)[problem.shape]
    return np.stack([of_shape[:, 0], of_shape[:, 1], problem.data_ranks, of_shape[:, 2]], axis=1)
