"""What the end of a simulated step waited for, one thing after the other, back to its start."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Kind, view
from bench.cost import Costs
from bench.errors import BadInput
from bench.program import Op, Program
from bench.timeline import Timeline

LATENCY, PORT = "latency", "waiting for a port"
SMS, NUM_PORTS = 4, 4
"""Resources of a rank: sending NIC and NVLink, receiving NIC and NVLink, SMs."""
TINY_S = 1e-12


class Piece(NamedTuple):
    """Some seconds of the step; `what` is empty where the task ran, else what held it up."""

    task: int
    start_s: float
    end_s: float
    what: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Event(Enum):
    START = auto()
    END = auto()


class _Cause(NamedTuple):
    """That something could not be before `at_s`, when an event of `task` let it go."""

    at_s: float
    event: Event
    task: int
    what: str = ""


@dataclass(frozen=True)
class CriticalPath:
    """Walks a simulated timeline backwards; tasks are numbered as in it, operation by operation, rank by rank.

    Raises BadInput for a measured timeline: causes are found by equal times, which measured clocks do not give.
    """

    program: Program
    costs: Costs
    timeline: Timeline

    def __post_init__(self) -> None:
        if self.timeline.source != "simulated":
            raise BadInput("timeline.source", self.timeline.source, "simulated")

    @cached_property
    def whole(self) -> list[Piece]:
        """Pieces from the start of the step to its end, each beginning where the one before ends."""
        return self._walk(Event.END, int(np.argmax(self.timeline.end_s)), self.timeline.step_time_s, 0.0)

    def before(self, task: int, until_s: float) -> list[Piece]:
        """What `task` waited for until it started, from `until_s` on."""
        return self._walk(Event.START, task, self._start[task], until_s)

    def resource_s(self, task: int) -> list[float]:
        """Seconds for which a task takes each resource of its rank."""
        k, i = self._op_of[task], self.place(task)
        op = Op(int(self.program.op[k]))
        ran = self._end[task] - self._start[task]
        if op in (Op.COMPUTE, Op.UPDATE):
            return [0.0] * NUM_PORTS + [ran]
        if op is Op.SYNC:
            return [ran] * NUM_PORTS + [0.0]
        taken = self._ports[int(self.program.template[k])]
        sends = op is Op.SEND
        return [float(taken[p][i]) if (p < NUM_PORTS // 2) == sends else 0.0 for p in range(NUM_PORTS)] + [0.0]

    def place(self, task: int) -> int:
        """The task's rank within its group."""
        return task - self._base[self._op_of[task]]

    def operation(self, task: int) -> int:
        """Number of the task's operation in the program."""
        return self._op_of[task]

    def users(self, rank: int, resource: int) -> list[int]:
        """Tasks that take a resource of a rank, in the order in which they got it."""
        return self._users.get((rank, resource), [])

    # The walk

    def _walk(self, event: Event, task: int, at_s: float, until_s: float) -> list[Piece]:
        pieces: list[Piece] = []
        while at_s > until_s + TINY_S:
            cause = self._end_cause(task, at_s) if event is Event.END else self._start_cause(task)
            reached = at_s if cause is None else min(cause.at_s, at_s)
            if cause is None:
                break
            if at_s - max(reached, until_s) > TINY_S:
                pieces.append(Piece(task, max(reached, until_s), at_s, cause.what))
            at_s, event, task = reached, cause.event, cause.task
        return pieces[::-1]

    def _end_cause(self, task: int, at_s: float) -> _Cause:
        """Why a task had not ended earlier: it ran, or its message was still on its way."""
        if self.program.op[self._op_of[task]] == Op.RECV:
            last = max(self._senders(task), key=self._end.__getitem__)
            arrival = self._end[last] + self._latency(task)
            if arrival >= self._end[task] - TINY_S and self._start[task] < self._end[last] < at_s:
                return _Cause(self._end[last], Event.END, last, LATENCY)
        return _Cause(self._start[task], Event.START, task)

    def _start_cause(self, task: int) -> _Cause | None:
        """What let a task start: the latest of what it needs, or the one before it on a resource; None at the start."""
        start = self._start[task]
        needed = max(self._needs(task), key=lambda cause: cause.at_s, default=None)
        ready = needed.at_s if needed else 0.0
        if start - ready > TINY_S:
            holder = self._holder(task)
            if holder is not None:
                return holder
        if needed is None:
            return None
        # A message arrives a latency after its first sender starts.
        return needed if needed.event is Event.END else needed._replace(at_s=self._start[needed.task], what=LATENCY)

    def _needs(self, task: int) -> Iterator[_Cause]:
        k, i = self._op_of[task], self.place(task)
        op = self.program.op[k]
        if op == Op.UPDATE:
            yield from (self._ended(each) for sync in self._syncs for each in self._tasks(sync))
        if op == Op.SYNC:
            for each in range(len(self._tasks(k))):
                yield from self._own_needs(k, each)
        else:
            yield from self._own_needs(k, i)
        if op == Op.RECV:
            first = min(self._senders(task), key=self._start.__getitem__)
            yield _Cause(self._start[first] + self._latency(task), Event.START, first)

    def _own_needs(self, k: int, i: int) -> Iterator[_Cause]:
        """Of operation k on the i-th rank: the one before it in its queue, and what it depends on."""
        if self._follows[k]:
            yield self._ended(self._base[k - 1] + i)
        for d in self._deps[self._dep_ptr[k] : self._dep_ptr[k + 1]]:
            yield self._ended(self._base[d] + i)

    def _ended(self, task: int) -> _Cause:
        return _Cause(self._end[task], Event.END, task)

    def _holder(self, task: int) -> _Cause | None:
        """The task that left a resource when `task` took it; it held the port for its own bytes, or the SMs."""
        found: _Cause | None = None
        rank = int(self.timeline.rank[task])
        for resource, seconds in enumerate(self.resource_s(task)):
            place = self._turn.get((task, resource), 0)
            if seconds > 0 and place > 0:
                other = self._users[rank, resource][place - 1]
                released = self._start[other] + self.resource_s(other)[resource]
                if released <= self._start[task] + TINY_S and (found is None or released > found.at_s):
                    what = PORT if resource != SMS else ""
                    found = _Cause(released, Event.END, other, what)
        return found

    # Columns as lists: the walk looks at single entries

    @cached_property
    def _start(self) -> list[float]:
        return self.timeline.start_s.tolist()

    @cached_property
    def _end(self) -> list[float]:
        return self.timeline.end_s.tolist()

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        groups = self.program.plan.placement.groups
        return np.array([group.size // self.timeline.stands_for for group in groups], dtype=np.int64)

    @cached_property
    def _base(self) -> list[int]:
        return [0, *np.cumsum(self._sizes[self.program.group]).tolist()]

    @cached_property
    def _op_of(self) -> list[int]:
        return np.repeat(np.arange(self.program.num_ops), self._sizes[self.program.group]).tolist()

    def _tasks(self, k: int) -> range:
        return range(self._base[k], self._base[k + 1])

    @cached_property
    def _deps(self) -> list[int]:
        return self.program.deps.tolist()

    @cached_property
    def _dep_ptr(self) -> list[int]:
        return self.program.dep_ptr.tolist()

    @cached_property
    def _follows(self) -> list[bool]:
        """Whether an operation waits for the one before it: same queue, and not the two halves of one exchange."""
        follows = np.ones(self.program.num_ops, dtype=bool)
        follows[self.program.queue_ptr[:-1]] = False
        before = np.arange(self.program.num_ops) - 1
        follows[(self.program.op == Op.RECV) & (self.program.partner == before)] = False
        return follows.tolist()

    @cached_property
    def _syncs(self) -> list[int]:
        return np.flatnonzero(self.program.op == Op.SYNC).tolist()

    def _senders(self, task: int) -> range:
        partner = int(self.program.partner[self._op_of[task]])
        if view(int(self.program.code[partner])).kind in (Kind.HOP, Kind.RESIDUAL):
            own = self._base[partner] + self.place(task)
            return range(own, own + 1)
        return self._tasks(partner)

    def _latency(self, task: int) -> float:
        return float(self._ports[int(self.program.template[self._op_of[task]])][NUM_PORTS][self.place(task)])

    @cached_property
    def _ports(self) -> dict[int, list[list[float]]]:
        """Of each template that is a transfer: seconds of the four ports, and the latency, by rank."""
        found = {}
        for row, code in enumerate(self.program.templates):
            if self.program.volumes[row].terms:
                ports = self.costs.ports(view(int(code)))
                columns = (ports.nic_send_s, ports.nvlink_send_s, ports.nic_receive_s, ports.nvlink_receive_s)
                found[row] = [column.tolist() for column in (*columns, ports.latency_s)]
        return found

    @cached_property
    def _users(self) -> dict[tuple[int, int], list[int]]:
        """Tasks by rank and resource, in the order in which they took it."""
        users: dict[tuple[int, int], list[int]] = {}
        ranks = self.timeline.rank.tolist()
        for task in np.lexsort((self.timeline.end_s, self.timeline.start_s)).tolist():
            for resource, seconds in enumerate(self.resource_s(task)):
                if seconds > 0:
                    users.setdefault((ranks[task], resource), []).append(task)
        return users

    @cached_property
    def _turn(self) -> dict[tuple[int, int], int]:
        """Where each task stands among the users of each of its resources."""
        return {
            (task, resource): place for (_, resource), tasks in self._users.items() for place, task in enumerate(tasks)
        }
