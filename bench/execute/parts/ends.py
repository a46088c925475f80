"""The two ends of the model: the embedding, and the head with its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.execute.entropy import cross_entropy
from bench.execute.parts.linear import DeferredLinear
from bench.execute.parts.megatron import rms_norm
from bench.execute.support import require_supported
from bench.execute.wgrad import main_grad
from bench.models import Model


class EmbedPart(nn.Module):
    """Token embeddings; weight [vocabulary, H], uninitialised. Its gradient is no GEMM and is summed in pass
    B.
    """

    defers_weight_gradients = False

    def __init__(self, model: Model, *, device: torch.device | str, dtype: torch.dtype) -> None:
        require_supported(model)
        super().__init__()
        self.model = model
        self.weight = nn.Parameter(torch.empty(model.vocab_size, model.hidden_size, device=device, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [b, S] -> [b x S, H], sequence after sequence."""
        x: Tensor = _Embed.apply(tokens.reshape(-1), self.weight)
        return x


class _Embed(torch.autograd.Function):
    """Adds straight into the gradient buffer: no gradient as large as the table for every micro-batch."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return weight.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        tokens, weight = ctx.saved_tensors
        into = main_grad(weight)
        into.index_add_(0, tokens, grad.to(into.dtype))
        return None, None


class HeadPart(nn.Module):
    """Final norm, logits and cross-entropy; weights are uninitialised."""

    def __init__(self, model: Model, *, device: torch.device | str, dtype: torch.dtype) -> None:
        require_supported(model)
        super().__init__()
        self.model = model
        self.norm = rms_norm(model, model.hidden_size, device=torch.device(device), dtype=dtype)
        self.head = DeferredLinear(model.hidden_size, model.vocab_size, device=torch.device(device), dtype=dtype)

    def forward(self, x: Tensor, labels: Tensor, scale: float) -> Tensor:
        """scale * the sum over rows of -log softmax(logits)[label], an fp32 scalar.

        Args:
            x: [T, H].
            labels: int64 [T].
            scale: one over the tokens of the global batch, for a loss that sums up to the global mean.
        """
        return cross_entropy(self.head(self.norm(x)), labels).sum() * scale
