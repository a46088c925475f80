"""The compiled loop of the simulation.

A task is one operation on one rank; those of operation k are base[k] .. base[k + 1] - 1. A task waits for a number of
conditions (its queue's predecessor, its dependencies, the arrival of its message). The last one puts it on a heap, keyed
by the time at which it became ready, ties by task number. Popped in that order, it takes its resources from the moment
they are free: first come, first served. Its end is then known and meets conditions of others, never earlier than the
present time, so one pass over the heap is the whole simulation.

Resources of a rank: the SMs, and the sending and the receiving port of NIC and NVLink.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

COMPUTE, SEND, RECV, SYNC, UPDATE = range(5)  # bench.program.Op, as the compiler wants them
NIC_OUT, NVLINK_OUT, NIC_IN, NVLINK_IN, SMS, NUM_RESOURCES = range(6)
NUM_PORTS = 4

I8, I32, I64 = NDArray[np.int8], NDArray[np.int32], NDArray[np.int64]
F64 = NDArray[np.float64]


class Ops(NamedTuple):
    """Operations, by number; `task_op` by task.

    next_op: the operation that its end lets go in its queue, -1 if none. users[user_ptr[k] : user_ptr[k + 1]] depend on
    k. message: number of the first message of a SEND or RECV; one message an operation where every rank sends to
    every rank, one a rank where a rank sends to the same-numbered rank (`to_same_rank`).
    """

    op: I8
    base: I64
    task_op: I32
    first_rank: I32
    next_op: I32
    user_ptr: I64
    users: I32
    partner: I32
    message: I64
    to_same_rank: NDArray[np.bool_]
    row: I32
    updates: I64


class Durations(NamedTuple):
    """Seconds by row and rank of the group: of the SMs or a sum (`first`), of the sending ports (`first` NIC, `second`
    NVLink), of the receiving ports, and of the latency."""

    first: F64
    second: F64
    first_in: F64
    second_in: F64
    latency: F64


class State(NamedTuple):
    """What changes. pending, ready, start, end by task; unsent (senders that have not started), first_start,
    last_start, last_end by message; unready, together by operation (a sum starts when all its ranks are ready)."""

    pending: I32
    ready: F64
    start: F64
    end: F64
    unsent: I32
    first_start: F64
    last_start: F64
    last_end: F64
    unready: I32
    together: F64
    free: F64
    keys: F64
    heap: I64
    counts: I64  # entries on the heap, tasks done, sums that have not ended
    synced: F64  # end of the last sum so far


@njit(cache=True, nogil=True)
def run(ops: Ops, seconds: Durations, state: State) -> int:
    """Runs the program; returns the number of tasks that finished."""
    for task in range(len(ops.task_op)):
        if state.pending[task] == 0:
            _push(state, 0.0, task)
    while state.counts[0] > 0:
        task = _pop(state)
        k = ops.task_op[task]
        kind = ops.op[k]
        if kind == COMPUTE or kind == UPDATE:
            _compute(ops, seconds, state, k, task)
        elif kind == SEND:
            _send(ops, seconds, state, k, task)
        elif kind == RECV:
            _receive(ops, seconds, state, k, task)
        else:
            _sync(ops, seconds, state, k, task)
    return int(state.counts[1])


@njit(cache=True, nogil=True)
def _compute(ops, seconds, state, k, task):  # type: ignore[no-untyped-def]
    i = task - ops.base[k]
    rank = ops.first_rank[k] + i
    start = max(state.ready[task], state.free[SMS, rank])
    end = start + seconds.first[ops.row[k], i]
    state.free[SMS, rank] = end
    state.start[task], state.end[task] = start, end
    _finish(ops, state, k, task)


@njit(cache=True, nogil=True)
def _send(ops, seconds, state, k, task):  # type: ignore[no-untyped-def]
    """Takes the sending ports; tells the receivers once all senders have started."""
    i = task - ops.base[k]
    nic_s, nvlink_s = seconds.first[ops.row[k], i], seconds.second[ops.row[k], i]
    start = _take(state, ops.first_rank[k] + i, NIC_OUT, nic_s, nvlink_s, state.ready[task])
    end = start + max(nic_s, nvlink_s)
    state.start[task], state.end[task] = start, end
    other = ops.partner[k]
    message = ops.message[k]
    low, high = ops.base[other], ops.base[other + 1]
    if ops.to_same_rank[k]:
        message += i
        low, high = low + i, low + i + 1
    state.first_start[message] = min(state.first_start[message], start)
    state.last_start[message] = max(state.last_start[message], start)
    state.last_end[message] = max(state.last_end[message], end)
    state.unsent[message] -= 1
    if state.unsent[message] == 0:
        for receiver in range(low, high):
            latency = seconds.latency[ops.row[other], receiver - ops.base[other]]
            _meet(ops, state, other, receiver, state.first_start[message] + latency)
    _finish(ops, state, k, task)


@njit(cache=True, nogil=True)
def _receive(ops, seconds, state, k, task):  # type: ignore[no-untyped-def]
    """Takes the receiving ports for as long as its bytes need; ends when the last byte has come."""
    i = task - ops.base[k]
    row = ops.row[k]
    nic_s, nvlink_s = seconds.first_in[row, i], seconds.second_in[row, i]
    start = _take(state, ops.first_rank[k] + i, NIC_IN, nic_s, nvlink_s, state.ready[task])
    arrival = state.last_end[_message(ops, k, task)] + seconds.latency[row, i]
    state.start[task] = start
    state.end[task] = max(start + max(nic_s, nvlink_s), arrival)
    _finish(ops, state, k, task)


@njit(cache=True, nogil=True)
def _sync(ops, seconds, state, k, task):  # type: ignore[no-untyped-def]
    """Starts when the last rank of the group is ready and all their ports are free; takes all of them."""
    rank = ops.first_rank[k] + task - ops.base[k]
    begin = state.ready[task]
    for port in range(NUM_PORTS):
        begin = max(begin, state.free[port, rank])
    state.together[k] = max(state.together[k], begin)
    state.unready[k] -= 1
    if state.unready[k] > 0:
        return
    for each in range(ops.base[k], ops.base[k + 1]):
        i = each - ops.base[k]
        state.start[each] = state.together[k]
        state.end[each] = state.together[k] + seconds.first[ops.row[k], i]
        state.free[:NUM_PORTS, ops.first_rank[k] + i] = state.end[each]
        state.synced[0] = max(state.synced[0], state.end[each])
        state.counts[2] -= 1
        _finish(ops, state, k, each)
    if state.counts[2] == 0:
        # Every update needs the gradient norm of all groups.
        for update in ops.updates:
            for each in range(ops.base[update], ops.base[update + 1]):
                _meet(ops, state, update, each, state.synced[0])


@njit(cache=True, nogil=True)
def _take(state, rank, first, nic_s, nvlink_s, ready):  # type: ignore[no-untyped-def]
    """Takes two neighbouring ports from one moment on, each for its own time; one that is not needed does not count."""
    start = ready
    if nic_s > 0:
        start = max(start, state.free[first, rank])
    if nvlink_s > 0:
        start = max(start, state.free[first + 1, rank])
    if nic_s > 0:
        state.free[first, rank] = start + nic_s
    if nvlink_s > 0:
        state.free[first + 1, rank] = start + nvlink_s
    return start


@njit(cache=True, nogil=True)
def _finish(ops, state, k, task):  # type: ignore[no-untyped-def]
    """Meets one condition of the queue's next task and of each task that depends on this one."""
    state.counts[1] += 1
    i = task - ops.base[k]
    end = state.end[task]
    after = ops.next_op[k]
    if after >= 0:
        _meet(ops, state, after, ops.base[after] + i, end)
    for place in range(ops.user_ptr[k], ops.user_ptr[k + 1]):
        user = ops.users[place]
        _meet(ops, state, user, ops.base[user] + i, end)


@njit(cache=True, nogil=True)
def _meet(ops, state, k, task, at):  # type: ignore[no-untyped-def]
    state.ready[task] = max(state.ready[task], at)
    state.pending[task] -= 1
    if state.pending[task] == 0:
        key = state.ready[task]
        if ops.op[k] == RECV:
            # Not known before its last sender has started.
            key = max(key, state.last_start[_message(ops, k, task)])
        _push(state, key, task)


@njit(cache=True, nogil=True)
def _message(ops, k, task):  # type: ignore[no-untyped-def]
    return ops.message[k] + (task - ops.base[k] if ops.to_same_rank[k] else 0)


@njit(cache=True, nogil=True)
def _push(state, key, task):  # type: ignore[no-untyped-def]
    keys, heap = state.keys, state.heap
    place = state.counts[0]
    state.counts[0] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and heap[parent] < task):
            break
        keys[place], heap[place] = keys[parent], heap[parent]
        place = parent
    keys[place], heap[place] = key, task


@njit(cache=True, nogil=True)
def _pop(state):  # type: ignore[no-untyped-def]
    keys, heap = state.keys, state.heap
    top = heap[0]
    state.counts[0] -= 1
    size = state.counts[0]
    key, task = keys[size], heap[size]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            keys[right] < keys[child] or (keys[right] == keys[child] and heap[right] < heap[child])
        ):
            child = right
        if key < keys[child] or (key == keys[child] and task < heap[child]):
            break
        keys[place], heap[place] = keys[child], heap[child]
        place = child
    keys[place], heap[place] = key, task
    return top
