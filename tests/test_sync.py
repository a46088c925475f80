"""Gradient sums, the clip norm, sharded state and the optimizer step, against the same in one process."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from bench.action import Kind
from bench.errors import BadInput
from bench.execute.pool import RankPool
from bench.models import Model
from bench.placement import Group, Placement

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from bench.execute.clock import align_clocks  # noqa: E402
from bench.execute.init import initial_value, initialise, named_global, parameter_shapes  # noqa: E402
from bench.execute.optimizer import clip_scale, square_sum  # noqa: E402
from bench.execute.parts import AttentionPart, EmbedPart, ExpertPart, HeadPart  # noqa: E402
from bench.execute.sync import GradientSync, OptimizerSettings  # noqa: E402

MODEL = Model(
    name="sync",
    num_layers=1,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_experts=4,
    top_k=2,
    expert_hidden_size=24,
    num_shared_experts=1,
    shared_hidden_size=16,
    vocab_size=40,
)
SETTINGS = OptimizerSettings(lr=0.01, max_norm=1.0, warmup_steps=2)
NUM_STEPS = 3

# Attention on two ranks, experts on two others; everything on two ranks; with shared experts on either side.
APART = Placement(
    (Group("A0", 0, 2), Group("F0", 2, 2)), embed="A0", head="A0", attention=("A0",), expert=("F0",), join=("A0",),
    shared_on="expert",
)  # fmt: skip
TOGETHER = Placement((Group("S0", 0, 2),), embed="S0", head="S0", attention=("S0",), expert=("S0",), join=("S0",))
MIRRORED = Placement(
    (Group("S0", 0, 2), Group("S1", 2, 2)), embed="S0", head="S1", attention=("S0",), expert=("S1",), join=("S0",),
    directions=2,
)  # fmt: skip
SETS = [(APART, 1), (APART, 2), (TOGETHER, 1), (TOGETHER, 3), (MIRRORED, 1), (MIRRORED, 2)]


def parts_of(placement: Placement, rank: int, dtype: Any) -> list[nn.Module]:
    """The parts of a one-layer model on a global rank."""
    where: dict[str, Any] = {"device": "cpu", "dtype": dtype}
    place = rank % placement.size
    group = next(group for group in placement.groups if place in group.ranks)
    on_expert = placement.shared_on == "expert"
    parts: list[nn.Module] = []
    if group.name in placement.homes(Kind.EMBED):
        parts.append(EmbedPart(MODEL, **where))
        parts.append(AttentionPart(MODEL, 0, global_sequences=1, shared_on_attention=not on_expert, **where))
        parts.append(HeadPart(MODEL, **where))
    if group.name in placement.homes(Kind.EXPERT, 0):
        local = MODEL.num_experts // group.size
        first = (place - group.first) * local
        parts.append(
            ExpertPart(MODEL, 0, first_expert=first, num_local_experts=local, shared_on_expert=on_expert, **where)
        )
    for part in parts:
        initialise(part, seed=3)
    return parts


def gradient(name: str, shape: tuple[int, ...], rank: int, step: int) -> Tensor:
    """A rank's share of a gradient; large enough in the first step for clipping to be active."""
    return initial_value(name + " gradient", shape, seed=1000 * step + rank, num_layers=1) * (50 if step == 0 else 0.1)


def run_steps(placement: Placement, num_replicas: int, shard_state: bool, dtype: Any) -> dict[str, Any]:
    """What this rank holds after some steps with made-up gradients."""
    rank = dist.get_rank()
    parts = parts_of(placement, rank, dtype)
    sync = GradientSync(
        parts, placement, rank, num_replicas, SETTINGS, device=torch.device("cpu"), shard_state=shard_state
    )
    sums: dict[str, Any] = {}
    norms = []
    for step in range(NUM_STEPS):
        for part in parts:
            for name, value, grad in named_global(part):
                grad.add_(gradient(name, tuple(value.shape), rank, step))
        sync.sync()
        if step == 0:
            for flat in sync.flats:
                flat.gather_gradients()
            sums = {name: grad.clone() for part in parts for name, _, grad in named_global(part)}
        norms.append(sync.update(step).item())
    weights = {name: value.clone() for part in parts for name, value, _ in named_global(part)}
    left = sum(grad.abs().sum().item() for part in parts for _, _, grad in named_global(part))
    return {"sums": sums, "norms": norms, "weights": weights, "state_bytes": sync.state_bytes, "left": left}


def in_one_process(
    holders: dict[str, list[int]], dtype: Any
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Summed gradients of the first step, norms, weights after all."""
    weights = {
        name: initial_value(name, shape, seed=3, num_layers=1).to(dtype)
        for name, shape in parameter_shapes(MODEL).items()
    }
    optimizer = SETTINGS.adamw(weights.values())
    first: dict[str, Tensor] = {}
    norms = []
    for step in range(NUM_STEPS):
        grads = {
            name: sum((gradient(name, tuple(value.shape), rank, step) for rank in holders[name]), torch.zeros(()))
            for name, value in weights.items()
        }
        first = first or {name: grad.clone() for name, grad in grads.items()}
        for name, value in weights.items():
            value.main_grad = grads[name]  # type: ignore[attr-defined]
        norm = square_sum(list(grads.values()), "cpu").sqrt()
        norms.append(norm.item())
        optimizer.lr = SETTINGS.lr_at(step)
        optimizer.step(clip_scale(norm, SETTINGS.max_norm))
    return first, norms, weights


def holders_of(results: list[dict[str, Any]]) -> dict[str, list[int]]:
    holders: dict[str, list[int]] = {}
    for rank, result in enumerate(results):
        for name in result["weights"]:
            holders.setdefault(name, []).append(rank)
    return holders


@pytest.mark.parametrize("shard_state", [False, True])
@pytest.mark.parametrize(("placement", "num_replicas"), SETS)
def test_ranks_equal_one_process(pool: RankPool, placement: Placement, num_replicas: int, shard_state: bool) -> None:
    ranks = placement.size * num_replicas
    results = pool.run(run_steps, placement, num_replicas, shard_state, torch.float32, world_size=ranks)
    holders = holders_of(results)
    assert holders.keys() == parameter_shapes(MODEL).keys()
    sums, norms, weights = in_one_process(holders, torch.float32)
    assert norms[0] > SETTINGS.max_norm > norms[1]
    for result in results:
        assert result["norms"] == pytest.approx(norms, rel=1e-6)
        assert result["left"] == 0
        for name, value in result["weights"].items():
            torch.testing.assert_close(result["sums"][name], sums[name])
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)
    for name, ranks_of in holders.items():
        for rank in ranks_of[1:]:
            assert torch.equal(results[rank]["weights"][name], results[ranks_of[0]]["weights"][name])


def test_sharded_state_is_smaller_and_gives_the_same(pool: RankPool) -> None:
    whole, shards = (pool.run(run_steps, TOGETHER, 2, shard, torch.bfloat16, world_size=4) for shard in (False, True))
    for one, other in zip(whole, shards, strict=True):
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-6)
        for name, value in one["weights"].items():
            torch.testing.assert_close(value, other["weights"][name], rtol=2**-7, atol=1e-4)
    # fp32 main weights and two moments of every parameter: on every rank, or of half of its experts (2 replicas) and
    # a quarter of what all four ranks hold. Slices are padded to whole multiples of 64 elements.
    elements = {name: int(np.prod(shape)) for name, shape in parameter_shapes(MODEL).items()}
    experts = sum(size for name, size in elements.items() if ".experts." in name) // 2
    others = sum(size for name, size in elements.items() if ".experts." not in name)
    assert all(result["state_bytes"] == 12 * (experts + others) for result in whole)
    assert sum(result["state_bytes"] for result in shards) == 12 * (2 * experts + others)
    assert max(result["state_bytes"] for result in shards) <= 12 * (experts / 2 + others / 4 + 128)


def test_bf16_weights_follow_fp32_main_weights(pool: RankPool) -> None:
    results = pool.run(run_steps, APART, 1, True, torch.bfloat16, world_size=4)
    _, _, weights = in_one_process(holders_of(results), torch.bfloat16)
    for result in results:
        for name, value in result["weights"].items():
            assert value.dtype == torch.bfloat16
            torch.testing.assert_close(value, weights[name], rtol=2**-7, atol=1e-4)


def test_learning_rate_warms_up_linearly() -> None:
    settings = OptimizerSettings(lr=8.0, warmup_steps=4)
    assert [settings.lr_at(step) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert OptimizerSettings(lr=8.0).lr_at(0) == 8.0


@pytest.mark.parametrize("field", ["lr", "eps", "max_norm", "warmup_steps"])
def test_impossible_settings_are_refused(field: str) -> None:
    with pytest.raises(BadInput, match=f"optimizer.{field}"):
        OptimizerSettings(**{field: -1})  # type: ignore[arg-type]


def clocks_apart(apart_s: float) -> tuple[float, float]:
    """What `align_clocks` finds where rank r's clock is ahead of rank 0's by r x apart_s."""
    rank, clock = dist.get_rank(), time.perf_counter
    time.perf_counter = lambda: clock() + rank * apart_s
    try:
        return tuple(align_clocks())
    finally:
        time.perf_counter = clock


def test_clocks_are_aligned_within_the_stated_error(pool: RankPool) -> None:
    found = pool.run(clocks_apart, 3.0, world_size=3)
    assert len({error for _, error in found}) == 1
    for rank, (offset, error) in enumerate(found):
        assert 0 < error < 1
        assert abs(offset + 3.0 * rank) <= error


def test_a_shared_clock_is_left_alone(pool: RankPool) -> None:
    found = pool.run(clocks_apart, 0.0, world_size=2)
    assert [offset for offset, _ in found] == [0.0, 0.0]
    assert found[0][1] > 0
