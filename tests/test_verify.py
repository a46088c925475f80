"""Systems on real ranks compute the reference's loss, gradients, clip norm and updated weights.

Models are as small as they can be with everything in them: a case takes a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import in_chunks

from bench.execute.pool import RankPool
from bench.lower import lower

torch = pytest.importorskip("torch")

from verify_trials import DENSE_FIRST, FOUR_LAYERS, SHARED, SIGMOID, SIX_EXPERTS, SMALL, Trial, af, check, ep  # noqa: E402

from bench.execute.host_state import HostState  # noqa: E402
from bench.execute.init import parameter_shapes  # noqa: E402
from bench.execute.island import Island  # noqa: E402
from bench.execute.job import Job  # noqa: E402
from bench.execute.parts import AttentionPart, ExpertPart  # noqa: E402
from bench.execute.sync import OptimizerSettings  # noqa: E402
from bench.execute.verify import RankOutcome, ReferenceStep, step_on_rank, verify  # noqa: E402

EXPERT_PARALLEL = [
    Trial("ep", ep(ep=1)),
    Trial("ep", ep(ep=2)),
    Trial("ep", ep(ep=4), {"num_experts": 8}),
    Trial("ep", ep(ep=2, pp=2)),
    Trial("ep", ep(ep=1, pp=2, vpp=2), FOUR_LAYERS, 4),
    Trial("ep", ep(ep=2, pp=3), {**DENSE_FIRST, **SHARED}, 3),
    Trial("ep", ep(ep=1, pp=3), {"num_layers": 3, "num_dense_layers": 2, "dense_hidden_size": 48}, 3),
]
# M : N on one and two groups, one and two layers a group.
RATIOS = [
    *(Trial("disagmoe", af(m, n)) for m, n in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1))),
    *(Trial("disagmoe", af(m, n, 2)) for m, n in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1))),
    *(
        Trial("disagmoe", af(m, n, 2, layers_per_chunk=2, round_length=2), FOUR_LAYERS, 3)
        for m, n in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1))
    ),
    Trial("disagmoe", af(1, 1, 3), {"num_layers": 4}),  # groups that hold different numbers of layers
    Trial("disagmoe", af(1, 2, 2, head_group=1), {"num_layers": 2}),
    Trial("disagmoe", af(1, 2, 2, shift_at=2, round_length=2), FOUR_LAYERS | {"window_pattern": (6, 0)}, 3),
    # Attention and experts of different depth.
    Trial("disagmoe", af(2, 1, 1, expert_groups=2)),
    Trial("disagmoe", af(1, 2, 3, expert_groups=1), DENSE_FIRST, 3),
    Trial("disagmoe", af(1, 1, 2, expert_groups=3, recompute="full", deferred_w=2), {**SHARED, "num_layers": 4}, 3),
    Trial("disagmoe", af(1, 3), SIX_EXPERTS),
]
ROUTERS = [
    *(
        Trial(system, layout, {"top_k": top_k})
        for top_k in (1, 4)
        for system, layout in (("ep", ep(ep=2)), ("disagmoe", af(2, 2)), ("disagmoe", af(1, 2, 2)))
    ),
    Trial("disagmoe", af(2, 1, 2), {"router_normalize": False, "aux_loss_coeff": 0.02}),
    Trial("disagmoe", af(1, 2), {"router_softmax_after_topk": True, "router_normalize": False}),
    Trial("ep", ep(ep=2, pp=2), {**SIGMOID, "top_k": 1, "router_normalize": False}),
    Trial("ep", ep(ep=2), SIGMOID),
    Trial("disagmoe", af(2, 2, 2), SIGMOID),
]
OFFLOADED = [
    Trial("ep", ep(ep=2, replicas=2, offload="state"), dtype="bf16"),
    Trial("disagmoe", af(2, 1, 2, offload="all", shard_state=False)),
]
AWAY = [
    Trial("ep", ep(ep=2, pp=2, offload="activations"), SHARED, 3, dtype="bf16"),
    Trial("tutel", ep(ep=2, chunks=2, mbs=2, offload="activations"), {**DENSE_FIRST, **SIGMOID}),
    Trial("megatron-overlap", ep(ep=2, offload="activations"), SIGMOID, 3),
    Trial("dualpipe", ep(ep=2, pp=2, offload="activations"), SHARED, 4),
    Trial("disagmoe", af(2, 1, 2, offload="all", deferred_w=2), {**SHARED, **SIGMOID}, 3),
]
# An expert and a rank without tokens, all tokens on one rank, popular experts.
UNEVEN = [
    Trial(system, layout, {"num_experts": 8, **model}, routing=routing)
    for routing in ("empty-expert", "hot-rank", "zipf:1.2", "balanced")
    for system, layout, model in (
        ("ep", ep(ep=2, copies="expert"), {}),
        ("disagmoe", af(2, 2), {}),
        ("disagmoe", af(1, 4, copies="expert"), SHARED),
        ("disagmoe", af(2, 2, 2), {"top_k": 1}),
    )
]
SHARED_EXPERTS = [
    *(
        Trial(system, layout, {**SHARED, **model})
        for model in ({}, DENSE_FIRST)
        for system, layout in (
            ("ep", ep(ep=2)),
            ("disagmoe", af(2, 1)),
            ("disagmoe", af(2, 1, shared_on="expert")),
            ("disagmoe", af(1, 2, 2, shared_on="expert", copies="expert")),
        )
    ),
    # 16 tokens over three expert ranks: they do not get as many.
    Trial("disagmoe", af(2, 3, shared_on="expert"), {**SHARED, **SIX_EXPERTS}),
]
SCHEDULES = [
    *(
        Trial(system, layout, FOUR_LAYERS, microbatches)
        for microbatches in (1, 3, 8)
        for system, layout in (
            ("ep", ep(ep=1, pp=2)),
            ("disagmoe", af(1, 1, 2, round_length=3)),
            ("disagmoe", af(2, 1, 2, round_length=8, deferred_w=3)),
        )
    ),
    *(
        Trial(system, {**layout, "copies": copies, "recompute": recompute, "mbs": 2}, SHARED)
        for copies in ("expert", "rank")
        for recompute in ("none", "full", "redispatch")
        for system, layout in (("ep", ep(ep=2, pp=2)), ("disagmoe", af(2, 2)), ("disagmoe", af(1, 2, 2)))
    ),
    Trial("disagmoe", af(1, 2, 2, recompute="full"), {**SIGMOID, **DENSE_FIRST}),
]
REPLICAS = [
    Trial(system, {**layout, "replicas": 2, "shard_state": shard_state}, SHARED)
    for shard_state in (True, False)
    for system, layout in (
        ("ep", ep(ep=2, pp=2)),
        ("disagmoe", af(2, 1, shared_on="expert")),
        ("disagmoe", af(1, 1, 2)),
    )
]


# Slices of a micro-batch: every way of keeping and sending, and experts without tokens.
SLICED = [
    Trial("tutel", ep(ep=2, chunks=1)),
    Trial("tutel", ep(ep=2, chunks=2, copies="expert"), routing="hot-rank"),
    Trial("tutel", ep(ep=2, pp=2, chunks=4, recompute="full"), SHARED, 3),
    Trial("tutel", ep(ep=1, pp=2, vpp=2, chunks=2, recompute="redispatch", copies="expert"), FOUR_LAYERS, 4),
    Trial("tutel", ep(ep=2, chunks=4, recompute="redispatch", mbs=2, replicas=2), {**DENSE_FIRST, **SIGMOID}),
]
APART_IN_CHUNKS = [
    (2, Trial("disagmoe", af(2, 2, copies="expert", recompute="full"), SHARED)),
    (4, Trial("disagmoe", af(1, 2, 2, shared_on="expert"), {**SHARED, **DENSE_FIRST}, 3)),
    (2, Trial("disagmoe", af(2, 1, 2, recompute="redispatch", round_length=2), SIGMOID, 3, "zipf:1.2")),
    (16, Trial("disagmoe", af(1, 4, copies="expert", recompute="redispatch"), {"num_experts": 8})),
]


@pytest.mark.parametrize("trial", SLICED, ids=str)
def test_slices_of_a_microbatch(trial: Trial, pool: RankPool) -> None:
    check(trial, pool)


@pytest.mark.parametrize(("chunks", "trial"), APART_IN_CHUNKS, ids=str)
def test_any_plan_in_chunks(chunks: int, trial: Trial, pool: RankPool) -> None:
    """Also where no system would: between groups, and residuals whole beside outputs in chunks."""
    whole = Job.of(trial.case(), "synthetic")
    job = dataclasses.replace(whole, program=lower(in_chunks(whole.program.plan, chunks), whole.case.model))
    reference = ReferenceStep(job)
    report = reference.compare(pool.run(step_on_rank, job, reference.settings, world_size=job.world_size))
    assert report.ok, str(report)


# Every parameter on two groups, each with half of the micro-batches; with one stage, the order of a pair alone.
TWO_COPIES = [
    Trial("dualpipe", ep(ep=2, pp=2), SHARED, 4),
    Trial("dualpipe", ep(ep=1, pp=4, shard_state=False), FOUR_LAYERS, 8),
    Trial("dualpipe", ep(ep=1, pp=2, replicas=2, mbs=2), {**DENSE_FIRST, **SHARED}, 6),
    Trial("dualpipe", ep(ep=2, pp=2, recompute="redispatch", copies="expert"), SIGMOID, 4, "zipf:1.2"),
    Trial("dualpipe", ep(ep=2, pp=4, recompute="full"), FOUR_LAYERS, 8, "hot-rank"),
    Trial("dualpipe", ep(ep=1, pp=2), {"num_experts": 8, "top_k": 4}, 4, dtype="bf16"),
    Trial("dualpipe", ep(ep=2), SHARED, 3),
]


@pytest.mark.parametrize("trial", TWO_COPIES, ids=str)
def test_two_copies_of_every_parameter(trial: Trial, pool: RankPool) -> None:
    report = check(trial, pool)
    case = trial.case()
    copies = 1 if case.layout.pp == 1 else 2
    assert f"dualpipe (plan, {'pair-order' if copies == 1 else 'two-copies'})" in str(report)
    for parameter in report.parameters:
        shards = case.layout.ep if ".experts." in parameter.name else 1
        assert len(parameter.ranks) == copies * case.layout.ep * (case.layout.replicas or 1) / shards


@pytest.mark.parametrize("trial", EXPERT_PARALLEL, ids=str)
def test_expert_parallel(trial: Trial, pool: RankPool) -> None:
    check(trial, pool)


@pytest.mark.parametrize("trial", RATIOS, ids=str)
def test_ratios_of_attention_and_expert_ranks(trial: Trial, pool: RankPool) -> None:
    check(trial, pool)


@pytest.mark.parametrize("trial", ROUTERS, ids=str)
def test_routers_and_their_losses(trial: Trial, pool: RankPool) -> None:
    check(trial, pool)


def host_state_on_rank(job: Job, settings: OptimizerSettings) -> tuple[RankOutcome, int]:
    """A step, and the bytes of optimizer state that its update fetched from the host."""
    fetched: list[int] = []
    through = HostState.through

    def listening(self: HostState, cut: Any) -> Iterator[Any]:
        for copies in through(self, cut):
            fetched.append(sum(copy.nbytes for copied in copies for copy in copied))
            yield copies

    HostState.through = listening  # type: ignore[method-assign]
    try:
        return step_on_rank(job, settings), sum(fetched)
    finally:
        HostState.through = through  # type: ignore[method-assign]


@pytest.mark.parametrize("trial", OFFLOADED, ids=str)
def test_optimizer_state_with_the_host(trial: Trial, pool: RankPool) -> None:
    job = Job.of(trial.case(), "synthetic")
    reference = ReferenceStep(job)
    outcomes, fetched = zip(
        *pool.run(host_state_on_rank, job, reference.settings, world_size=job.world_size), strict=True
    )
    report = reference.compare(outcomes)
    assert report.ok, str(report)
    # Two moments, in bf16 also main weights; sharded state of a parameter is fetched by one of its ranks.
    state = {"fp32": 8, "bf16": 12}[trial.dtype]
    sharded = trial.layout.get("shard_state", True)
    shapes = parameter_shapes(job.case.model)
    held = sum(math.prod(shapes[one.name]) * (1 if sharded else len(one.ranks)) for one in report.parameters)
    assert sum(fetched) == state * held


def away_on_rank(job: Job, settings: OptimizerSettings) -> tuple[RankOutcome, int, int]:
    """A step, how many forwards there were of attention and experts, and how many sent something to the host."""
    passes: list[bool] = []
    forward = Island.forward

    def watched(self: Island, *args: Any, **options: Any) -> Any:
        before = self.host_bytes
        out = forward(self, *args, **options)
        if isinstance(self.part, AttentionPart | ExpertPart):
            passes.append(self.host_bytes > before)
        return out

    Island.forward = watched  # type: ignore[method-assign]
    try:
        return step_on_rank(job, settings), len(passes), sum(passes)
    finally:
        Island.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("trial", AWAY, ids=str)
def test_activations_with_the_host(trial: Trial, pool: RankPool) -> None:
    job = Job.of(trial.case(), "synthetic")
    reference = ReferenceStep(job)
    outcomes, passes, away = zip(
        *pool.run(away_on_rank, job, reference.settings, world_size=job.world_size), strict=True
    )
    report = reference.compare(outcomes)
    assert report.ok, str(report)
    assert min(passes) > 0
    assert away == passes


@pytest.mark.parametrize("trial", UNEVEN, ids=str)
def test_uneven_routing(trial: Trial, pool: RankPool) -> None:
    report = check(trial, pool)
    assert report.flips == 0
    experts = {c.name: c.norm for c in report.parameters if ".experts." in c.name}
    idle = {name for name, norm in experts.items() if norm == 0}
    layers = range(SMALL.num_layers)
    match trial.routing:
        case "empty-expert":
            assert {f"layers.{layer}.experts.{e}.fc1" for layer in layers for e in (0, 7)} <= idle
        case "hot-rank":
            num_ranks = trial.layout.get("ep") or trial.layout["expert_ranks"]
            hot = {
                f"layers.{layer}.experts.{e}.{fc}"
                for layer in layers
                for e in range(8 // num_ranks)
                for fc in ("fc1", "fc2")
            }
            assert experts.keys() - idle == hot


@pytest.mark.parametrize("trial", SHARED_EXPERTS, ids=str)
def test_shared_experts_on_either_side(trial: Trial, pool: RankPool) -> None:
    check(trial, pool)


@pytest.mark.parametrize("trial", SCHEDULES, ids=str)
def test_microbatches_copies_and_recompute(trial: Trial, pool: RankPool) -> None:
    check(trial, pool)


@pytest.mark.parametrize("trial", REPLICAS, ids=str)
def test_two_replicas(trial: Trial, pool: RankPool) -> None:
    report = check(trial, pool)
    assert min(len(check.ranks) for check in report.parameters) == 2


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    """Random layouts of at most eight ranks."""
    shared = draw(st.booleans())
    dense = draw(st.integers(0, 1))
    layers = draw(st.integers(dense + 1, 4))
    model = {
        "num_layers": layers,
        "num_dense_layers": dense,
        "dense_hidden_size": 48,
        "num_experts": 12,
        "top_k": draw(st.integers(1, 4)),
        **(SHARED if shared else {}),
        **(SIGMOID if draw(st.booleans()) else {}),
    }
    layout: dict[str, Any] = {
        "copies": draw(st.sampled_from(["expert", "rank"])),
        "recompute": draw(st.sampled_from(["none", "full", "redispatch"])),
        "mbs": draw(st.integers(1, 2)),
        "shard_state": draw(st.booleans()),
    }
    microbatches = draw(st.integers(1, 4))
    routing = draw(st.sampled_from(["learned", "balanced", "zipf:1.0", "hot-rank", "empty-expert"]))
    if draw(st.booleans()):
        pp = draw(st.integers(1, min(3, layers)))
        size = draw(st.sampled_from([ranks for ranks in (1, 2, 3, 4) if ranks * pp <= 8]))
        layout |= {"ep": size, "pp": pp, "replicas": draw(st.integers(1, min(2, 8 // (size * pp))))}
        chunks = draw(st.sampled_from([None, 1, 2, 4]))
        if chunks is not None:
            return Trial("tutel", {**layout, "chunks": chunks}, model, microbatches, routing)
        return Trial("ep", layout, model, microbatches, routing)
    groups = draw(st.integers(1, min(2, layers)))
    m = draw(st.integers(1, 8 // groups - 1))
    n = draw(st.sampled_from([ranks for ranks in (1, 2, 3, 4, 6) if (m + ranks) * groups <= 8]))
    chunk = draw(st.integers(1, layers // groups))
    layout |= {
        "attention_ranks": m,
        "expert_ranks": n,
        "groups": groups,
        "layers_per_chunk": chunk,
        "shift_at": draw(st.sampled_from([None, *range(chunk, layers, chunk)])),
        "round_length": draw(st.integers(1, 4)),
        "deferred_w": draw(st.integers(0, 3)),
        "head_group": draw(st.one_of(st.none(), st.integers(0, groups - 1))),
        "shared_on": draw(st.sampled_from(["attention", "expert"])) if shared else "attention",
        "replicas": draw(st.integers(1, min(2, 8 // ((m + n) * groups)))),
    }
    return Trial("disagmoe", layout, model, microbatches, routing)


@given(trials(), st.integers(0, 1000))
@settings(max_examples=25)
def test_random_layouts(pool: RankPool, trial: Trial, seed: int) -> None:
    report = verify(trial.case(seed), pool)
    assert report.ok, str(report)


BF16 = [
    Trial("ep", ep(ep=2, pp=2), {"num_experts": 8, "top_k": 4}, 4, dtype="bf16"),
    Trial("disagmoe", af(2, 2, 2), {"num_experts": 8, "top_k": 4, **SHARED}, 4, dtype="bf16"),
    Trial("disagmoe", af(1, 2, 2, copies="expert", recompute="full"), {**SIGMOID, **FOUR_LAYERS}, 4, dtype="bf16"),
]


@pytest.mark.parametrize("trial", BF16, ids=str)
def test_bf16_with_the_systems_experts_replayed(trial: Trial, pool: RankPool) -> None:
    report = check(trial, pool)
    assert report.dtype == "bf16"
    assert report.tolerance.gradient > 1e-3
    assert report.worst.gradient_error > 1e-5  # it was bf16
    if report.replayed:
        free = verify(trial.case(), pool, replay=False)
        assert free.flips == report.flips > 0
        assert free.free == report.free
        assert free.worst.gradient_error == report.free.worst_gradient_error


def test_some_bf16_run_has_flips(pool: RankPool) -> None:
    """A few in ten thousand choices; without them nothing would show that replaying works."""
    trial = Trial("disagmoe", af(1, 1, mbs=16), {**FOUR_LAYERS, "num_experts": 12, "top_k": 4}, 8, dtype="bf16")
    report = check(trial, pool)
    assert report.flips > 0
    assert report.replayed
    assert report.free.worst_gradient_error > 2 * report.worst.gradient_error
