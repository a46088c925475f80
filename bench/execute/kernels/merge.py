"""Pairs from several sources, each sorted by expert, put in the experts' order in one pass."""

# Triton's language is not Python's, and Triton is not installed everywhere.
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def merge(pairs: Tensor, segments: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """(permutation, rows, weights), int64, int64 and fp32 [P], of the pairs in their new order.

    Args:
        pairs: int32 [P, 2]: a row of the source's, and the bits of an fp32 weight.
        segments: int64 [4, n] of pairs that stay together: their number, where they begin and where they are to begin,
            and what is added to their rows. largest: the largest of these numbers.
    """
    permutation = torch.empty(pairs.shape[0], dtype=torch.int64, device=pairs.device)
    rows = torch.empty_like(permutation)
    weights = torch.empty(pairs.shape[0], dtype=torch.float32, device=pairs.device)
    if largest:
        grid = (segments.shape[1], triton.cdiv(largest, BLOCK))
        _merge[grid](pairs, segments, permutation, rows, weights, segments.shape[1], BLOCK)
    return permutation, rows, weights


@triton.jit(do_not_specialize=["num_segments"])
def _merge(pairs, segments, permutation, rows, weights, num_segments, BLOCK: tl.constexpr):
    segment = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(segments + segment)
    source = tl.load(segments + num_segments + segment) + at
    target = tl.load(segments + 2 * num_segments + segment) + at
    row = tl.load(pairs + 2 * source, mask=inside, other=0)
    bits = tl.load(pairs + 2 * source + 1, mask=inside, other=0)
    tl.store(permutation + target, source, mask=inside)
    tl.store(rows + target, row + tl.load(segments + 3 * num_segments + segment), mask=inside)
    tl.store(weights + target, bits.to(tl.float32, bitcast=True), mask=inside)
