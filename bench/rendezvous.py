"""The run with zero durations and blocking rendezvous, compiled: how far a program gets. See `bench.check`.

Both ends of a transfer finish together, once all that either waits for has finished and both stand at the head of their
queues. So a transfer is one thing that waits for what its ends wait for, and things finish in any order that respects
this.
"""

import numpy as np

from bench.program import Op, Program
from bench.simulate.engine import turned
from bench.simulate.loops import Loop

SYNC, UPDATE = int(Op.SYNC), int(Op.UPDATE)


def num_finished(program: Program) -> int:
    """Operations that finish; all of them unless the program is in deadlock."""
    first = np.zeros(program.num_ops + 1, dtype=np.bool_)
    first[program.queue_ptr] = True
    user_ptr, users = turned(len(program.deps), program.dep_ptr, program.deps)
    return int(_FINISHED(program.num_ops, program.op, program.partner, first, program.dep_ptr, user_ptr, users))


def _finished(op, partner, first, dep_ptr, user_ptr, users):  # type: ignore[no-untyped-def]
    num_ops, num_syncs = len(op), np.sum(op == SYNC)
    updates = np.flatnonzero(op == UPDATE)
    # Of two ends, the first stands for both.
    stands_for = np.arange(num_ops)
    left = np.zeros(num_ops, dtype=np.int64)
    for k in range(num_ops):
        if partner[k] >= 0:
            stands_for[k] = min(k, partner[k])
        left[stands_for[k]] += dep_ptr[k + 1] - dep_ptr[k] + (num_syncs if op[k] == UPDATE else 0)
        if not first[k] and partner[k] != k - 1:
            left[stands_for[k]] += 1
    ready, size = np.empty(num_ops, dtype=np.int64), 0
    for k in range(num_ops):
        if stands_for[k] == k and left[k] == 0:
            ready[size] = k
            size += 1
    num_done = 0
    while size > 0:
        size -= 1
        one = ready[size]
        for end in (one, np.int64(partner[one])):
            if end < 0:
                continue
            num_done += 1
            for place in range(user_ptr[end] - 1, user_ptr[end + 1]):
                if place >= user_ptr[end]:
                    after = users[place]
                elif not first[end + 1] and partner[end + 1] != end:
                    after = end + 1  # in its queue
                else:
                    continue
                left[stands_for[after]] -= 1
                if left[stands_for[after]] == 0:
                    ready[size] = stands_for[after]
                    size += 1
            if op[end] == SYNC:
                for update in updates:
                    left[update] -= 1
                    if left[update] == 0:
                        ready[size] = update
                        size += 1
    return num_done


_FINISHED = Loop(_finished)
