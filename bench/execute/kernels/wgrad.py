"""Weight gradients of grouped matrix products, added to fp32 buffers without a product in memory in between."""

# Triton's language is not Python's, and Triton is not installed everywhere.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_N, BLOCK_K = 128, 128, 64
NUM_WARPS, NUM_STAGES = 4, 3  # on an H200 the fastest of ten shapes of a program


def accumulate(into: Tensor, grad: Tensor, x: Tensor, offsets: Tensor) -> None:
    """into[e] += grad_e^T x_e, summed in fp32, for the rows of every group e.

    Args:
        into: fp32 [groups, M, N]. grad: [rows, M]. x: [rows, N]. All contiguous.
        offsets: int32 [groups], the end of every group's rows.
    """
    groups, m, n = into.shape
    grid = (triton.cdiv(m, BLOCK_M) * triton.cdiv(n, BLOCK_N), groups)
    _accumulate[grid](
        into,
        grad,
        x,
        offsets,
        m,
        n,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def _accumulate(into, grad, x, offsets, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    group = tl.program_id(1)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0)
    stop = tl.load(offsets + group)
    if start < stop:
        columns_n = tl.cdiv(n, BLOCK_N)
        row = tl.program_id(0) // columns_n * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tl.program_id(0) % columns_n * BLOCK_N + tl.arange(0, BLOCK_N)
        in_m, in_n = row < m, column < n
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for first in range(start, stop, BLOCK_K):
            token = first + tl.arange(0, BLOCK_K)
            there = token < stop
            at = token.to(tl.int64)[:, None]
            left = tl.load(grad + at * m + row[None, :], mask=there[:, None] & in_m[None, :], other=0.0)
            right = tl.load(x + at * n + column[None, :], mask=there[:, None] & in_n[None, :], other=0.0)
            total = tl.dot(tl.trans(left), right, total)
        place = into + (group.to(tl.int64) * m + row[:, None]) * n + column[None, :]
        inside = in_m[:, None] & in_n[None, :]
        tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)
