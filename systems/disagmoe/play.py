"""The compiled loop that plays a step through: which group does what next, given how long parts and transfers take.

Work is (part, micro-batch). Columns with one entry a part are indexed by part; those of a group by group. Loads the
compiler, so it is imported where a step is played and nowhere else.
"""

import heapq
from typing import NamedTuple, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]
F64: TypeAlias = NDArray[np.float64]

FORWARD, BACKWARD, AGAIN, NUM_QUEUES = range(4)


class Parts(NamedTuple):
    """num_inputs: what a part waits for. weight: number of its weight gradient, -1 if none. after_again: 1 for a
    backward that needs its part computed again. Of part i, feeds are feed_ptr[i] .. feed_ptr[i + 1] - 1: the consumer,
    the code of the transfer or -1, its seconds."""

    group: I64
    code: I64
    seconds: F64
    num_inputs: I64
    weight: I64
    after_again: I64
    feed_ptr: I64
    feed_to: I64
    feed_code: I64
    feed_s: F64


class Queues(NamedTuple):
    """Fixed orders: work of queue q (FORWARD, BACKWARD, AGAIN) of group g is ptr[g, q] .. ptr[g, q + 1] - 1."""

    ptr: I64
    part: I64
    microbatch: I64


@njit(cache=True, nogil=True)
def play(  # type: ignore[no-untyped-def]
    parts, queues, in_flight_limit, deferred, lookahead, num_microbatches, microbatch_step
):
    """Codes that each group computes and sends, in order, one after the other: (codes, [groups], codes, [groups])."""
    num_groups = len(in_flight_limit)
    arrived = np.zeros((len(parts.code), num_microbatches), dtype=np.int64)
    next_of = queues.ptr[:, :NUM_QUEUES].copy()
    in_flight = np.zeros(num_groups, dtype=np.int64)
    ahead = np.zeros(num_groups, dtype=np.int64)
    busy = np.zeros(num_groups, dtype=np.bool_)
    send_free_s = np.zeros(num_groups)
    # Put-off weight gradients, first in, first out: those of a group are at most its backwards.
    of_weights = np.zeros(num_groups + 1, dtype=np.int64)
    of_weights[1:] = np.cumsum(queues.ptr[:, BACKWARD + 1] - queues.ptr[:, BACKWARD])
    weight_part = np.zeros(of_weights[-1], dtype=np.int64)
    weight_microbatch = np.zeros(of_weights[-1], dtype=np.int64)
    oldest, newest = of_weights[:-1].copy(), of_weights[:-1].copy()
    order = [[np.int64(0)][:0] for _ in range(num_groups)]
    sends = [[np.int64(0)][:0] for _ in range(num_groups)]
    events = [(0.0, 0, 0, 0, 0, False)][:0]
    ticket = 0
    to_start = np.arange(num_groups)
    now = 0.0
    while True:
        for g in to_start:
            if busy[g]:
                continue
            part, m = np.int64(-1), np.int64(-1)
            if newest[g] - oldest[g] > deferred:
                part, m = weight_part[oldest[g]], weight_microbatch[oldest[g]]
                oldest[g] += 1
            for queue in (BACKWARD, AGAIN, FORWARD):
                place = next_of[g, queue]
                if part >= 0 or place == queues.ptr[g, queue + 1]:
                    continue
                if queue == AGAIN and ahead[g] >= lookahead:
                    continue
                if queue == FORWARD and in_flight[g] >= in_flight_limit[g]:
                    continue
                first, turn = queues.part[place], queues.microbatch[place]
                if arrived[first, turn] != parts.num_inputs[first]:
                    continue
                part, m = first, turn
                next_of[g, queue] += 1
                if queue == BACKWARD:
                    in_flight[g] -= 1
                    ahead[g] -= parts.after_again[part]
                    if parts.weight[part] >= 0:
                        weight_part[newest[g]], weight_microbatch[newest[g]] = parts.weight[part], m
                        newest[g] += 1
                elif queue == AGAIN:
                    ahead[g] += 1
                else:
                    in_flight[g] += 1
            if part < 0 and newest[g] > oldest[g]:
                part, m = weight_part[oldest[g]], weight_microbatch[oldest[g]]
                oldest[g] += 1
            if part >= 0:
                busy[g] = True
                order[g].append(parts.code[part] + microbatch_step * m)
                ticket += 1
                heapq.heappush(events, (now + parts.seconds[part], ticket, g, part, m, True))  # type: ignore[misc]
        if len(events) == 0:
            break
        now, _, g, ended, of, ends = heapq.heappop(events)  # type: ignore[assignment]
        if ends:
            busy[g] = False
            for feed in range(parts.feed_ptr[ended], parts.feed_ptr[ended + 1]):
                target, arrival = parts.feed_to[feed], now
                if parts.feed_code[feed] >= 0:
                    # One send port a group, in order.
                    send_free_s[g] = max(now, send_free_s[g]) + parts.feed_s[feed]
                    sends[g].append(parts.feed_code[feed] + microbatch_step * of)
                    arrival = send_free_s[g]
                ticket += 1
                heapq.heappush(events, (arrival, ticket, parts.group[target], target, of, False))
        else:
            arrived[ended, of] += 1
        to_start = np.array([g])
    return [np.array(each) for each in order], [np.array(each) for each in sends]
