"""Shapes and variants of mixture-of-experts transformer models."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from bench.errors import BadInput, from_pydantic, unknown
from bench.files import looks_like_path, parse_mapping, read_mapping

Width = Annotated[int, Field(ge=1, le=1 << 20)]
OptionalWidth = Annotated[int, Field(ge=0, le=1 << 20)]
Window = Annotated[int, Field(ge=0, le=1 << 24)]


class MLA(BaseModel):
    """Multi-head latent attention dimensions (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    ``q_lora_rank`` 0 means that the queries are projected directly. Heads share the keys' rope part.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    q_lora_rank: OptionalWidth
    kv_lora_rank: Width
    qk_nope_head_dim: Annotated[int, Field(ge=1, le=1024)]
    qk_rope_head_dim: Annotated[int, Field(ge=2, le=1024)]
    v_head_dim: Annotated[int, Field(ge=1, le=1024)]

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: the part without and the part with rotary positions."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class Model(BaseModel):
    """One decoder-only transformer with mixture-of-experts layers. Widths are elements, counts are per model.

    Attributes:
        num_dense_layers: the first layers, whose FFN is dense (``dense_hidden_size``) and not a mixture.
        num_kv_heads, head_dim: of grouped-query attention; with ``mla``, ``num_heads`` and the query's width.
        window_pattern: attention window of layer l is ``window_pattern[l % len]``; 0, or no pattern, is full
            attention.
        qk_norm: RMSNorm of every query and key head before the rotary positions.
        attention_bias: q, k, v and output projections have biases.
        attention_sinks: one learned logit per head in the denominator of the softmax.
        shared_hidden_size: total width of all shared experts, which every token passes.
        router_softmax_after_topk: softmax over the chosen logits only, instead of over all of them.
        router_normalize: the weights of the chosen experts are divided by their sum.
        router_scale: factor on the weights, after normalisation.
        router_groups, router_top_groups: experts are chosen within the best ``router_top_groups`` of the
            ``router_groups`` groups of neighbouring experts.
        router_bias: a per-expert bias on the scores, for the choice and not for the weights (DeepSeek-V3).
        router_linear_bias: the router's projection has a bias, which is part of the logits (GPT-OSS).
        rope_scaling: how rotary frequencies are stretched to longer sequences (``yarn``); nothing counted changes.
        aux_loss_coeff, z_loss_coeff: of the load-balancing loss, and of the logits' squared log-sum-exp.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    num_layers: Annotated[int, Field(ge=1, le=1024)]
    num_dense_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    hidden_size: Width
    num_heads: Annotated[int, Field(ge=1, le=4096)]
    num_kv_heads: Annotated[int, Field(ge=1, le=4096)]
    head_dim: Annotated[int, Field(ge=2, le=1024)]
    mla: MLA | None = None
    window_pattern: Annotated[tuple[Window, ...], Field(max_length=1024, strict=False)] = ()
    qk_norm: bool = False
    attention_bias: bool = False
    attention_sinks: bool = False
    num_experts: Annotated[int, Field(ge=1, le=65536)]
    top_k: Annotated[int, Field(ge=1, le=1024)]
    expert_hidden_size: Width
    num_shared_experts: Annotated[int, Field(ge=0, le=256)] = 0
    shared_hidden_size: OptionalWidth = 0
    dense_hidden_size: OptionalWidth = 0
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_softmax_after_topk: bool = False
    router_normalize: bool = True
    router_scale: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 1.0
    router_groups: Annotated[int, Field(ge=1, le=1024)] = 1
    router_top_groups: Annotated[int, Field(ge=1, le=1024)] = 1
    router_bias: bool = False
    router_linear_bias: bool = False
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    expert_bias: bool = False
    vocab_size: Annotated[int, Field(ge=2, le=1 << 24)]
    tied_head: bool = False
    rope_theta: Annotated[float, Field(gt=1, le=1e12, allow_inf_nan=False)] = 10000.0
    rope_scaling: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,30}$")] = "none"
    norm_eps: Annotated[float, Field(gt=0, le=0.1, allow_inf_nan=False)] = 1e-6
    aux_loss_coeff: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0
    z_loss_coeff: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0

    @model_serializer(mode="wrap")
    def _without_usual_scaling(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The field came later: left out at its default, so that ids of earlier cases stay what they were."""
        return {key: value for key, value in handler(self).items() if (key, value) != ("rope_scaling", "none")}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_attention()
        self._check_experts()
        self._check_router()
        return self

    def _check_attention(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise BadInput("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads ({self.num_heads})")
        if self.mla is None:
            if self.head_dim % 2:
                raise BadInput("head_dim", self.head_dim, "an even number (rotary positions)")
            return
        if self.mla.qk_rope_head_dim % 2:
            raise BadInput(
                "mla.qk_rope_head_dim", self.mla.qk_rope_head_dim, "an even number (rotary positions)"
            )
        if self.num_kv_heads != self.num_heads:
            raise BadInput("num_kv_heads", self.num_kv_heads, f"num_heads ({self.num_heads}) with mla")
        if self.head_dim != self.mla.qk_head_dim:
            raise BadInput("head_dim", self.head_dim, f"nope + rope width ({self.mla.qk_head_dim}) with mla")
        for flag in ("qk_norm", "attention_bias", "attention_sinks"):
            if getattr(self, flag):
                raise BadInput(flag, True, "False with mla")

    def _check_experts(self) -> None:
        if self.top_k > self.num_experts:
            raise BadInput("top_k", self.top_k, f"1 to num_experts ({self.num_experts})")
        if self.num_dense_layers >= self.num_layers:
            raise BadInput(
                "num_dense_layers", self.num_dense_layers, f"0 to num_layers - 1 ({self.num_layers - 1})"
            )
        if self.num_dense_layers and not self.dense_hidden_size:
            raise BadInput(
                "dense_hidden_size", 0, f"at least 1 with num_dense_layers {self.num_dense_layers}"
            )
        if bool(self.num_shared_experts) != bool(self.shared_hidden_size):
            raise BadInput(
                "shared_hidden_size",
                self.shared_hidden_size,
                f"positive exactly where num_shared_experts ({self.num_shared_experts}) is",
            )
        if self.num_shared_experts and self.shared_hidden_size % self.num_shared_experts:
            raise BadInput(
                "shared_hidden_size",
                self.shared_hidden_size,
                f"a multiple of num_shared_experts ({self.num_shared_experts})",
            )

    def _check_router(self) -> None:
        if self.num_experts % self.router_groups:
            raise BadInput(
                "router_groups", self.router_groups, f"a divisor of num_experts ({self.num_experts})"
            )
        if self.router_top_groups > self.router_groups:
            raise BadInput(
                "router_top_groups", self.router_top_groups, f"1 to router_groups ({self.router_groups})"
            )
        reachable = self.num_experts // self.router_groups * self.router_top_groups
        if self.top_k > reachable:
            raise BadInput(
                "top_k", self.top_k, f"at most {reachable}, the experts of router_top_groups groups"
            )
        if self.router_softmax_after_topk and self.router_score != "softmax":
            raise BadInput("router_softmax_after_topk", True, "False with router_score 'sigmoid'")

    @property
    def q_size(self) -> int:
        """Elements of one token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys, which without MLA is that of its values as well."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of one head's values."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def attention_output_size(self) -> int:
        """Elements of one token's attention output, before the output projection."""
        return self.num_heads * self.v_head_dim

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    def __hash__(self) -> int:
        # A few fields tell most apart, and what is found once is looked up by these again and again.
        return hash((self.name, self.num_layers, self.num_experts, self.top_k))

    def window(self, layer: int) -> int:
        """Attention window of a layer in tokens, the token itself included; 0 is full attention."""
        self._check_layer(layer)
        return self.window_pattern[layer % len(self.window_pattern)] if self.window_pattern else 0

    def is_dense(self, layer: int) -> bool:
        """Whether the layer's FFN is dense."""
        self._check_layer(layer)
        return layer < self.num_dense_layers

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise BadInput("layer", layer, f"0 to {self.num_layers - 1}")

    def to_text(self) -> str:
        """JSON with sorted keys, one field a line; ``parse`` is its inverse."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The model that ``to_text`` wrote. Raises ``BadInput``."""
        return cls.from_fields(parse_mapping(text, "json", "model"))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The model of a mapping of our own field names. Raises ``BadInput``."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise from_pydantic(error, "model", cls) from None


def get_model(name_or_path: str) -> Model:
    """A named model, or one read from a file.

    A file is JSON or TOML with the fields of ``Model``, or a Hugging Face ``config.json`` of a supported
    family. Raises ``BadInput``.
    """
    if not looks_like_path(name_or_path):
        name = ALIASES.get(name_or_path, name_or_path)
        if name not in MODELS:
            raise unknown("model", name_or_path, [*MODELS, *ALIASES])
        return MODELS[name]
    path = Path(name_or_path)
    fields = read_mapping(path, "model")
    if "model_type" in fields or "architectures" in fields:
        from bench.hf import model_from_config

        return model_from_config(fields, path.stem if path.stem != "config" else path.resolve().parent.name)
    return Model.from_fields(fields)


def _named(*models: Model) -> dict[str, Model]:
    return {model.name: model for model in models}


# fmt: off
MODELS: dict[str, Model] = _named(
    # openai/gpt-oss: gpt_oss/torch/model.py (biases everywhere, sinks, window 128 on even layers).
    Model(
        name="gpt-oss-120b", num_layers=36, hidden_size=2880, num_heads=64, num_kv_heads=8, head_dim=64,
        window_pattern=(128, 0), attention_bias=True, attention_sinks=True, num_experts=128, top_k=4,
        expert_hidden_size=2880, router_softmax_after_topk=True, router_normalize=False,
        router_linear_bias=True, activation="clamped_swiglu", expert_bias=True, vocab_size=201088,
        rope_theta=150000.0, norm_eps=1e-5,
    ),
    # NVIDIA-NeMo/Megatron-Bridge: tests of the Qwen3-MoE bridge; pytorch/torchtitan: models/qwen3.
    Model(
        name="qwen3-235b", num_layers=94, hidden_size=4096, num_heads=64, num_kv_heads=4, head_dim=128,
        qk_norm=True, num_experts=128, top_k=8, expert_hidden_size=1536, vocab_size=151936, rope_theta=1e6,
        aux_loss_coeff=0.001,
    ),
    # The same sources.
    Model(
        name="qwen3-30b", num_layers=48, hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128,
        qk_norm=True, num_experts=128, top_k=8, expert_hidden_size=768, vocab_size=151936, rope_theta=1e6,
        aux_loss_coeff=0.001,
    ),
    # MegaScale-MoE (arXiv 2505.11432), table 2, and deepseek-ai/DeepSeek-MoE's DeepseekConfig.
    Model(
        name="deepseek-moe-16b", num_layers=28, num_dense_layers=1, hidden_size=2048, num_heads=16,
        num_kv_heads=16, head_dim=128, num_experts=64, top_k=6, expert_hidden_size=1408,
        num_shared_experts=2, shared_hidden_size=2816, dense_hidden_size=10944, router_normalize=False,
        vocab_size=102400, aux_loss_coeff=0.001,
    ),
    # deepseek-ai/DeepSeek-V3: inference/configs/config_16B.json.
    Model(
        name="deepseek-v2-lite", num_layers=27, num_dense_layers=1, hidden_size=2048, num_heads=16,
        num_kv_heads=16, head_dim=192, num_experts=64, top_k=6, expert_hidden_size=1408,
        num_shared_experts=2, shared_hidden_size=2816, mla=MLA(q_lora_rank=0, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128), dense_hidden_size=10944,
        router_normalize=False, vocab_size=102400, aux_loss_coeff=0.001,
    ),
    # deepseek-ai/DeepSeek-V3: inference/configs/config_236B.json.
    Model(
        name="deepseek-v2", num_layers=60, num_dense_layers=1, hidden_size=5120, num_heads=128,
        num_kv_heads=128, head_dim=192, num_experts=160, top_k=6, expert_hidden_size=1536,
        num_shared_experts=2, shared_hidden_size=3072, mla=MLA(q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128), dense_hidden_size=12288,
        router_normalize=False, router_scale=16.0, router_groups=8, router_top_groups=3, vocab_size=102400,
        aux_loss_coeff=0.003,
    ),
    # deepseek-ai/DeepSeek-V3: inference/configs/config_671B.json. Multi-token prediction is left out.
    Model(
        name="deepseek-v3", num_layers=61, num_dense_layers=3, hidden_size=7168, num_heads=128,
        num_kv_heads=128, head_dim=192, num_experts=256, top_k=8, expert_hidden_size=2048,
        num_shared_experts=1, shared_hidden_size=2048, mla=MLA(q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128), dense_hidden_size=18432,
        router_score="sigmoid", router_scale=2.5, router_groups=8, router_top_groups=4, router_bias=True,
        vocab_size=129280, aux_loss_coeff=0.0001,
    ),
    # mistralai/Mixtral-8x7B-v0.1: config.json.
    Model(
        name="mixtral-8x7b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        num_experts=8, top_k=2, expert_hidden_size=14336, vocab_size=32000, rope_theta=1e6, norm_eps=1e-5,
        aux_loss_coeff=0.02,
    ),
    # mistralai/Mixtral-8x22B-v0.1: config.json; MegaScale-MoE, table 2.
    Model(
        name="mixtral-8x22b", num_layers=56, hidden_size=6144, num_heads=48, num_kv_heads=8, head_dim=128,
        num_experts=8, top_k=2, expert_hidden_size=16384, vocab_size=32000, rope_theta=1e6, norm_eps=1e-5,
        aux_loss_coeff=0.001,
    ),
    # Small enough to train on a laptop's CPU; vocabulary: bytes.
    Model(
        name="tiny", num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8,
        top_k=2, expert_hidden_size=96, vocab_size=256,
    ),
    Model(
        name="tiny-shared", num_layers=4, num_dense_layers=1, hidden_size=64, num_heads=4, num_kv_heads=2,
        head_dim=16, num_experts=8, top_k=2, expert_hidden_size=96, num_shared_experts=1,
        shared_hidden_size=96, dense_hidden_size=256, vocab_size=256,
    ),
    Model(
        name="tiny-sigmoid", num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
        qk_norm=True, num_experts=8, top_k=4, expert_hidden_size=96, router_score="sigmoid",
        router_scale=2.5, vocab_size=256, aux_loss_coeff=0.01, z_loss_coeff=0.001,
    ),
    Model(
        name="tiny-window", num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
        window_pattern=(6, 0), num_experts=8, top_k=2, expert_hidden_size=96, vocab_size=256,
    ),
    Model(
        name="tiny-mla", num_layers=4, num_dense_layers=1, hidden_size=64, num_heads=4, num_kv_heads=4,
        head_dim=24, mla=MLA(q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12), num_experts=8, top_k=2, expert_hidden_size=96, num_shared_experts=1,
        shared_hidden_size=96, dense_hidden_size=256, vocab_size=256,
    ),
)
# fmt: on

ALIASES = {"deepseek-moe": "deepseek-moe-16b"}
