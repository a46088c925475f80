"""Models from a Hugging Face ``config.json`` of the supported mixture-of-experts families.

The keys are those of the ``configuration_*.py`` of huggingface/transformers. Dropout, multi-token prediction and
quantisation do not change the shapes that are counted here and are left out; of rotary scaling the kind is kept.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from bench.errors import BadInput, unknown
from bench.models import Model

Fields = dict[str, Any]


class Config(Mapping[str, Any]):
    """A configuration whose missing keys are collected, so that one error names them all."""

    def __init__(self, family: str, values: Mapping[str, Any]) -> None:
        self.family = family
        self.values_by_key = dict(values)
        self.missing: list[str] = []

    def __getitem__(self, key: str) -> Any:
        """The value of a required key; 1 stands in for a missing one until ``require_all``."""
        value = self.values_by_key.get(key)
        if value is None:
            self.missing.append(key)
            return 1
        return value

    def __iter__(self) -> Any:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an optional key; null counts as absent."""
        value = self.values_by_key.get(key)
        return default if value is None else value

    def count(self, key: str) -> int:
        """A required key as a positive whole number."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"config.{key}", value, "a whole number of at least 1")
        return value

    def optional_count(self, key: str) -> int:
        """An optional key as a whole number, 0 where it is absent."""
        return self.count(key) if self.get(key, 0) != 0 else 0

    def items_of(self, key: str, default: list[Any]) -> list[Any]:
        """An optional key as a list."""
        value = self.get(key, default)
        if not isinstance(value, list):
            raise BadInput(f"config.{key}", value, "a list")
        return value

    def only(self, key: str, default: Any, allowed: tuple[Any, ...]) -> Any:
        """An optional key that may take these values alone."""
        value = self.get(key, default)
        if value not in allowed:
            raise BadInput(f"config.{key}", value, " or ".join(map(repr, allowed)) + f" for {self.family}")
        return value

    def require_all(self) -> None:
        if self.missing:
            keys = ", ".join(f"config.{key}" for key in dict.fromkeys(self.missing))
            raise BadInput(keys, None, f"a value (the family {self.family} requires it)")


def model_from_config(values: Mapping[str, Any], name: str) -> Model:
    """The model that a Hugging Face configuration describes. Raises ``BadInput``.

    Args:
        values: the parsed ``config.json``.
        name: what to call the model; characters that a name may not have become dashes.
    """
    family = _family(values)
    config = Config(family, values)
    config.only("hidden_act", "silu", ("silu",))
    fields = FAMILIES[family](config)
    config.require_all()
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or family
    return Model.from_fields({"name": clean[:100], **fields})


def _family(values: Mapping[str, Any]) -> str:
    family = values.get("model_type")
    if family is None:
        architectures = values.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else architectures
        family = ARCHITECTURES.get(str(first))
        if family is None:
            raise unknown("config.architectures", first, ARCHITECTURES)
    if not isinstance(family, str) or family not in FAMILIES:
        raise unknown("config.model_type", family, FAMILIES)
    return family


def _common(config: Config) -> Fields:
    """Fields that every family spells alike."""
    num_heads = config.count("num_attention_heads")
    rope = config.get("rope_parameters", {})
    theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    scaling = {**(rope if isinstance(rope, Mapping) else {}), **_mapping(config, "rope_scaling")}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads", num_heads),
        "head_dim": config.get("head_dim") or max(1, config.count("hidden_size") // num_heads),
        "vocab_size": config["vocab_size"],
        "tied_head": config.get("tie_word_embeddings", False),
        "rope_theta": config.get("rope_theta", theta if theta is not None else 10000.0),
        "rope_scaling": "none" if kind == "default" else kind,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "top_k": config["num_experts_per_tok"],
    }


def _mapping(config: Config, key: str) -> Mapping[str, Any]:
    value = config.get(key, {})
    if not isinstance(value, Mapping):
        raise BadInput(f"config.{key}", value, "an object")
    return value


def _gpt_oss(config: Config) -> Fields:
    return _common(config) | {
        "num_experts": config["num_local_experts"],
        "expert_hidden_size": config["intermediate_size"],
        "window_pattern": _windows(config),
        "attention_bias": config.get("attention_bias", True),
        "attention_sinks": True,
        "expert_bias": True,
        "router_linear_bias": True,
        "router_softmax_after_topk": True,
        "router_normalize": False,
        "activation": "clamped_swiglu",
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }


def _qwen3_moe(config: Config) -> Fields:
    config.only("decoder_sparse_step", 1, (1,))
    config.only("use_sliding_window", False, (False,))
    dense = config.items_of("mlp_only_layers", [])
    if dense != list(range(len(dense))):
        raise BadInput("config.mlp_only_layers", dense, "the first layers, 0 to some n - 1, or none")
    return _common(config) | {
        "num_dense_layers": len(dense),
        "dense_hidden_size": config["intermediate_size"] if dense else 0,
        "num_experts": config["num_experts"],
        "expert_hidden_size": config["moe_intermediate_size"],
        "qk_norm": True,
        "attention_bias": config.get("attention_bias", False),
        "router_normalize": config.get("norm_topk_prob", False),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }


def _mixtral(config: Config) -> Fields:
    window = config.optional_count("sliding_window")
    return _common(config) | {
        "num_experts": config["num_local_experts"],
        "expert_hidden_size": config["intermediate_size"],
        "window_pattern": (window,) if window else (),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }


def _deepseek(config: Config) -> Fields:
    """DeepSeekMoE, and what its successors share with it."""
    config.only("moe_layer_freq", 1, (1,))
    num_dense = config.optional_count("first_k_dense_replace")
    num_shared = config.optional_count("n_shared_experts")
    return _common(config) | {
        "num_dense_layers": num_dense,
        "dense_hidden_size": config["intermediate_size"] if num_dense else 0,
        "num_experts": config["n_routed_experts"],
        "expert_hidden_size": config["moe_intermediate_size"],
        "num_shared_experts": num_shared,
        "shared_hidden_size": num_shared * config.count("moe_intermediate_size") if num_shared else 0,
        "attention_bias": config.get("attention_bias", False),
        "router_score": config.only("scoring_func", "softmax", ("softmax", "sigmoid")),
        "router_normalize": config.get("norm_topk_prob", False),
        "aux_loss_coeff": config.get("aux_loss_alpha", 0.0),
    }


def _mla(config: Config) -> Fields:
    nope, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    return {
        "num_kv_heads": config["num_attention_heads"],
        "head_dim": nope + rope,
        "mla": {
            "q_lora_rank": config.get("q_lora_rank", 0),
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": config["v_head_dim"],
        },
    }


def _deepseek_v2(config: Config) -> Fields:
    fields = _deepseek(config) | _mla(config)
    method = config.only("topk_method", "greedy", ("greedy", "group_limited_greedy"))
    if method == "group_limited_greedy":
        fields |= {"router_groups": config["n_group"], "router_top_groups": config["topk_group"]}
    # The family's gate either normalises or scales, never both.
    scale = 1.0 if fields["router_normalize"] else config.get("routed_scaling_factor", 1.0)
    return fields | {"router_scale": scale}


def _deepseek_v3(config: Config) -> Fields:
    config.only("topk_method", "noaux_tc", ("noaux_tc",))
    config.only("scoring_func", "sigmoid", ("sigmoid",))
    return (
        _deepseek(config)
        | _mla(config)
        | {
            "router_score": "sigmoid",
            "router_bias": True,
            "router_normalize": config.get("norm_topk_prob", True),
            "router_scale": config.get("routed_scaling_factor", 1.0),
            "router_groups": config.get("n_group", 1),
            "router_top_groups": config.get("topk_group", 1),
        }
    )


def _windows(config: Config) -> tuple[int, ...]:
    """The shortest pattern that repeats into ``layer_types``; without those, every other layer slides."""
    window = config.optional_count("sliding_window")
    types = config.items_of("layer_types", ["sliding_attention", "full_attention"])
    known = {"sliding_attention": window, "full_attention": 0}
    for kind in types:
        if not isinstance(kind, str) or kind not in known:
            raise unknown("config.layer_types", kind, known)
    pattern = tuple(known[kind] for kind in types)
    for period in range(1, len(pattern) + 1):
        if all(pattern[i] == pattern[i % period] for i in range(len(pattern))):
            return pattern[:period] if any(pattern) else ()
    return ()


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "gpt_oss": _gpt_oss,
    "qwen3_moe": _qwen3_moe,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "mixtral": _mixtral,
}

ARCHITECTURES = {
    "GptOssForCausalLM": "gpt_oss",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "MixtralForCausalLM": "mixtral",
}
