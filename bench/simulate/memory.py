"""Bytes held over a simulated step: static state, and values from the start of their maker to the end of their user."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import view
from bench.cost import Costs
from bench.program import Held, Ints, Op, Program
from bench.simulate.loops import Loop
from bench.timeline import Timeline

Floats = NDArray[np.float64]
WORKING = len(Held)  # beside the reasons of `Held`: needed while the action runs


class Moved(NamedTuple):
    """[tasks]: bytes that each task allocates at its start, and gives back at its end."""

    taken: Floats
    given: Floats

    @classmethod
    def of(cls, program: Program, costs: Costs, base: NDArray[np.int64], sizes: NDArray[np.int64]) -> "Moved":
        """Args as in `held_bytes`; `base`: first task of each operation, and their number."""
        task, last_task, held = _spans(program, costs, base, sizes)
        return cls(*(np.bincount(tasks, held, int(base[-1])).astype(np.float64) for tasks in (task, last_task)))


def peak_bytes(program: Program, costs: Costs, timeline: Timeline) -> Floats:
    """[timed ranks, in the order of the placement's groups]: the most bytes that each rank holds at once.

    Static state plus the largest sum of values that are held at a time: the program's lifetimes, and what a backward
    computes again while it runs. At one moment, what ends is
    given back before what begins is allocated.
    """
    sizes = np.array([group.size // timeline.stands_for for group in program.plan.placement.groups])
    return held_bytes(program, costs, sizes, timeline.start_s, timeline.end_s)


def held_bytes(program: Program, costs: Costs, sizes: NDArray[np.int64], start_s: Floats, end_s: Floats) -> Floats:
    """`peak_bytes` of tasks with their times.

    Args:
        sizes: [groups], timed ranks of each.
    """
    base = np.concatenate([[0], np.cumsum(sizes[program.group])])
    return highest_bytes(program, costs, sizes, Moved.of(program, costs, base, sizes), start_s, end_s)


def highest_bytes(
    program: Program, costs: Costs, sizes: NDArray[np.int64], moved: Moved, start_s: Floats, end_s: Floats
) -> Floats:
    """`held_bytes` where it is known what each task allocates and gives back."""
    of_op = sizes[program.group]
    first_rank = (np.cumsum(sizes) - sizes)[program.group]
    rank = np.arange(len(start_s)) + np.repeat(first_rank - (np.cumsum(of_op) - of_op), of_op)
    # Sorting is stable: ends, which come first, stay before starts of the same moment. What moves nothing is no event.
    events = np.concatenate([np.flatnonzero(moved.given), len(start_s) + np.flatnonzero(moved.taken)])
    order = events[np.argsort(np.concatenate([end_s, start_s])[events], kind="stable")]
    groups = program.plan.placement.groups
    static = np.repeat([costs.static_bytes(group.name) for group in groups], sizes)
    return static + _HIGHEST(len(order), order, rank, *moved, len(static))


def least_peak_bytes(program: Program, costs: Costs) -> float:
    """Bytes that the fullest rank holds at the least, whenever its operations run.

    When an action of a queue starts, all before it in the queue have started and none behind it has ended: what those
    before it keep for those behind it is held.
    """
    values = _values_of(program, costs)
    queue = program.queue_of()
    mine = queue[values.first] == queue[values.last]
    amounts, number = _amounts(program, costs, values.kinds)
    held = np.array([amount.min() for amount in amounts])[number][values.kind_of[mine]]
    taken, given = (
        np.bincount(ops[mine], held, program.num_ops).astype(np.float64) for ops in (values.first, values.last)
    )
    static = np.array([costs.static_bytes(group.name) for group in program.plan.placement.groups])
    return float((static[program.group] + np.cumsum(taken - given) + given).max())


def _highest(order, rank, taken, given, num_ranks):  # type: ignore[no-untyped-def]
    """[ranks]: the largest sum of what is held. Of n tasks, event i < n is the end of task i, n + i its start."""
    now, most = np.zeros(num_ranks), np.zeros(num_ranks)
    for event in order:
        if event < len(rank):
            now[rank[event]] -= given[event]
        else:
            task = event - len(rank)
            r = rank[task]
            now[r] += taken[task]
            most[r] = max(most[r], now[r])
    return most


_HIGHEST = Loop(_highest)


class _Values(NamedTuple):
    """Operations whose start and end bound each value; `kinds` (a template and a reason each), and that of each."""

    first: Ints
    last: Ints
    kinds: NDArray[np.int64]
    kind_of: NDArray[np.int64]


def _values(program: Program, working: bool) -> _Values:
    """Lifetimes of a program, and where `working` what its actions work with."""
    lives = program.lifetimes
    # What an action works with lives as long as the action.
    again = np.flatnonzero(program.op == Op.COMPUTE).astype(np.int32) if working else np.zeros(0, dtype=np.int32)
    first, last = np.concatenate([lives.first, again]), np.concatenate([lives.last, again])
    held = np.concatenate([lives.held, np.full(len(again), WORKING, dtype=np.int8)])
    # A packed message is described by its transfer, which is where its span ends.
    template = program.template[np.where(held == Held.SENT, last, first)]
    numbers = template * (WORKING + 1) + held
    there = np.zeros(len(program.templates) * (WORKING + 1), dtype=bool)
    there[numbers] = True
    return _Values(first, last, np.flatnonzero(there), (np.cumsum(there) - 1)[numbers])


def _values_of(program: Program, costs: Costs) -> _Values:
    working = costs.has_working_bytes
    found: _Values = program.once(("values", working), lambda: _values(program, working))
    return found


def _amounts(program: Program, costs: Costs, kinds: NDArray[np.int64]) -> tuple[list[Floats], NDArray[np.int64]]:
    """[ranks] bytes of values that differ, and of every kind the number of its like."""
    different, like = costs.alike(program.templates)
    template, reason = np.divmod(kinds, WORKING + 1)
    alike, number = np.unique(like[template] * (WORKING + 1) + reason, return_inverse=True)
    amounts = []
    for of, why in zip(*(column.tolist() for column in np.divmod(alike, WORKING + 1)), strict=True):
        action = view(int(program.templates[different[of]]))
        amounts.append(costs.working_bytes(action) if why == WORKING else costs.held_bytes(Held(why), action))
    return amounts, number


def _spans(
    program: Program, costs: Costs, base: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Of every value on every rank: first task, last task, bytes."""
    first, last, kinds, kind_of = _values_of(program, costs)
    amounts, number = _amounts(program, costs, kinds)
    table = np.zeros((len(amounts), int(sizes.max())))
    for row, amount in enumerate(amounts):
        table[row, : min(len(amount), table.shape[1])] = amount[: table.shape[1]]
    if table.shape[1] == 1:
        return first.astype(np.int64), last.astype(np.int64), table[number, 0][kind_of]
    size = sizes[program.group[first]]
    value = np.repeat(np.arange(len(size)), size)
    place = np.arange(len(value)) - np.repeat(np.cumsum(size) - size, size)
    return base[first[value]] + place, base[last[value]] + place, table[number[kind_of[value]], place]
