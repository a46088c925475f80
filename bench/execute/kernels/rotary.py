"""Rotary positions."""

# Triton's language is not Python's, and Triton is not installed everywhere.
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(x: Tensor, angles: Tensor, sign: int) -> Tensor:
    """x [S, b, heads, dim], dim contiguous; angles fp32 [S, dim / 2]; the result is contiguous."""
    length, batch, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (length * batch,)
        padded = (triton.next_power_of_2(heads), triton.next_power_of_2(dim // 2))
        _rotate[grid](x, angles, out, batch, heads, dim // 2, *x.stride()[:3], sign, *padded)
    return out


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
