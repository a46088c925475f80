"""What a timeline says, in numbers: one module for simulated and measured steps.

Intervals are operations' [start_s, end_s]. A rank *computes* while a COMPUTE or UPDATE of it runs; a link of it is
*busy* while a SEND, RECV or SYNC of it that carries bytes runs. Averages are over the ranks of the timeline.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

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
    return Metrics(
        step_time_s=step_s,
        tokens_per_s=tokens / step_s,
        tokens_per_s_per_gpu=tokens / step_s / gpus,
        tflops_per_gpu=flops / step_s / gpus / 1e12,
        mfu=useful,
        hfu=None if useful is None else useful * (1 if case.layout.recompute == "none" else FORWARD_AGAIN),
        bubble_fraction=bubble_fraction(timeline),
        exposed_comm_s=exposed_comm_s(timeline),
        overlapped_fraction=overlapped_fraction(timeline),
        moving_s=moving_s(timeline),
        waiting_s=waiting_s(timeline),
    )


def mfu(model_flops: float, step_time_s: float, num_gpus: int, peak_flops_per_s: float) -> float:
    """Model FLOPs / (step time x GPUs x dense peak); recomputation does not count (arXiv 2204.02311, app. B)."""
    return model_flops / (step_time_s * num_gpus * peak_flops_per_s)


def bubble_fraction(timeline: Timeline) -> float:
    """1 - (time in which a rank computes) / step time, mean over ranks.

    The bubble over the *ideal* time, as the pipeline literature has it ((p - 1) / m for 1F1B), is b / (1 - b).
    """
    return 1.0 - _mean(timeline, _computes(timeline)) / timeline.step_time_s


def exposed_comm_s(timeline: Timeline) -> float:
    """Time in which a link of a rank is busy while the rank does not compute, mean over ranks.

    Of links L and computation C: |L or C| - |C|. This is the first of two definitions in use; for the second see
    `exposed_by_free_comm_s`.
    """
    computes, moves = _computes(timeline), _moves(timeline)
    return max(0.0, _mean(timeline, computes | moves) - _mean(timeline, computes))


def moving_s(timeline: Timeline) -> float:
    """Time in which a link of a rank is busy, mean over ranks."""
    return _mean(timeline, _moves(timeline))


def overlapped_fraction(timeline: Timeline) -> float:
    """1 - exposed_comm_s / moving_s: the share of communication hidden behind computation; 1 where there is none."""
    moving = moving_s(timeline)
    return 1.0 - exposed_comm_s(timeline) / moving if moving > 0 else 1.0


def taxed_share(timeline: Timeline) -> float:
    """Of the time in which ranks run compute actions, the share in which a link of theirs is busy too."""
    computes, moves = timeline.op == Op.COMPUTE, _moves(timeline)
    computing = _mean(timeline, computes)
    both = computing + _mean(timeline, moves) - _mean(timeline, computes | moves)
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


def _computes(timeline: Timeline) -> NDArray[np.bool_]:
    return np.isin(timeline.op, (Op.COMPUTE, Op.UPDATE))


def _moves(timeline: Timeline) -> NDArray[np.bool_]:
    return np.isin(timeline.op, (Op.SEND, Op.RECV, Op.SYNC)) & (timeline.bytes > 0)


def _num_ranks(timeline: Timeline) -> int:
    return len(np.unique(timeline.rank))


def _mean(timeline: Timeline, chosen: NDArray[np.bool_]) -> float:
    """Length of the union of the chosen intervals of a rank, mean over ranks."""
    length = union_s(timeline.rank[chosen], timeline.start_s[chosen], timeline.end_s[chosen])
    return length / _num_ranks(timeline)


def union_s(rank: NDArray[np.int32], start_s: Floats, end_s: Floats) -> float:
    """Sum over ranks of the length of the union of a rank's intervals."""
    total = 0.0
    order = np.lexsort((start_s, rank))
    rank, start_s, end_s = rank[order], start_s[order], end_s[order]
    bounds = np.flatnonzero(np.diff(rank, prepend=-1, append=-1)) if len(rank) else np.zeros(1, dtype=np.int64)
    for low, high in pairwise(bounds):
        reached = np.maximum.accumulate(end_s[low:high])
        # What an interval adds is what of it lies beyond all that began before it.
        covered = np.concatenate([[-np.inf], reached[:-1]])
        total += float(np.maximum(0.0, end_s[low:high] - np.maximum(start_s[low:high], covered)).sum())
    return total
