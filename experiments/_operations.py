"""Single operations of one layer on one device: what share of the device's peaks the trainer's kernels reach.

FLOPs and bytes are counted as `bench.roofline` counts them, so that a share here is what a field of
`bench.assumptions.Assumptions` means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from bench.action import Pass
from bench.assumptions import get_assumptions
from bench.roofline import swiglu_elements
from experiments._timed import Device, Reading, Took

BACKWARD = get_assumptions().attention_backward_factor


def readings(on: Device, rounds: int) -> list[Reading]:
    """All operations, in the order of the assumptions' fields: medians over rounds that follow one another."""
    found = [list(_round(on)) for _ in range(rounds)]
    return [replace(some[0], took=Took.median(each.took for each in some)) for some in zip(*found, strict=True)]


def _round(on: Device) -> Iterator[Reading]:
    for some in (_products, _grouped_products, _attention, _passes, _optimizer, _gap, _host_link):
        yield from some(on)


def _products(on: Device) -> Iterator[Reading]:
    import torch

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
        took = on.took(partial(torch.matmul, a, b.T))
        yield Reading(
            field,
            f"matrix product, {name}",
            f"{rows} x {inner} x {columns}",
            "FLOP/s",
            2.0 * rows * inner * columns,
            took,
        )


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

        largest, kept = rows == s.rows[-1], grouped_linear(x, weight, counts, offsets)
        with torch.no_grad():
            took = on.took(partial(grouped_linear, x, weight, counts, offsets))
        yield Reading("grouped_gemm" if largest else "", "grouped product, forward", shape, "FLOP/s", flops, took, rows)
        # Outside a store of weight gradients, autograd's backward makes both.
        both = partial(torch.autograd.grad, kept, [x, weight], grad, retain_graph=True, allow_unused=True)
        took = on.took(both)
        field = "grouped_gemm_backward" if largest else ""
        yield Reading(field, "grouped product, both gradients", shape, "FLOP/s", 2 * flops, took, rows)


def _attention(on: Device) -> Iterator[Reading]:
    """Of one sequence: cuDNN's, which is what is assumed, and torch's flash attention, which ranks take."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from bench.execute.parts.core import attend

    s = on.shapes
    cuda = on.device.type == "cuda"
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION} if cuda else {"CPU": None}
    for name, backend in backends.items():
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            for span in s.spans:
                q, k, v = (on.randn(1, s.heads, span, s.head_dim).requires_grad_() for _ in range(3))
                # Two products over the causal half, its diagonal included.
                flops = 2.0 * 2 * s.heads * s.head_dim * span * (span + 1) / 2
                shape = f"one sequence of {span} tokens, {s.heads} heads of {s.head_dim}"
                assumed = name != "flash"
                with torch.no_grad():
                    took = on.took(partial(attend, q, k, v))
                field = "attention_forward" if assumed else ""
                yield Reading(field, f"attention ({name}), forward", shape, "FLOP/s", flops, took, span)
                kept, grad = attend(q, k, v), on.randn(1, s.heads, span, s.head_dim)
                took = on.took(partial(torch.autograd.grad, kept, [q, k, v], grad, retain_graph=True))
                field = "attention_backward" if assumed else ""
                words = f"attention ({name}), backward as {BACKWARD:g} forwards"
                yield Reading(field, words, shape, "FLOP/s", BACKWARD * flops, took, span)


def _passes(on: Device) -> Iterator[Reading]:
    """Kernels between the products; SwiGLU, which moves what is counted and no more, is what `hbm` means."""
    for some in (_swiglu, _norm, _rows, _entropy):
        yield from some(on)


def _swiglu(on: Device) -> Iterator[Reading]:
    import torch

    from bench.execute.fused import swiglu

    width = on.shapes.width
    rows = on.shapes.elements // (4 * width)
    gate_up, grad = on.randn(rows, 2 * width).requires_grad_(), on.randn(rows, width)
    shape, each = f"{rows} rows, width {width}", float(rows * width * on.element_bytes)
    kept = swiglu(gate_up)
    with torch.no_grad():
        forward = on.took(partial(swiglu, gate_up))
    backward = on.took(partial(torch.autograd.grad, kept, [gate_up], grad, retain_graph=True))
    moved = each * (swiglu_elements(1, Pass.F) + swiglu_elements(1, Pass.B))
    yield Reading("hbm", "SwiGLU, forward and backward", shape, "bytes/s", moved, forward + backward)


def _norm(on: Device) -> Iterator[Reading]:
    """And the sum of two tensors, a residual."""
    import torch

    hidden, tokens = on.shapes.hidden, on.shapes.tokens * 4
    x, shape = on.randn(tokens, hidden).requires_grad_(), f"{tokens} x {hidden}"
    norm = torch.nn.RMSNorm(hidden, device=on.device, dtype=on.dtype)
    each, kept, slope = float(tokens * hidden * on.element_bytes), norm(x), on.randn(tokens, hidden)
    with torch.no_grad():
        yield Reading("", "RMS norm, forward", shape, "bytes/s", 2 * each, on.took(partial(norm, x)))
        yield Reading("", "sum of two tensors", shape, "bytes/s", 3 * each, on.took(partial(torch.add, x, slope)))
    took = on.took(partial(torch.autograd.grad, kept, [x, norm.weight], slope, retain_graph=True))
    yield Reading("", "RMS norm, backward", shape, "bytes/s", 3 * each, took)


def _rows(on: Device) -> Iterator[Reading]:
    """What packs a dispatch, and what adds a combine up."""
    import torch

    from bench.execute.fused import Pairs, gather, sum_pairs

    s = on.shapes
    row = torch.randperm(s.tokens * s.top_k, device=on.device, generator=on.generator) % s.tokens
    pairs, u = Pairs.of(row, s.tokens), on.randn(s.tokens, s.hidden)
    shape, each = f"{s.tokens} tokens x {s.top_k}, {s.hidden}", float(s.hidden * on.element_bytes)
    moved = 2 * len(row) * each
    yield Reading("", "rows of a token copied", shape, "bytes/s", moved, on.took(partial(gather, u, pairs)))
    took = on.took(partial(sum_pairs, pairs, gather(u, pairs)))
    yield Reading("", "rows of a token summed", shape, "bytes/s", (len(row) + s.tokens) * each, took)


def _entropy(on: Device) -> Iterator[Reading]:
    import torch

    from bench.execute.entropy import cross_entropy

    s = on.shapes
    tokens = max(1, s.elements // s.vocabulary)
    logits, slope = on.randn(tokens, s.vocabulary).requires_grad_(), torch.ones(tokens, device=on.device)
    labels = torch.randint(s.vocabulary, (tokens,), device=on.device, generator=on.generator)
    kept = cross_entropy(logits, labels)
    took = on.took(partial(cross_entropy, logits.detach(), labels))
    took += on.took(partial(torch.autograd.grad, kept, [logits], slope, retain_graph=True))
    moved = 3.0 * tokens * s.vocabulary * on.element_bytes  # read; read again and their gradient written
    yield Reading("", "cross-entropy, forward and backward", f"{tokens} x {s.vocabulary}", "bytes/s", moved, took)


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
    yield Reading("optimizer", "AdamW", shape, "bytes/s", number * per_param, on.took(optimizer.step))


def _gap(on: Device) -> Iterator[Reading]:
    """What a kernel takes besides its bytes: kernels of a few bytes, one behind the other, all launched beforehand."""
    import torch

    x = torch.zeros(32, device=on.device)
    if on.device.type == "cpu":
        yield Reading("kernel_s", "an empty kernel behind another", "32 elements", "s", 0.0, on.took(lambda: x.add_(1)))
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
    once = median(found)
    yield Reading("kernel_s", "an empty kernel behind another", "32 elements", "s", 0.0, Took(once, once))


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

    yield Reading("", "to and from the host at once, one GPU", f"{size >> 20} MiB", "host bytes/s", size, on.took(both))


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
