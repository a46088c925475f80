"""Shares of time: what a lane does, where its operations are too narrow to be drawn one by one."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def shares(start: Floats, end: Floats, edges: Floats) -> Floats:
    """The share of each bin that the union of the intervals [start, end) covers; `edges` of the bins ascend."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    # Without what earlier intervals cover, the rest of each one begins after all before it have ended.
    covered = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    start = np.maximum(start, covered)
    length = np.maximum(end - start, 0.0)
    total = np.concatenate([[0.0], np.cumsum(length)])
    begun = np.searchsorted(start, edges, side="right")
    still_to_come = np.where(begun > 0, np.append(start + length, -np.inf)[begun - 1] - edges, 0.0)
    return np.diff(total[begun] - np.maximum(still_to_come, 0.0)) / np.diff(edges)


def stacked(start: Floats, end: Floats, what: Ints, edges: Floats) -> tuple[Ints, Floats, Floats, Ints]:
    """Columns of a stack for each bin: (bin's number, bottom, top, what), as shares of the bin from 0 to 1.

    Intervals of one `what` are united; where different ones run at once, the stack is scaled to 1.
    """
    kinds = np.unique(what)
    layers = np.array([shares(start[what == kind], end[what == kind], edges) for kind in kinds])
    layers /= np.maximum(layers.sum(axis=0), 1.0)
    tops = np.cumsum(layers, axis=0)
    layer, column = np.nonzero(layers > 0)
    top = tops[layer, column]
    return column, top - layers[layer, column], top, kinds[layer]
