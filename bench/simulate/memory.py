"""Bytes held over a simulated step: static state, and values from the start of their maker to the end of their user."""

import numpy as np
from numpy.typing import NDArray

from bench.action import view
from bench.cost import Costs
from bench.program import Held, Op, Program
from bench.simulate.loops import Loop
from bench.timeline import Timeline

Floats = NDArray[np.float64]
WORKING = len(Held)  # beside the reasons of `Held`: needed while the action runs


def net_bytes(program: Program, costs: Costs, base: NDArray[np.int64], sizes: NDArray[np.int64]) -> Floats:
    """[tasks]: bytes that each task allocates minus those it gives back."""
    task, last_task, held = _spans(program, costs, base, sizes)
    num_tasks = int(base[-1])
    taken, given = (np.bincount(tasks, held, num_tasks).astype(np.float64) for tasks in (task, last_task))
    return taken - given


def peak_bytes(program: Program, costs: Costs, timeline: Timeline) -> Floats:
    """[timed ranks, in the order of the placement's groups]: the most bytes that each rank holds at once.

    Static state plus the largest sum of values that are held at a time: the program's lifetimes, and what a backward
    computes again while it runs. At one moment, what ends is
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
    # Sorting is stable: ends, which come first, stay before starts of the same moment.
    order = np.argsort(when, kind="stable")
    static = np.repeat([costs.static_bytes(group.name) for group in groups], sizes)
    return static + _HIGHEST(len(order), order, rank, held, len(static))


def _highest(order, rank, held, num_ranks):  # type: ignore[no-untyped-def]
    """[ranks]: the largest sum of what is held. Of n values, event i < n is the end of value i, n + i its start."""
    now, most = np.zeros(num_ranks), np.zeros(num_ranks)
    for event in order:
        value = event % len(held)
        r = rank[value]
        if event < len(held):
            now[r] -= held[value]
        else:
            now[r] += held[value]
            most[r] = max(most[r], now[r])
    return most


_HIGHEST = Loop(_highest)


def _spans(
    program: Program, costs: Costs, base: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Of every value on every rank: first task, last task, bytes."""
    values = program.lifetimes
    first, last, held = values.first, values.last, values.held.astype(np.int64)
    # What an action works with lives as long as the action.
    again = np.flatnonzero(program.op == Op.COMPUTE) if costs.has_working_bytes else np.zeros(0, dtype=np.int64)
    first, last = np.concatenate([first, again]), np.concatenate([last, again])
    held = np.concatenate([held, np.full(len(again), WORKING)])
    # A packed message is described by its transfer, which is where its span ends.
    template = program.template[np.where(held == Held.SENT, last, first)]
    size = sizes[program.group[first]]
    different, like = costs.alike(program.templates)
    kinds, kind_of = np.unique(like[template] * (WORKING + 1) + held, return_inverse=True)
    table = np.zeros((len(kinds), int(sizes.max())))
    for row, each in enumerate(kinds.tolist()):
        number, why = divmod(each, WORKING + 1)
        action = view(int(program.templates[different[number]]))
        amount = costs.working_bytes(action) if why == WORKING else costs.held_bytes(Held(why), action)
        table[row, : min(len(amount), table.shape[1])] = amount[: table.shape[1]]
    value = np.repeat(np.arange(len(size)), size)
    place = np.arange(len(value)) - np.repeat(np.cumsum(size) - size, size)
    return base[first[value]] + place, base[last[value]] + place, table[kind_of[value], place]
