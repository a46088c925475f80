"""megatron-core's GPTModel of a case: its configuration, a stage's chunks, and its parameters by their global names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.case import Layout
from bench.execute.entropy import cross_entropy
from bench.execute.init import draw
from bench.execute.parts.linear import MegatronLinear
from bench.execute.parts.megatron import CausalSDPA, FusedSelfAttention, transformer_config
from bench.models import Model
from systems.baselines.colocated import chunks_of_layers

with warnings.catch_warnings():
    # It warns that TransformerEngine and apex are absent.
    warnings.simplefilter("ignore")
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType, LayerType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from systems.megatron_core.parts import Experts, Router, SwiGLU

# Names in a layer of GPTModel -> names in the layer, see `bench.execute.init`.
_IN_LAYER = {
    "input_layernorm.weight": "attention.norm.weight",
    "self_attention.linear_qkv.weight": "attention.qkv.weight",
    "self_attention.q_layernorm.weight": "attention.q_norm.weight",
    "self_attention.k_layernorm.weight": "attention.k_norm.weight",
    "self_attention.linear_proj.weight": "attention.proj.weight",
    "pre_mlp_layernorm.weight": "ffn.norm.weight",
    "mlp.linear_fc1.weight": "ffn.fc1",
    "mlp.linear_fc2.weight": "ffn.fc2",
    "mlp.router.weight": "router.weight",
    "mlp.shared_experts.linear_fc1.weight": "shared.fc1",
    "mlp.shared_experts.linear_fc2.weight": "shared.fc2",
}
_ENDS = {
    "embedding.word_embeddings.weight": "embed.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "output_layer.weight": "head.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class LanguageModel(GPTModel):
    """Its loss by this harness's cross-entropy: without TransformerEngine its own makes several copies in fp32."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Labels [b, S], logits [S, b, V] -> [b, S]."""
        losses = cross_entropy(logits.flatten(0, 1), labels.t().flatten())
        return losses.view(logits.shape[:2]).t().contiguous()


def full_config(model: Model, layout: Layout, dtype: torch.dtype, **more: Any) -> TransformerConfig:
    """megatron-core's configuration of a model and a layout; `more` are fields of it."""
    softmax = model.router_score == "softmax"
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return transformer_config(
        model,
        dtype,
        use_cpu_initialization=False,
        use_te_activation_func=True,  # take the activation that the layer spec names
        pipeline_dtype=dtype,
        num_moe_experts=model.num_experts,
        moe_layer_freq=[0] * model.num_dense_layers + [1] * (model.num_layers - model.num_dense_layers),
        moe_ffn_hidden_size=model.expert_hidden_size,
        moe_shared_expert_intermediate_size=model.shared_hidden_size or None,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        moe_router_topk=model.top_k,
        moe_router_score_function=model.router_score,
        moe_router_pre_softmax=softmax and not (model.router_softmax_after_topk or model.router_normalize),
        moe_router_topk_scaling_factor=model.router_scale if model.router_scale != 1.0 else None,
        moe_router_load_balancing_type="seq_aux_loss" if model.aux_loss_coeff else "none",
        moe_aux_loss_coeff=model.aux_loss_coeff,
        moe_z_loss_coeff=model.z_loss_coeff or None,
        expert_model_parallel_size=layout.ep,
        pipeline_model_parallel_size=layout.pp,
        pipeline_model_parallel_layout=_stages(model, layout) if layout.pp > 1 else None,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        microbatch_group_size_per_vp_stage=layout.microbatch_group or layout.pp,
        # With two stages both messages between them have the same two ends: only in this form are they told apart.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        # It frees an output when its message is posted, which here may not have left.
        deallocate_pipeline_outputs=layout.vpp == 1,
        **(whole if layout.recompute == "redispatch" else {}),
        **more,
    )


def _stages(model: Model, layout: Layout) -> list[list[LayerType]]:
    """What every chunk holds, in the order of the model: this harness's division, which need not be even."""
    chunks = [[LayerType.decoder] * len(one) for one in chunks_of_layers(model.num_layers, layout.pp * layout.vpp)]
    return [
        [LayerType.embedding] * (number == 0) + chunk + [LayerType.loss] * (number == len(chunks) - 1)
        for number, chunk in enumerate(chunks)
    ]


def build_chunks(
    model: Model, layout: Layout, config: TransformerConfig, *, stage: int, max_seq_len: int, device: torch.device
) -> list[GPTModel]:
    """A stage's chunks, on the device; weights are uninitialised."""
    of_chunk = chunks_of_layers(model.num_layers, layout.pp * layout.vpp)
    chunks = []
    for number in range(layout.vpp):
        place = number * layout.pp + stage
        with torch.device(device):
            chunk = LanguageModel(
                config,
                TransformerBlockSubmodules(
                    layer_specs=[_layer(model, layer) for layer in of_chunk[place]], layer_norm=WrappedTorchNorm
                ),
                vocab_size=model.vocab_size,
                max_sequence_length=max_seq_len,
                pre_process=place == 0,
                post_process=place == len(of_chunk) - 1,
                position_embedding_type="none",  # rotary positions are the attention core's
                share_embeddings_and_output_weights=False,
                vp_stage=number if layout.vpp > 1 else None,
            )
        chunks.append(chunk.to(device=device, dtype=config.params_dtype))
    return chunks


def _layer(model: Model, layer: int) -> ModuleSpec:
    qk_norm = WrappedTorchNorm if model.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=MegatronLinear,
        core_attention=partial(CausalSDPA, model=model),
        linear_proj=MegatronLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    feed_forward = MLPSubmodules(linear_fc1=MegatronLinear, activation_func=SwiGLU, linear_fc2=MegatronLinear)
    if model.is_dense(layer):
        mlp = ModuleSpec(module=MLP, submodules=feed_forward)
    else:
        shared = ModuleSpec(module=SharedExpertMLP, submodules=feed_forward)
        experts = MoESubmodules(experts=Experts, shared_experts=shared, router=Router)
        mlp = ModuleSpec(module=MoELayer, submodules=experts)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=FusedSelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def global_views(chunks: Sequence[nn.Module], first_expert: int) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """(global name, parameter, index of the expert within it) of everything that chunks hold.

    Args:
        first_expert: number of this rank's first expert, the same in every layer.
    """
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            match = _LAYER.fullmatch(name)
            if match is None:
                yield _ENDS[name], param, None
                continue
            at = f"layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}"  # type: ignore[union-attr,index]
            if match[2] in ("mlp.experts.fc1", "mlp.experts.fc2"):
                for expert in range(param.shape[0]):
                    yield f"{at}.experts.{first_expert + expert}.{match[2][-3:]}", param, expert
            else:
                yield f"{at}.{_IN_LAYER[match[2]]}", param, None


def initialise(chunks: Sequence[nn.Module], first_expert: int, **how: Any) -> None:
    """Sets every parameter to the value that its name has in every system; `how` as of `bench.execute.init.draw`."""
    for name, param, expert in global_views(chunks, first_expert):
        draw(name, param if expert is None else param[expert], **how)
