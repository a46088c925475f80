"""One rank's telemetry of a run: the sampler beside it, when its steps began and ended, and what got in between."""

import gc
import hashlib
import platform
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

from bench.telemetry.host import host_probes
from bench.telemetry.network import network_probes
from bench.telemetry.nvml import Gpu, no_gpu, open_gpu
from bench.telemetry.sampler import Sampler, Samples

DEFAULT_HZ = 10.0
MAX_SHARE = 0.02
"""Of a processor, for a rank's readings: some devices take a millisecond and more for a single one."""


class Pause(NamedTuple):
    """Something other than the step that took its time: kind (``gc``, ``checkpoint``), from when to when."""

    kind: str
    start_s: float
    end_s: float


class StepSpan(NamedTuple):
    """A step on the rank's clock. sent_bytes: of messages to other ranks that the plan had it send."""

    step: int
    start_s: float
    end_s: float
    sent_bytes: float


@dataclass
class RankTelemetry:
    """What a rank brings home. Times are of its ``perf_counter``; `offset_s` makes them rank 0's.

    Attributes:
        num_ranks: of the run. host: tells hosts apart without naming them.
        facts: of the GPU, see `bench.telemetry.nvml`.
        wall_jump_s: by how much the wall clock moved against the monotonic one during the run.
    """

    rank: int
    host: str
    samples: Samples
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[StepSpan] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    offset_s: float = 0.0
    num_ranks: int = 1
    wall_jump_s: float = 0.0


class Session:
    """A context: telemetry of this process while it is open.

    Args:
        rank: global rank, of `num_ranks`. hz: samples a second.
        gpu: this process's GPU, of `open_gpu`, or `no_gpu` with the reason.
        offset_s: see `RankTelemetry`. max_share: see `Sampler`.
    """

    def __init__(
        self,
        rank: int,
        gpu: Gpu,
        hz: float = DEFAULT_HZ,
        *,
        offset_s: float = 0.0,
        num_ranks: int = 1,
        max_share: float | None = MAX_SHARE,
    ) -> None:
        host, no_host = host_probes()
        network, no_network = network_probes()
        absent = {**gpu.absent, **no_host, **no_network}
        self._sampler = Sampler([*gpu.probes, *host, *network], hz, absent, max_share=max_share)
        self._found = RankTelemetry(rank, host_digest(), self._sampler.samples, gpu.facts)
        self._found.offset_s, self._found.num_ranks = offset_s, num_ranks
        self._collecting = 0.0
        self._walls = 0.0

    def __enter__(self) -> Self:
        self._walls = time.time() - time.perf_counter()
        gc.callbacks.append(self._on_gc)
        self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._sampler.stop()
        gc.callbacks.remove(self._on_gc)
        self._found.wall_jump_s = time.time() - time.perf_counter() - self._walls

    def step(self, step: int, start_s: float, end_s: float, sent_bytes: float = 0.0) -> None:
        """Notes a step that is done."""
        self._found.steps.append(StepSpan(step, start_s, end_s, sent_bytes))

    def pause(self, kind: str, start_s: float, end_s: float) -> None:
        """Notes what got between steps or into one, such as a checkpoint."""
        self._found.pauses.append(Pause(kind, start_s, end_s))

    def paused(self) -> AbstractContextManager[None]:
        """See `Sampler.paused`."""
        return self._sampler.paused()

    @property
    def result(self) -> RankTelemetry:
        """Everything noted; complete once the context has ended."""
        return self._found

    def _on_gc(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        elif self._collecting:
            self.pause("gc", self._collecting, time.perf_counter())


def gpu_of_rank(device: str) -> Gpu:
    """The GPU that torch has made this process's own, found by its UUID; on ``cpu`` none, with that reason."""
    if device != "cuda":
        return no_gpu("the run uses no GPU")
    import torch

    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return open_gpu(index, None if uuid is None else f"GPU-{uuid}")


def host_digest() -> str:
    """8 hex digits that tell this host from others without naming it; the same as in provenance."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]
