"""What an attention rank computes of one layer, up to the dispatch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.execute.parts.latent import LatentAttention
from bench.execute.parts.linear import FeedForward
from bench.execute.parts.megatron import rms_norm, self_attention
from bench.execute.parts.router import Router
from bench.execute.support import require_supported
from bench.models import Model


class AttentionOutput(NamedTuple):
    """``h`` [T, H]; of a mixture layer also ``u`` [T, H], ids int64 [T, k], weights fp32 [T, k] and the losses."""

    h: Tensor
    u: Tensor | None = None
    expert_ids: Tensor | None = None
    weights: Tensor | None = None
    aux: Tensor | None = None


class AttentionPart(nn.Module):
    """h = x + attention(norm x); u = norm h; router(u). Weights are uninitialised: see `bench.execute.init`.

    A dense layer adds its FFN of u to h, and h is x_{l+1}. With ``shared_on_attention`` h has the shared
    experts' output added, so that x_{l+1} = h + the routed experts' outputs.

    Args:
        layer: number of the layer, from 0.
        global_sequences: sequences of the global batch, by which the router's losses are divided.
    """

    def __init__(
        self,
        model: Model,
        layer: int,
        *,
        global_sequences: int,
        shared_on_attention: bool = False,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        require_supported(model)
        super().__init__()
        where: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        self.model, self.layer = model, layer
        self.norm = rms_norm(model, model.hidden_size, **where)
        latent = model.mla is not None
        self.attention = LatentAttention(model, layer, **where) if latent else self_attention(model, layer, **where)
        self.ffn_norm = rms_norm(model, model.hidden_size, **where)
        self.ffn: FeedForward | None = None
        self.router: Router | None = None
        self.shared: FeedForward | None = None
        if model.is_dense(layer):
            self.ffn = FeedForward(model.hidden_size, model.dense_hidden_size, **where)
        else:
            self.router = Router(model, global_sequences=global_sequences, **where)
            if shared_on_attention and model.num_shared_experts:
                self.shared = FeedForward(model.hidden_size, model.shared_hidden_size, **where)

    def forward(self, x: Tensor, num_sequences: int, replay_ids: Tensor | None = None) -> AttentionOutput:
        """x [T, H] of ``num_sequences`` sequences of one length, one after another.

        With ``replay_ids`` int64 [T, k] these experts are taken; their weights are those of this x all the
        same.
        """
        length = x.shape[0] // num_sequences
        # megatron-core wants [S, b, H]; this is a view, and the linears look through it.
        by_position = self.norm(x).view(num_sequences, length, -1).transpose(0, 1)
        out, _ = self.attention(by_position, attention_mask=None)
        h = x + out.transpose(0, 1).reshape(x.shape)
        u = self.ffn_norm(h)
        if self.ffn is not None:
            return AttentionOutput(h + self.ffn(u))
        assert self.router is not None
        routing = self.router(u, num_sequences, replay_ids)
        if self.shared is not None:
            h = h + self.shared(u)
        return AttentionOutput(h, u, *routing)

    def replay(self, output: AttentionOutput) -> dict[str, Any]:
        """Arguments with which a second forward chooses the same experts."""
        return {} if output.expert_ids is None else {"replay_ids": output.expert_ids}
