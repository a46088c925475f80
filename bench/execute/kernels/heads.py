"""From the projection of a token to its queries, keys and values: norms of heads and rotary positions in one pass."""

# Triton's language is not Python's, and Triton is not installed everywhere.
# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PROGRAMS = 256  # of a key head, in the backward: each leaves a part of the norms' weight gradients


def forward(
    qkv: Tensor, angles: Tensor, num_heads: int, num_groups: int, weights: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, b, heads, dim], keys and values [S, b, groups, dim], sequence after sequence in memory.

    Args:
        qkv: [S, b, (heads + 2 groups) x dim], group after group: its queries, its key, its value.
        angles: fp32 [S, dim / 2].
        weights: of the norms of queries and keys, where there are any.
    """
    length, batch, dim = _sizes(qkv, num_heads, num_groups)
    q, k, v = (
        torch.empty(batch, length, heads, dim, dtype=qkv.dtype, device=qkv.device)
        for heads in (num_heads, num_groups, num_groups)
    )
    if qkv.numel():
        q_weight, k_weight = weights or (qkv, qkv)
        blocks = _blocks(num_heads // num_groups, dim)
        _forward[(length * batch, num_groups)](
            qkv,
            angles,
            q_weight,
            k_weight,
            q,
            k,
            v,
            length,
            num_groups,
            num_heads // num_groups,
            dim // 2,
            eps,
            *qkv.stride()[:2],
            NORMED=weights is not None,
            **blocks,
        )
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


def backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    angles: Tensor,
    num_heads: int,
    num_groups: int,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``qkv``, and of the two weights, fp32 [2, dim]."""
    length, batch, dim = _sizes(qkv, num_heads, num_groups)
    out = torch.empty(batch, length, qkv.shape[2], dtype=qkv.dtype, device=qkv.device).transpose(0, 1)
    programs = min(length * batch, MOST_PROGRAMS)
    parts = torch.zeros(programs * num_groups, 2, dim, dtype=torch.float32, device=qkv.device)
    if qkv.numel():
        grads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        q_weight, k_weight = weights or (qkv, qkv)
        _backward[(programs, num_groups)](
            *grads,
            qkv,
            angles,
            q_weight,
            k_weight,
            out,
            parts,
            length,
            length * batch,
            num_groups,
            num_heads // num_groups,
            dim // 2,
            eps,
            *qkv.stride()[:2],
            *(stride for grad in grads for stride in grad.stride()[:3]),
            NORMED=weights is not None,
            **_blocks(num_heads // num_groups, dim),
        )
    return out, parts.sum(dim=0) if weights is not None else None


def _sizes(qkv: Tensor, num_heads: int, num_groups: int) -> tuple[int, int, int]:
    return qkv.shape[0], qkv.shape[1], qkv.shape[2] // (num_heads + 2 * num_groups)


def _blocks(queries: int, dim: int) -> dict[str, int]:
    return {"HEADS": triton.next_power_of_2(queries + 2), "HALF": triton.next_power_of_2(dim // 2)}


@triton.jit
def _scale(q_weight, k_weight, column, of_query, of_key):
    """The norms' weights of these columns; 1 for a value."""
    scale = tl.load(q_weight + column, mask=of_query, other=1.0).to(tl.float32)
    return tl.where(of_key, tl.load(k_weight + column, mask=of_key, other=1.0).to(tl.float32), scale)


@triton.jit
def _turn(angles, column, half, plain, kind: tl.constexpr):
    """Cosines and sines of a position, rounded as the unfused form has them; a value is not turned."""
    angle = tl.load(angles + column, mask=column < half, other=0.0)
    cos = tl.where(plain, 1.0, tl.cos(angle).to(kind).to(tl.float32))
    sin = tl.where(plain, 0.0, tl.sin(angle).to(kind).to(tl.float32))
    return cos, sin


@triton.jit
def _one_of(from_q, from_k, from_v, of_query, of_key, of_value):
    """The gradients of a group's queries, key and value, each a row."""
    rows = tl.load(from_q, mask=of_query, other=0.0).to(tl.float32)
    rows += tl.load(from_k, mask=of_key, other=0.0).to(tl.float32)
    return rows + tl.load(from_v, mask=of_value, other=0.0).to(tl.float32)


@triton.jit
def _forward(
    qkv,
    angles,
    q_weight,
    k_weight,
    q,
    k,
    v,
    length,
    groups,
    queries,
    half,
    eps,
    stride_s,
    stride_b,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence, position = token // length, token % length
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < queries + 2) & (column < half)
    of_query, of_key, plain = inside & (head < queries), inside & (head == queries), head == queries + 1
    source = qkv + position * stride_s + sequence * stride_b + (group * (queries + 2) + head) * 2 * half + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        scale_1 = _scale(q_weight, k_weight, column, of_query, of_key)
        scale_2 = _scale(q_weight, k_weight, half + column, of_query, of_key)
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        root = tl.where(plain, 1.0, tl.rsqrt(squares / (2 * half) + eps))
        first, second = first * root * scale_1, second * root * scale_2
    kind = q.dtype.element_ty
    cos, sin = _turn(angles + position * half, column, half, plain, kind)
    turned_1, turned_2 = (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)
    target = q + ((token * groups + group) * queries + head) * 2 * half + column
    tl.store(target, turned_1, mask=of_query)
    tl.store(target + half, turned_2, mask=of_query)
    shift = (token * groups + group) * 2 * half + column + head * 0
    tl.store(k + shift, turned_1, mask=of_key)
    tl.store(k + shift + half, turned_2, mask=of_key)
    tl.store(v + shift, turned_1, mask=inside & plain)
    tl.store(v + shift + half, turned_2, mask=inside & plain)


@triton.jit
def _backward(
    grad_q,
    grad_k,
    grad_v,
    qkv,
    angles,
    q_weight,
    k_weight,
    out,
    parts,
    length,
    tokens,
    groups,
    queries,
    half,
    eps,
    stride_s,
    stride_b,
    q_s,
    q_b,
    q_n,
    k_s,
    k_b,
    k_n,
    v_s,
    v_b,
    v_n,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    group = tl.program_id(1)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < queries + 2) & (column < half)
    of_query, of_key, plain = inside & (head < queries), inside & (head == queries), head == queries + 1
    of_value = inside & plain
    kind = out.dtype.element_ty
    if NORMED:
        scale_1 = _scale(q_weight, k_weight, column, of_query, of_key)
        scale_2 = _scale(q_weight, k_weight, half + column, of_query, of_key)
        total_1 = tl.zeros([HEADS, HALF], dtype=tl.float32)
        total_2 = tl.zeros([HEADS, HALF], dtype=tl.float32)
    for number in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(number, tl.int64)
        sequence, position = token // length, token % length
        from_q = grad_q + position * q_s + sequence * q_b + (group * queries + head) * q_n + column
        from_k = grad_k + position * k_s + sequence * k_b + group * k_n + column + head * 0
        from_v = grad_v + position * v_s + sequence * v_b + group * v_n + column + head * 0
        first = _one_of(from_q, from_k, from_v, of_query, of_key, of_value)
        second = _one_of(from_q + half, from_k + half, from_v + half, of_query, of_key, of_value)
        cos, sin = _turn(angles + position * half, column, half, plain, kind)
        back_1, back_2 = first * cos + second * sin, second * cos - first * sin
        place = (group * (queries + 2) + head) * 2 * half + column
        if NORMED:
            source = qkv + position * stride_s + sequence * stride_b + place
            unit_1 = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            unit_2 = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
            squares = tl.sum(unit_1 * unit_1 + unit_2 * unit_2, axis=1)[:, None]
            root = tl.rsqrt(squares / (2 * half) + eps)
            unit_1, unit_2 = unit_1 * root, unit_2 * root
            total_1 += back_1 * unit_1
            total_2 += back_2 * unit_2
            slope_1, slope_2 = back_1 * scale_1, back_2 * scale_2
            along = tl.sum(slope_1 * unit_1 + slope_2 * unit_2, axis=1)[:, None] / (2 * half)
            back_1 = tl.where(plain, back_1, root * (slope_1 - unit_1 * along))
            back_2 = tl.where(plain, back_2, root * (slope_2 - unit_2 * along))
        target = out + token * groups * (queries + 2) * 2 * half + place
        tl.store(target, back_1.to(kind), mask=inside)
        tl.store(target + half, back_2.to(kind), mask=inside)
    if NORMED:
        part = parts + (tl.program_id(0) * groups + group) * 4 * half + tl.arange(0, HALF)
        there = tl.arange(0, HALF) < half
        tl.store(part, tl.sum(tl.where(of_query, total_1, 0.0), axis=0), mask=there)
        tl.store(part + half, tl.sum(tl.where(of_query, total_2, 0.0), axis=0), mask=there)
        tl.store(part + 2 * half, tl.sum(tl.where(of_key, total_1, 0.0), axis=0), mask=there)
        tl.store(part + 3 * half, tl.sum(tl.where(of_key, total_2, 0.0), axis=0), mask=there)
