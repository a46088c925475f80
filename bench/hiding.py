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


class Work(NamedTuple):
    """What the ranks of a step do.

    Attributes:
        compute_s: the longest that any rank computes.
        send_s: the longest that any rank sends messages, gradient sums left out.
        bound_s: the longest that any rank computes, or that any rank's links are busy: no order of the same work ends
            sooner.
        step_s: of the timeline.
    """

    compute_s: float
    send_s: float
    bound_s: float
    step_s: float

    @property
    def fraction_of_bound(self) -> float:
        return self.bound_s / self.step_s


def work(timeline: Timeline) -> Work:
    """Of a timeline, simulated or measured."""
    computes = np.isin(timeline.op, (Op.COMPUTE, Op.UPDATE))
    carries = timeline.bytes > 0
    sends = (timeline.op == Op.SEND) & carries
    moves = (timeline.op == Op.SYNC) | (np.isin(timeline.op, (Op.SEND, Op.RECV)) & carries)
    ranks = [timeline.rank == rank for rank in np.unique(timeline.rank)]
    compute_s, send_s, move_s = (
        max(_union_s(timeline, own & chosen) for own in ranks) for chosen in (computes, sends, moves)
    )
    return Work(compute_s, send_s, max(compute_s, move_s), timeline.step_time_s)


def hidden_share(serial_s: float, step_s: float, send_s: float) -> float:
    """(serial - step) / transfer: 1 where all transfers are hidden, 0 where none is.

    Args:
        serial_s: the step of the plan without overlap, see `bench.serial`, on the same ranks.
        send_s: what its busiest rank sends in that step.
    """
    return (serial_s - step_s) / send_s if send_s > 0 else 1.0


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
