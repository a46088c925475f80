import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.flops import (
    LAYER_PARTS,
    PARTS,
    attention_pairs,
    forward_terms,
    model_parts,
    num_parameters,
    parameters,
    part_flops,
    step_flops,
)
from bench.models import MLA, MODELS, Model

GQA = Model(
    name="gqa",
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    window_pattern=(3, 0),
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
DIRECT = LATENT.model_copy(update={"mla": LATENT.mla.model_copy(update={"q_lora_rank": 0})})


def test_a_grouped_query_layer_by_hand():
    # 2 sequences of 5 tokens; 4 heads of 6 = 24 query elements, 2 x 6 = 12 of keys and of values.
    def terms(part, layer):
        return forward_terms(GQA, part, layer, tokens=10, seq_len=5)

    assert terms("attention", 0) == {
        "qkv": 2 * 10 * 8 * (24 + 12 + 12),
        "output": 2 * 10 * 24 * 8,
        "scores": 2 * (2 * (1 + 2 + 3 + 3 + 3)) * 24,  # a window of 3
        "context": 2 * (2 * (1 + 2 + 3 + 3 + 3)) * 24,
    }
    assert terms("attention", 1)["scores"] == 2 * (2 * (1 + 2 + 3 + 4 + 5)) * 24
    assert terms("dense_ffn", 0) == {"gate_up": 2 * 10 * 8 * 22, "down": 2 * 10 * 11 * 8}
    assert terms("router", 1) == {"router": 2 * 10 * 8 * 5}
    assert terms("shared", 1) == {"gate_up": 2 * 10 * 8 * 18, "down": 2 * 10 * 9 * 8}
    assert terms("expert", 1) == {"gate_up": 2 * 20 * 8 * 14, "down": 2 * 20 * 7 * 8}
    assert terms("head", 1) == {"logits": 2 * 10 * 8 * 13}
    assert terms("embed", 0) == {}
    # A layer has the parts of its kind only.
    assert [terms(part, 0) for part in ("router", "shared", "expert")] == [{}, {}, {}]
    assert terms("dense_ffn", 1) == {}


def test_a_latent_attention_layer_by_hand():
    # 4 heads: queries and keys of 3 + 2, values of 4; one sequence of 6 tokens has 21 pairs.
    assert forward_terms(LATENT, "attention", 0, tokens=6, seq_len=6) == {
        "q_down": 2 * 6 * 8 * 6,
        "q_up": 2 * 6 * 6 * 20,
        "kv_down": 2 * 6 * 8 * (7 + 2),
        "kv_up": 2 * 6 * 7 * 4 * (3 + 4),
        "output": 2 * 6 * 16 * 8,
        "scores": 2 * 21 * 20,
        "context": 2 * 21 * 16,
    }
    assert forward_terms(DIRECT, "attention", 0, tokens=6, seq_len=6)["q"] == 2 * 6 * 8 * 20


def test_assignments_replace_top_k():
    terms = forward_terms(GQA, "expert", 1, tokens=10, seq_len=5, assignments=3)
    assert terms == {"gate_up": 2 * 3 * 8 * 14, "down": 2 * 3 * 7 * 8}


@given(st.integers(1, 60), st.integers(0, 80))
@settings(max_examples=60, deadline=None)
def test_pairs_equal_a_count_of_them(seq_len, window):
    reach = window or seq_len
    counted = sum(1 for i in range(seq_len) for j in range(seq_len) if i - reach < j <= i)
    assert attention_pairs(seq_len, window) == counted


@given(
    st.sampled_from([*MODELS.values(), GQA, LATENT, DIRECT]),
    st.sampled_from(PARTS),
    st.integers(0, 1000),
    st.integers(1, 8),
    st.integers(1, 5000),
)
@settings(max_examples=100, deadline=None)
def test_three_passes_cost_three_forwards(model, part, layer, num_sequences, seq_len):
    layer %= model.num_layers
    size = {"tokens": num_sequences * seq_len, "seq_len": seq_len}
    forward = sum(forward_terms(model, part, layer, **size).values())
    flops = {pass_: part_flops(model, part, layer, pass_, **size) for pass_ in "FBW"}
    assert flops["F"] == forward
    assert sum(flops.values()) == pytest.approx(3 * forward, rel=1e-12)
    core = sum(
        value
        for name, value in forward_terms(model, part, layer, **size).items()
        if name in ("scores", "context")
    )
    assert flops["W"] == pytest.approx(forward - core, rel=1e-12)


def test_a_step_is_three_forwards_of_every_part():
    layers = [(part, layer) for layer in (0, 1) for part in LAYER_PARTS]
    forward = sum(
        sum(forward_terms(GQA, part, layer, tokens=10, seq_len=5).values())
        for part, layer in [*layers, ("head", 1)]
    )
    assert step_flops(GQA, 5, 10) == 3 * forward
    assert list(model_parts(GQA)) == [
        ("embed", 0),
        ("attention", 0),
        ("dense_ffn", 0),
        ("attention", 1),
        ("router", 1),
        ("shared", 1),
        ("expert", 1),
        ("head", 1),
    ]


def test_parameters_by_hand():
    assert parameters(GQA, "attention", 0) == {
        "attention_norm": 8,
        "qkv": 8 * 48,
        "output": 24 * 8,
        "ffn_norm": 8,
    }
    assert parameters(GQA, "expert", 1) == {"gate_up": 5 * 8 * 14, "down": 5 * 7 * 8}
    assert parameters(GQA, "expert", 0) == {}
    assert parameters(GQA, "head", 1) == {"final_norm": 8, "projection": 8 * 13}
    assert parameters(GQA.model_copy(update={"tied_head": True}), "head", 1) == {"final_norm": 8}
    assert parameters(LATENT, "attention", 0) == {
        "attention_norm": 8,
        "q_down": 48,
        "q_up": 120,
        "kv_down": 72,
        "kv_up": 196,
        "output": 128,
        "ffn_norm": 8,
        "q_latent_norm": 6,
        "kv_latent_norm": 7,
    }
    gpt = MODELS["gpt-oss-120b"]
    attention = parameters(gpt, "attention", 0)
    assert (attention["qkv_bias"], attention["output_bias"], attention["sinks"]) == (5120, 2880, 64)
    assert parameters(gpt, "router", 0)["router_bias"] == 128
    assert parameters(gpt, "expert", 0)["gate_up_bias"] == 128 * 5760
    assert parameters(MODELS["qwen3-30b"], "attention", 0)["k_norm"] == 128


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # in 1e9, as each model's authors print them
        ("gpt-oss-120b", 116.83, None),
        ("qwen3-235b", 235, 22),
        ("qwen3-30b", 30.5, 3.3),
        ("deepseek-moe-16b", 16.4, 2.8),
        ("deepseek-v2-lite", 15.7, None),
        ("deepseek-v2", 236, 21),
        ("deepseek-v3", 671, 37),
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
    ],
)
def test_parameters_near_the_published(name, total, active):
    count = num_parameters(MODELS[name])
    assert count.total == pytest.approx(total * 1e9, rel=0.005)
    if active is not None:
        assert count.active == pytest.approx(active * 1e9, rel=0.02)


def test_active_parameters_of_gpt_oss_leave_out_its_embedding():
    # The model card's 5.13 billion count the unembedding and not the embedding.
    gpt = MODELS["gpt-oss-120b"]
    embedding = parameters(gpt, "embed", 0)["embedding"]
    assert num_parameters(gpt).active - embedding == pytest.approx(5.13e9, rel=0.001)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: forward_terms(GQA, "ffn", 0, tokens=5, seq_len=5), "part"),
        (lambda: forward_terms(GQA, "attention", 2, tokens=5, seq_len=5), "layer"),
        (lambda: forward_terms(GQA, "attention", 0, tokens=5, seq_len=0), "seq_len"),
        (lambda: part_flops(GQA, "attention", 0, "BW", tokens=5, seq_len=5), "pass"),
        (lambda: parameters(GQA, "expert", -1), "layer"),
        (lambda: attention_pairs(4, -1), "window"),
    ],
)
def test_bad_input_is_named(call, field):
    with pytest.raises(BadInput) as caught:
        call()
    assert caught.value.field == field


def causal_attention(model, q, k, v):
    """Attention without a wasted pair: each query meets its own keys alone. Shapes (heads, S, head dim)."""
    import torch

    rows = []
    for i in range(q.shape[1]):
        first = max(0, i + 1 - (model.window(0) or q.shape[1]))
        scores = q[:, i : i + 1] @ k[:, first : i + 1].transpose(1, 2)
        rows.append(torch.softmax(scores, -1) @ v[:, first : i + 1])
    return torch.cat(rows, 1)


def gqa_forward(model, x, weights):
    """One grouped-query layer with a dense SwiGLU, x of (S, H)."""
    import torch

    seq_len = x.shape[0]
    q, k, v = (x @ weights["qkv"]).split([model.q_size, model.kv_size, model.kv_size], 1)
    q, k, v = (t.view(seq_len, -1, model.head_dim).transpose(0, 1) for t in (q, k, v))
    repeat = model.num_heads // model.num_kv_heads
    out = causal_attention(model, q, k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0))
    h = x + out.transpose(0, 1).reshape(seq_len, -1) @ weights["output"]
    gate, up = (h @ weights["gate_up"]).chunk(2, 1)
    return h + (torch.nn.functional.silu(gate) * up) @ weights["down"]


def mla_forward(model, x, weights):
    """One layer of latent attention with a query latent, x of (S, H)."""
    import torch

    mla, seq_len = model.mla, x.shape[0]
    q = (x @ weights["q_down"] @ weights["q_up"]).view(seq_len, model.num_heads, -1).transpose(0, 1)
    latent, rope = (x @ weights["kv_down"]).split([mla.kv_lora_rank, mla.qk_rope_head_dim], 1)
    kv = (latent @ weights["kv_up"]).view(seq_len, model.num_heads, -1).transpose(0, 1)
    nope, v = kv.split([mla.qk_nope_head_dim, mla.v_head_dim], 2)
    k = torch.cat([nope, rope.expand(model.num_heads, -1, -1)], 2)
    return causal_attention(model, q, k, v).transpose(0, 1).reshape(seq_len, -1) @ weights["output"]


@pytest.mark.parametrize(
    ("model", "parts", "forward"),
    [(GQA, ("attention", "dense_ffn"), gqa_forward), (LATENT, ("attention",), mla_forward)],
)
def test_torch_counts_the_same(model, parts, forward):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    hidden, seq_len = model.hidden_size, 7
    sizes = {
        name: size
        for part in parts
        for name, size in parameters(model, part, 0).items()
        if "norm" not in name
    }
    rows = {"down": model.dense_hidden_size, "output": model.attention_output_size}
    if model.mla is not None:
        rows |= {"q_up": model.mla.q_lora_rank, "kv_up": model.mla.kv_lora_rank}
    weights = {
        name: torch.randn(rows.get(name, hidden), size // rows.get(name, hidden))
        for name, size in sizes.items()
    }
    x = torch.randn(seq_len, hidden, requires_grad=True)

    def counted(with_weights: bool) -> tuple[int, int]:
        for weight in weights.values():
            weight.requires_grad_(with_weights)
        with FlopCounterMode(display=False) as forward_counter:
            loss = forward(model, x, weights).sum()
        with FlopCounterMode(display=False) as backward_counter:
            loss.backward()
        return forward_counter.get_total_flops(), backward_counter.get_total_flops()

    def ours(pass_: str) -> float:
        return sum(part_flops(model, part, 0, pass_, tokens=seq_len, seq_len=seq_len) for part in parts)

    assert counted(with_weights=False) == (ours("F"), ours("B"))
    assert counted(with_weights=True) == (ours("F"), ours("B") + ours("W"))
