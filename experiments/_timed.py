"""Timing of single operations on one device: in a short run behind a pause, and in a long run of themselves.

Matrix products alone draw more power than a GPU may, which lowers its clocks; a step has other work as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.clusters import Gpu

if TYPE_CHECKING:
    import torch

SHORT_S, FEWEST = 0.08, 3  # a short run takes no longer, unless it is of so few
Unit = Literal["FLOP/s", "bytes/s", "host bytes/s", "s"]


@dataclass(frozen=True)
class Shapes:
    """Sizes of what is timed. qkv: columns of a projection. spans: lengths of causal sequences. rows: rows an expert.
    elements: of what the kernels between the products move, and of an optimizer's tensors. pause_s, long_s: how long
    the device rests before a short run, and is busy before a long one. repeats: how many times an operation is timed,
    fewer where a short run would be long.
    """

    square: int = 8192
    hidden: int = 4096
    qkv: int = 9216
    heads: int = 32
    head_dim: int = 128
    spans: tuple[int, ...] = (4096, 8192, 16384, 32768)
    experts: int = 16
    rows: tuple[int, ...] = (256, 1024, 4096)
    width: int = 1536
    vocabulary: int = 151936
    tokens: int = 16384
    top_k: int = 8
    elements: int = 1 << 29
    pause_s: float = 0.2
    long_s: float = 0.5
    repeats: int = 20


SMALL = Shapes(
    square=64,
    hidden=64,
    qkv=128,
    heads=2,
    head_dim=32,
    spans=(32, 64),
    experts=2,
    rows=(8, 16),
    width=32,
    vocabulary=256,
    tokens=64,
    top_k=2,
    elements=1 << 12,
    pause_s=0.0,
    long_s=0.0,
    repeats=3,
)


class Took(NamedTuple):
    """Seconds of one time of an operation, in a short run and in a long one."""

    short_s: float
    long_s: float

    @classmethod
    def median(cls, some: Iterable[Took]) -> Took:
        """Of each by itself."""
        return cls(*map(median, zip(*some, strict=True)))

    def __add__(self, other: Took) -> Took:  # type: ignore[override]
        return Took(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Reading:
    """One operation. field: the assumption that it measures; empty for one that only shows how it compares.

    amount: FLOPs or bytes of one time as the cost model counts them. took: of one time. x: rows an expert or tokens of
    a sequence, where it is timed for several.
    """

    field: str
    name: str
    shape: str
    unit: Unit
    amount: float
    took: Took
    x: int = 0

    def share(self, gpu: Gpu, dtype: str, *, long: bool = False) -> float | None:
        """Of the device's peak, in a short or in a long run; None for a time."""
        peaks = {
            "FLOP/s": gpu.peak_flops(dtype),
            "bytes/s": gpu.hbm_bytes_per_s,
            "host bytes/s": gpu.host_bytes_per_s,
        }
        return None if self.unit == "s" else self.amount / self.took[long] / peaks[self.unit]


class Device:
    """Where operations are timed, and random values on it."""

    def __init__(self, device: str, shapes: Shapes) -> None:
        import torch

        self.device, self.shapes = torch.device(device), shapes
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.dtype_name = "bf16" if device == "cuda" else "fp32"
        self.generator = torch.Generator(device).manual_seed(0)

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    def randn(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of the working dtype unless told otherwise; zeros would need less power than a run's values."""
        import torch

        return torch.randn(*size, device=self.device, dtype=dtype or self.dtype, generator=self.generator)

    def took(self, call: Callable[[], Any]) -> Took:
        """Medians of calls that follow one another."""
        call()
        if self.device.type == "cpu":
            once = median(_wall_s(call) for _ in range(self.shapes.repeats))
            return Took(once, once)
        import torch

        def whole() -> None:
            call()
            torch.cuda.synchronize()

        whole()
        once = _wall_s(whole)
        time.sleep(self.shapes.pause_s)
        times = max(FEWEST, min(self.shapes.repeats, int(SHORT_S / once)))
        short_s = self._median_s(call, times)
        for _ in range(min(2000, int(self.shapes.long_s / once))):
            call()
        return Took(short_s, self._median_s(call, times))

    def _median_s(self, call: Callable[[], Any], times: int) -> float:
        import torch

        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        call()
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        return median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e-3


def _wall_s(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
