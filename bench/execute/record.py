"""What a rank reports of one step, and the `Timeline` that the reports of all ranks make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bench.action import Action, pack, unpack
from bench.execute.transport import Channel
from bench.program import Ints, Op, Program
from bench.timeline import Seconds, Timeline


@dataclass(frozen=True)
class StepResult:
    """One rank's report.

    Attributes:
        loss: this rank's terms of the loss; the sum over all ranks is the global batch's.
        ops: numbers of the rank's operations in the program; the columns that follow have one entry for each.
        ready_s, start_s, end_s: seconds from the rank's own start of the step; see `Timeline`. A transfer starts when
            it is posted, though not before the one ahead of it in its queue is over.
        begun_s: when it really began, whatever is ahead of it: posts overlap.
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
    begun_s: Seconds
    bytes: NDArray[np.int64]
    posted_s: dict[int, float]
    base_s: float
    load: dict[int, list[int]]
    expert_ids: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    peak_bytes: int = 0


class NativeSpan(NamedTuple):
    """Something that a system's own code did: from when to when, in seconds from the rank's own start of the step."""

    op: Op
    action: Action
    start_s: float
    end_s: float
    num_bytes: int


@dataclass(frozen=True)
class NativeTrace:
    """Of a rank's step; `base_s` as in `StepResult`."""

    rank: int
    spans: tuple[NativeSpan, ...]
    base_s: float


def native_timeline(program: Program, traces: Sequence[NativeTrace], clock_error_s: float = 0.0) -> Timeline:
    """The measured timeline of a system's own code, each span in the queue where the plan has its kind.

    When an operation could have begun is not known: it is ready when it starts.
    """
    first = min(trace.base_s for trace in traces)
    size = program.plan.placement.size
    groups = program.plan.placement.groups
    all_spans = [(trace, span) for trace in traces for span in trace.spans]
    start, end = (
        np.array([getattr(span, name) + trace.base_s - first for trace, span in all_spans])
        for name in ("start_s", "end_s")
    )
    queues = [
        _queue_of(program, next(group.name for group in groups if trace.rank % size in group.ranks), span.action)
        for trace, span in all_spans
    ]
    return Timeline(
        source="measured",
        queues=program.queues,
        rank=np.array([trace.rank for trace, _ in all_spans], dtype=np.int32),
        queue=np.array(queues, dtype=np.int32),
        op=np.array([span.op for _, span in all_spans], dtype=np.int8),
        code=pack(span.action for _, span in all_spans),
        ready_s=start.copy(),
        start_s=start,
        end_s=end,
        bytes=np.array([span.num_bytes for _, span in all_spans], dtype=np.float64),
        flops=np.zeros(len(all_spans)),
        alloc_bytes=np.zeros(len(all_spans)),
        clock_error_s=clock_error_s,
    )


def _queue_of(program: Program, group: str, action: Action) -> int:
    """The number of the group's queue in which actions of this kind stand; its first one where there is none."""
    own = [number for number, (name, _) in enumerate(program.queues) if name == group]
    kinds = unpack(program.code).kind
    for number in own:
        if (kinds[program.queue_ptr[number] : program.queue_ptr[number + 1]] == action.kind).any():
            return number
    return own[0]


def merge_timeline(program: Program, results: Sequence[StepResult], clock_error_s: float = 0.0) -> Timeline:
    """The measured timeline of all ranks, on the clock of the one that began first.

    A receive that was posted before its message left starts when the message did, at the earliest of its senders: what
    comes before is waiting. Memory of single operations is not measured, and FLOPs are counted by those who need them:
    both columns are zero. The ranks' ``base_s`` are on one clock, to within `clock_error_s`.
    """
    first = min(result.base_s for result in results)
    begun = {result.rank: np.full(program.num_ops, np.inf) for result in results}
    for result in results:
        begun[result.rank][result.ops] = result.begun_s + (result.base_s - first)
    columns = [_on_one_clock(program, result, begun, result.base_s - first) for result in results]
    ready, start, end = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    ops = np.concatenate([result.ops for result in results])
    return Timeline(
        source="measured",
        queues=program.queues,
        rank=np.concatenate([np.full(len(r.ops), r.rank, dtype=np.int32) for r in results]),
        queue=program.queue_of()[ops],
        op=program.op[ops],
        code=program.code[ops],
        ready_s=ready,
        start_s=start,
        end_s=end,
        bytes=np.concatenate([result.bytes for result in results]).astype(np.float64),
        flops=np.zeros(len(ops)),
        alloc_bytes=np.zeros(len(ops)),
        clock_error_s=clock_error_s,
    )


def _on_one_clock(
    program: Program, result: StepResult, begun: dict[int, Seconds], shift: float
) -> tuple[Seconds, Seconds, Seconds]:
    """(ready, start, end) of a rank's operations; `begun` has every rank's operations on the common clock."""
    ready, start, end = result.ready_s + shift, result.start_s + shift, result.end_s + shift
    place = program.plan.placement
    replica, local = divmod(result.rank, place.size)
    for number in np.flatnonzero(program.op[result.ops] == Op.RECV):
        k = int(result.ops[number])
        channel = Channel.of(program.action(k), place, replica * place.size)
        index = local - place.groups[program.group[k]].first
        sources = [channel.sources[index]] if channel.pairwise else channel.sources
        left = min(begun[source][program.partner[k]] for source in sources)
        start[number] = min(max(start[number], left), end[number])
        ready[number] = max(ready[number], left)
    return np.minimum(ready, start), start, end


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
