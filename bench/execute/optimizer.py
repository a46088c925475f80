"""AdamW on fp32 main weights, and the clip norm. The executor's ranks and the reference share it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from bench.execute.host_state import FETCHED_BYTES, HostState
from bench.execute.kernels import kernels
from bench.execute.wgrad import main_grad

SLICE_BYTES = 2**29
"""Of the second moments, what an update has a temporary copy of at a time."""


class AdamW:
    """AdamW (arXiv 1711.05101, algorithm 2, bias-corrected), reading gradients from ``main_grad``.

    A parameter of lower precision than fp32 has an fp32 main weight, of which it is the rounded copy.
    Parameters of one dimension (norms) are not decayed.

    Args:
        params: the parameters of this rank, contiguous.
        weight_decay: decoupled; multiplied by the learning rate.
        offload: keeps main weights and moments in the host's memory, see `bench.execute.host_state`. An fp32
            parameter, which is its own main weight, stays where it is.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        offload: bool = False,
    ) -> None:
        self.params = list(params)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.num_steps = 0
        values = [param.detach() for param in self.params]
        self._host = HostState(values[0].device) if offload and values else None
        # Shares memory where the dtype does not change: an fp32 parameter is its own main weight.
        self.main = [self._main_weight(value, torch.promote_types(value.dtype, torch.float32)) for value in values]
        self._rounded = [
            (value, main) for value, main in zip(values, self.main, strict=True) if value.dtype != main.dtype
        ]
        zeros = torch.zeros_like if self._host is None else self._host.zeros_like
        self.first_moments = [zeros(main) for main in self.main]
        self.second_moments = [zeros(main) for main in self.main]

    def _main_weight(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        if self._host is None or value.dtype == dtype:
            return value.to(dtype)
        return self._host.copy_of(value, dtype)

    @property
    def state(self) -> list[Tensor]:
        """Moments, and main weights that are not the parameters themselves."""
        return [*self.first_moments, *self.second_moments, *(main for _, main in self._rounded)]

    @torch.no_grad()
    def step(self, clip_scale: float | Tensor = 1.0) -> None:
        """One update with the gradients times ``clip_scale``; the gradient buffers may be scaled in place."""
        self.num_steps += 1
        if not self.params:
            return
        fused = kernels("adamw", self.params[0]) if self._host is None else None
        if fused is not None:
            self._step_fused(fused, clip_scale)
        else:
            self._step_by_operators(clip_scale)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compiles and loads an update's kernels and changes nothing; in a step, loading would wait for other ranks."""
        fused = kernels("adamw", self.params[0]) if self.params and self._host is None else None
        if fused is not None:
            scale = torch.zeros((), dtype=torch.float32, device=self.params[0].device)
            self._update_fused(fused, scale, betas=(1.0, 1.0), decay=1.0, rate=0.0, root=1.0)

    def _step_fused(self, fused: ModuleType, clip_scale: float | Tensor) -> None:
        if not isinstance(clip_scale, Tensor):
            clip_scale = torch.full((), clip_scale, device=self.params[0].device)
        beta1, beta2 = self.betas
        self._update_fused(
            fused,
            clip_scale.to(torch.float32),
            betas=self.betas,
            decay=1 - self.lr * self.weight_decay,
            rate=self.lr / (1 - beta1**self.num_steps),
            root=math.sqrt(1 - beta2**self.num_steps),
        )

    def _update_fused(
        self, fused: ModuleType, scale: Tensor, *, betas: tuple[float, float], decay: float, rate: float, root: float
    ) -> None:
        state = zip(self.params, self.main, self.first_moments, self.second_moments, strict=True)
        for param, main, first, second in state:
            fused.update(
                param.detach(),
                main,
                main_grad(param).contiguous(),
                first,
                second,
                scale,
                betas=betas,
                eps=self.eps,
                decay=decay if main.dim() > 1 else 1.0,
                rate=rate,
                root=root,
            )

    def _step_by_operators(self, clip_scale: float | Tensor) -> None:
        grads = [main_grad(param) for param in self.params]
        if isinstance(clip_scale, Tensor):
            clip_scale = clip_scale.to(grads[0].dtype)  # of another dtype it would be one kernel a parameter
        torch._foreach_mul_(grads, clip_scale)
        grads = [grad.contiguous() for grad in grads]  # autograd's own may be transposed
        if self._host is None:
            for part in slices((self.main, grads, self.first_moments, self.second_moments), SLICE_BYTES):
                self._update(*part)
            self._round()
        else:
            self._stream(self._host, grads)

    def _stream(self, host: HostState, grads: list[Tensor]) -> None:
        """The update of state that is with the host; parameters of lower precision are rounded on the way."""
        values = [param.detach() for param in self.params]
        on_host = self._rounded != []
        assert len(self._rounded) in (0, len(values))
        cut = list(slices((self.main, grads, self.first_moments, self.second_moments, values), FETCHED_BYTES))
        state = [[first, second, *([main] if on_host else [])] for main, _, first, second, _ in cut]
        for here, (main, grad, _, _, value) in zip(host.through(state), cut, strict=True):
            self._update(here[2] if on_host else main, grad, here[0], here[1])
            if on_host:
                torch._foreach_copy_(value, here[2])

    def _update(self, main: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor]) -> None:
        """Of some elements; all lists on the device."""
        beta1, beta2 = self.betas
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        decayed = [each for each in main if each.dim() > 1]
        if decayed and self.weight_decay:
            torch._foreach_mul_(decayed, 1 - self.lr * self.weight_decay)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, math.sqrt(1 - beta2**self.num_steps))
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_addcdiv_(main, first, denominators, -self.lr / (1 - beta1**self.num_steps))

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


def slices(alike: Sequence[Sequence[Tensor]], limit: int) -> Iterator[list[list[Tensor]]]:
    """Views of several lists of contiguous tensors of the same shapes, in slices of at most `limit` bytes of the first.

    Where a tensor is cut, the pieces are one row of a matrix, or of a vector if it is one.
    """
    parts: list[list[Tensor]] = [[] for _ in alike]
    taken = 0
    for tensors in zip(*alike, strict=True):
        size = tensors[0].element_size()
        if tensors[0].dim() and tensors[0].numel() * size > limit:
            flat = [tensor.view(1, -1) if tensor.dim() > 1 else tensor for tensor in tensors]
            cut = [tensor.split(max(1, limit // size), dim=-1) for tensor in flat]
        else:
            cut = [(tensor,) for tensor in tensors]
        for pieces in zip(*cut, strict=True):
            piece_bytes = pieces[0].numel() * size
            if taken and taken + piece_bytes > limit:
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
