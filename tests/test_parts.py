"""Parts of the model, passes F, B and W, against the plain reference."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bench.errors import BadInput  # noqa: E402
from bench.execute.init import initialise, named_global, parameter_shapes  # noqa: E402
from bench.execute.island import Island  # noqa: E402
from bench.execute.parts import AttentionPart, ExpertPart, HeadPart, unsupported  # noqa: E402
from bench.execute.reference import ReferenceModel  # noqa: E402
from bench.models import MODELS, Model  # noqa: E402
from tests.parts_step import NORM_JITTER, SEED, Layout, Step, assert_equal_grads  # noqa: E402

FP32 = 1e-5

BASE = Model(
    name="small",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    top_k=2,
    expert_hidden_size=24,
    vocab_size=64,
    aux_loss_coeff=0.02,
    z_loss_coeff=0.003,
)
SHARED = BASE.model_copy(update={"num_shared_experts": 2, "shared_hidden_size": 40})
VARIANTS = {
    "top-1 of all": BASE.model_copy(update={"top_k": 1, "router_normalize": False}),
    "top-1 normalised": BASE.model_copy(update={"top_k": 1}),
    "top-2": BASE,
    "top-4 not normalised": BASE.model_copy(update={"top_k": 4, "router_normalize": False}),
    "top-4 softmax after": BASE.model_copy(update={"top_k": 4, "router_softmax_after_topk": True}),
    "scaled": BASE.model_copy(update={"router_scale": 2.5}),
    "sigmoid": BASE.model_copy(update={"router_score": "sigmoid", "router_scale": 2.5, "top_k": 4}),
    "sigmoid not normalised": BASE.model_copy(update={"router_score": "sigmoid", "router_normalize": False}),
    "sigmoid top-1": BASE.model_copy(update={"router_score": "sigmoid", "top_k": 1}),
    "qk-norm, one KV head": BASE.model_copy(update={"qk_norm": True, "num_kv_heads": 1}),
    "all heads KV": BASE.model_copy(update={"num_kv_heads": 4, "aux_loss_coeff": 0.0}),
    "dense first": BASE.model_copy(update={"num_dense_layers": 1, "dense_hidden_size": 56}),
    "every expert": BASE.model_copy(update={"num_experts": 4, "top_k": 4}),
}


def sequences(model: Model, num_sequences: int = 4, length: int = 6, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.vocab_size, (num_sequences, length + 1), generator=generator)


def compare(model: Model, layout: Layout, batch, replay_ids=None) -> Step:
    reference = ReferenceModel(model, SEED, norm_jitter=NORM_JITTER)
    expected = reference.loss_and_gradients(batch, replay_ids=replay_ids, collect_ids=True)
    step = Step(model, layout, batch.shape[0])
    loss = step.run(batch, replay_ids)
    assert loss == pytest.approx(expected.loss, rel=1e-6)
    for layer, ids in expected.expert_ids.items():
        assert torch.equal(torch.cat(step.expert_ids[layer]).view_as(ids).sort(-1)[0], ids.sort(-1)[0])
    assert_equal_grads(step.grads(), expected.grads, FP32)
    return step


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_the_reference(name):
    compare(VARIANTS[name], Layout(), sequences(VARIANTS[name]))


@pytest.mark.parametrize("shared_on_attention", [True, False])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_shared_experts_equal_the_reference_on_either_side(shared_on_attention, num_shards):
    layout = Layout(num_shards=num_shards, shared_on_attention=shared_on_attention)
    compare(SHARED, layout, sequences(SHARED))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_losses_do_not_depend_on_how_sequences_are_laid_out(num_microbatches):
    compare(BASE, Layout(num_microbatches=num_microbatches), sequences(BASE))


@pytest.mark.parametrize("expert", [0, 5])
def test_all_tokens_to_one_expert_leaves_shards_without_rows(expert):
    model = VARIANTS["top-1 of all"]
    batch = sequences(model)
    replay = {layer: torch.full((4, 6, 1), expert) for layer in range(model.num_layers)}
    step = compare(model, Layout(num_shards=4), batch, replay)
    other = f"layers.0.experts.{expert ^ 4}.fc1"
    assert step.grads()[other].abs().max() == 0


def test_experts_without_tokens_in_a_shard_with_tokens():
    batch = sequences(BASE)
    replay = {layer: torch.tensor([0, 3]).expand(4, 6, 2).contiguous() for layer in range(2)}
    step = compare(BASE, Layout(num_shards=1), batch, replay)
    grads = step.grads()
    assert grads["layers.1.experts.2.fc2"].abs().max() == 0
    assert grads["layers.1.experts.3.fc2"].abs().max() > 0


def test_replayed_ids_keep_the_scores_gradient():
    """Weights come from the scores at the replayed ids, so the router learns through them."""
    batch = sequences(BASE)
    generator = torch.Generator().manual_seed(3)
    replay = {layer: torch.rand(4, 6, BASE.num_experts, generator=generator).topk(2).indices for layer in range(2)}
    step = compare(BASE, Layout(), batch, replay)
    assert torch.equal(torch.cat(step.expert_ids[1]).view(4, 6, 2), replay[1])
    assert step.grads()["layers.0.router.weight"].norm() > 0


@pytest.mark.parametrize("model", [SHARED, VARIANTS["dense first"]], ids=["shared", "dense first"])
def test_recompute_changes_nothing_but_what_is_kept(model):
    batch = sequences(model)
    steps = [Step(model, Layout(recompute=recompute, shared_on_attention=False), 4) for recompute in (False, True)]
    losses = [step.run(batch) for step in steps]
    assert losses[0] == losses[1]
    kept, again = (step.grads() for step in steps)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    # Every forward GEMM runs once more, and no other.
    assert steps[1].ops["B"] - steps[0].ops["B"] == steps[0].ops["F"]
    assert steps[1].ops["W"] == steps[0].ops["W"]


def test_weight_gradients_run_in_pass_w_and_nowhere_else():
    """Per micro-batch and GEMM weight: one GEMM in F, one in B (dx), one in W (dW)."""
    model = SHARED.model_copy(update={"num_dense_layers": 1, "dense_hidden_size": 56})
    layout = Layout(num_shards=2, num_microbatches=2)
    step = Step(model, layout, 4)
    step.run(sequences(model))
    dense = 2 * 2  # qkv, proj of two layers
    dense += 2 + 1 + 2 + 1  # dense FFN, router, shared experts, head
    grouped = 2 * layout.num_shards  # fc1, fc2
    for pass_ in "FBW":
        ops = step.ops[pass_]
        assert ops.pop("_grouped_mm") == grouped * layout.num_microbatches, pass_
        assert ops.total() == dense * layout.num_microbatches, pass_
    for island in step.islands:
        assert all(param.grad is None for param in island.part.parameters())
        assert island.keys == ()
        assert island.live_bytes == 0


def test_pass_b_leaves_gemm_weights_untouched():
    part = AttentionPart(BASE, 0, global_sequences=2, device="cpu", dtype=torch.float32)
    initialise(part, SEED)
    island = Island(part)
    grads = {name: grad for name, _, grad in named_global(part)}
    out = island.forward(0, torch.randn(12, 32), 2)
    island.backward(0, torch.randn(12, 32), torch.randn(12, 32), None, torch.randn(12, 2))
    for name, grad in grads.items():
        assert bool(grad.abs().max() > 0) == name.endswith("norm.weight"), name
    island.weight_gradient(0)
    assert all(grad.abs().max() > 0 for grad in grads.values())
    assert out.weights.dtype == torch.float32
    assert out.expert_ids.dtype == torch.int64


def test_an_expert_part_without_rows_or_pairs():
    part = ExpertPart(BASE, 0, first_expert=4, num_local_experts=4, device="cpu", dtype=torch.float32)
    initialise(part, SEED)
    island = Island(part)
    nothing = torch.zeros(0, dtype=torch.int64)
    for rows in (0, 3):  # rows without pairs give zeros
        y = island.forward(rows, torch.randn(rows, 32), nothing, torch.zeros(0), [0, 0, 0, 0])
        assert y.shape == (rows, 32)
        assert not y.any()
        grad_rows, _, grad_weights, _ = island.backward(rows, torch.randn(rows, 32))
        assert grad_rows.shape == (rows, 32)
        assert grad_weights.shape == (0,)
        island.weight_gradient(rows)
    assert all(not grad.any() for _, _, grad in named_global(part))


def test_expert_sums_are_rounded_once():
    """Three bf16 outputs of one row: the fp32 sum is rounded, not every partial sum."""
    model = BASE.model_copy(update={"top_k": 4})
    part = ExpertPart(model, 0, first_expert=0, num_local_experts=8, device="cpu", dtype=torch.bfloat16)
    initialise(part, SEED)
    rows, weights = torch.randn(1, 32).bfloat16(), torch.tensor([100.0, 1.0, 1.0])
    index = torch.zeros(3, dtype=torch.int64)
    y = part(rows, index, weights, [1, 1, 1, 0, 0, 0, 0, 0])
    apart = [part(rows, index[:1], weights[e : e + 1], [int(e == other) for other in range(8)]) for e in range(3)]
    assert torch.equal(y, sum(part.float() for part in apart).bfloat16())


@pytest.mark.parametrize("model", [SHARED, VARIANTS["sigmoid"]], ids=["shared", "sigmoid"])
def test_bf16_follows_the_reference_with_replayed_ids(model):
    batch = sequences(model, length=16)
    exact = ReferenceModel(model, SEED, norm_jitter=NORM_JITTER).loss_and_gradients(batch, collect_ids=True)
    step = Step(model, Layout(), 4, torch.bfloat16)
    loss = step.run(batch, exact.expert_ids)
    assert loss == pytest.approx(exact.loss, rel=5e-3)
    assert_equal_grads(step.grads(), exact.grads, 0.1)
    assert all(grad.dtype == torch.float32 for grad in step.grads().values())


def test_head_works_in_chunks_of_rows(monkeypatch):
    part = HeadPart(BASE, device="cpu", dtype=torch.float32)
    initialise(part, SEED)
    x, labels = torch.randn(10, 32), torch.randint(0, 64, (10,))
    island = Island(part)
    whole = island.forward("whole", x, labels, 0.1)
    monkeypatch.setattr("bench.execute.entropy.CHUNK_ELEMENTS", 3 * 64)
    chunked = island.forward("chunked", x, labels, 0.1)
    expected = torch.nn.functional.cross_entropy(part.head(part.norm(x)), labels, reduction="sum") * 0.1
    assert whole.item() == pytest.approx(expected.item(), rel=1e-6)
    assert chunked.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(island.backward("whole")[0], island.backward("chunked")[0], rtol=1e-5, atol=1e-8)


def test_parts_hold_every_parameter_of_the_model_once():
    model = SHARED.model_copy(update={"num_dense_layers": 1, "dense_hidden_size": 56, "qk_norm": True})
    step = Step(model, Layout(num_shards=4), 4)
    held = [entry for island in step.islands for entry in named_global(island.part)]
    shapes = {name: tuple(value.shape) for name, value, _ in held}
    assert len(held) == len(shapes)
    assert shapes == parameter_shapes(model)


def test_named_views_share_memory_with_the_parameters():
    part = ExpertPart(BASE, 1, first_expert=2, num_local_experts=3, device="cpu", dtype=torch.bfloat16)
    views = {name: (value, grad) for name, value, grad in named_global(part)}
    value, grad = views["layers.1.experts.3.fc1"]
    value.fill_(2)
    grad.fill_(3)
    assert bool((part.fc1[1] == 2).all())
    assert bool((part.fc1.main_grad[1] == 3).all())
    assert grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "field"),
    [("gpt-oss-120b", "attention_sinks"), ("deepseek-v3", "router_groups"), ("gpt-oss-120b", "activation")],
)
def test_what_cannot_be_executed_is_named(name, field):
    model = MODELS[name]
    assert any(line.startswith(f"model.{field}:") for line in unsupported(model))
    with pytest.raises(BadInput):
        HeadPart(model, device="cpu", dtype=torch.float32)


def test_executable_models_have_nothing_unsupported():
    for name in ("tiny", "tiny-shared", "tiny-sigmoid", "qwen3-30b", "mixtral-8x7b", "deepseek-moe-16b"):
        assert unsupported(MODELS[name]) == []


def test_experts_outside_the_model_and_wrong_counts_are_refused():
    with pytest.raises(BadInput, match="num_local_experts"):
        ExpertPart(BASE, 0, first_expert=6, num_local_experts=4, device="cpu", dtype=torch.float32)
    part = ExpertPart(BASE, 0, first_expert=6, num_local_experts=2, device="cpu", dtype=torch.float32)
    with pytest.raises(BadInput, match="counts"):
        part(torch.zeros(3, 32), torch.zeros(2, dtype=torch.int64), torch.ones(2), [1, 0])


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("model", [SHARED, VARIANTS["sigmoid"], VARIANTS["dense first"]], ids=lambda m: m.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_equals_the_reference(model, dtype):
    batch = sequences(model, length=16)
    reference = ReferenceModel(model, SEED, norm_jitter=NORM_JITTER)
    expected = reference.loss_and_gradients(batch, collect_ids=True)
    step = Step(model, Layout(num_shards=4, shared_on_attention=False), 4, dtype, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        loss = step.run(batch, {layer: ids.cuda() for layer, ids in expected.expert_ids.items()})
    torch.cuda.synchronize()
    assert loss == pytest.approx(expected.loss, rel=1e-6 if dtype == torch.float32 else 5e-3)
    grads = {name: grad.cpu() for name, grad in step.grads().items()}
    assert_equal_grads(grads, expected.grads, 2e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.gpu
@needs_cuda
def test_no_pass_waits_for_the_device():
    """The host must run ahead: with synchronisation forbidden, a bf16 step of every part goes through."""
    model = MODELS["tiny-shared"]
    where = {"device": "cuda", "dtype": torch.bfloat16}
    attention = Island(AttentionPart(model, 1, global_sequences=4, **where))
    expert = Island(ExpertPart(model, 1, first_expert=0, num_local_experts=8, shared_on_expert=True, **where))
    head = Island(HeadPart(model, **where))
    x = torch.randn(32, 64, **where)
    index, weights = torch.arange(32, device="cuda") % 32, torch.rand(32, device="cuda")
    labels = torch.zeros(32, dtype=torch.int64, device="cuda")
    for island in (attention, expert, head):
        initialise(island.part, SEED)

    def step() -> None:
        out = attention.forward(0, x, 2, recompute=True)
        y = expert.forward(0, out.u, index, weights, [4, 0, 8, 0, 0, 4, 0, 0, 16])
        head.forward(0, out.h + y, labels, 1.0)
        grad = head.backward(0)[0]
        grad_u = expert.backward(0, grad)[0]
        attention.backward(0, grad, grad_u, None, torch.ones_like(out.weights))
        for island in (head, expert, attention):
            island.weight_gradient(0)

    step()  # buffers and the rotary table are made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
