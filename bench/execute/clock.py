"""One clock for all ranks: how far each rank's ``perf_counter`` is from rank 0's, and a bound on the error.

Cristian's algorithm (Distributed Computing 3, 1989): rank r notes its time, asks rank 0 for its own, and notes its time
again. If the answer took as long as the question, rank 0 read its clock in the middle; the error is at most half of the
round trip. Of several round trips the shortest is believed.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

ROUNDS = 20


class Clock(NamedTuple):
    """What to add to this rank's ``perf_counter`` to have rank 0's, and the largest error bound over all ranks."""

    offset_s: float
    error_s: float


def align_clocks(rounds: int = ROUNDS) -> Clock:
    """Measures every rank against rank 0, over gloo; called by all ranks of the default group together.

    Ranks of one host may share a clock; then the estimate is nothing but noise, within its error. So an offset that is
    not larger than its error counts as none, and the error is reported all the same.
    """
    rank = dist.get_rank()
    offset, error = 0.0, 0.0
    for other in range(1, dist.get_world_size()):
        if rank == 0:
            _answer(other, rounds)
        elif rank == other:
            offset, error = _ask(rounds)
    worst = torch.tensor([error], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Clock(offset if abs(offset) > error else 0.0, worst.item())


def _ask(rounds: int) -> tuple[float, float]:
    """Offset and error of the shortest of several round trips to rank 0."""
    question, answer = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    trips = []
    for _ in range(rounds):
        start = time.perf_counter()
        dist.send(question, 0)
        dist.recv(answer, 0)
        stop = time.perf_counter()
        trips.append((stop - start, answer.item() - (start + stop) / 2))
    duration, offset = min(trips)
    return offset, duration / 2


def _answer(rank: int, rounds: int) -> None:
    question = torch.zeros(1, dtype=torch.float64)
    for _ in range(rounds):
        dist.recv(question, rank)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), rank)
