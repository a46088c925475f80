"""Linear and grouped-linear functions whose backward leaves the weight gradient for later (pass W).

The backward of an ordinary linear computes dx = g W and dW = g^T x together. A schedule that fills bubbles
wants dx at once and dW whenever there is room (zero-bubble pipelining, arXiv 2401.10241). Here the backward
returns dx only and leaves dW in the `WeightGradStore` that was collecting when the forward ran;
`WeightGradStore.run` is pass W. Weight gradients are accumulated in the parameter's ``main_grad``, an fp32
buffer; ``param.grad`` stays None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.execute.kernels import kernels

# The backward on CUDA runs in autograd's own threads, where no context of the caller's is visible: so the
# store is looked up in the forward and travels inside the graph.
_collecting: ContextVar[WeightGradStore | None] = ContextVar("weight_grad_store", default=None)


class WeightGradStore:
    """Weight gradients put off by backward passes, in the order in which they were put off."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Tensor, Callable[..., None], tuple[Any, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Forward passes inside the block put their weight gradients off into this store."""
        token = _collecting.set(self)
        try:
            yield
        finally:
            _collecting.reset(token)

    def append(self, param: Tensor, accumulate: Callable[..., None], *operands: Any) -> None:
        """Puts ``accumulate(main_grad(param), *operands)`` off until `run`. Operands are detached tensors."""
        self._pending.append((param, accumulate, operands))

    def run(self) -> None:
        """Computes every pending weight gradient; operands are freed one by one."""
        with torch.no_grad():
            while self._pending:
                param, accumulate, operands = self._pending.popleft()
                accumulate(main_grad(param), *operands)

    def tensors(self) -> Iterator[Tensor]:
        """The operands that are kept for `run`."""
        for _, _, operands in self._pending:
            yield from (operand for operand in operands if isinstance(operand, Tensor))


def main_grad(param: Tensor) -> Tensor:
    """The parameter's fp32 gradient buffer of the same shape; made, and zero, where there is none yet."""
    buffer: Tensor | None = getattr(param, "main_grad", None)
    if buffer is None:
        dtype = torch.promote_types(param.dtype, torch.float32)
        buffer = torch.zeros(param.shape, dtype=dtype, device=param.device)
        param.main_grad = buffer  # type: ignore[attr-defined]
    return buffer


def accumulate_in_backward(param: torch.nn.Parameter) -> None:
    """Has autograd's gradient of a parameter moved into ``main_grad`` as soon as it exists."""

    def move(leaf: Tensor) -> None:
        if leaf.grad is not None:
            main_grad(leaf).add_(leaf.grad)
            leaf.grad = None

    param.register_post_accumulate_grad_hook(move)


def _defer(store: WeightGradStore | None, param: Tensor, accumulate: Callable[..., None], *operands: Any) -> None:
    if store is not None:
        store.append(param, accumulate, *operands)
        return
    with torch.no_grad():
        accumulate(main_grad(param), *operands)


def linear(x: Tensor, weight: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T with a deferred weight gradient.

    Args:
        x: [..., in]; of three dimensions the first two may be transposed in memory, which costs no copy.
        weight: [out, in], a leaf.
        compute_dtype: dtype of the product and its result; that of x where not given.
    Returns:
        [..., out], laid out in memory as x is.
    """
    if x.dim() == 3 and not x.is_contiguous() and x.transpose(0, 1).is_contiguous():
        return linear(x.transpose(0, 1), weight, compute_dtype).transpose(0, 1)
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _Linear.apply(rows, weight, compute_dtype or x.dtype, _collecting.get())
    return y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, compute_dtype: torch.dtype, store: WeightGradStore | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        # The parameter itself, which has its gradient's buffer: what is saved may come back as another tensor.
        ctx.weight, ctx.store, ctx.compute_dtype = weight, store, compute_dtype
        return functional.linear(x.to(compute_dtype), weight.to(compute_dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.to(ctx.compute_dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            _defer(ctx.store, weight, _accumulate_linear, grad, x.detach())
        return grad_x, None, None, None


def _accumulate_linear(into: Tensor, grad: Tensor, x: Tensor) -> None:
    """into [out, in] += grad^T [out, rows] x [rows, in], summed in the precision of ``into``."""
    if grad.shape[0] == 0:
        return
    if grad.dtype == into.dtype:
        into.addmm_(grad.t(), x.to(into.dtype))
    elif grad.is_cuda:
        torch.addmm(into, grad.t(), x, out_dtype=into.dtype, out=into)
    else:  # no mixed-precision GEMM on the CPU
        into.addmm_(grad.t().to(into.dtype), x.to(into.dtype))


def to_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host as a tensor on the device; the host does not wait for what the device has queued."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int], offsets: Tensor) -> Tensor:
    """Every group's rows times that group's own weight, with a deferred weight gradient.

    Args:
        x: [rows, in], the rows of group 0 first. Row strides of all operands are multiples of 16 bytes.
        weight: [groups, out, in], a leaf.
        counts: rows of every group; they sum to ``rows``; zeros are allowed.
        offsets: int32 [groups], the cumulative sum of ``counts``, on x's device.
    Returns:
        [rows, out].
    """
    y: Tensor = _GroupedLinear.apply(x, weight, tuple(counts), offsets, _collecting.get())
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: tuple[int, ...],
        offsets: Tensor,
        store: WeightGradStore | None,
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, offsets)
        ctx.weight, ctx.store, ctx.counts = weight, store, counts
        if x.shape[0] == 0:
            return x.new_zeros(0, weight.shape[1])
        return functional.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x, offsets), weight = ctx.saved_tensors, ctx.weight
        if x.shape[0] == 0:
            return torch.zeros_like(x), None, None, None, None
        grad = grad.contiguous()  # grouped_mm refuses expanded gradients
        grad_x = functional.grouped_mm(grad, weight, offs=offsets) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            _defer(ctx.store, weight, _accumulate_grouped, grad, x.detach(), offsets, ctx.counts)
        return grad_x, None, None, None, None


def _accumulate_grouped(into: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, counts: tuple[int, ...]) -> None:
    """into [groups, out, in] += grad_e^T x_e for every group e."""
    fused = kernels("wgrad", grad)
    if fused is not None and (grad.dtype, into.dtype) == (torch.bfloat16, torch.float32):
        fused.accumulate(into, grad, x, offsets)
        return
    product = functional.grouped_mm(grad.t(), x, offs=offsets)
    empty = [group for group, count in enumerate(counts) if count == 0]
    if empty:
        # Kernels differ in whether the product of a group without rows is written at all.
        product.index_fill_(0, to_device(empty, torch.int64, x.device), 0)
    into.add_(product)
