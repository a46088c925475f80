"""A `Timeline` is what one optimizer step did; simulated and executed steps have the same columns."""

import json
from dataclasses import dataclass
from typing import Any, Literal

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

    def to_text(self) -> str:
        """JSON: names and numbers as they are, columns as lists; `parse` is its inverse, to the last bit."""
        plain = {"source": self.source, "clock_error_s": self.clock_error_s, "stands_for": self.stands_for}
        columns = {name: getattr(self, name).tolist() for name in COLUMNS}
        return json.dumps({**plain, "queues": [list(queue) for queue in self.queues], **columns})

    @classmethod
    def parse(cls, text: str) -> "Timeline":
        """From `to_text`. Raises BadInput for another text."""
        try:
            values = json.loads(text)
            columns: Any = {name: np.array(values.pop(name), dtype=COLUMNS[name]) for name in COLUMNS}
            queues = tuple((str(group), str(stream)) for group, stream in values.pop("queues"))
            return cls(queues=queues, **columns, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput("timeline text", text[:60], f"what Timeline.to_text writes ({error})") from None


COLUMNS = {
    "rank": np.int32,
    "queue": np.int32,
    "op": np.int8,
    "code": np.int64,
    "ready_s": np.float64,
    "start_s": np.float64,
    "end_s": np.float64,
    "bytes": np.float64,
    "flops": np.float64,
    "alloc_bytes": np.float64,
}
