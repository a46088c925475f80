"""Bytes held over a simulated step: static state, and values from the start of their maker to the end of their user."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bench.action import view
from bench.cost import Costs
from bench.program import Held, Program
from bench.timeline import Timeline

Floats = NDArray[np.float64]


def net_bytes(program: Program, costs: Costs, base: NDArray[np.int64], sizes: NDArray[np.int64]) -> Floats:
    """[tasks]: bytes that each task allocates minus those it gives back."""
    task, last_task, held = _spans(program, costs, base, sizes)
    num_tasks = int(base[-1])
    taken, given = (np.bincount(tasks, held, num_tasks).astype(np.float64) for tasks in (task, last_task))
    return taken - given


def peak_bytes(program: Program, costs: Costs, timeline: Timeline) -> Floats:
    """[timed ranks, in the order of the placement's groups]: the most bytes that each rank holds at once.

    Static state plus the largest sum of the program's lifetimes that are open at a time. At one moment, what ends is
    given back before what begins is allocated.
    """
    groups = program.plan.placement.groups
    sizes = np.array([group.size // timeline.stands_for for group in groups])
    base = np.concatenate([[0], np.cumsum(sizes[program.group])])
    task, last_task, held = _spans(program, costs, base, sizes)
    first_rank = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    op_of = np.repeat(np.arange(program.num_ops), np.diff(base))
    rank = (first_rank[program.group[op_of]] + np.arange(len(op_of)) - base[op_of])[task]
    when = np.concatenate([timeline.end_s[last_task], timeline.start_s[task]])
    change = np.concatenate([-held, held])
    where = np.concatenate([rank, rank])
    # Sorting is stable: ends, which come first, stay before starts of the same moment.
    order = np.lexsort((when, where))
    running = np.cumsum(change[order])
    peaks = np.repeat([costs.static_bytes(group.name) for group in groups], sizes)
    bounds = np.searchsorted(where[order], np.arange(len(peaks) + 1))
    for r, (low, high) in enumerate(pairwise(bounds)):
        # A rank's changes sum to 0, so the running sum begins again for every rank.
        peaks[r] += running[low:high].max(initial=0.0)
    return peaks


def _spans(
    program: Program, costs: Costs, base: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Of every lifetime on every rank: first task, last task, bytes."""
    spans = program.lifetimes
    # A packed message is described by its transfer, which is where the span ends.
    described = np.where(spans.held == Held.SENT, spans.last, spans.first)
    template = program.template[described]
    size = sizes[program.group[spans.first]]
    key = template.astype(np.int64) * len(Held) + spans.held
    kinds, kind_of = np.unique(key, return_inverse=True)
    table = np.zeros((len(kinds), int(sizes.max())))
    for row, each in enumerate(kinds.tolist()):
        values = costs.held_bytes(Held(each % len(Held)), view(int(program.templates[each // len(Held)])))
        table[row, : min(len(values), table.shape[1])] = values[: table.shape[1]]
    number = np.repeat(np.arange(len(size)), size)
    place = np.arange(len(number)) - np.repeat(np.cumsum(size) - size, size)
    return base[spans.first[number]] + place, base[spans.last[number]] + place, table[kind_of[number], place]
