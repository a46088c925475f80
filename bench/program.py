"""A `Program` is a lowered plan: operations in queues, with what each waits for, and how long each value lives.

Operations belong to groups; rank i of a group runs operation k of its queues on its own data. Columns are numpy arrays
of one length, in queue order, so a program of a million operations costs megabytes and no Python objects.
"""

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.action import Action, Codes, view
from bench.edges import Volume
from bench.models import Model
from bench.plan import Plan

Ints = NDArray[np.int32]


class Op(IntEnum):
    """What an operation is. SEND and RECV are the two ends of one transfer action."""

    COMPUTE = 0
    SEND = 1
    RECV = 2
    SYNC = 3
    UPDATE = 4


class Held(IntEnum):
    """Why memory is held: see `Lifetimes`."""

    FORWARD = 0  # what F keeps for B
    BACKWARD = 1  # what B keeps for W
    SENT = 2  # a packed message, until it has left
    RECEIVED = 3  # a received message, until it is consumed
    AGAIN = 4  # what R computed once more, until B


@dataclass(frozen=True)
class Lifetimes:
    """Values with explicit lifetimes: held from the start of `first` to the end of `last` (operation numbers)."""

    held: NDArray[np.int8]
    first: Ints
    last: Ints


@dataclass(frozen=True)
class Program:
    """Operations sorted by queue: queue q holds operations queue_ptr[q] .. queue_ptr[q+1]-1 and runs them in order.

    Columns (one entry an operation): `op` (`Op`), `code` (packed action), `group` (index into the placement's groups),
    `peer` (the other end's group for SEND and RECV, else -1), `partner` (the other end's operation, else -1),
    `template` (number in `templates` of the action with the first micro-batch of its direction, 0 where there is one
    direction only; costs are per template).
    Dependencies of operation k on others of its own group: deps[dep_ptr[k] : dep_ptr[k+1]]; those of a SYNC also on
    operations of a group of equal size that holds the same parts, rank i on rank i. A RECV on rank j of its group needs
    its partner SEND on every rank of the sending group that has rows for j; a residual or hop goes from rank i to
    rank i. An UPDATE needs every SYNC of the replica.
    """

    plan: Plan
    model: Model
    op: NDArray[np.int8]
    code: Codes
    group: NDArray[np.int16]
    peer: NDArray[np.int16]
    partner: Ints
    template: Ints
    templates: Codes
    volumes: tuple[Volume, ...]  # one a template; empty for what is not a transfer
    queues: tuple[tuple[str, str], ...]  # (group, stream); receive streams are named recv/KIND:PASS/FROM
    queue_ptr: Ints
    dep_ptr: Ints
    deps: Ints
    lifetimes: Lifetimes
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for this program and those of the same columns (on other ranks)."""
        if what not in self._known:
            self._known[what] = make()
        return self._known[what]

    @property
    def num_ops(self) -> int:
        return len(self.op)

    def action(self, k: int) -> Action:
        return view(int(self.code[k]))

    def queue_of(self) -> Ints:
        """For each operation, the number of its queue."""
        return np.repeat(np.arange(len(self.queues), dtype=np.int32), np.diff(self.queue_ptr))

    def waits_for(self, k: int) -> list[int]:
        return [int(d) for d in self.deps[self.dep_ptr[k] : self.dep_ptr[k + 1]]]

    def describe(self, k: int) -> str:
        """For people: ``A0 send dispatch:F0.1 -> F0``."""
        groups = self.plan.placement.groups
        name, action = groups[self.group[k]].name, self.action(k)
        match Op(self.op[k]):
            case Op.SEND:
                return f"{name} send {action} -> {groups[self.peer[k]].name}"
            case Op.RECV:
                return f"{name} recv {action} <- {groups[self.peer[k]].name}"
        return f"{name} {action}"

    def to_text(self) -> str:
        """What the program was lowered from: its model, then its plan. `bench.lower.parse_program` is the inverse."""
        return f"model {json.dumps(json.loads(self.model.to_text()))}\n{self.plan}"

    def __str__(self) -> str:
        """For people: every operation with what it waits for."""
        lines = []
        for q, (group, stream) in enumerate(self.queues):
            lines.append(f"queue {group} {stream}")
            for k in range(self.queue_ptr[q], self.queue_ptr[q + 1]):
                waits = ", ".join(self.describe(d) for d in self.waits_for(k))
                lines.append(f"  {k}: {self.describe(k)}" + (f"  after {waits}" if waits else ""))
        return "\n".join(lines) + "\n"
