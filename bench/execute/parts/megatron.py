"""megatron-core's modules on any device, without its global state.

Three things in megatron-core 0.16.1 tie these modules to CUDA or to `parallel_state`; nothing is patched, each
is stepped round:

- Process groups are asked for ``size()`` and ``rank()`` alone where a group has one rank: `SoloGroup`. A missing
  context-parallel group would be looked up in `parallel_state`.
- Column- and RowParallelLinear allocate on ``torch.cuda.current_device()`` and compute dW in the backward: the
  layer spec names `MegatronLinear` instead.
- RotaryEmbedding.forward moves its frequencies to CUDA; ``get_freqs_non_repeated`` does not. Its application is
  fused only with TransformerEngine: `FusedSelfAttention` splits, normalises and turns heads in one function instead.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.execute.heads import split_heads
from bench.execute.parts.core import attend
from bench.execute.parts.linear import MegatronLinear
from bench.execute.wgrad import accumulate_in_backward
from bench.models import Model

with warnings.catch_warnings():
    # It warns that TransformerEngine and apex are absent: no module used here has a use for them.
    warnings.simplefilter("ignore")
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.moe.moe_utils import (
        switch_load_balancing_loss_func,
        topk_routing_with_score_function,
        z_loss_func,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "rms_norm",
    "self_attention",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "z_loss_func",
]


class SoloGroup:
    """A process group of this rank alone, which needs no torch.distributed."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def transformer_config(model: Model, dtype: torch.dtype, **more: Any) -> TransformerConfig:
    """megatron-core's configuration of a model: what its attention and norms read, and `more` of its fields."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.dense_hidden_size or model.expert_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        cuda_graph_scope=[],
        **more,
    )


class RotaryAngles:
    """megatron-core's rotary angles of the positions of a sequence, for heads of ``dim`` elements."""

    def __init__(self, dim: int, theta: float) -> None:
        # On the CPU whatever the device: the frequencies of all placements agree to the last bit.
        self._frequencies = RotaryEmbedding(
            dim, 1.0, rotary_base=theta, use_cpu_initialization=True, cp_group=SoloGroup()
        )
        self._angles = torch.empty(0, dim // 2, device="cpu")

    def of(self, length: int, device: torch.device) -> Tensor:
        """fp32 [length, dim / 2]."""
        if self._angles.shape[0] != length or self._angles.device != device:
            self._angles = self._frequencies.get_freqs_non_repeated(length).to(device)
        return self._angles


class CausalSDPA(nn.Module):
    """Causal attention of queries and keys that are turned already.

    Args:
        model: for the rotary frequencies, which `FusedSelfAttention` asks for. window: see `attend`.
        The rest are the arguments of megatron-core's layer spec.
    """

    def __init__(self, *, model: Model, window: int = 0, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.softmax_scale, self.window = softmax_scale, window
        self.angles = RotaryAngles(model.head_dim, model.rope_theta)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None = None, **_: Any) -> Tensor:
        """[S, b, heads, head dim] -> [S, b, heads x head dim]."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = attend(q, k, v, window=self.window, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class FusedSelfAttention(SelfAttention):
    """megatron-core's self-attention, whose way from the projection to turned heads is `split_heads`."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **options: Any) -> Any:
        """[S, b, H] -> queries [S, b, heads, head dim], keys and values [S, b, groups, head dim]."""
        assert not options.get("output_gate")
        qkv, _ = self.linear_qkv(hidden_states)
        angles = self.core_attention.angles.of(qkv.shape[0], qkv.device)
        norms = [norm for norm in (self.q_layernorm, self.k_layernorm) if isinstance(norm, nn.RMSNorm)]
        weights = (norms[0].weight, norms[1].weight) if norms else None
        eps = (norms[0].eps or 0.0) if norms else 0.0
        return split_heads(qkv, angles, self.config.num_attention_heads, self.config.num_query_groups, weights, eps)


def rms_norm(model: Model, width: int, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A norm whose weight gradient is accumulated in pass B: it is a sum over rows, not a GEMM."""
    config = transformer_config(model, dtype, use_cpu_initialization=True)
    norm: nn.Module = WrappedTorchNorm(config=config, hidden_size=width, eps=model.norm_eps)
    return _settled(norm, device, dtype)


def self_attention(model: Model, layer: int, *, device: torch.device, dtype: torch.dtype) -> SelfAttention:
    """megatron-core's self-attention with deferred linears and an SDPA core."""
    norm = ModuleSpec(module=WrappedTorchNorm) if model.qk_norm else None
    solo = SoloGroup()
    with torch.device(device):
        attention = FusedSelfAttention(
            config=transformer_config(model, dtype, use_cpu_initialization=True),
            submodules=SelfAttentionSubmodules(
                linear_qkv=MegatronLinear,
                core_attention=partial(CausalSDPA, model=model, window=model.window(layer)),
                linear_proj=MegatronLinear,
                q_layernorm=norm,
                k_layernorm=norm,
            ),
            layer_number=layer + 1,
            attn_mask_type=AttnMaskType.causal,
            pg_collection=ProcessGroupCollection(tp=solo, cp=solo),
        )
    return _settled(attention, device, dtype)


def _settled(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    module = module.to(device=device, dtype=dtype)
    for name, child in module.named_modules():
        if isinstance(child, nn.RMSNorm):
            assert isinstance(child.weight, nn.Parameter), name
            accumulate_in_backward(child.weight)
    return module
