"""Sums of rows that are named by an index, in fp32, rounded once; no atomics, so always in the same order."""

# Triton's language is not Python's, and Triton is not installed everywhere.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from bench.execute.kernels.blocks import block


def sum_rows(first: Tensor, second: Tensor | None, order: Tensor, starts: Tensor) -> Tensor:
    """out[r] = sum of the rows ``order[starts[r]:starts[r + 1]]`` of ``first`` followed by ``second``, in fp32."""
    num_rows, width = starts.shape[0] - 1, first.shape[1]
    out = first.new_empty(num_rows, width)
    if out.numel():
        size = block(width)
        other = first if second is None else second
        grid = (num_rows, triton.cdiv(width, size))
        _sum_rows[grid](first, other, first.shape[0], order, starts, out, width, size)
    return out


def add_rows(base: Tensor | None, rows: Tensor, places: Tensor) -> Tensor:
    """out[t] = base[t] + the sum of rows[p] over the places p of t that are not negative.

    Args:
        base: [T, H]; nothing to add to where not given.
        rows: [R, H].
        places: int32 [T, K].
    """
    (num_rows, most), width = places.shape, rows.shape[1]
    out = rows.new_empty(num_rows, width)
    if out.numel():
        size = block(width)
        grid = (num_rows, triton.cdiv(width, size))
        _add_rows[grid](out if base is None else base, rows, places, out, most, width, base is not None, size)
    return out


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
def _add_rows(base, rows, places, out, most, width, BASED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if BASED:
        total += tl.load(base + row * width + column, mask=inside, other=0.0).to(tl.float32)
    for number in range(most):
        place = tl.load(places + row * most + number).to(tl.int64)
        there = inside & (place >= 0)
        total += tl.load(rows + place * width + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
