"""What a rank reports of one step, and the `Timeline` that the reports of all ranks make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bench.action import TRANSFERS, view
from bench.edges import ends
from bench.execute.transport import Channel
from bench.program import Ints, Op, Program
from bench.timeline import Seconds, Timeline


@dataclass(frozen=True)
class StepResult:
    """One rank's report.

    Attributes:
        loss: this rank's terms of the loss; the sum over all ranks is the global batch's.
        ops: numbers of the rank's operations in the program; the columns that follow have one entry for each.
        ready_s, start_s, end_s: seconds from the rank's own start of the step; see `Timeline`. A receive starts when it
            is posted, though not before the one ahead of it in its queue has arrived.
        bytes: that crossed a link.
        posted_s: operation -> seconds at which a receive was posted.
        base_s: the rank's start of the step, on the host's monotonic clock.
        load: layer -> pairs that each of this rank's experts had, the shared experts last where they are here.
        expert_ids: (layer, micro-batch) -> int64 [T, k] on the CPU, where they were asked for.
        peak_bytes: most memory allocated on the GPU during the step; 0 on the CPU, where it is not measured.
    """

    rank: int
    loss: float
    ops: Ints
    ready_s: Seconds
    start_s: Seconds
    end_s: Seconds
    bytes: NDArray[np.int64]
    posted_s: dict[int, float]
    base_s: float
    load: dict[int, list[int]]
    expert_ids: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    peak_bytes: int = 0


def merge_timeline(program: Program, results: Sequence[StepResult], clock_error_s: float = 0.0) -> Timeline:
    """The measured timeline of all ranks, on the clock of the one that began first.

    What a receive waited for its sender is no transfer: it is moved in front of `start_s`, except that a receive
    which found its message already there starts when it was posted. The ranks' hosts share a monotonic clock, or their
    `base_s` has been corrected to within `clock_error_s`.
    """
    first = min(result.base_s for result in results)
    size = program.plan.placement.size
    queue_of = program.queue_of()
    starts = np.full((max(result.rank for result in results) // size + 1, program.num_ops), np.inf)
    for result in results:
        replica = result.rank // size
        begun = result.start_s + (result.base_s - first)
        starts[replica, result.ops] = np.minimum(starts[replica, result.ops], begun)
    columns: dict[str, list[NDArray[np.float64]]] = {"ready_s": [], "start_s": [], "end_s": []}
    for result in results:
        shift = result.base_s - first
        start, end = result.start_s + shift, result.end_s + shift
        ready = result.ready_s + shift
        receives = np.flatnonzero(program.op[result.ops] == Op.RECV)
        sent = starts[result.rank // size, program.partner[result.ops[receives]]]
        ready[receives] = np.minimum(np.maximum(ready[receives], sent), end[receives])
        start[receives] = np.clip(sent, start[receives], end[receives])
        for name, column in (("ready_s", np.minimum(ready, start)), ("start_s", start), ("end_s", end)):
            columns[name].append(column)
    ops = np.concatenate([result.ops for result in results])
    return Timeline(
        source="measured",
        queues=program.queues,
        rank=np.concatenate([np.full(len(r.ops), r.rank, dtype=np.int32) for r in results]),
        queue=queue_of[ops],
        op=program.op[ops],
        code=program.code[ops],
        **{name: np.concatenate(parts) for name, parts in columns.items()},
        bytes=np.concatenate([result.bytes for result in results]).astype(np.float64),
        flops=np.zeros(len(ops)),
        alloc_bytes=np.zeros(len(ops)),
        clock_error_s=clock_error_s,
    )


def traffic(program: Program, results: Sequence[StepResult]) -> dict[Channel, int]:
    """Bytes that crossed a link, by channel; ranks of the channels count within the replica."""
    placement = program.plan.placement
    total: dict[Channel, int] = {}
    for result in results:
        for k, size in zip(result.ops.tolist(), result.bytes.tolist(), strict=True):
            if program.op[k] == Op.SEND:
                channel = Channel.of(program.action(k), placement, 0)
                total[channel] = total.get(channel, 0) + size
    return total
