"""How much of a step lies ahead of each operation at the least: the longest chain of operations that wait for one
another, each for as long as it takes on the rank where it is shortest. Nobody waits for a port or for SMs here, so no
simulated step is shorter."""

import numpy as np
from numpy.typing import NDArray

from bench.program import Program
from bench.simulate import engine
from bench.simulate.engine import RECV, SEND, SYNC, UPDATE
from bench.simulate.loops import Loop
from bench.simulate.wiring import Wiring

Floats = NDArray[np.float64]


def ahead_of_each(program: Program, wiring: Wiring, ops: engine.Ops, takes_s: Floats, receives_s: Floats) -> Floats:
    """[operations]: seconds from its start to the end of the step, at the least. Zeros where the plan does not end.

    Args:
        takes_s, receives_s: by row of `ops`, seconds of an operation (of a transfer, of its sending end); of its
            receiving end and of its latency, [2, rows].
    """
    order = program.once("order", lambda: _ORDER(len(ops.op), ops, wiring.conditions))
    return _AHEAD(len(ops.op), order, ops, takes_s, receives_s[0], receives_s[1])


def _order(ops, conditions):  # type: ignore[no-untyped-def]
    """Operations, each behind all that it waits for; fewer than all where some wait for each other."""
    op, next_op, user_ptr, users, partner = ops.op, ops.next_op, ops.user_ptr, ops.users, ops.partner
    left = conditions.copy()
    order = np.empty(len(op), dtype=np.int32)
    known = looked_at = 0
    unsummed = 0
    for k in range(len(op)):
        unsummed += op[k] == SYNC
        if left[k] == 0:
            order[known] = k
            known += 1
    while looked_at < known:
        k = order[looked_at]
        looked_at += 1
        for place in range(user_ptr[k] - 2, user_ptr[k + 1]):
            if place == user_ptr[k] - 2:
                after = next_op[k]
            elif place == user_ptr[k] - 1:
                after = partner[k] if op[k] == SEND else -1
            else:
                after = users[place]
            if after >= 0:
                left[after] -= 1
                if left[after] == 0:
                    order[known] = after
                    known += 1
        if op[k] == SYNC:
            unsummed -= 1
            if unsummed == 0:
                for update in ops.updates:
                    left[update] -= 1
                    if left[update] == 0:
                        order[known] = update
                        known += 1
    return order[:known]


def _ahead(order, ops, takes_s, receives_s, latency_s):  # type: ignore[no-untyped-def]
    op, next_op, user_ptr, users, partner, row = ops.op, ops.next_op, ops.user_ptr, ops.users, ops.partner, ops.row
    ahead, after_end = np.zeros(len(op)), np.zeros(len(op))
    if len(order) < len(op):
        return ahead
    updating = 0.0
    for place in range(len(order) - 1, -1, -1):
        k = order[place]
        after = ahead[next_op[k]] if next_op[k] >= 0 else 0.0
        for user in range(user_ptr[k], user_ptr[k + 1]):
            after = max(after, ahead[users[user]])
        if op[k] == SYNC:
            after = max(after, updating)
        after_end[k] = after
        if op[k] == RECV:
            ahead[k] = receives_s[row[k]] + after
        else:
            if op[k] == SEND:
                # What is sent arrives a latency after it has left.
                after = max(after, latency_s[row[k]] + after_end[partner[k]])
            ahead[k] = takes_s[row[k]] + after
        if op[k] == UPDATE:
            updating = max(updating, ahead[k])
    return ahead


_ORDER, _AHEAD = Loop(_order), Loop(_ahead)
