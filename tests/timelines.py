"""Timelines written by hand, for tests of what reads them."""

import numpy as np

from bench.action import Action, pack
from bench.placement import Group, Placement
from bench.program import Op
from bench.timeline import Timeline

# One layer: attention on ranks 0 and 1, experts on rank 2, the head back on A0.
PLACEMENT = Placement((Group("A0", 0, 2), Group("F0", 2, 1)), "A0", "A0", ("A0",), ("F0",), ("A0",))
TWO_STAGES = Placement((Group("S0", 0, 2), Group("S1", 2, 2)), "S0", "S1", ("S0", "S1"), ("S0", "S1"), ("S0", "S1"))

Row = tuple[int, str, str, Op, str, float, float]
"""rank, group, stream, operation, action, start and end in seconds."""


def timeline(rows: list[Row], *, source: str = "simulated", clock_error_s: float = 0.0) -> Timeline:
    queues = tuple(dict.fromkeys((group, stream) for _, group, stream, *_ in rows))
    start = np.array([row[5] for row in rows], dtype=float)
    return Timeline(
        source=source,  # type: ignore[arg-type]
        queues=queues,
        rank=np.array([row[0] for row in rows], dtype=np.int32),
        queue=np.array([queues.index((row[1], row[2])) for row in rows], dtype=np.int32),
        op=np.array([row[3] for row in rows], dtype=np.int8),
        code=pack([Action.parse(row[4]) for row in rows]),
        ready_s=start / 2,
        start_s=start,
        end_s=np.array([row[6] for row in rows], dtype=float),
        bytes=np.array([1e6 if row[3] in (Op.SEND, Op.RECV) else 0 for row in rows], dtype=float),
        flops=np.array([1e9 if row[3] is Op.COMPUTE else 0 for row in rows], dtype=float),
        alloc_bytes=np.zeros(len(rows)),
        clock_error_s=clock_error_s,
    )


def one_layer(source: str = "simulated", scale: float = 1e-3) -> Timeline:
    """Two micro-batches through `PLACEMENT`, forward; rank 1 is the slower of the attention ranks."""
    rows: list[Row] = []
    for m in range(2):
        for rank in (0, 1):
            lag = 0.25 * rank
            rows.append((rank, "A0", "compute", Op.COMPUTE, f"attn:F0.{m}", m, m + 0.75 + lag))
            rows.append((rank, "A0", "send", Op.SEND, f"dispatch:F0.{m}", m + 0.75 + lag, m + 1 + lag))
            rows.append((rank, "A0", "recv/combine:F/F0", Op.RECV, f"combine:F0.{m}", m + 2, m + 2.5))
        rows.append((2, "F0", "recv/dispatch:F/A0", Op.RECV, f"dispatch:F0.{m}", m + 0.75, m + 1.25))
        rows.append((2, "F0", "compute", Op.COMPUTE, f"expert:F0.{m}", m + 1.25, m + 2))
        rows.append((2, "F0", "send", Op.SEND, f"combine:F0.{m}", m + 2, m + 2.5))
    rows += [(rank, group, "compute", Op.UPDATE, "update", 4, 4.5) for rank, group in ((0, "A0"), (1, "A0"), (2, "F0"))]
    rows = [(*row[:5], row[5] * scale, row[6] * scale) for row in rows]
    return timeline(rows, source=source, clock_error_s=5e-6 if source == "measured" else 0.0)


def hops(num_replicas: int = 1) -> Timeline:
    """One hop from stage S0 to S1 of `TWO_STAGES` on every rank of every replica."""
    rows: list[Row] = []
    for replica in range(num_replicas):
        for i in range(2):
            rows.append((4 * replica + i, "S0", "hops", Op.SEND, "hop:F1.0", 1 + i, 2 + i))
            rows.append((4 * replica + 2 + i, "S1", "recv/hop:F/S0", Op.RECV, "hop:F1.0", 1 + i, 3 + i))
    return timeline(rows)


def repeated(num_operations: int) -> Timeline:
    """Rank 0 computes one micro-batch after another, a microsecond each."""
    number = np.arange(num_operations, dtype=np.int64)
    zeros = np.zeros(num_operations)
    first = pack([Action.parse("attn:F0.0")])[0]
    step = pack([Action.parse("attn:F0.1")])[0] - first
    return Timeline(
        source="simulated",
        queues=(("A0", "compute"),),
        rank=zeros.astype(np.int32),
        queue=zeros.astype(np.int32),
        op=np.full(num_operations, Op.COMPUTE, dtype=np.int8),
        code=first + number * step,
        ready_s=number * 1e-6,
        start_s=number * 1e-6,
        end_s=number * 1e-6 + 0.8e-6,
        bytes=zeros,
        flops=zeros,
        alloc_bytes=zeros,
    )
