"""What the loop has to know of a program whatever its costs: found once for all programs of one order."""

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Kind, kinds_of
from bench.program import Op, Program
from bench.simulate import engine

Sizes = NDArray[np.int64]
"""[groups]: timed ranks of each."""


class Wiring(NamedTuple):
    """`ops`: with rows of no costs yet. conditions: [operations], what each of its tasks waits for. senders:
    [messages]. syncs: operations. most_waiting: tasks that may be on the heap at a time."""

    ops: engine.Ops
    conditions: NDArray[np.int32]
    senders: NDArray[np.int64]
    syncs: NDArray[np.int64]
    most_waiting: int

    @classmethod
    def of(cls, program: Program, sizes: Sizes) -> "Wiring":
        found: Wiring = program.once(("wiring", sizes.tobytes()), lambda: _wired(program, sizes))
        return found

    def ops_at(self, program: Program, row_of: NDArray[np.int64]) -> engine.Ops:
        """The operations with their rows in a table of costs: those of templates, then sync and update by group."""
        row = row_of[program.template]
        for offset, those in enumerate((self.syncs, self.ops.updates)):
            row[those] = int(row_of.max()) + 1 + 2 * program.group[those].astype(np.int64) + offset
        return self.ops._replace(row=row)

    def state(self, sizes: Sizes) -> engine.State:
        """Before anything has begun."""
        ops = self.ops
        tasks = np.zeros((len(ops.task_op), engine.NUM_FIELDS))
        tasks[:, engine.PENDING] = self.conditions[ops.task_op]
        messages = np.zeros((len(self.senders), 4))
        messages[:, engine.FIRST_START] = inf
        messages[:, engine.UNSENT] = self.senders
        ranks_of_sums = np.zeros(len(ops.op), dtype=np.int32)
        ranks_of_sums[self.syncs] = np.diff(ops.base)[self.syncs]
        return engine.State(
            tasks=tasks,
            messages=messages,
            unready=ranks_of_sums,
            together=np.zeros(len(ops.op)),
            free=np.zeros((int(sizes.sum()), engine.NUM_RESOURCES)),
            keys=np.zeros(self.most_waiting),
            heap=np.zeros(self.most_waiting, dtype=np.int64),
            unsummed=np.array([ranks_of_sums.sum()]),
        )


def _wired(program: Program, sizes: Sizes) -> Wiring:
    group = program.group.astype(np.int64)
    of_op = sizes[group]
    numbers = np.arange(program.num_ops, dtype=np.int32)
    first_rank = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    kinds = kinds_of(program.templates)
    to_same_rank = ((kinds == Kind.RESIDUAL) | (kinds == Kind.HOP))[program.template]
    follows = _follows(program)
    user_ptr, users = engine.turned(len(program.deps), program.dep_ptr, program.deps)
    sends = program.op == Op.SEND
    # A message to all ranks of a group has all ranks as its senders, one to the same-numbered rank has one.
    num_messages = np.where(sends, np.where(to_same_rank, of_op, 1), 0)
    message = np.cumsum(num_messages) - num_messages
    receives = program.op == Op.RECV
    message[receives] = message[program.partner[receives]]
    conditions = np.diff(program.dep_ptr)
    conditions[1:] += follows[:-1]
    conditions[receives | (program.op == Op.UPDATE)] += 1
    return Wiring(
        engine.Ops(
            op=program.op,
            base=np.concatenate([[0], np.cumsum(of_op)]),
            task_op=np.repeat(numbers, of_op),
            first_rank=first_rank[group],
            next_op=np.where(follows, numbers + 1, -1).astype(np.int32),
            user_ptr=user_ptr,
            users=users,
            partner=program.partner,
            message=message,
            to_same_rank=to_same_rank,
            row=np.zeros(0, dtype=np.int64),
            updates=np.flatnonzero(program.op == Op.UPDATE),
        ),
        conditions,
        np.repeat(np.where(to_same_rank, 1, of_op)[sends], num_messages[sends]),
        np.flatnonzero(program.op == Op.SYNC),
        # In a queue, one task of a rank is on the heap at a time; the two halves of an exchange may make it two.
        2 * int(of_op[program.queue_ptr[:-1]].sum()) + 1,
    )


def _follows(program: Program) -> NDArray[np.bool_]:
    """Whether the end of operation k lets operation k + 1 go: same queue, and not the two halves of one exchange."""
    follows = np.ones(program.num_ops, dtype=bool)
    follows[program.queue_ptr[1:] - 1] = False
    halves = (program.op == Op.SEND) & (program.partner == np.arange(program.num_ops) + 1)
    return follows & ~halves
