"""The fullest moment of a simulated step: on which rank, doing what, and what fills the memory then."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Action, Kind, unpack, view
from bench.check import around
from bench.cost import Costs
from bench.errors import BadInput
from bench.plan import COMPUTE_STREAM, ActionColumn
from bench.program import Held, Op, Program
from bench.simulate.memory import WORKING, peak_bytes
from bench.timeline import Timeline

GIB = 2**30
_PARTS = {Kind.EMBED: "embedding", Kind.ATTENTION: "attention", Kind.EXPERT: "experts", Kind.JOIN: "join"}
_STATE = {"reserve": "reserve: context, communicators, what the allocator cannot use"}
_WHY = {
    Held.FORWARD: "activations of {}, until their backward",
    Held.BACKWARD: "activations of {}, until their weight gradients",
    Held.AGAIN: "activations of {}, computed once more",
    WORKING: "activations of {}, held for this action alone",
    Held.SENT: "buffers of messages to send",
    Held.RECEIVED: "buffers of messages received",
}


class Filling(NamedTuple):
    """Bytes for one reason, and of how many micro-batches they are (0 for what is there all the time)."""

    what: str
    num_bytes: float
    num_microbatches: int = 0


@dataclass(frozen=True)
class Peak:
    """The fullest moment of the fullest rank.

    Attributes:
        operation: of the program; the one that began at that moment. computing: the one that computed, None if idle.
        fillings: what is held, state first, then the rest by size; they sum to `num_bytes`.
        in_flight, in_flight_bytes: micro-batches of which something waits for its backward, and the bytes of it.
        by_group: the most bytes on a rank of each group.
    """

    program: Program
    rank: int
    at_s: float
    step_time_s: float
    operation: int
    computing: int | None
    fillings: tuple[Filling, ...]
    in_flight: int
    in_flight_bytes: float
    by_group: dict[str, float]

    @property
    def group(self) -> str:
        return self.program.plan.placement.groups[self.program.group[self.operation]].name

    @property
    def num_bytes(self) -> float:
        return sum(each.num_bytes for each in self.fillings)

    @property
    def actions(self) -> tuple[Action, ...]:
        """What ran at that moment."""
        running = (self.operation, *([] if self.computing is None else [self.computing]))
        return tuple(dict.fromkeys(self.program.action(k) for k in running))

    def shown(self, capacity_bytes: float) -> str:
        """For people: the queues around the moment, what fills the memory, and what would fit."""
        when = f"{self.at_s * 1e3:.4g} ms of a step of {self.step_time_s * 1e3:.4g} ms"
        lines = [f"fullest: rank {self.rank}, of group {self.group}, at {when}:"]
        lines += [self._around(k) for k in dict.fromkeys([self.operation, self.computing]) if k is not None]
        rows = [*self.fillings, Filling("all of it", self.num_bytes)]
        rows.append(Filling("expected: at most", capacity_bytes))
        width = max(len(row.what) for row in rows)
        for row in rows:
            count = f"  {row.num_microbatches} micro-batch{'es' * (row.num_microbatches > 1)}"
            lines.append(
                f"  {row.what:<{width}}  {row.num_bytes / GIB:8.2f} GiB" + (count if row.num_microbatches else "")
            )
        over = {name: held for name, held in self.by_group.items() if held > capacity_bytes and name != self.group}
        if over:
            lines.append("also too full: " + ", ".join(f"{name} {held / GIB:.1f} GiB" for name, held in over.items()))
        return "\n".join([*lines, self._expected(capacity_bytes)])

    def _around(self, k: int) -> str:
        """The queue of an operation near it; of a plan's own queue as the plan has it."""
        program = self.program
        queue = int(program.queue_of()[k])
        key, first = program.queues[queue], int(program.queue_ptr[queue])
        own = program.plan.queues.get(key)
        if own is None:
            return around(key, ActionColumn(program.code[first : program.queue_ptr[queue + 1]]), k - first)
        return around(key, own, int(np.flatnonzero(own.codes == program.code[k])[0]))

    def _expected(self, capacity_bytes: float) -> str:
        rest = self.num_bytes - self.in_flight_bytes
        if not self.in_flight or rest >= capacity_bytes:
            return f"without any activations that wait for a backward it needs {rest / GIB:.1f} GiB"
        fit = int((capacity_bytes - rest) // (self.in_flight_bytes / self.in_flight))
        return f"{self.in_flight} micro-batches wait for their backward; with as much of each, {fit} would fit"


class _Values(NamedTuple):
    """Values on one rank: why held (`Held` or WORKING), the action that they are of, from when to when, bytes."""

    why: NDArray[np.int64]
    code: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    num_bytes: NDArray[np.float64]
    operation: NDArray[np.int64]


def find_peak(program: Program, costs: Costs, timeline: Timeline) -> Peak:
    """Where and when `bench.simulate.memory.peak_bytes` is highest.

    Raises BadInput for a timeline of another program.
    """
    groups = program.plan.placement.groups
    sizes = np.array([group.size // timeline.stands_for for group in groups])
    base = np.concatenate([[0], np.cumsum(sizes[program.group])])
    if base[-1] != len(timeline):
        raise BadInput("timeline", len(timeline), f"the {base[-1]} operations of the program on its ranks")
    peaks = peak_bytes(program, costs, timeline)
    first_rank = np.concatenate([[0], np.cumsum(sizes)])
    fullest = int(peaks.argmax())
    g = int(np.searchsorted(first_rank, fullest, side="right")) - 1
    place = fullest - int(first_rank[g])
    values = _values(program, costs, timeline, base, g, place)
    # At one moment, what ends is given back before what begins is allocated.
    when = np.concatenate([values.end_s, values.start_s])
    order = np.lexsort((np.arange(len(when)), when))
    running = np.cumsum(np.concatenate([-values.num_bytes, values.num_bytes])[order])
    event = int(order[int(running.argmax())])
    value = event - len(values.end_s) if event >= len(values.end_s) else event
    at_s = float(when[event])
    held = (values.start_s <= at_s) & (values.end_s > at_s)
    waiting = held & (values.why == Held.FORWARD)
    return Peak(
        program=program,
        rank=groups[g].first + place,
        at_s=at_s,
        step_time_s=timeline.step_time_s,
        operation=int(values.operation[value]),
        computing=_computing(program, timeline, base, (g, place), at_s),
        fillings=(
            *(Filling(_STATE.get(name, name), size) for name, size in costs.static_parts(groups[g].name).items()),
            *_fillings(values, held),
        ),
        in_flight=len(np.unique(unpack(values.code[waiting]).microbatch)),
        in_flight_bytes=float(values.num_bytes[waiting].sum()),
        by_group={
            group.name: float(peaks[low:high].max())
            for group, low, high in zip(groups, first_rank[:-1], first_rank[1:], strict=True)
        },
    )


def _values(
    program: Program, costs: Costs, timeline: Timeline, base: NDArray[np.int64], group: int, place: int
) -> _Values:
    """All values that a rank holds at some time."""
    lives = program.lifetimes
    again = np.flatnonzero(program.op == Op.COMPUTE) if costs.has_working_bytes else np.zeros(0, dtype=np.int64)
    first, last = np.concatenate([lives.first, again]), np.concatenate([lives.last, again])
    why = np.concatenate([lives.held.astype(np.int64), np.full(len(again), WORKING)])
    mine = program.group[first] == group
    first, last, why = first[mine], last[mine], why[mine]
    of = np.where(why == Held.SENT, last, first)  # a packed message is described by its transfer
    kinds, kind_of = np.unique(program.template[of].astype(np.int64) * (WORKING + 1) + why, return_inverse=True)
    table = np.zeros(len(kinds))
    for row, kind in enumerate(kinds.tolist()):
        template, reason = divmod(kind, WORKING + 1)
        action = view(int(program.templates[template]))
        held = costs.working_bytes(action) if reason == WORKING else costs.held_bytes(Held(reason), action)
        table[row] = held[place] if place < len(held) else 0.0
    num_bytes = table[kind_of]
    real = num_bytes > 0
    start_s, end_s = timeline.start_s[base[first] + place], timeline.end_s[base[last] + place]
    code = program.code[of]
    return _Values(why[real], code[real], start_s[real], end_s[real], num_bytes[real], first[real].astype(np.int64))


def _fillings(values: _Values, held: NDArray[np.bool_]) -> Iterator[Filling]:
    """By reason and part of the model, largest first."""
    columns = unpack(values.code)
    by_words: dict[str, tuple[float, set[int]]] = {}
    for why, kind in {*zip(values.why[held].tolist(), columns.kind[held].tolist(), strict=True)}:
        alike = held & (values.why == why) & (columns.kind == kind)
        words = _WHY[why].format(_PARTS.get(kind, Kind(kind).name.lower()))
        size, of = by_words.setdefault(words, (0.0, set()))
        by_words[words] = size + float(values.num_bytes[alike].sum()), of | set(columns.microbatch[alike].tolist())
    for words, (size, of) in sorted(by_words.items(), key=lambda item: -item[1][0]):
        yield Filling(words, size, len(of))


def _computing(
    program: Program, timeline: Timeline, base: NDArray[np.int64], where: tuple[int, int], at_s: float
) -> int | None:
    """The operation of the rank's compute queue that runs at that time."""
    group, place = where
    name = program.plan.placement.groups[group].name
    for q, key in enumerate(program.queues):
        if key == (name, COMPUTE_STREAM):
            operations = np.arange(program.queue_ptr[q], program.queue_ptr[q + 1])
            tasks = base[operations] + place
            running = operations[(timeline.start_s[tasks] <= at_s) & (timeline.end_s[tasks] > at_s)]
            return int(running[0]) if len(running) else None
    return None
