"""Cross-entropy of rows of logits: one pass forward, one pass backward, and no copy in fp32."""

# Triton's language is not Python's, and Triton is not installed everywhere.
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
NUM_WARPS = 4


def forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(losses, normalizers), fp32 [T] each, of logits [T, V] and labels int64 [T]."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    normalizers = torch.empty_like(losses)
    if logits.numel():
        _forward[(logits.shape[0],)](
            logits, labels, losses, normalizers, logits.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return losses, normalizers


def backward(logits: Tensor, labels: Tensor, normalizers: Tensor, grads: Tensor) -> Tensor:
    """Gradients of the logits from those of the losses, fp32 [T] of any stride."""
    out = torch.empty_like(logits)
    if logits.numel():
        grid = (logits.shape[0], triton.cdiv(logits.shape[1], BLOCK))
        _backward[grid](
            logits,
            labels,
            normalizers,
            grads,
            grads.stride(0),
            out,
            logits.shape[1],
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["labels"])
def _forward(logits, labels, losses, normalizers, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    most = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(most, value)
        # A lane that has seen nothing but the end of the row has no maximum to scale by.
        total = tl.where(higher == float("-inf"), 0.0, total * tl.exp(most - higher) + tl.exp(value - higher))
        most = higher
    highest = tl.max(most)
    total = tl.sum(tl.where(most == float("-inf"), 0.0, total * tl.exp(most - highest)))
    normalizer = highest + tl.log(total)
    label = tl.load(labels + row)
    tl.store(losses + row, normalizer - tl.load(logits + label).to(tl.float32))
    tl.store(normalizers + row, normalizer)


@triton.jit(do_not_specialize_on_alignment=["labels", "grads"])
def _backward(logits, labels, normalizers, grads, stride, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32)
    slope = tl.exp(value - tl.load(normalizers + row))
    slope = tl.where(column == tl.load(labels + row), slope - 1.0, slope) * tl.load(grads + row * stride)
    tl.store(out + row * width + column, slope.to(out.dtype.element_ty), mask=inside)
