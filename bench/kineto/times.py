"""The numbers that come out of traces; all times in seconds unless a name says otherwise.

With C the union of the times in which work that computes runs, and M the same for communication (intervals of all
streams of one GPU): overlapped = |C and M|, exposed = |M| - overlapped, busy = |C or M or host copies|, and
idle = span - busy, where the span runs from the first start to the last end of any work on that GPU.
A stream's own numbers use its own C and M, but its communication is overlapped where any stream of its GPU computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.kineto.classes import Kind

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class Busy:
    """One GPU or stream."""

    span_s: float
    busy_s: float
    compute_s: float
    communication_s: float
    overlapped_s: float
    exposed_s: float
    idle_s: float


@dataclass(frozen=True)
class StreamTime:
    stream: int
    num_operations: int
    time: Busy


@dataclass(frozen=True)
class ClassTime:
    """sum_s counts every operation; busy_s is the union; exposed_s (communication) is what no compute runs beside."""

    name: str
    kind: Kind
    num_operations: int
    sum_s: float
    busy_s: float
    exposed_s: float | None


@dataclass(frozen=True)
class PhaseTime:
    """Unions over the operations of one phase; exposed_s is where no operation of any phase computes."""

    phase: str
    num_operations: int
    compute_s: float
    communication_s: float
    exposed_s: float


@dataclass(frozen=True)
class UnknownKernel:
    name: str
    num_operations: int
    sum_s: float


@dataclass(frozen=True)
class GpuTime:
    """One GPU of one rank.

    start_ns: its first work on the trace's clock. unknown: the busiest kernels of no class. by_class, by_use: for
    pictures, what part of each of many equal columns of the span is busy: by (stream, class) on that stream, and over
    all streams as compute alone, overlapped, exposed ("compute", "overlapped", "exposed").
    """

    device: int
    name: str | None
    start_ns: int
    time: Busy
    streams: tuple[StreamTime, ...]
    classes: tuple[ClassTime, ...]
    phases: tuple[PhaseTime, ...]
    unknown: tuple[UnknownKernel, ...]
    by_class: Mapping[tuple[int, str], Shares]
    by_use: Mapping[str, Shares]


@dataclass(frozen=True)
class RankTime:
    """One file. num_steps: iterations that the profiler marked."""

    file: str
    rank: int
    world_size: int | None
    num_events: int
    num_steps: int
    gpus: tuple[GpuTime, ...]


@dataclass(frozen=True)
class Spread:
    """One measure over all GPUs; `largest` is the (rank, device) that has most of it."""

    measure: str
    min_s: float
    median_s: float
    max_s: float
    largest: tuple[int, int]


@dataclass(frozen=True)
class Waiting:
    """Collectives of one class, the n-th of a process group matched over the ranks that take part in it.

    moving_s: of each matched collective the shortest of its ranks' durations, summed over a rank's collectives.
    waiting_s: the rest, time that a rank spent in the kernel because another was late or had more to move. Both by rank
    and device. No clocks are compared. num_unmatched: operations whose group has other counts on other ranks.
    """

    class_: str
    num_matched: int
    num_unmatched: int
    moving_s: tuple[tuple[int, int, float], ...]
    waiting_s: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Skew:
    """start_spread_s: between the first and last GPU to start, by the hosts' clocks; None where they differ in kind."""

    spreads: tuple[Spread, ...]
    waiting: tuple[Waiting, ...]
    start_spread_s: float | None


@dataclass(frozen=True)
class Analysis:
    """Ranks in order. skew is None for a single GPU."""

    ranks: tuple[RankTime, ...]
    skew: Skew | None
    warnings: tuple[str, ...]
