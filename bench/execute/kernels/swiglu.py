"""SwiGLU and its gradients, a pass each over the rows."""

# Triton's language is not Python's, and Triton is not installed everywhere.
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.execute.kernels.blocks import block


def swiglu_forward(gate_up: Tensor, weights: Tensor | None) -> Tensor:
    """silu(gate) * up (* weights): [rows, 2 x width] -> [rows, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        size = block(width)
        grid = (rows, triton.cdiv(width, size))
        _swiglu_forward[grid](gate_up, weights, out, width, weights is not None, size)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``gate_up`` and ``weights``."""
    rows, width = grad.shape
    grad_gate_up = torch.empty_like(gate_up)
    grad_weights = None if weights is None else torch.zeros_like(weights)
    if grad.numel():
        _swiglu_backward[(rows,)](
            grad, gate_up, weights, grad_gate_up, grad_weights, width, weights is not None, block(width)
        )
    return grad_gate_up, grad_weights


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
