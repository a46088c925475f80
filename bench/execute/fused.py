"""What lies between the GEMMs, with its gradients: SwiGLU, rotary positions, gathers and sums of rows.

On CUDA these are single Triton kernels where Triton is installed (it comes with torch on Linux), elsewhere a few
operators of torch. Both compute in fp32 and round once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.execute.kernels import kernels


def swiglu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) * up, times a weight a row where given.

    A weight commutes with the linear that follows; weighting here saves keeping that linear's output for the
    weight's gradient.

    Args:
        gate_up: [rows, 2 x width], gate first.
        weights: fp32 [rows].
    Returns:
        [rows, width] in the dtype of ``gate_up``.
    """
    out: Tensor = _SwiGLU.apply(gate_up, weights)
    return out


class _SwiGLU(torch.autograd.Function):
    """Keeps its input only; what autograd would keep is several times that."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up, weights)
        fused = kernels("swiglu", gate_up)
        if fused is not None:
            out: Tensor = fused.swiglu_forward(gate_up, weights)
            return out
        gate, up = gate_up.float().chunk(2, dim=-1)
        value = functional.silu(gate) * up
        return (value if weights is None else value * weights[:, None]).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up, weights = ctx.saved_tensors
        fused = kernels("swiglu", gate_up)
        if fused is not None:
            grads: tuple[Tensor, Tensor | None] = fused.swiglu_backward(grad.contiguous(), gate_up, weights)
            return grads
        gate, up = gate_up.float().chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad = grad.float()
        grad_weights = None
        if weights is not None:
            grad_weights = (grad * silu * up).sum(dim=-1)
            grad = grad * weights[:, None]
        grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        return torch.cat((grad_gate, grad * silu), dim=-1).to(gate_up.dtype), grad_weights


class Pairs(NamedTuple):
    """Which of ``num_rows`` rows every pair belongs to: int64 [P]; on CUDA also the pairs sorted by row.

    Row r has the pairs ``order[starts[r] : starts[r + 1]]``, or without ``starts`` the pair ``order[r]`` alone: sums
    need no atomics, and always add in one order.
    """

    row: Tensor
    num_rows: int
    order: Tensor | None = None
    starts: Tensor | None = None

    @classmethod
    def of(cls, row: Tensor, num_rows: int) -> Pairs:
        """Pairs that belong to these rows, int64 [P]. Where there are as many as rows, every row has one."""
        if kernels("rows", row) is None:
            return cls(row, num_rows)
        if len(row) == num_rows:
            numbers = torch.arange(num_rows, device=row.device)
            return cls(row, num_rows, torch.empty_like(row).scatter_(0, row, numbers))
        ascending, order = row.sort(stable=True)
        starts = torch.searchsorted(ascending, torch.arange(num_rows + 1, device=row.device))
        return cls(row, num_rows, order, starts)


def gather(rows: Tensor, pairs: Pairs) -> Tensor:
    """A copy of its row for every pair, [R, H] -> [P, H]; the gradients of a row's copies are summed in fp32."""
    copies: Tensor = _Gather.apply(rows, *pairs)
    return copies


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, row: Tensor, num_rows: int, order: Tensor | None, starts: Tensor | None
    ) -> Tensor:
        ctx.pairs = Pairs(row, num_rows, order, starts)
        return rows.index_select(0, row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _sum(ctx.pairs, grad, None), None, None, None, None


def sum_pairs(pairs: Pairs, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Sum over every row's pairs in fp32, [P, H] -> [R, H].

    Args:
        first: values of the first pairs.
        second: values of the remaining pairs, where there are any.
    """
    total: Tensor = _SumPairs.apply(first, second, *pairs)
    return total


class _SumPairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor | None,
        row: Tensor,
        num_rows: int,
        order: Tensor | None,
        starts: Tensor | None,
    ) -> Tensor:
        ctx.row, ctx.num_first, ctx.has_second = row, first.shape[0], second is not None
        return _sum(Pairs(row, num_rows, order, starts), first, second)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first = grad.index_select(0, ctx.row[: ctx.num_first])
        second = grad.index_select(0, ctx.row[ctx.num_first :]) if ctx.has_second else None
        return first, second, None, None, None, None


def _sum(pairs: Pairs, first: Tensor, second: Tensor | None) -> Tensor:
    fused = kernels("rows", first)
    if fused is not None and pairs.starts is None:
        assert pairs.order is not None
        return (first if second is None else torch.cat((first, second))).index_select(0, pairs.order)
    if fused is not None:
        second = None if second is None else second.contiguous()
        out: Tensor = fused.sum_rows(first.contiguous(), second, pairs.order, pairs.starts)
        return out
    total = torch.zeros(pairs.num_rows, first.shape[1], dtype=torch.float32, device=first.device)
    total.index_add_(0, pairs.row[: first.shape[0]], first.float())
    if second is not None:
        total.index_add_(0, pairs.row[first.shape[0] :], second.float())
    return total.to(first.dtype)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864): dimension i turns with i + head dim / 2.

    Args:
        x: [S, b, heads, head dim].
        angles: fp32 [S, head dim / 2].
    """
    out: Tensor = _Rotate.apply(x, angles)
    return out


class _Rotate(torch.autograd.Function):
    """The gradient turns back by the same angles; nothing else is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.angles = angles
        return _turn(x, angles, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _turn(grad, ctx.angles, -1), None


def _turn(x: Tensor, angles: Tensor, sign: int) -> Tensor:
    fused = kernels("rotary", x)
    if fused is not None:
        x = x if x.stride(-1) == 1 else x.contiguous()
        out: Tensor = fused.rotate(x, angles, sign)
        return out
    wide = angles[:, None, None, :]
    cos, sin = wide.cos().to(x.dtype), wide.sin().to(x.dtype) * sign
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
