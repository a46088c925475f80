"""The reference against formulas written out, and against differences of its own loss in fp64."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from bench.errors import BadInput  # noqa: E402
from bench.execute.init import parameter_shapes  # noqa: E402
from bench.execute.optimizer import AdamW  # noqa: E402
from bench.execute.reference import ReferenceModel, reference_step  # noqa: E402
from bench.models import MODELS, Model  # noqa: E402

FULL = Model(
    name="full",
    num_layers=3,
    num_dense_layers=1,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    num_experts=4,
    top_k=2,
    expert_hidden_size=8,
    num_shared_experts=1,
    shared_hidden_size=8,
    dense_hidden_size=24,
    vocab_size=32,
    aux_loss_coeff=0.05,
    z_loss_coeff=0.01,
)
SIGMOID = FULL.model_copy(update={"router_score": "sigmoid", "router_scale": 2.0, "qk_norm": False})


def batch(model: Model, num_sequences: int = 3, length: int = 5):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.vocab_size, (num_sequences, length + 1), generator=generator)


def scaled_up(reference: ReferenceModel, factor: float = 8.0) -> ReferenceModel:
    """Weights large enough that attention, router and losses are far from uniform."""
    with torch.no_grad():
        for name, value in reference.parameters.items():
            if not name.endswith("norm.weight"):
                value.mul_(factor)
    return reference


@pytest.mark.parametrize("model", [FULL, SIGMOID], ids=["softmax", "sigmoid"])
def test_gradients_are_the_slopes_of_the_loss(model):
    """Central differences along a random direction of every parameter by itself, experts' ids held fixed."""
    reference = scaled_up(ReferenceModel(model, 0, dtype=torch.float64, norm_jitter=0.1))
    sequences = batch(model)
    _, grads, ids = reference.loss_and_gradients(sequences, collect_ids=True)
    step = 1e-5
    for name, value in reference.parameters.items():
        direction = torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(5))
        losses = []
        with torch.no_grad():
            for sign in (1, -1):
                value.add_(sign * step * direction)
                losses.append(reference._loss(sequences, len(sequences), ids)[0].item())
                value.sub_(sign * step * direction)
        slope = (losses[0] - losses[1]) / (2 * step)
        assert slope == pytest.approx((grads[name] * direction).sum().item(), rel=1e-5, abs=1e-8), name


def test_attention_is_causal_softmax_with_rotary_positions():
    """Loops over heads and positions, with rotations as complex numbers."""
    reference = scaled_up(ReferenceModel(FULL, 0, dtype=torch.float64, norm_jitter=0.1), 20.0)
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    at = "layers.0.attention."
    weights = {name: value.detach() for name, value in reference.parameters.items()}

    def turned(row, position):
        rotated = torch.complex(row[:4], row[4:]) * torch.polar(
            torch.ones(4, dtype=torch.float64),
            torch.tensor([position * 10000.0 ** (-i / 4) for i in range(4)], dtype=torch.float64),
        )
        return torch.cat((rotated.real, rotated.imag))

    def normed(row, which):
        return row / (row.square().mean() + 1e-6).sqrt() * weights[at + f"{which}_norm.weight"]

    out = torch.zeros(4, 32, dtype=torch.float64)
    for head in range(4):
        group = weights[at + "qkv.weight"][head // 2 * 32 : head // 2 * 32 + 32]
        q_weight, k_weight, v_weight = group[head % 2 * 8 :][:8], group[16:24], group[24:]
        for t in range(4):
            q = turned(normed(q_weight @ x[0, t], "q"), t)
            scores = [q @ turned(normed(k_weight @ x[0, s], "k"), s) / math.sqrt(8) for s in range(t + 1)]
            shares = torch.stack(scores).softmax(0)
            out[t, head * 8 : head * 8 + 8] = sum(share * (v_weight @ x[0, s]) for s, share in enumerate(shares))
    expected = out @ weights[at + "proj.weight"].T
    assert torch.allclose(reference._attention(at, x, 0)[0], expected, atol=1e-10)
    assert expected.norm() > 1e-2


def test_router_losses_are_those_of_the_formulas():
    model = FULL.model_copy(update={"num_dense_layers": 0})
    reference = scaled_up(ReferenceModel(model, 0, dtype=torch.float64))
    sequences = batch(model, num_sequences=2)
    plain = model.model_copy(update={"aux_loss_coeff": 0.0, "z_loss_coeff": 0.0})
    without = scaled_up(ReferenceModel(plain, 0, dtype=torch.float64))
    seen = []
    route = reference._route
    reference._route = lambda *args: seen.append(route(*args)) or seen[-1]
    loss = reference.loss_and_gradients(sequences).loss
    total = 0.0
    for _, ids, _, logits in seen:  # one sequence after another, layer by layer
        probability = logits[0].softmax(-1)
        for expert in range(4):
            fraction = (ids[0] == expert).sum().item() / (2 * 5)
            total += 0.05 * 4 * fraction * probability[:, expert].mean() / 2
        total += 0.01 * logits[0].exp().sum(-1).log().square().mean() / 2
    assert len(seen) == 2 * 3
    assert loss - without.loss_and_gradients(sequences).loss == pytest.approx(total.item(), rel=1e-9)


def test_chunks_and_the_order_of_sequences_do_not_matter():
    reference = ReferenceModel(FULL, 0, dtype=torch.float64)
    sequences = batch(FULL)
    one = reference.loss_and_gradients(sequences, collect_ids=True)
    for other, order in (
        (reference.loss_and_gradients(sequences, sequences_per_chunk=2, collect_ids=True), [0, 1, 2]),
        (reference.loss_and_gradients(sequences.flip(0), collect_ids=True), [2, 1, 0]),
    ):
        assert other.loss == pytest.approx(one.loss, rel=1e-12)
        for name, grad in one.grads.items():
            assert torch.allclose(other.grads[name], grad, rtol=1e-9, atol=1e-14), name
        assert torch.equal(other.expert_ids[1], one.expert_ids[1][order])


def test_ids_are_of_every_mixture_layer_and_only_on_request():
    reference = ReferenceModel(FULL, 0)
    result = reference.loss_and_gradients(batch(FULL), collect_ids=True)
    assert {layer: tuple(ids.shape) for layer, ids in result.expert_ids.items()} == {1: (3, 5, 2), 2: (3, 5, 2)}
    assert reference.loss_and_gradients(batch(FULL)).expert_ids == {}
    assert {name: tuple(grad.shape) for name, grad in result.grads.items()} == parameter_shapes(FULL)


def test_replaying_other_experts_changes_the_loss_and_who_learns():
    reference = ReferenceModel(FULL, 0)
    sequences = batch(FULL)
    free = reference.loss_and_gradients(sequences)
    replay = {layer: torch.tensor([3, 1]).expand(3, 5, 2) for layer in (1, 2)}
    forced = reference.loss_and_gradients(sequences, replay_ids=replay)
    assert forced.loss != free.loss
    assert not forced.grads["layers.1.experts.0.fc1"].any()
    assert forced.grads["layers.1.experts.3.fc1"].any()


def test_bf16_gradients_are_summed_in_fp32_and_near_those_of_fp32():
    model = MODELS["tiny"]
    sequences = batch(model, length=16)
    exact = ReferenceModel(model, 0).loss_and_gradients(sequences, collect_ids=True)
    rounded = ReferenceModel(model, 0, dtype=torch.bfloat16).loss_and_gradients(sequences, replay_ids=exact.expert_ids)
    assert rounded.loss == pytest.approx(exact.loss, rel=5e-3)
    for name in ("layers.1.attention.qkv.weight", "head.weight", "embed.weight"):
        grad = rounded.grads[name]
        assert grad.dtype == torch.float32
        assert (grad - exact.grads[name]).norm() < 0.05 * exact.grads[name].norm()


def test_steps_lower_the_loss_and_clip():
    reference = ReferenceModel(FULL, 0)
    optimizer = AdamW(reference.parameters.values(), lr=1e-2, weight_decay=0.0)
    steps = [reference_step(reference, optimizer, batch(FULL), max_norm=0.5) for _ in range(20)]
    assert steps[0].loss == pytest.approx(math.log(32), rel=0.05)
    assert steps[-1].loss < steps[0].loss - 0.3
    assert steps[0].grad_norm > 0.5
    # What the optimizer saw was clipped: its first moment after one step is a tenth of the gradient.
    again = ReferenceModel(FULL, 0)
    optimizer = AdamW(again.parameters.values(), lr=1e-2)
    reference_step(again, optimizer, batch(FULL), max_norm=0.5)
    norm = torch.stack([moment.norm() for moment in optimizer.first_moments]).norm().item()
    assert norm == pytest.approx(0.1 * 0.5, rel=1e-4)


def test_the_reference_does_not_load_megatron():
    import subprocess
    import sys

    code = "import sys, bench.execute.reference; print(any('megatron' in name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("shape", [(0, 5), (2, 1)])
def test_batches_without_a_token_to_predict_are_refused(shape):
    with pytest.raises(BadInput, match="sequences"):
        ReferenceModel(FULL, 0).loss_and_gradients(torch.zeros(shape, dtype=torch.int64))
