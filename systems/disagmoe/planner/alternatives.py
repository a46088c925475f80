"""More than one allocation: the next best splits, and the best of every number of groups or replicas."""

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput
from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, Allocation, allocate
from systems.disagmoe.planner.problem import Problem


def alternatives(problem: Problem, num: int, *, time_limit_s: float = DEFAULT_LIMIT_S) -> list[Allocation]:
    """The best allocation and the next best ones, each with another (p, p_F, M, N); fewer where there are no more."""
    excluded = np.zeros(len(problem), dtype=bool)
    splits = _splits(problem)
    found: list[Allocation] = []
    while len(found) < num:
        try:
            found.append(allocate(problem, time_limit_s=time_limit_s, excluded=excluded))
        except BadInput:
            if not found:
                raise
            break
        excluded |= (splits == splits[found[-1].candidate]).all(axis=1)
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
