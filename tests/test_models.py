import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.models import ALIASES, MLA, MODELS, Model, get_model

TINY = json.loads(MODELS["tiny"].to_text())


def refusal(fields: dict) -> BadInput:
    with pytest.raises(BadInput) as caught:
        Model.from_fields(fields)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", MODELS)
def test_named_models_round_trip(name):
    assert MODELS[name].name == name
    assert Model.parse(MODELS[name].to_text()) == MODELS[name]


@st.composite
def models(draw):
    num_kv_heads = draw(st.integers(1, 8))
    num_heads = num_kv_heads * draw(st.integers(1, 8))
    num_layers = draw(st.integers(1, 20))
    num_dense = draw(st.integers(0, num_layers - 1))
    groups = draw(st.integers(1, 4))
    num_experts = groups * draw(st.integers(1, 16))
    num_shared = draw(st.integers(0, 3))
    mla = None
    if draw(st.booleans()):
        num_kv_heads = num_heads
        mla = MLA(
            q_lora_rank=draw(st.integers(0, 64)),
            kv_lora_rank=draw(st.integers(1, 64)),
            qk_nope_head_dim=draw(st.integers(1, 32)),
            qk_rope_head_dim=2 * draw(st.integers(1, 16)),
            v_head_dim=draw(st.integers(1, 32)),
        )
    return Model(
        name="drawn",
        num_layers=num_layers,
        num_dense_layers=num_dense,
        dense_hidden_size=draw(st.integers(1, 512)),
        hidden_size=draw(st.integers(1, 512)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=mla.qk_head_dim if mla else 2 * draw(st.integers(1, 64)),
        mla=mla,
        window_pattern=tuple(draw(st.lists(st.integers(0, 64), max_size=3))),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        router_groups=groups,
        router_top_groups=groups,
        expert_hidden_size=draw(st.integers(1, 512)),
        num_shared_experts=num_shared,
        shared_hidden_size=num_shared * draw(st.integers(1, 64)),
        rope_theta=draw(st.floats(2, 1e9)),
        vocab_size=draw(st.integers(2, 10_000)),
    )


@given(models())
@settings(max_examples=40, deadline=None)
def test_text_and_parse_are_inverse(model):
    text = model.to_text()
    assert Model.parse(text) == model
    assert Model.parse(text).to_text() == text


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"top_k": 9}, "model.top_k"),
        ({"top_k": 0}, "model.top_k"),
        ({"num_kv_heads": 3}, "model.num_kv_heads"),
        ({"head_dim": 15}, "model.head_dim"),
        ({"num_dense_layers": 4, "dense_hidden_size": 8}, "model.num_dense_layers"),
        ({"num_dense_layers": 1}, "model.dense_hidden_size"),
        ({"num_shared_experts": 1}, "model.shared_hidden_size"),
        ({"shared_hidden_size": 8}, "model.shared_hidden_size"),
        ({"num_shared_experts": 2, "shared_hidden_size": 9}, "model.shared_hidden_size"),
        ({"router_groups": 3}, "model.router_groups"),
        ({"router_groups": 2, "router_top_groups": 3}, "model.router_top_groups"),
        ({"router_groups": 8, "router_top_groups": 1}, "model.top_k"),
        ({"router_score": "sigmoid", "router_softmax_after_topk": True}, "model.router_softmax_after_topk"),
        ({"router_score": "tanh"}, "model.router_score"),
        ({"hidden_size": 1 << 40}, "model.hidden_size"),
        ({"num_layers": -1}, "model.num_layers"),
        ({"num_layers": True}, "model.num_layers"),
        ({"hidden_size": "64"}, "model.hidden_size"),
        ({"rope_theta": float("nan")}, "model.rope_theta"),
        ({"norm_eps": 0.0}, "model.norm_eps"),
        ({"window_pattern": [-1]}, "model.window_pattern.0"),
        ({"name": "two words"}, "model.name"),
        ({"num_expert": 4}, "model.num_expert"),
        ({"mla": {"q_lora_rank": 0, "rank": 1}}, "model.mla.rank"),
    ],
)
def test_bad_fields_are_named(change, field):
    assert refusal(TINY | change).field == field


def test_mla_fixes_the_heads():
    v3 = json.loads(MODELS["deepseek-v3"].to_text())
    assert refusal(v3 | {"head_dim": 128}).field == "model.head_dim"
    assert refusal(v3 | {"num_kv_heads": 64}).field == "model.num_kv_heads"
    assert refusal(v3 | {"qk_norm": True}).field == "model.qk_norm"


def test_an_unknown_field_lists_the_known_ones():
    error = refusal(TINY | {"topk": 2})
    assert error.value == 2
    assert "num_experts" in error.allowed
    assert "did you mean 'top_k'?" in error.allowed


def test_models_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        MODELS["tiny"].num_layers = 5  # type: ignore[misc]


def test_windows_repeat_over_the_layers():
    gpt = MODELS["gpt-oss-120b"]
    assert [gpt.window(layer) for layer in range(4)] == [128, 0, 128, 0]
    assert MODELS["tiny"].window(3) == 0
    for layer in (-1, 36):
        with pytest.raises(BadInput, match=r"layer: .* 0 to 35"):
            gpt.window(layer)


def test_dense_layers_come_first():
    v3 = MODELS["deepseek-v3"]
    assert [v3.is_dense(layer) for layer in range(5)] == [True, True, True, False, False]
    assert v3.num_moe_layers == 58


def test_sizes_of_queries_keys_and_outputs():
    gpt, v3 = MODELS["gpt-oss-120b"], MODELS["deepseek-v3"]
    assert (gpt.q_size, gpt.kv_size, gpt.attention_output_size) == (4096, 512, 4096)
    assert (v3.q_size, v3.attention_output_size) == (128 * 192, 128 * 128)


def test_get_model_by_name_and_alias():
    assert get_model("tiny") is MODELS["tiny"]
    assert get_model("deepseek-moe") is MODELS[ALIASES["deepseek-moe"]]
    with pytest.raises(BadInput) as caught:
        get_model("qwen3-235")
    assert all(name in caught.value.allowed for name in MODELS)
    assert "did you mean 'qwen3-235b'?" in caught.value.allowed


def test_get_model_from_json_and_toml(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(MODELS["deepseek-v3"].to_text())
    assert get_model(str(path)) == MODELS["deepseek-v3"]
    path = tmp_path / "own.toml"
    path.write_text(
        'name = "own"\nnum_layers = 2\nhidden_size = 8\nnum_heads = 2\nnum_kv_heads = 1\nhead_dim = 4\n'
        "num_experts = 4\ntop_k = 2\nexpert_hidden_size = 16\nvocab_size = 32\nwindow_pattern = [4, 0]\n"
    )
    assert get_model(str(path)).window_pattern == (4, 0)


@pytest.mark.parametrize(
    ("name", "content", "allowed"),
    [
        ("m.json", b"{", "JSON text"),
        ("m.json", b"[1]", "a JSON mapping"),
        ("m.json", b"[" * 100_000, "JSON text"),
        ("m.json", b"\xff\xfe", "a readable file"),
        ("m.toml", b"a = ", "TOML text"),
        ("m.json", None, "a readable file"),
    ],
)
def test_malformed_files_are_refused(tmp_path, name, content, allowed):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        get_model(str(path))
    assert allowed in caught.value.allowed
    assert "\n" not in str(caught.value)
