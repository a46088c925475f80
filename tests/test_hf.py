"""Configurations as the families' repositories publish them, cut to the keys that shape the model."""

import json

import pytest

from bench.errors import BadInput
from bench.execute.support import unsupported
from bench.flops import num_parameters
from bench.hf import FAMILIES, model_from_config
from bench.models import MODELS, get_model

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DEEPSEEK_MOE = {
    "model_type": "deepseek",
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "vocab_size": 102400,
}
DEEPSEEK_V2 = DEEPSEEK_MOE | {
    "model_type": "deepseek_v2",
    "aux_loss_alpha": 0.003,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 128,
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "model_type": "deepseek_v3",
    "aux_loss_alpha": 0.0001,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
PUBLISHED = {
    "gpt-oss-120b": GPT_OSS,
    "qwen3-235b": QWEN3,
    "deepseek-moe-16b": DEEPSEEK_MOE,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v3": DEEPSEEK_V3,
    "mixtral-8x7b": MIXTRAL,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_the_named_model(name):
    assert model_from_config(PUBLISHED[name], name) == MODELS[name]


def test_every_family_is_tried():
    assert {config["model_type"] for config in PUBLISHED.values()} == set(FAMILIES)


def test_a_file_is_recognised_and_named_after_its_folder(tmp_path):
    folder = tmp_path / "My Qwen (copy)"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    model = get_model(str(folder / "config.json"))
    assert model == MODELS["qwen3-235b"].model_copy(update={"name": "My-Qwen-copy"})


def test_architectures_alone_name_the_family():
    config = {key: value for key, value in QWEN3.items() if key != "model_type"}
    assert model_from_config(config, "qwen3-235b") == MODELS["qwen3-235b"]


def test_v2_lite_has_no_query_latent_and_greedy_choice():
    config = DEEPSEEK_V2 | {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0}
    model = model_from_config(config, "x")
    assert model.mla is not None
    assert model.mla.q_lora_rank == 0
    assert (model.router_groups, model.router_top_groups, model.router_scale) == (1, 1, 1.0)


def test_rope_theta_may_stand_in_rope_parameters():
    config = {key: value for key, value in MIXTRAL.items() if key != "rope_theta"}
    model = model_from_config(config | {"rope_parameters": {"rope_theta": 5e5}}, "x")
    assert model.rope_theta == 5e5


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "yarn"),  # DeepSeek's spelling
        ({"rope_scaling": {"rope_type": "yarn", "factor": 32.0}}, "yarn"),  # GPT-OSS's
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}, "llama3"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "none"),
        ({"rope_scaling": None}, "none"),
    ],
)
def test_rotary_scaling_is_kept_by_its_name_and_refused_where_it_would_run(keys, kind):
    usual = DEEPSEEK_V2 | {"topk_method": "greedy"}
    model = model_from_config(usual | keys, "x")
    assert model.rope_scaling == kind
    plain = model_from_config(usual, "x")
    assert num_parameters(model) == num_parameters(plain)
    lines = unsupported(model)
    assert lines == ([] if kind == "none" else [f"model.rope_scaling: {kind!r} is not valid; allowed: none to execute"])
    # Cases of models without it have the ids that they had.
    assert ("rope_scaling" in model.model_dump()) == (kind != "none")
    assert type(model)(**model.model_dump()) == model


def test_dense_first_layers_of_qwen():
    model = model_from_config(QWEN3 | {"mlp_only_layers": [0, 1]}, "x")
    assert (model.num_dense_layers, model.dense_hidden_size) == (2, 12288)


def test_missing_keys_are_named_together():
    config = {key: value for key, value in QWEN3.items() if key not in ("num_experts", "vocab_size")}
    with pytest.raises(BadInput) as caught:
        model_from_config(config, "x")
    assert caught.value.field == "config.vocab_size, config.num_experts"
    assert "qwen3_moe" in caught.value.allowed


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "llama"}, "config.model_type"),
        ({"architectures": ["LlamaForCausalLM"]}, "config.architectures"),
        ({"architectures": []}, "config.architectures"),
        ({"model_type": ["mixtral"]}, "config.model_type"),
        (QWEN3 | {"decoder_sparse_step": 2}, "config.decoder_sparse_step"),
        (QWEN3 | {"mlp_only_layers": [3]}, "config.mlp_only_layers"),
        (QWEN3 | {"mlp_only_layers": 3}, "config.mlp_only_layers"),
        (QWEN3 | {"hidden_act": "gelu"}, "config.hidden_act"),
        (QWEN3 | {"num_attention_heads": 0}, "config.num_attention_heads"),
        (QWEN3 | {"num_attention_heads": "64"}, "config.num_attention_heads"),
        (QWEN3 | {"vocab_size": "many"}, "model.vocab_size"),
        (GPT_OSS | {"layer_types": ["linear_attention"] * 36}, "config.layer_types"),
        (GPT_OSS | {"layer_types": 7}, "config.layer_types"),
        (GPT_OSS | {"rope_scaling": "yarn"}, "config.rope_scaling"),
        (GPT_OSS | {"rope_scaling": {"rope_type": "Ya RN"}}, "model.rope_scaling"),
        (DEEPSEEK_V2 | {"topk_method": "random"}, "config.topk_method"),
        (DEEPSEEK_MOE | {"moe_layer_freq": 2}, "config.moe_layer_freq"),
        (DEEPSEEK_MOE | {"n_shared_experts": "2"}, "config.n_shared_experts"),
    ],
)
def test_what_is_not_supported_is_refused(config, field):
    with pytest.raises(BadInput) as caught:
        model_from_config(config, "x")
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_unsupported_families_see_the_supported_ones():
    with pytest.raises(BadInput) as caught:
        model_from_config({"model_type": "llama"}, "x")
    assert all(family in caught.value.allowed for family in FAMILIES)
