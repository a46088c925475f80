"""Queries, keys and values from their common projection: split, normalised by heads, turned to their positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.execute.fused import rotate
from bench.execute.kernels import kernels


def split_heads(
    qkv: Tensor,
    angles: Tensor,
    num_heads: int,
    num_groups: int,
    weights: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, b, heads, dim], keys and values [S, b, groups, dim]; on CUDA one kernel each way.

    Args:
        qkv: [S, b, (heads + 2 groups) x dim], group after group: its queries, its key, its value.
        angles: of rotary positions, fp32 [S, dim / 2]; see `rotate`.
        weights: [dim] each, of RMS norms of queries and keys; none where not given.
    """
    if kernels("heads", qkv) is None:
        return _split_by_operators(qkv, angles, num_heads, num_groups, weights, eps)
    q_weight, k_weight = weights or (None, None)
    q, k, v = _SplitHeads.apply(qkv, q_weight, k_weight, angles, num_heads, num_groups, eps)
    return q, k, v


def _split_by_operators(
    qkv: Tensor, angles: Tensor, num_heads: int, num_groups: int, weights: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    queries, dim = num_heads // num_groups, qkv.shape[-1] // (num_heads + 2 * num_groups)
    q, k, v = qkv.unflatten(-1, (num_groups, queries + 2, dim)).split((queries, 1, 1), dim=3)
    q, k, v = (heads.flatten(2, 3) for heads in (q, k, v))
    if weights is not None:
        q, k = (functional.rms_norm(x, (dim,), weight, eps) for x, weight in zip((q, k), weights, strict=True))
    return rotate(q, angles), rotate(k, angles), v


class _SplitHeads(torch.autograd.Function):
    """Keeps the projection only, and normalises once more in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        angles: Tensor,
        num_heads: int,
        num_groups: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
        ctx.save_for_backward(qkv, q_weight, k_weight, angles)
        ctx.shape = num_heads, num_groups, eps
        weights = None if q_weight is None else (q_weight, k_weight)
        fused = kernels("heads", qkv)
        assert fused is not None
        found: tuple[Tensor, Tensor, Tensor] = fused.forward(qkv, angles, num_heads, num_groups, weights, eps)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, angles = ctx.saved_tensors
        num_heads, num_groups, eps = ctx.shape
        weights = None if q_weight is None else (q_weight, k_weight)
        fused = kernels("heads", qkv)
        assert fused is not None
        grad, of_weights = fused.backward(grads, qkv, angles, num_heads, num_groups, weights, eps)
        of_q, of_k = (None, None) if weights is None else of_weights.to(q_weight.dtype)
        return grad, of_q, of_k, None, None, None, None
