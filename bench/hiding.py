"""Whether a step hides its exchanges behind computation: what a plan claims, and what a timeline shows.

All seconds are of the step itself, as it ran: computation that a transfer beside it slows down counts as it is.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Kind, view
from bench.metrics import union_s
from bench.plan import COMPUTE_STREAM
from bench.program import Op, Program
from bench.timeline import Timeline

EXCHANGES = (int(Kind.DISPATCH), int(Kind.COMBINE))
LEAST_HIDDEN = 1e-3
"""Share of the exchanges' time; below it, what is hidden is chance."""


class Hiding(NamedTuple):
    """Of the rank whose computation and transfers together take longest.

    Attributes:
        compute_s, transfer_s: in which it computes; in which its links carry messages, gradient sums left out.
        serial_s: its step if nothing were hidden: the one after the other, and its gradient sums.
        bound_s: the longest that any rank computes, or that any rank's links are busy: no order of the same work ends
            sooner.
        step_s: of the timeline.
    """

    compute_s: float
    transfer_s: float
    serial_s: float
    bound_s: float
    step_s: float

    @property
    def hidden_share(self) -> float:
        """(serial - step) / transfer: 1 where all transfers are hidden and the rank never waits, 0 where none is; less
        where it waits for others. 1 without transfers.
        """
        return (self.serial_s - self.step_s) / self.transfer_s if self.transfer_s > 0 else 1.0

    @property
    def fraction_of_bound(self) -> float:
        return self.bound_s / self.step_s


def hiding(timeline: Timeline) -> Hiding:
    """What a timeline, simulated or measured, shows."""
    computes = np.isin(timeline.op, (Op.COMPUTE, Op.UPDATE))
    moves = np.isin(timeline.op, (Op.SEND, Op.RECV)) & (timeline.bytes > 0)
    sums = timeline.op == Op.SYNC
    found = []
    for rank in np.unique(timeline.rank):
        own = timeline.rank == rank
        compute_s, move_s, sum_s = (_union_s(timeline, own & chosen) for chosen in (computes, moves, sums))
        found.append((compute_s + move_s + sum_s, compute_s, move_s, max(compute_s, move_s + sum_s)))
    serial_s, compute_s, move_s, _ = max(found)
    return Hiding(compute_s, move_s, serial_s, max(one[3] for one in found), timeline.step_time_s)


def claims_overlap(program: Program) -> bool:
    """Whether the plan has exchanges beside its computation: those that stand in the compute stream are serial."""
    beside = np.array([stream != COMPUTE_STREAM for _, stream in program.queues])
    chosen = (program.op == Op.SEND) & beside[program.queue_of()]
    return bool(np.isin(_kinds(program.code[chosen]), EXCHANGES).any())


def exchanges_s(timeline: Timeline) -> tuple[float, float]:
    """Seconds in which a rank's links carry exchanges, and in how many of them it computes; sums over ranks."""
    computes = timeline.op == Op.COMPUTE
    moves = np.isin(timeline.op, (Op.SEND, Op.RECV)) & (timeline.bytes > 0) & np.isin(_kinds(timeline.code), EXCHANGES)
    computing, moving = (_union_s(timeline, chosen) for chosen in (computes, moves))
    return moving, computing + moving - _union_s(timeline, computes | moves)


def broken_claim(program: Program, timeline: Timeline) -> str:
    """Why the step does not do what its plan claims; empty where it does, or where the plan claims nothing."""
    if not claims_overlap(program):
        return ""
    moving_s, hidden_s = exchanges_s(timeline)
    if moving_s == 0 or hidden_s > LEAST_HIDDEN * moving_s:
        return ""
    return (
        f"the plan runs its exchanges beside computation, and none was hidden: of {moving_s * 1e3:.3g} ms, "
        f"{hidden_s * 1e3:.2g} ms"
    )


def _kinds(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    unique, inverse = np.unique(codes, return_inverse=True)
    return np.array([int(view(int(code)).kind) for code in unique], dtype=np.int64)[inverse]


def _union_s(timeline: Timeline, chosen: NDArray[np.bool_]) -> float:
    return union_s(timeline.rank[chosen], timeline.start_s[chosen], timeline.end_s[chosen])
