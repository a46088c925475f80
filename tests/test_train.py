"""Training runs: every system follows the reference's losses, and what a run reports is what happened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import make_case

from bench.case import Case
from bench.errors import BadInput
from bench.execute.pool import RankError, RankPool
from bench.flops import step_flops
from bench.models import Model
from bench.program import Op

torch = pytest.importorskip("torch")

from bench.execute.job import Job  # noqa: E402
from bench.execute.staged import warm_up  # noqa: E402
from bench.execute.sync import OptimizerSettings  # noqa: E402
from bench.execute.train import StepRecord, executed_timeline, train  # noqa: E402
from bench.execute.trainer import RankTrainer  # noqa: E402

MODEL = Model(
    name="bytes",
    num_layers=2,
    hidden_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    num_experts=8,
    top_k=2,
    expert_hidden_size=64,
    num_shared_experts=1,
    shared_hidden_size=32,
    vocab_size=256,
    aux_loss_coeff=0.01,
)
SEQUENCES = 8
QUICK = OptimizerSettings(lr=2e-3, warmup_steps=5)

# All of them train on 8 sequences of 32 tokens a step.
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("reference", {"mbs": 4, "microbatches": 2}),
    "ep": ("ep", {"ep": 2, "pp": 2, "microbatches": 4}),
    "dualpipe": ("dualpipe", {"ep": 2, "pp": 2, "microbatches": 4}),
    "disagmoe": ("disagmoe", {"attention_ranks": 2, "expert_ranks": 1, "groups": 2, "mbs": 2, "microbatches": 2}),
    "disagmoe twice": ("disagmoe", {"expert_ranks": 2, "replicas": 2, "microbatches": 4, "shared_on": "expert"}),
}


def case_of(name: str, model: Model = MODEL, routing: str = "learned", dtype: str = "fp32", seed: int = 0) -> Case:
    system, layout = SYSTEMS[name]
    case = make_case(system, model, seq_len=32, **layout)
    assert case.workload.num_sequences == SEQUENCES
    changes = {"routing": routing, "dtype": dtype, "seed": seed}
    return case.model_copy(update={"workload": case.workload.model_copy(update=changes)})


@pytest.fixture(scope="module")
def curves(pool: RankPool) -> dict[str, list[float]]:
    """Losses of fifty steps on real text."""
    names = ("reference", "ep", "disagmoe")
    return {name: list(train(case_of(name), steps=50, pool=pool, settings=QUICK).losses) for name in names}


@pytest.mark.slow
def test_losses_fall_along_one_curve(curves: dict[str, list[float]]) -> None:
    expected = np.array(curves["reference"])
    assert expected[0] == pytest.approx(np.log(256), rel=0.02)
    assert np.mean(expected[-5:]) < expected[0] - 2
    for losses in curves.values():
        assert np.array(losses[:10]) == pytest.approx(expected[:10], rel=1e-5)
        # Later, near ties that are broken differently may add up.
        assert np.array(losses) == pytest.approx(expected, rel=1e-3)


def test_replicas_shared_experts_on_the_expert_side_and_two_copies_follow_it_too(pool: RankPool) -> None:
    names = ("reference", "disagmoe twice", "dualpipe")
    expected, *others = (train(case_of(name), steps=8, pool=pool, settings=QUICK).losses for name in names)
    for losses in others:
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["ep", "disagmoe"])
def test_forced_experts_are_those_of_the_reference(name: str, pool: RankPool) -> None:
    losses = [train(case_of(which, routing="zipf:1.0"), steps=3, pool=pool).losses for which in ("reference", name)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] != train(case_of("reference"), steps=3, pool=pool).losses


def test_bf16_follows_fp32(pool: RankPool) -> None:
    wide, narrow = (
        train(case_of("disagmoe", dtype=dtype), steps=12, pool=pool, settings=QUICK).losses
        for dtype in ("fp32", "bf16")
    )
    assert narrow == pytest.approx(wide, rel=0.02)
    assert narrow != wide
    assert narrow[-1] < narrow[0] - 0.3


def test_a_seed_decides_everything(pool: RankPool) -> None:
    first, again, other = (train(case_of("disagmoe", seed=seed), steps=3, pool=pool).losses for seed in (1, 1, 2))
    assert first == pytest.approx(again, rel=1e-6)
    assert abs(first[0] - other[0]) > 1e-4


@pytest.mark.parametrize("name", ["reference", "ep", "disagmoe"])
def test_steps_are_reported_as_they_happen(name: str, pool: RankPool) -> None:
    seen: list[StepRecord] = []
    result = train(case_of(name), steps=3, pool=pool, on_step=seen.append, settings=QUICK)
    assert [record.step for record in seen] == [0, 1, 2]
    assert tuple(record.loss for record in seen) == result.losses
    assert tuple(record.grad_norm for record in seen) == result.grad_norms
    assert tuple(record.tokens_per_s for record in seen) == result.tokens_per_s
    assert tuple(record.load_imbalance for record in seen) == result.load_imbalance
    assert all(rate > 0 for rate in result.tokens_per_s)
    assert result.case_id == case_of(name).id
    assert result.timeline is None


def test_an_error_in_on_step_ends_the_run(pool: RankPool) -> None:
    def stop(record: StepRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(case_of("ep"), steps=1000, pool=pool, on_step=stop)
    assert train(case_of("ep"), steps=1, pool=pool).losses[0] > 0


def test_learning_rate_and_warm_up_take_effect(pool: RankPool) -> None:
    slow, warming, fast = (
        train(case_of("ep"), steps=4, pool=pool, settings=settings).losses
        for settings in (
            OptimizerSettings(lr=1e-9),
            OptimizerSettings(lr=4e-3, warmup_steps=100),
            OptimizerSettings(lr=4e-3),
        )
    )
    assert slow[0] == warming[0] == fast[0]
    assert slow[3] > warming[3] > fast[3]


@pytest.mark.parametrize(("routing", "least", "most"), [("hot-rank", 2.0, 2.0), ("balanced", 1.0, 1.2)])
def test_load_imbalance_is_that_of_the_experts(routing: str, least: float, most: float, pool: RankPool) -> None:
    """Two expert ranks: the fullest has twice the mean when it has all. Shared experts are not counted."""
    for name in ("disagmoe twice", "dualpipe"):
        for load in train(case_of(name, routing=routing), steps=2, pool=pool).load_imbalance:
            assert least <= load <= most


def test_a_rank_with_all_experts_is_balanced(pool: RankPool) -> None:
    assert train(case_of("disagmoe"), steps=2, pool=pool).load_imbalance == (1.0, 1.0)


@pytest.mark.parametrize("name", ["ep", "dualpipe", "disagmoe", "disagmoe twice"])
def test_the_timeline_has_every_operation_of_every_rank(name: str, pool: RankPool) -> None:
    case = case_of(name)
    result = train(case, steps=3, pool=pool, timeline_step=-1)
    timeline, job = result.timeline, Job.of(case)
    assert timeline is not None
    groups = job.program.plan.placement.groups
    per_group = np.bincount(job.program.group, minlength=len(groups))
    expected = sum(int(n) * group.size for n, group in zip(per_group, groups, strict=True)) * job.batch.num_replicas
    assert len(timeline) == expected
    assert set(timeline.rank.tolist()) == set(range(job.world_size))
    assert timeline.source == "measured"
    assert (timeline.ready_s <= timeline.start_s).all()
    assert (timeline.start_s <= timeline.end_s).all()
    assert 0 < timeline.step_time_s < 60
    assert timeline.clock_error_s == result.clock_error_s > 0
    once = step_flops(case.model, case.workload.seq_len, case.workload.global_batch_tokens)
    assert timeline.flops.sum() == pytest.approx(once)
    # Nobody updates before everybody's gradients are summed, up to the clocks' error.
    syncs, updates = (timeline.end_s[timeline.op == op] for op in (Op.SYNC, Op.UPDATE))
    assert updates.min() + timeline.clock_error_s >= syncs.max()


def test_the_references_plan_can_be_traced(pool: RankPool) -> None:
    timeline = executed_timeline(case_of("reference"), pool=pool)
    assert len(timeline) == Job.of(case_of("reference")).program.num_ops
    assert train(case_of("reference"), steps=1, pool=pool, timeline_step=0).timeline is None


def test_synthetic_tokens_on_request(pool: RankPool) -> None:
    small = MODEL.model_copy(update={"vocab_size": 100})
    assert train(case_of("ep", small), steps=1, pool=pool, data="synthetic").losses[0] == pytest.approx(
        np.log(100), rel=0.02
    )


def test_ranks_are_made_where_there_is_no_pool() -> None:
    assert len(train(case_of("reference"), steps=1).losses) == 1


def test_impossible_runs_are_refused(pool: RankPool) -> None:
    with pytest.raises(BadInput, match="vocab_size"):
        train(case_of("ep", MODEL.model_copy(update={"vocab_size": 100})), steps=1, pool=pool)
    with pytest.raises(BadInput, match="steps"):
        train(case_of("ep"), steps=0, pool=pool)
    with pytest.raises(BadInput, match="timeline_step"):
        train(case_of("ep"), steps=2, pool=pool, timeline_step=2)
    with pytest.raises(BadInput, match="corpus"):
        train(case_of("ep"), steps=1, pool=pool, data="poetry")
    with RankPool(2) as few, pytest.raises(BadInput, match="at least 4"):
        train(case_of("ep"), steps=1, pool=few)


def losses_after_warming_up(job: Job, warm: bool) -> list[float]:
    """This rank's part of the losses of two steps."""
    trainer = RankTrainer(job, QUICK)
    if warm:
        warm_up(trainer.worker, lambda microbatch: torch.zeros(job.batch.mbs, 33, dtype=torch.int64))
    return [trainer.step(number).loss for number in range(2)]


@pytest.mark.parametrize("name", ["ep", "disagmoe twice"])
def test_warming_up_over_host_memory_leaves_no_trace(name: str, pool: RankPool) -> None:
    job = Job.of(case_of(name))
    cold, warm = (pool.run(losses_after_warming_up, job, warm, world_size=job.world_size) for warm in (False, True))
    assert warm == cold


def fail_on_the_last_rank() -> None:
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        raise MemoryError("too large")


def test_a_pool_trains_again_after_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match="too large"):
        pool.run(fail_on_the_last_rank, world_size=4)
    assert train(case_of("disagmoe"), steps=1, pool=pool).losses[0] > 0
