import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.flops import PARTS, model_parts, parameters
from bench.memory import Recipe, Retained, retained_bytes, state_bytes
from bench.models import MLA, MODELS, Model

GQA = Model(
    name="gqa",
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=5,
    top_k=2,
    expert_hidden_size=7,
    num_shared_experts=1,
    shared_hidden_size=9,
    num_dense_layers=1,
    dense_hidden_size=11,
    vocab_size=13,
)
LATENT = Model(
    name="latent",
    num_layers=1,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=4,
    head_dim=5,
    mla=MLA(q_lora_rank=6, kv_lora_rank=7, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4),
    num_experts=5,
    top_k=2,
    expert_hidden_size=7,
    vocab_size=13,
)


def test_state_of_mixed_precision_adamw():
    assert state_bytes(1000, Recipe()) == 18_000
    assert state_bytes(1000, Recipe(), shards=4) == 1000 * (2 + 4) + 1000 * 12 // 4
    assert state_bytes(1, Recipe(), shards=5) == 6 + 3  # 2.4 bytes, rounded up
    assert state_bytes(1000, Recipe(grad_bytes=2), shards=2) == 4_000 + 6_000
    assert state_bytes(1000, Recipe(weight_bytes=4, main_weight_bytes=0)) == 16_000
    assert state_bytes(0, Recipe()) == 0


def test_state_of_an_expert_rank_of_qwen3():
    # Four F-groups of 16 ranks hold one copy of the 227 billion expert parameters: 63.9 GB a rank.
    model = MODELS["qwen3-235b"]
    experts = sum(
        sum(parameters(model, part, layer).values()) for part, layer in model_parts(model) if part == "expert"
    )
    assert state_bytes(experts // 64, Recipe()) == pytest.approx(63.9e9, rel=1e-3)


@pytest.mark.parametrize(("num_params", "shards", "field"), [(-1, 1, "num_params"), (1, 0, "shards")])
def test_bad_state_is_named(num_params, shards, field):
    with pytest.raises(BadInput) as caught:
        state_bytes(num_params, Recipe(), shards=shards)
    assert caught.value.field == field


def test_a_recipe_is_bounded():
    with pytest.raises(ValueError, match="grad_bytes"):
        Recipe(grad_bytes=16)


def held(part, layer=1, model=GQA, **given) -> Retained:
    return retained_bytes(model, part, layer, tokens=10, **given)


def test_grouped_query_attention_by_hand():
    # H = 8, q 24, k and v 12 each, output 24; two bytes an element, four a log-sum-exp.
    assert held("attention") == Retained(
        10 * 2 * (8 + 8 + (24 + 12 + 12) + 24 + 8 + 8) + 10 * 4 * 4,  # x, norm x, q k v, output, h, u; lse
        10 * 2 * (8 + 24 + 8 + (24 + 12 + 12) + 8),  # norm x, output, u; d(q k v), dh
    )
    assert held("attention", recompute="full") == Retained(10 * 2 * 8, held("attention").after_backward)
    normed = held("attention", model=GQA.model_copy(update={"qk_norm": True}))
    assert normed.after_forward - held("attention").after_forward == 10 * 2 * (24 + 12)
    assert normed.after_backward == held("attention").after_backward


def test_latent_attention_by_hand():
    # 4 heads: q and k of 5, v of 4; latents 6 and 7, beside the latter 2 for the rope part.
    assert held("attention", 0, LATENT) == Retained(
        10 * 2 * (4 * 8 + (6 + 9) + (6 + 7) + 20 + 20 + 16 + 16) + 10 * 4 * 4,
        # norm x, u, dh; normed latents; output; d q_down, d q_up, d kv_down, d kv_up
        10 * 2 * (3 * 8 + (6 + 7) + 16 + 6 + 20 + 9 + 4 * (3 + 4)),
    )


def test_router_by_hand():
    assert held("router") == Retained(10 * (5 * 4 + 2 * 12), 10 * 5 * 4)
    assert held("router", recompute="full") == Retained(10 * 2 * 12, 10 * 5 * 4)


def test_experts_by_hand():
    # 20 assignments of 10 tokens that came in 12 rows; inner width 7.
    received = 12 * 2 * 8 + 20 * 12
    inner = 20 * 2 * (14 + 7)
    assert held("expert", rows=12) == Retained(received + inner, received + inner + 12 * 2 * 8)
    assert held("expert", rows=12, recompute="full") == Retained(received, received + inner + 12 * 2 * 8)
    assert held("expert") == held("expert", assignments=20, rows=20)
    assert held("expert", assignments=0) == Retained(0, 0)


def test_dense_and_shared_by_hand():
    assert held("dense_ffn", 0) == Retained(10 * 2 * 33, 10 * 2 * (33 + 8))
    assert held("dense_ffn", 0, recompute="full") == Retained(0, 10 * 2 * (33 + 8))
    assert held("shared") == Retained(10 * 2 * 27, 10 * 2 * (27 + 8))
    # Beside the experts the gradient's rows are theirs.
    assert held("shared", rows=10) == Retained(10 * 2 * 27, 10 * 2 * 27)


def test_embedding_and_head_by_hand():
    assert held("embed") == Retained(10 * 8, 10 * 8 + 10 * 2 * 8)
    assert held("head") == Retained(10 * (2 * 8 + 2 * 8 + 4 * 13 + 8), 10 * (2 * 8 + 2 * 13))
    assert held("head", recompute="full").after_forward == 10 * (2 * 8 + 8)


@pytest.mark.parametrize(("part", "layer"), [("expert", 0), ("router", 0), ("shared", 0), ("dense_ffn", 1)])
def test_a_part_that_the_layer_lacks_keeps_nothing(part, layer):
    assert held(part, layer) == Retained(0, 0)


@given(
    st.sampled_from([*MODELS.values(), GQA, LATENT]),
    st.sampled_from(PARTS),
    st.integers(0, 200),
    st.integers(1, 99),
)
@settings(max_examples=80, deadline=None)
def test_bytes_grow_with_tokens_and_recompute_saves_in_forward_alone(model, part, layer, tokens):
    layer %= model.num_layers
    one = retained_bytes(model, part, layer, tokens=1)
    many = retained_bytes(model, part, layer, tokens=tokens)
    assert many == pytest.approx(tuple(tokens * size for size in one))
    full = retained_bytes(model, part, layer, tokens=tokens, recompute="full")
    assert full.after_forward <= many.after_forward
    assert full.after_backward == many.after_backward


@pytest.mark.parametrize(
    ("given", "field"),
    [({"part": "ffn"}, "part"), ({"recompute": "half"}, "recompute"), ({"layer": 2}, "layer")],
)
def test_bad_input_is_named(given, field):
    arguments = {"part": "attention", "layer": 0, **given}
    with pytest.raises(BadInput) as caught:
        retained_bytes(GQA, tokens=1, **arguments)
    assert caught.value.field == field
