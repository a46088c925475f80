"""Linear layers with deferred weight gradients, and the SwiGLU feed-forward made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.execute.fused import swiglu
from bench.execute.wgrad import linear


class DeferredLinear(nn.Module):
    """x W^T, no bias; weight [out, in], uninitialised.

    Args:
        compute_dtype: dtype of the product and its result; that of the input where not given.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.compute_dtype = compute_dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return linear(x, self.weight, self.compute_dtype)


class MegatronLinear(DeferredLinear):
    """What megatron-core's attention asks its layer spec for, on torch's default device; returns (output,
    bias).
    """

    def __init__(self, in_features: int, out_features: int, *, config: Any, bias: bool, **_: Any) -> None:
        assert not bias
        super().__init__(in_features, out_features, device=torch.get_default_device(), dtype=config.params_dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class FeedForward(nn.Module):
    """fc2(silu(gate) * up) with [gate; up] = fc1 x: a dense layer's FFN, or the shared experts as one."""

    def __init__(self, hidden_size: int, width: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1 = DeferredLinear(hidden_size, 2 * width, device=device, dtype=dtype)
        self.fc2 = DeferredLinear(width, hidden_size, device=device, dtype=dtype)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]; with ``weights`` fp32 [T], row t is multiplied by weights[t]."""
        out: Tensor = self.fc2(swiglu(self.fc1(x), weights))
        return out
