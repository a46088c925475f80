"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with deferred linears.

megatron-core's own module takes no other down-projections than its own, which compute dW in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.execute.fused import rotate
from bench.execute.parts.core import attend
from bench.execute.parts.linear import DeferredLinear
from bench.execute.parts.megatron import RotaryAngles, rms_norm
from bench.models import Model


class LatentAttention(nn.Module):
    """Queries, keys and values of low rank; keys have a part with rotary positions that all heads share.

    With a ``q_lora_rank``: q = q_up norm(q_down x), otherwise q = q_up x. c, r = kv_down x; k and v are kv_up norm(c),
    and r, turned, stands beside every head's k. The rotary halves are the two halves of that part, where DeepSeek's
    own weights have them interleaved.
    """

    def __init__(self, model: Model, layer: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert model.mla is not None
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.mla, self.num_heads, self.window = model.mla, model.num_heads, model.window(layer)
        mla, hidden = model.mla, model.hidden_size
        if mla.q_lora_rank:
            self.q_down = DeferredLinear(hidden, mla.q_lora_rank, **where)
            self.q_norm = rms_norm(model, mla.q_lora_rank, **where)
        self.q_up = DeferredLinear(mla.q_lora_rank or hidden, model.q_size, **where)
        self.kv_down = DeferredLinear(hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, **where)
        self.kv_norm = rms_norm(model, mla.kv_lora_rank, **where)
        self.kv_up = DeferredLinear(
            mla.kv_lora_rank, model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), **where
        )
        self.proj = DeferredLinear(model.attention_output_size, hidden, **where)
        self._angles = RotaryAngles(mla.qk_rope_head_dim, model.rope_theta)

    def forward(self, x: Tensor, attention_mask: None = None) -> tuple[Tensor, None]:
        """[S, b, H] -> [S, b, H], and no bias."""
        mla, heads = self.mla, self.num_heads
        angles = self._angles.of(x.shape[0], x.device)
        q = self.q_up(self.q_norm(self.q_down(x)) if mla.q_lora_rank else x).unflatten(-1, (heads, -1))
        q_plain, q_turned = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        latent, shared = self.kv_down(x).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (heads, -1))
        k_plain, v = kv.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        k_turned = rotate(shared.unsqueeze(2), angles).expand(-1, -1, heads, -1)
        query = torch.cat((q_plain, rotate(q_turned, angles)), dim=-1)
        key = torch.cat((k_plain, k_turned), dim=-1)
        by_head = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, v)]
        out = attend(*by_head, window=self.window)
        return self.proj(out.permute(2, 0, 1, 3).flatten(2)), None
