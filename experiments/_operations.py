"""Single operations of one layer on one device, timed: what share of the device's peaks the trainer's kernels reach.

FLOPs and bytes are counted as `bench.roofline` counts them, so that a share here is what a field of
`bench.assumptions.Assumptions` means. Times are of a device that has been at work for a while: its clocks are those of a
long run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from bench.clusters import Gpu

if TYPE_CHECKING:
    import torch

Unit = Literal["FLOP/s", "bytes/s", "host bytes/s", "s"]


@dataclass(frozen=True)
class Shapes:
    """Sizes of what is timed. qkv: columns of a projection. spans: lengths of causal sequences. rows: rows an expert.
    elements: of what the kernels between the products move, and of an optimizer's tensors. burst_s, repeats: how long
    the device is kept busy before an operation is timed, and the least number of times that it is timed.
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
    burst_s: float = 0.5
    repeats: int = 20


SMALL = Shapes(
    **{"square": 64, "hidden": 64, "qkv": 128, "heads": 2, "head_dim": 32, "spans": (32, 64), "experts": 2},
    **{"rows": (8, 16), "width": 32, "vocabulary": 256, "tokens": 64, "top_k": 2, "elements": 1 << 12},
    **{"burst_s": 0.0, "repeats": 3},
)


@dataclass(frozen=True)
class Reading:
    """One operation. field: the assumption that it measures; empty for one that only shows how it compares.

    amount: FLOPs or bytes of one time as the cost model counts them. seconds: of one time. x: rows an expert or tokens
    of a sequence, where it is timed for several.
    """

    field: str
    name: str
    shape: str
    unit: Unit
    amount: float
    seconds: float
    x: int = 0

    def share(self, gpu: Gpu, dtype: str) -> float | None:
        """Of the device's peak; None for a time."""
        peaks = {
            "FLOP/s": gpu.peak_flops(dtype),
            "bytes/s": gpu.hbm_bytes_per_s,
            "host bytes/s": gpu.host_bytes_per_s,
        }
        return None if self.unit == "s" else self.amount / self.seconds / peaks[self.unit]


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

    def seconds(self, call: Callable[[], Any]) -> float:
        """Median of calls, each timed by itself behind others of its kind."""
        if self.device.type == "cpu":
            call()
            return median(_wall_s(call) for _ in range(self.shapes.repeats))
        return self._device_seconds(call)

    def _device_seconds(self, call: Callable[[], Any]) -> float:
        import torch

        call()
        torch.cuda.synchronize()
        once = _wall_s(lambda: (call(), torch.cuda.synchronize()))
        times = max(self.shapes.repeats, int(self.shapes.burst_s / max(once, 1e-6)))
        times = min(times, 2000)
        for _ in range(times):
            call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        return median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)) * 1e-3


def _wall_s(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def readings(on: Device) -> Iterator[Reading]:
    """All operations, in the order of the assumptions' fields."""
    for some in (_products, _grouped_products, _attention, _passes, _optimizer, _gap, _host_link):
        yield from some(on)


def _products(on: Device) -> Iterator[Reading]:
    s, tokens = on.shapes, on.shapes.tokens
    sizes = {
        "large": (s.square, s.square, s.square),
        "attention's projection": (tokens, s.hidden, s.qkv),
        "attention's output": (tokens, s.heads * s.head_dim, s.hidden),
        "logits": (tokens // 4, s.hidden, s.vocabulary),
    }
    for name, (rows, inner, columns) in sizes.items():
        a, b = on.randn(rows, inner), on.randn(columns, inner)
        field = "gemm" if name == "large" else ""
        seconds = on.seconds(lambda a=a, b=b: a @ b.T)
        yield Reading(field, f"matrix product, {name}", f"{rows} x {inner} x {columns}", "FLOP/s",
                      2.0 * rows * inner * columns, seconds)


def _grouped_products(on: Device) -> Iterator[Reading]:
    """The gate and up projections of a rank's experts, forward, input gradient and weight gradient."""
    import torch

    from bench.execute.wgrad import grouped_linear, main_grad

    s = on.shapes
    for rows in s.rows:
        counts, total = [rows] * s.experts, rows * s.experts
        offsets = torch.arange(rows, total + 1, rows, dtype=torch.int32, device=on.device)
        weight = torch.nn.Parameter(on.randn(s.experts, 2 * s.width, s.hidden) * 0.02)
        main_grad(weight)
        x, grad = on.randn(total, s.hidden).requires_grad_(), on.randn(total, 2 * s.width)
        flops = 2.0 * total * s.hidden * 2 * s.width
        shape = f"{s.experts} experts x {rows} rows, {s.hidden} x {2 * s.width}"

        def forward(x: Any = x, weight: Any = weight, counts: Any = counts, offsets: Any = offsets) -> Any:
            return grouped_linear(x, weight, counts, offsets)

        kept = forward()

        def backward(kept: Any = kept, x: Any = x, grad: Any = grad) -> None:
            torch.autograd.grad(kept, [x], grad, retain_graph=True)

        largest = rows == s.rows[-1]
        with torch.no_grad():
            seconds = on.seconds(forward)
        yield Reading("grouped_gemm" if largest else "", "grouped product, forward", shape, "FLOP/s", flops, seconds, rows)
        # Outside a store of weight gradients, autograd's backward makes both.
        seconds = on.seconds(backward)
        field = "grouped_gemm_backward" if largest else ""
        yield Reading(field, "grouped product, both gradients", shape, "FLOP/s", 2 * flops, seconds, rows)


def _attention(on: Device) -> Iterator[Reading]:
    import torch

    from bench.execute.parts.core import attend

    s = on.shapes
    for span in s.spans:
        batch = max(1, s.tokens // span)
        q, k, v = (on.randn(batch, s.heads, span, s.head_dim).requires_grad_() for _ in range(3))
        # Two products over the causal half, its diagonal included.
        flops = 2.0 * 2 * batch * s.heads * s.head_dim * span * (span + 1) / 2
        shape = f"{batch} x {s.heads} heads of {s.head_dim}, {span} tokens"
        with torch.no_grad():
            seconds = on.seconds(lambda q=q, k=k, v=v: attend(q, k, v))
        yield Reading("attention_forward", "attention core, forward", shape, "FLOP/s", flops, seconds, span)
        kept, grad = attend(q, k, v), on.randn(batch, s.heads, span, s.head_dim)
        seconds = on.seconds(
            lambda kept=kept, q=q, k=k, v=v, grad=grad: torch.autograd.grad(kept, [q, k, v], grad, retain_graph=True)
        )
        yield Reading("attention_backward", "attention core, backward as 2.5 forwards", shape, "FLOP/s",
                      2.5 * flops, seconds, span)


def _passes(on: Device) -> Iterator[Reading]:
    """Kernels between the products; SwiGLU, which moves what is counted and no more, is what `hbm` means."""
    import torch

    from bench.execute.entropy import cross_entropy
    from bench.execute.fused import Pairs, gather, sum_pairs, swiglu

    s, e = on.shapes, on.element_bytes
    rows = s.elements // (4 * s.width)
    gate_up, grad = on.randn(rows, 2 * s.width).requires_grad_(), on.randn(rows, s.width)
    shape = f"{rows} rows, width {s.width}"
    kept = swiglu(gate_up)
    with torch.no_grad():
        forward_s = on.seconds(lambda: swiglu(gate_up))
    backward_s = on.seconds(lambda: torch.autograd.grad(kept, [gate_up], grad, retain_graph=True))
    moved = float(rows * s.width * e)
    yield Reading("hbm", "SwiGLU, forward and backward", shape, "bytes/s", 9 * moved, forward_s + backward_s)
    yield Reading("", "SwiGLU, forward", shape, "bytes/s", 3 * moved, forward_s)
    del gate_up, grad, kept

    x, tokens = on.randn(s.tokens * 4, s.hidden).requires_grad_(), s.tokens * 4
    norm, shape = torch.nn.RMSNorm(s.hidden, device=on.device, dtype=on.dtype), f"{tokens} x {s.hidden}"
    moved, kept = float(tokens * s.hidden * e), norm(x)
    with torch.no_grad():
        yield Reading("", "RMS norm, forward", shape, "bytes/s", 2 * moved, on.seconds(lambda: norm(x)))
        yield Reading("", "sum of two tensors", shape, "bytes/s", 3 * moved, on.seconds(lambda: x + x.detach()))
    slope = torch.ones_like(x)
    seconds = on.seconds(lambda: torch.autograd.grad(kept, [x, norm.weight], slope, retain_graph=True))
    yield Reading("", "RMS norm, backward", shape, "bytes/s", 3 * moved, seconds)
    del x, kept, slope

    row = torch.randperm(s.tokens * s.top_k, device=on.device, generator=on.generator) % s.tokens
    pairs, u = Pairs.of(row, s.tokens), on.randn(s.tokens, s.hidden)
    shape, moved = f"{s.tokens} tokens x {s.top_k}, {s.hidden}", float(len(row) * s.hidden * e)
    yield Reading("", "rows of a token copied", shape, "bytes/s", 2 * moved, on.seconds(lambda: gather(u, pairs)))
    copies = gather(u, pairs)
    added = moved + float(s.tokens * s.hidden * e)
    yield Reading("", "rows of a token summed", shape, "bytes/s", added, on.seconds(lambda: sum_pairs(pairs, copies)))
    del copies

    tokens = max(1, s.elements // s.vocabulary)
    logits = on.randn(tokens, s.vocabulary).requires_grad_()
    labels = torch.randint(s.vocabulary, (tokens,), device=on.device, generator=on.generator)
    kept, slope = cross_entropy(logits, labels), torch.ones(tokens, device=on.device)
    seconds = on.seconds(lambda: cross_entropy(logits, labels).detach())
    seconds += on.seconds(lambda: torch.autograd.grad(kept, [logits], slope, retain_graph=True))
    moved = float(tokens * s.vocabulary * (3 * e))
    yield Reading("", "cross-entropy, forward and backward", f"{tokens} x {s.vocabulary}", "bytes/s", moved, seconds)


def _optimizer(on: Device) -> Iterator[Reading]:
    import torch

    from bench.execute.optimizer import AdamW
    from bench.execute.wgrad import main_grad

    s = on.shapes
    size = max(1, s.elements // (4 * s.hidden))
    params = [torch.nn.Parameter(on.randn(size, s.hidden)) for _ in range(4)]
    for param in params:
        main_grad(param).normal_()
    optimizer = AdamW(params, lr=1e-4)
    number = float(sum(param.numel() for param in params))
    # Gradient read, main weight and two moments read and written, weight written.
    low = on.element_bytes if on.dtype != torch.float32 else 0
    per_param = 4 + 3 * 8 + low
    shape = f"4 x {size} x {s.hidden}"
    yield Reading("optimizer", "AdamW", shape, "bytes/s", number * per_param, on.seconds(optimizer.step))


def _gap(on: Device) -> Iterator[Reading]:
    """What a kernel takes besides its bytes: kernels of a few bytes, one behind the other, all launched beforehand."""
    import torch

    x = torch.zeros(32, device=on.device)
    if on.device.type == "cpu":
        yield Reading("kernel_s", "an empty kernel behind another", "32 elements", "s", 0.0, on.seconds(lambda: x.add_(1)))
        return
    times = 400
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(on.shapes.repeats):
        torch.cuda._sleep(20_000_000)  # while the GPU waits, the host launches all
        start.record()
        for _ in range(times):
            x.add_(1)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e-3 / times)
    yield Reading("kernel_s", "an empty kernel behind another", "32 elements", "s", 0.0, median(found))


def _host_link(on: Device) -> Iterator[Reading]:
    """Both directions at once, of one GPU; the assumption is of all GPUs of a node."""
    import torch

    if on.device.type == "cpu":
        return
    size = on.shapes.elements
    up, down = (torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(2))
    there, back = (torch.empty(size, dtype=torch.uint8, device=on.device) for _ in range(2))
    other = torch.cuda.Stream()

    def both() -> None:
        other.wait_stream(torch.cuda.current_stream())
        there.copy_(up, non_blocking=True)
        with torch.cuda.stream(other):
            down.copy_(back, non_blocking=True)
        torch.cuda.current_stream().wait_stream(other)

    yield Reading("", "to and from the host at once, one GPU", f"{size >> 20} MiB", "host bytes/s", size, on.seconds(both))


def fitted(points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Shares of two directions on long spans, and the span at which either reaches half of its share.

    share(span) = most x span / (span + half), least squares of the relative errors.

    Args:
        points, others: (span, share) of the forward and of the backward.
    """
    import numpy as np
    from scipy.optimize import least_squares

    spans, shares = np.array([*points, *others]).T
    first = np.arange(len(spans)) < len(points)

    def errors(values: Any) -> Any:
        forward, backward, half = values
        return np.where(first, forward, backward) * spans / (spans + half) / shares - 1

    bounds = ([1e-6, 1e-6, 0.0], [1.0, 1.0, 1e6])
    forward, backward, half = least_squares(errors, [0.6, 0.5, 1000.0], bounds=bounds, x_scale=[1, 1, 1e3]).x
    return float(forward), float(backward), float(half)
