"""Causal attention by torch's fused kernels, over all keys or over a window of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int = 0, scale: float | None = None) -> Tensor:
    """softmax(q k^T scale) v over the keys up to the query's own; of a window the last ones, its own included.

    Args:
        q: [b, heads, S, d]. k: [b, groups, S, d]. v: [b, groups, S, dv]. Head i belongs to group i * groups / heads.
        window: keys that a query meets; 0 for all before it.
        scale: 1 / sqrt(d) where not given.
    Returns:
        [b, heads, S, dv].
    """
    if window and window < q.shape[2]:
        return _windowed(q, k, v, window, scale)
    # Causal attention has fused kernels that do not repeat a group's keys.
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


def _windowed(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Block by block of ``window`` queries, whose keys are those of the block and of the one before it.

    So FLOPs and memory grow with S x window, and the masked kernel serves that knows no window of its own.
    """
    batch, heads, length, _ = q.shape
    num_blocks = -(-length // window)
    after = num_blocks * window - length
    q = functional.pad(q, (0, 0, 0, after)).unflatten(2, (num_blocks, window))
    q = q.transpose(1, 2).flatten(0, 1)  # [b blocks, heads, W, d]
    k, v = (_with_block_before(x, heads, window, after) for x in (k, v))
    mask = _mask(num_blocks, window, q.device).repeat(batch, 1, 1, 1)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.unflatten(0, (batch, num_blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _with_block_before(x: Tensor, heads: int, window: int, after: int) -> Tensor:
    """[b, groups, S, d] -> [b blocks, heads, 2 W, d]."""
    groups, dim = x.shape[1], x.shape[3]
    blocks = functional.pad(x, (0, 0, window, after)).unfold(2, 2 * window, window).transpose(-1, -2)
    blocks = blocks[:, :, None].expand(-1, -1, heads // groups, -1, -1, -1)
    return blocks.flatten(1, 2).transpose(1, 2).reshape(-1, heads, 2 * window, dim)


def _mask(num_blocks: int, window: int, device: torch.device) -> Tensor:
    """Whether query r of a block meets key c of its two: bool [blocks, 1, W, 2 W]. The first has no block before."""
    c = torch.arange(2 * window, device=device)
    ahead = c - torch.arange(window, device=device)[:, None]
    band = (ahead > 0) & (ahead <= window)
    exists = (torch.arange(num_blocks, device=device)[:, None] > 0) | (c >= window)
    return band & exists[:, None, None, :]
