"""The loop of the simulation.

A task is one operation on one rank; those of operation k are base[k] .. base[k + 1] - 1. A task waits for a number of
conditions (its queue's predecessor, its dependencies, the arrival of its message). The last one puts it on a heap,
keyed by the time at which it became ready, ties by task number. Popped in that order, it takes its resources from the
moment they are free: first come, first served. Its end is then known and meets conditions of others, never earlier
than the present time, so one pass over the heap is the whole simulation.

Resources of a rank: the SMs, and the sending and the receiving port of NIC and NVLink.

Compiled (see `loops`), helpers are inlined and take plain arrays: structures of arrays passed between compiled
functions cost ten times more than the work done here.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.simulate.loops import Loop

COMPUTE, SEND, RECV, SYNC, UPDATE = range(5)  # bench.program.Op, as the compiler wants them
NIC_OUT, NVLINK_OUT, NIC_IN, NVLINK_IN, SMS, NUM_RESOURCES = range(6)
NUM_PORTS = 4
READY, START, END, PENDING, NUM_FIELDS = range(5)  # of a task, side by side so that one cache line has them
FIRST_START, LAST_START, LAST_END, UNSENT = range(4)  # of a message

I8: TypeAlias = NDArray[np.int8]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
F64: TypeAlias = NDArray[np.float64]


class Ops(NamedTuple):
    """Operations, by number; `task_op` by task.

    next_op: the operation that its end lets go in its queue, -1 if none. users[user_ptr[k] : user_ptr[k + 1]] depend on
    k. message: number of the first message of a SEND or RECV; one message an operation where every rank sends to
    every rank, one a rank where a rank sends to the same-numbered rank (`to_same_rank`). row: in `Durations`.
    """

    op: I8
    base: I64
    task_op: I32
    first_rank: I64
    next_op: I32
    user_ptr: I64
    users: I32
    partner: I32
    message: I64
    to_same_rank: NDArray[np.bool_]
    row: I64
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
    """What changes. tasks: [tasks, READY .. PENDING], the last counts conditions that are not met. messages:
    [messages, FIRST_START .. UNSENT], the last counts senders that have not started. unready, together: [operations],
    ranks of a sum that are not ready and its start so far. free: [ranks, resources], when each is free. keys, heap:
    room for the heap. unsummed: number of sums that have not ended."""

    tasks: F64
    messages: F64
    unready: I32
    together: F64
    free: F64
    keys: F64
    heap: I64
    unsummed: I64


def _push(keys, heap, size, key, task):  # type: ignore[no-untyped-def]
    place = size
    while place > 0:
        parent = (place - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and heap[parent] < task):
            break
        keys[place], heap[place] = keys[parent], heap[parent]
        place = parent
    keys[place], heap[place] = key, task
    return size + 1


def _pop(keys, heap, size):  # type: ignore[no-untyped-def]
    """Takes the top off, which the caller has read."""
    size -= 1
    key, task = keys[size], heap[size]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (keys[right] < keys[child] or (keys[right] == keys[child] and heap[right] < heap[child])):
            child = right
        if key < keys[child] or (key == keys[child] and task < heap[child]):
            break
        keys[place], heap[place] = keys[child], heap[child]
        place = child
    keys[place], heap[place] = key, task
    return size


def _take(free, rank, port, nic_s, nvlink_s, ready):  # type: ignore[no-untyped-def]
    """Takes two neighbouring ports from one moment on, each for its own time; one that is not needed does not count."""
    start = ready
    if nic_s > 0:
        start = max(start, free[rank, port])
    if nvlink_s > 0:
        start = max(start, free[rank, port + 1])
    if nic_s > 0:
        free[rank, port] = start + nic_s
    if nvlink_s > 0:
        free[rank, port + 1] = start + nvlink_s
    return start


def _meet(tasks, task, at):  # type: ignore[no-untyped-def]
    """Meets one condition of a task at a time; whether it was the last one."""
    tasks[task, READY] = max(tasks[task, READY], at)
    tasks[task, PENDING] -= 1
    return tasks[task, PENDING] == 0


def _depart(messages, message, start, end):  # type: ignore[no-untyped-def]
    """Notes that one sender of a message has started; whether it was the last one."""
    messages[message, FIRST_START] = min(messages[message, FIRST_START], start)
    messages[message, LAST_START] = max(messages[message, LAST_START], start)
    messages[message, LAST_END] = max(messages[message, LAST_END], end)
    messages[message, UNSENT] -= 1
    return messages[message, UNSENT] == 0


def _deliver(tasks, message, latency, first_task, low, high, keys, heap, size):  # type: ignore[no-untyped-def]
    """Tells the receivers first_task + low .. high - 1 of a message that it is on its way; returns the heap's size."""
    for j in range(low, high):
        task = first_task + j
        if _meet(tasks, task, message[FIRST_START] + latency[j]):
            # Not known before its last sender has started.
            size = _push(keys, heap, size, max(tasks[task, READY], message[LAST_START]), task)
    return size


def _release(tasks, first_task, last_task, at, keys, heap, size):  # type: ignore[no-untyped-def]
    """Meets one condition of several tasks; returns the heap's size."""
    for task in range(first_task, last_task):
        if _meet(tasks, task, at):
            size = _push(keys, heap, size, tasks[task, READY], task)
    return size


def _start_sum(tasks, free, first_task, last_task, first_rank, start, seconds):  # type: ignore[no-untyped-def]
    """Runs a sum on all ranks of its group, on all their ports; returns its latest end."""
    latest = start
    for task in range(first_task, last_task):
        end = start + seconds[task - first_task]
        tasks[task, START], tasks[task, END] = start, end
        if end > start:
            free[first_rank + task - first_task, :NUM_PORTS] = end
        latest = max(latest, end)
    return latest


def _turned(ptr, targets):  # type: ignore[no-untyped-def]
    """Lists targets[ptr[k] : ptr[k + 1]] the other way round: for each number, the k in whose list it is, ascending."""
    num = len(ptr) - 1
    back_ptr = np.zeros(num + 1, dtype=np.int64)
    for target in targets:
        back_ptr[target + 1] += 1
    for k in range(num):
        back_ptr[k + 1] += back_ptr[k]
    back, free = np.empty(len(targets), dtype=np.int32), back_ptr.copy()
    for k in range(num):
        for place in range(ptr[k], ptr[k + 1]):
            back[free[targets[place]]] = k
            free[targets[place]] += 1
    return back_ptr, back


def _run(ops, seconds, state, ahead_s, limit_s):  # type: ignore[no-untyped-def]
    """Fills `state` (an `Ops`, a `Durations`, a `State`); returns the number of tasks that finished.

    Stops before, with -1, once a task starts so late that the step takes longer than `limit_s`: of each operation,
    `ahead_s` is the least time from its start to the end of the step.
    """
    op, base, task_op, first_rank, next_op, user_ptr, users, partner, message, to_same_rank, row, updates = ops
    first, second, first_in, second_in, latency = seconds
    tasks, messages, unready, together, free, keys, heap, unsummed = state
    size = done = 0
    summed = 0.0  # end of the last sum so far
    for task in range(len(task_op)):
        if tasks[task, PENDING] == 0:
            size = _push(keys, heap, size, 0.0, task)
    while size > 0:
        task = heap[0]
        size = _pop(keys, heap, size)
        k = task_op[task]
        kind, r, i = op[k], row[k], task - base[k]
        rank, ready = first_rank[k] + i, tasks[task, READY]
        low, high = task, task + 1  # tasks that end with this one
        if kind in (COMPUTE, UPDATE):
            tasks[task, START] = max(ready, free[rank, SMS])
            if tasks[task, START] + ahead_s[k] > limit_s:
                return -1
            tasks[task, END] = tasks[task, START] + first[r, i]
            free[rank, SMS] = tasks[task, END]
        elif kind == SEND:
            start = _take(free, rank, NIC_OUT, first[r, i], second[r, i], ready)
            end = start + max(first[r, i], second[r, i])
            tasks[task, START], tasks[task, END] = start, end
            if start + ahead_s[k] > limit_s:
                return -1
            same, there = to_same_rank[k], base[partner[k]]
            m = message[k] + (i if same else 0)
            if _depart(messages, m, start, end):
                from_j, to_j = (i, i + 1) if same else (0, base[partner[k] + 1] - there)
                size = _deliver(tasks, messages[m], latency[row[partner[k]]], there, from_j, to_j, keys, heap, size)
        elif kind == RECV:
            start = _take(free, rank, NIC_IN, first_in[r, i], second_in[r, i], ready)
            arrival = messages[message[k] + (i if to_same_rank[k] else 0), LAST_END] + latency[r, i]
            tasks[task, START] = start
            tasks[task, END] = max(start + max(first_in[r, i], second_in[r, i]), arrival)
        else:
            for port in range(NUM_PORTS if first[r, i] > 0 else 0):
                ready = max(ready, free[rank, port])
            together[k] = max(together[k], ready)
            unready[k] -= 1
            if unready[k] > 0:
                continue
            low, high = base[k], base[k + 1]
            summed = max(summed, _start_sum(tasks, free, low, high, first_rank[k], together[k], first[r]))
            unsummed[0] -= high - low
        for ended in range(low, high):
            done += 1
            i = ended - base[k]
            for place in range(user_ptr[k] - 1, user_ptr[k + 1]):
                after = next_op[k] if place < user_ptr[k] else users[place]
                if after >= 0 and _meet(tasks, base[after] + i, tasks[ended, END]):
                    key = tasks[base[after] + i, READY]
                    if op[after] == RECV:
                        key = max(key, messages[message[after] + (i if to_same_rank[after] else 0), LAST_START])
                    size = _push(keys, heap, size, key, base[after] + i)
        if kind == SYNC and unsummed[0] == 0:
            # Every update needs the gradient norm of all groups.
            for update in updates:
                size = _release(tasks, base[update], base[update + 1], summed, keys, heap, size)
    return done


run = Loop(_run, _push, _pop, _take, _meet, _depart, _deliver, _release, _start_sum)
turned = Loop(_turned)
