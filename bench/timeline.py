"""A `Timeline` is what one optimizer step did; simulated and executed steps have the same columns."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bench.action import Codes
from bench.errors import BadInput

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """Columns of one length, one entry an operation on a rank.

    rank: global rank. queue: index into `queues`, (group, stream) names. op: `bench.program.Op`. code: packed action.
    ready_s: when all it waits for was there. start_s, end_s: when it ran; start - ready is waiting for a turn or port.
    bytes: bytes that crossed a link (sends: sent, receives: received). flops: FLOPs of the action. alloc_bytes: bytes
    held from start_s on minus bytes given back at end_s; its sum over time is the memory above the static state.
    All times count from the start of the step on one clock; `clock_error_s` bounds its error between ranks.
    `stands_for` is the number of GPUs that each timed rank represents (1 unless symmetry was folded).
    """

    source: Literal["simulated", "measured"]
    queues: tuple[tuple[str, str], ...]
    rank: NDArray[np.int32]
    queue: NDArray[np.int32]
    op: NDArray[np.int8]
    code: Codes
    ready_s: Seconds
    start_s: Seconds
    end_s: Seconds
    bytes: NDArray[np.float64]
    flops: NDArray[np.float64]
    alloc_bytes: NDArray[np.float64]
    clock_error_s: float = 0.0
    stands_for: int = 1

    def __post_init__(self) -> None:
        sizes = {name: len(getattr(self, name)) for name in COLUMNS}
        if len(set(sizes.values())) > 1:
            raise BadInput("timeline", sizes, "columns of one length")

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def step_time_s(self) -> float:
        """From the start of the step to the end of its last operation."""
        return float(self.end_s.max(initial=0.0))


COLUMNS = ("rank", "queue", "op", "code", "ready_s", "start_s", "end_s", "bytes", "flops", "alloc_bytes")
