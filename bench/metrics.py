"""What a timeline says, in numbers: one module for simulated and measured steps.

Intervals are operations' [start_s, end_s]. A rank *computes* while a COMPUTE or UPDATE of it runs; a link of it is
*busy* while a SEND, RECV or SYNC of it that carries bytes runs. Averages are over the ranks of the timeline.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.case import Case
from bench.errors import BadInput
from bench.flops import step_flops
from bench.program import Op
from bench.timeline import Timeline

if TYPE_CHECKING:
    from bench.cost import Costs
    from bench.program import Program

Floats = NDArray[np.float64]

FORWARD_AGAIN = 4 / 3
"""FLOPs of a step with its forward twice over those with it once: F + B + W = 3 F."""


@dataclass(frozen=True)
class Metrics:
    """One step in numbers; each field is the function of its name, or a quotient that `metrics` documents."""

    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    hfu: float | None
    bubble_fraction: float
    exposed_comm_s: float
    overlapped_fraction: float
    moving_s: float
    waiting_s: float


def metrics(timeline: Timeline, case: Case, num_gpus: int | None = None) -> Metrics:
    """All metrics of one step of `case`.

    tokens_per_s = global batch / step time; tokens_per_s_per_gpu divides by the GPUs; tflops_per_gpu = model FLOPs of
    the step (`bench.flops.step_flops`) / (step time x GPUs) / 1e12; hfu is mfu with what is computed again counted, a
    third more where the layout recomputes: every part then runs its forward once more.

    Args:
        num_gpus: allocated GPUs, idle ones included; all of the case's cluster if not given.
    Raises:
        BadInput: a timeline without a step time.
    """
    step_s = timeline.step_time_s
    if not step_s > 0:
        raise BadInput("timeline", step_s, "a step that takes time")
    gpus = case.cluster.num_gpus if num_gpus is None else num_gpus
    tokens = case.workload.global_batch_tokens
    flops = step_flops(case.model, case.workload.seq_len, tokens)
    peak = case.cluster.gpu.peak_tflops.get(case.workload.dtype)
    useful = None if peak is None else mfu(flops, step_s, gpus, peak * 1e12)
    busy = Busy.of(timeline)
    return Metrics(
        step_time_s=step_s,
        tokens_per_s=tokens / step_s,
        tokens_per_s_per_gpu=tokens / step_s / gpus,
        tflops_per_gpu=flops / step_s / gpus / 1e12,
        mfu=useful,
        hfu=None if useful is None else useful * (1 if case.layout.recompute == "none" else FORWARD_AGAIN),
        bubble_fraction=1.0 - busy.computing_s / step_s,
        exposed_comm_s=busy.exposed_s,
        overlapped_fraction=busy.overlapped_fraction,
        moving_s=busy.moving_s,
        waiting_s=waiting_s(timeline),
    )


def mfu(model_flops: float, step_time_s: float, num_gpus: int, peak_flops_per_s: float) -> float:
    """Model FLOPs / (step time x GPUs x dense peak); recomputation does not count (arXiv 2204.02311, app. B)."""
    return model_flops / (step_time_s * num_gpus * peak_flops_per_s)


def bubble_fraction(timeline: Timeline) -> float:
    """1 - (time in which a rank computes) / step time, mean over ranks.

    The bubble over the *ideal* time, as the pipeline literature has it ((p - 1) / m for 1F1B), is b / (1 - b).
    """
    return 1.0 - Busy.of(timeline).computing_s / timeline.step_time_s


def exposed_comm_s(timeline: Timeline) -> float:
    """Time in which a link of a rank is busy while the rank does not compute, mean over ranks.

    Of links L and computation C: |L or C| - |C|. This is the first of two definitions in use; for the second see
    `exposed_by_free_comm_s`.
    """
    return Busy.of(timeline).exposed_s


def moving_s(timeline: Timeline) -> float:
    """Time in which a link of a rank is busy, mean over ranks."""
    return Busy.of(timeline).moving_s


def overlapped_fraction(timeline: Timeline) -> float:
    """1 - exposed_comm_s / moving_s: the share of communication hidden behind computation; 1 where there is none."""
    return Busy.of(timeline).overlapped_fraction


def taxed_share(timeline: Timeline) -> float:
    """Of the time in which ranks run compute actions, the share in which a link of theirs is busy too."""
    computing, moving, either = Busy.of(timeline, updates=False)
    both = computing + moving - either
    return min(1.0, max(0.0, both / computing)) if computing > 0 else 0.0


def waiting_s(timeline: Timeline) -> float:
    """Sum over a rank's transfers of start_s - ready_s, mean over ranks: queueing for ports, apart from moving.

    Transfers wait at the same time as others move, so this may exceed the step time.
    """
    moves = _moves(timeline)
    return float((timeline.start_s - timeline.ready_s)[moves].sum()) / _num_ranks(timeline)


def exposed_by_free_comm_s(program: "Program", costs: "Costs", step_time_s: float | None = None) -> float:
    """Step time minus that of the same program with communication that takes no time: the second definition.

    Counts what communication delays and not only what it leaves idle; differs widely from `exposed_comm_s`. The step
    is simulated if its time is not given.
    """
    from bench.simulate import simulate

    step_s = simulate(program, costs).step_time_s if step_time_s is None else step_time_s
    return step_s - simulate(program, costs.with_free_communication()).step_time_s


def _moves(timeline: Timeline) -> NDArray[np.bool_]:
    op = timeline.op
    return ((op == Op.SEND) | (op == Op.RECV) | (op == Op.SYNC)) & (timeline.bytes > 0)


def _num_ranks(timeline: Timeline) -> int:
    return int(np.count_nonzero(np.bincount(timeline.rank)))


class Busy(NamedTuple):
    """Seconds in which a rank computes, in which a link of it is busy, and in which either is so; means over ranks."""

    computing_s: float
    moving_s: float
    either_s: float

    @classmethod
    def of(cls, timeline: Timeline, *, updates: bool = True) -> "Busy":
        """`updates`: whether to update parameters is to compute."""
        computes, moves = timeline.op == Op.COMPUTE, _moves(timeline)
        if updates:
            computes |= timeline.op == Op.UPDATE
        order = _by_rank_and_start(timeline.rank, timeline.start_s)
        rank, start_s, end_s = timeline.rank[order], timeline.start_s[order], timeline.end_s[order]
        lengths = (
            _length_s(rank[chosen], start_s[chosen], end_s[chosen])
            for chosen in (each[order] for each in (computes, moves, computes | moves))
        )
        num_ranks = _num_ranks(timeline)
        return cls(*(length / num_ranks for length in lengths))

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.either_s - self.computing_s)

    @property
    def overlapped_fraction(self) -> float:
        return 1.0 - self.exposed_s / self.moving_s if self.moving_s > 0 else 1.0


def union_s(rank: NDArray[np.int32], start_s: Floats, end_s: Floats) -> float:
    """Sum over ranks of the length of the union of a rank's intervals."""
    order = _by_rank_and_start(rank, start_s)
    return _length_s(rank[order], start_s[order], end_s[order])


def _by_rank_and_start(rank: NDArray[np.int32], start_s: Floats) -> NDArray[np.int64]:
    """The order of intervals by rank, of a rank by start, of those that start together as they are given."""
    few = len(rank) and rank.min() >= 0 and rank.max() < 1 << 16
    order = np.argsort(rank.astype(np.uint16) if few else rank, kind="stable")
    for low, high in pairwise(_bounds(rank[order])):
        mine = order[low:high]
        # The starts of a rank are a few ascending runs, a queue each, which a stable sort merges.
        order[low:high] = mine[np.argsort(start_s[mine], kind="stable")]
    return order


def _bounds(rank: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where the intervals of each rank begin, and where the last one's end."""
    return np.flatnonzero(np.diff(rank, prepend=-1, append=-1)) if len(rank) else np.zeros(1, dtype=np.int64)


def _length_s(rank: NDArray[np.int32], start_s: Floats, end_s: Floats) -> float:
    """`union_s` of intervals in order."""
    total = 0.0
    for low, high in pairwise(_bounds(rank)):
        reached = np.maximum.accumulate(end_s[low:high])
        # What an interval adds is what of it lies beyond all that began before it.
        covered = np.concatenate([[-np.inf], reached[:-1]])
        total += float(np.maximum(0.0, end_s[low:high] - np.maximum(start_s[low:high], covered)).sum())
    return total
