"""Lengths of unions of intervals, in whole nanoseconds."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def union(start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The fewest disjoint intervals that cover the same points, sorted. Touching ones are joined, empty dropped."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return start, end
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    return start[first], reach[np.append(first[1:] - 1, len(start) - 1)]


def length(start: Ints, end: Ints) -> int:
    """Summed length of intervals as they are, overlaps counted again."""
    return int((end - start).sum())


def covered(start: Ints, end: Ints) -> int:
    """Length of the union."""
    return length(*union(start, end))


def both(a: tuple[Ints, Ints], b: tuple[Ints, Ints]) -> int:
    """Length of what two unions have in common: |A| + |B| - |A or B|."""
    together = covered(np.concatenate((a[0], b[0])), np.concatenate((a[1], b[1])))
    return length(*a) + length(*b) - together


def inside(at: Ints, start: Ints, end: Ints) -> NDArray[np.bool_]:
    """Which points lie in the union of half-open intervals."""
    start, end = union(start, end)
    found = np.searchsorted(start, at, side="right") - 1
    return (found >= 0) & (at < end[found]) if len(start) else np.zeros(len(at), dtype=bool)


def shares(start: Ints, end: Ints, edges: Floats) -> Floats:
    """What part of each bin between neighbouring `edges` the union covers, from 0 to 1."""
    start, end = union(start, end)
    if not len(start):
        return np.zeros(len(edges) - 1)
    # The covered length up to a point: it grows inside intervals and rests between them.
    points = np.stack([start, end], axis=1).reshape(-1)
    total = np.cumsum(end - start)
    reached = np.stack([total - (end - start), total], axis=1).reshape(-1)
    return np.diff(np.interp(edges, points, reached)) / np.diff(edges)
