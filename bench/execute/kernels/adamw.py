"""AdamW of one tensor in one pass over its gradient, its main weights and its moments."""

# Triton's language is not Python's, and Triton is not installed everywhere.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def update(
    value: Tensor,
    main: Tensor,
    grad: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    clip_scale: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    rate: float,
    root: float,
) -> None:
    """In place, of everything but the gradient. All are contiguous and, but for ``value``, in fp32.

    Args:
        value: the parameter: rounded main weights, or the main weights themselves.
        clip_scale: fp32 scalar, by which the gradient is multiplied first.
        decay: what main weights are multiplied by.
        rate: lr / (1 - beta1^steps). root: sqrt(1 - beta2^steps).
    """
    size = main.numel()
    if size:
        _update[(triton.cdiv(size, BLOCK),)](
            value,
            main,
            grad,
            first_moment,
            second_moment,
            clip_scale,
            size,
            betas[0],
            betas[1],
            eps,
            decay,
            rate,
            root,
            ROUNDED=value.dtype != main.dtype,
            BLOCK=BLOCK,
        )


@triton.jit(do_not_specialize_on_alignment=["clip_scale"])
def _update(
    value,
    main,
    grad,
    first_moment,
    second_moment,
    clip_scale,
    size,
    beta1,
    beta2,
    eps,
    decay,
    rate,
    root,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    slope = tl.load(grad + at, mask=inside, other=0.0) * tl.load(clip_scale)
    first = tl.load(first_moment + at, mask=inside, other=0.0)
    second = tl.load(second_moment + at, mask=inside, other=0.0)
    first += (1 - beta1) * (slope - first)
    second = second * beta2 + (1 - beta2) * slope * slope
    weight = tl.load(main + at, mask=inside, other=0.0) * decay
    weight -= rate * (first / (tl.sqrt(second) / root + eps))
    tl.store(first_moment + at, first, mask=inside)
    tl.store(second_moment + at, second, mask=inside)
    tl.store(main + at, weight, mask=inside)
    if ROUNDED:
        tl.store(value + at, weight.to(value.dtype.element_ty), mask=inside)
