"""AdamW on fp32 main weights, and the clip norm. The executor's ranks and the reference share it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bench.execute.wgrad import main_grad

SLICE_BYTES = 2**29
"""Of the second moments, what an update has a temporary copy of at a time."""


class AdamW:
    """AdamW (arXiv 1711.05101, algorithm 2, bias-corrected), reading gradients from ``main_grad``.

    A parameter of lower precision than fp32 has an fp32 main weight, of which it is the rounded copy.
    Parameters of one dimension (norms) are not decayed.

    Args:
        params: the parameters of this rank.
        weight_decay: decoupled; multiplied by the learning rate.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.params = list(params)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.num_steps = 0
        values = [param.detach() for param in self.params]
        # Shares memory where the dtype does not change: an fp32 parameter is its own main weight.
        self.main = [value.to(torch.promote_types(value.dtype, torch.float32)) for value in values]
        self._rounded = [
            (value, main) for value, main in zip(values, self.main, strict=True) if value.dtype != main.dtype
        ]
        self.first_moments = [torch.zeros_like(main) for main in self.main]
        self.second_moments = [torch.zeros_like(main) for main in self.main]

    @torch.no_grad()
    def step(self, clip_scale: float | Tensor = 1.0) -> None:
        """One update with the gradients times ``clip_scale``; the gradient buffers are scaled in place."""
        self.num_steps += 1
        if not self.params:
            return
        beta1, beta2 = self.betas
        grads = [main_grad(param) for param in self.params]
        if isinstance(clip_scale, Tensor):
            clip_scale = clip_scale.to(grads[0].dtype)  # of another dtype it would be one kernel a parameter
        torch._foreach_mul_(grads, clip_scale)
        torch._foreach_lerp_(self.first_moments, grads, 1 - beta1)
        torch._foreach_mul_(self.second_moments, beta2)
        torch._foreach_addcmul_(self.second_moments, grads, grads, 1 - beta2)
        decayed = [main for main in self.main if main.dim() > 1]
        if decayed and self.weight_decay:
            torch._foreach_mul_(decayed, 1 - self.lr * self.weight_decay)
        for main, first_moments, second_moments in slices((self.main, self.first_moments, self.second_moments)):
            denominators = torch._foreach_sqrt(second_moments)
            torch._foreach_div_(denominators, math.sqrt(1 - beta2**self.num_steps))
            torch._foreach_add_(denominators, self.eps)
            torch._foreach_addcdiv_(main, first_moments, denominators, -self.lr / (1 - beta1**self.num_steps))
            del denominators  # before the next slice takes its own
        self._round()

    @torch.no_grad()
    def restore(self, num_steps: int) -> None:
        """Goes on from main weights and moments that were set from outside, as they were after so many steps."""
        self.num_steps = num_steps
        self._round()

    def _round(self) -> None:
        for value, main in self._rounded:
            value.copy_(main)

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Sets every gradient buffer to zero, keeping its memory."""
        if self.params:
            torch._foreach_zero_([main_grad(param) for param in self.params])


def slices(alike: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Views of several lists of tensors of the same shapes, in slices of at most `SLICE_BYTES` of each list.

    A tensor is cut between rows of its first dimension; a single row may be larger than a slice.
    """
    parts: list[list[Tensor]] = [[] for _ in alike]
    taken = 0
    for tensors in zip(*alike, strict=True):
        size = tensors[0].numel() * tensors[0].element_size()
        rows = tensors[0].shape[0] if tensors[0].dim() else 1
        rows_a_slice = max(1, SLICE_BYTES * rows // max(size, 1))
        cut = [tensor.split(rows_a_slice) if tensor.dim() else (tensor,) for tensor in tensors]
        for pieces in zip(*cut, strict=True):
            piece_bytes = pieces[0].numel() * pieces[0].element_size()
            if taken and taken + piece_bytes > SLICE_BYTES:
                yield parts
                parts, taken = [[] for _ in alike], 0
            for part, piece in zip(parts, pieces, strict=True):
                part.append(piece)
            taken += piece_bytes
    if parts[0]:
        yield parts


@torch.no_grad()
def square_sum(grads: Sequence[Tensor], device: torch.device | str) -> Tensor:
    """Sum of the squares of all elements, an fp64 scalar on ``device``; zero where there are no gradients."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.double() for norm in torch._foreach_norm(list(grads))]).square().sum().to(device)


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this global norm are multiplied by: min(1, max_norm / norm). Stays on the device."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
