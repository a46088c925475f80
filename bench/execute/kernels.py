"""Triton kernels for what lies between the GEMMs. Only `bench.execute.fused` imports this, and only for CUDA.

Eager torch takes three to four times the experts' GEMM time for these, in passes over fp32 copies.
"""

# Triton's language is not Python's, and Triton is not installed everywhere.
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 1024
# Arguments that differ from call to call are not specialised on: another variant would be compiled and loaded in the
# middle of a step, and loading waits for the GPU to be idle, which it is not while a message is awaited.


def swiglu_forward(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    """silu(gate) * up (* weights): [rows, 2 x width] -> [rows, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        block = _block(width)
        grid = (rows, triton.cdiv(width, block))
        _swiglu_forward[grid](gate_up, weights, out, width, weights is not None, block)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``gate_up`` and ``weights``."""
    rows, width = grad.shape
    grad_gate_up = torch.empty_like(gate_up)
    grad_weights = None if weights is None else torch.zeros_like(weights)
    if grad.numel():
        _swiglu_backward[(rows,)](
            grad, gate_up, weights, grad_gate_up, grad_weights, width, weights is not None, _block(width)
        )
    return grad_gate_up, grad_weights


def sum_rows(first: Tensor, second: Tensor | None, order: Tensor, starts: Tensor) -> Tensor:
    """out[r] = sum of the rows ``order[starts[r]:starts[r + 1]]`` of ``first`` followed by ``second``, in fp32."""
    num_rows, width = starts.shape[0] - 1, first.shape[1]
    out = first.new_empty(num_rows, width)
    if out.numel():
        block = _block(width)
        other = first if second is None else second
        grid = (num_rows, triton.cdiv(width, block))
        _sum_rows[grid](first, other, first.shape[0], order, starts, out, width, block)
    return out


def rotate(x: Tensor, angles: Tensor, sign: int) -> Tensor:
    """x [S, b, heads, dim], dim contiguous; angles fp32 [S, dim / 2]; the result is contiguous."""
    length, batch, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (length * batch,)
        padded = (triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2))
        _rotate[grid](x, angles, out, batch, heads, dim // 2, *x.stride()[:3], sign, *padded)
    return out


def _block(width: int) -> int:
    return min(MAX_BLOCK, int(triton.next_power_of_2(width)))


@triton.jit(do_not_specialize_on_alignment=["weights"])
def _swiglu_forward(gate_up, weights, out, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        value *= tl.load(weights + row)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["weights"])
def _swiglu_backward(
    grad, gate_up, weights, grad_gate_up, grad_weights, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + row)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate_at = row * 2 * width + column
        slope = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + gate_at + width, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        total += slope * silu * up
        slope *= weight
        grad_gate = slope * up * (sigmoid + silu * (1 - sigmoid))
        kind = grad_gate_up.dtype.element_ty
        tl.store(grad_gate_up + gate_at, grad_gate.to(kind), mask=inside)
        tl.store(grad_gate_up + gate_at + width, (slope * silu).to(kind), mask=inside)
    if WEIGHTED:
        tl.store(grad_weights + row, tl.sum(total))


@triton.jit(do_not_specialize=["num_first"])
def _sum_rows(first, second, num_first, order, starts, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for at in range(tl.load(starts + row), tl.load(starts + row + 1)):
        pair = tl.load(order + at)
        if pair < num_first:
            value = tl.load(first + pair * width + column, mask=inside, other=0.0)
        else:
            value = tl.load(second + (pair - num_first) * width + column, mask=inside, other=0.0)
        total += value.to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    x,
    angles,
    out,
    batch,
    heads,
    half,
    stride_s,
    stride_b,
    stride_n,
    sign,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = token // batch
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    angle = tl.load(angles + position * half + column, mask=column < half, other=0.0)
    kind = out.dtype.element_ty
    # Rounded to the activations' dtype first, as the unfused form has it.
    cos, sin = tl.cos(angle).to(kind).to(tl.float32), tl.sin(angle).to(kind).to(tl.float32) * sign
    source = x + position * stride_s + (token % batch) * stride_b + head * stride_n + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * heads + head) * 2 * half + column
    tl.store(target, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(target + half, (second * cos + first * sin).to(kind), mask=inside)
