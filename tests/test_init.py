"""Initial values: a function of name and seed, whatever the placement."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bench.execute.init import initial_value, initialise, named_global, parameter_shapes  # noqa: E402
from bench.execute.parts import AttentionPart, ExpertPart  # noqa: E402
from bench.execute.reference import ReferenceModel  # noqa: E402
from bench.models import MODELS  # noqa: E402

MODEL = MODELS["tiny-shared"]


def values(part, seed=3):
    initialise(part, seed)
    return {name: value for name, value, _ in named_global(part)}


def test_an_expert_is_the_same_in_every_shard_and_none_is_like_another():
    where = {"device": "cpu", "dtype": torch.float32}
    whole = values(ExpertPart(MODEL, 2, first_expert=0, num_local_experts=8, **where))
    shard = values(ExpertPart(MODEL, 2, first_expert=5, num_local_experts=3, **where))
    assert set(shard) == {f"layers.2.experts.{e}.fc{n}" for e in (5, 6, 7) for n in (1, 2)}
    assert all(torch.equal(value, whole[name]) for name, value in shard.items())
    firsts = {value.flatten()[0].item() for value in whole.values()}
    assert len(firsts) == len(whole)


def test_parts_start_where_the_reference_starts():
    for dtype in (torch.float32, torch.bfloat16):
        reference = ReferenceModel(MODEL, 3, dtype=dtype).parameters
        part = AttentionPart(MODEL, 1, global_sequences=1, shared_on_attention=True, device="cpu", dtype=dtype)
        named = values(part)
        assert all(torch.equal(value, reference[name]) for name, value in named.items())
        assert "layers.1.shared.fc2" in named


def test_a_seed_gives_another_model_and_the_same_seed_the_same():
    shapes = parameter_shapes(MODEL)
    name = "layers.1.experts.4.fc1"
    draw = [initial_value(name, shapes[name], seed=seed, num_layers=4) for seed in (0, 0, 1)]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embed.weight", 0.02),
        ("layers.1.experts.0.fc1", 0.02),
        ("layers.1.experts.0.fc2", 0.02 / math.sqrt(8)),
        ("layers.0.attention.proj.weight", 0.02 / math.sqrt(8)),
        ("layers.0.ffn.fc2", 0.02 / math.sqrt(8)),
    ],
)
def test_standard_deviations(name, std):
    value = initial_value(name, parameter_shapes(MODEL)[name], seed=0, num_layers=4)
    assert value.std().item() == pytest.approx(std, rel=0.05)
    assert abs(value.mean().item()) < std / 10


def test_norms_are_one_and_jittered_on_request():
    name = "layers.0.ffn.norm.weight"
    assert bool((initial_value(name, (64,), seed=0, num_layers=4) == 1).all())
    jittered = initial_value(name, (64,), seed=0, num_layers=4, norm_jitter=0.1)
    assert jittered.std().item() == pytest.approx(0.1, rel=0.3)
