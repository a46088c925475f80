"""megatron-core as itself: the reference's loss and gradients, the order of our plan, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cases import make_case
from test_cli import call, call_json
from verify_trials import DENSE_FIRST, FOUR_LAYERS, SHARED, SIGMOID, SMALL, Trial, check

from bench.action import Kind, Pass, unpack, view
from bench.case import Case
from bench.errors import BadInput
from bench.execute.pool import RankPool
from bench.measured import measure
from bench.models import Model
from bench.plan import Plan
from bench.program import Op
from bench.system import plan_of, systems, trainer_of, trainers_of
from bench.timeline import Timeline
from bench.trace import to_chrome
from bench.trial import Trial as Measurement

pytest.importorskip("megatron.core")

from bench.execute.job import Job
from bench.execute.sync import OptimizerSettings
from bench.execute.trainer import open_trainer
from bench.execute.verify import verify


def megatron(**layout: Any) -> dict[str, Any]:
    return {"copies": "expert", **layout}


UNEVEN = {**DENSE_FIRST, **SHARED, "num_layers": 4, "qk_norm": True, "z_loss_coeff": 0.01, "aux_loss_coeff": 0.02}
NATIVE = [
    Trial("megatron", megatron(ep=2)),
    Trial("megatron", megatron(ep=1, pp=2, vpp=2), FOUR_LAYERS, 4),
    Trial("megatron", megatron(ep=2, pp=2, vpp=2, microbatch_group=3), FOUR_LAYERS, 5),
    Trial("megatron", megatron(ep=2, pp=3), UNEVEN, 3),  # stages of 2, 1 and 1 layers, the first one's first is dense
    Trial("megatron", megatron(ep=1, pp=3), {"num_layers": 3, "num_dense_layers": 2, "dense_hidden_size": 48}, 3),
    Trial("megatron", megatron(ep=2, replicas=2, mbs=2, shard_state=False)),
    Trial("megatron", megatron(ep=2, recompute="redispatch"), {**SIGMOID, **SHARED}),
    Trial("megatron", megatron(ep=2, mbs=2, recompute="redispatch"), routing="hot-rank"),
    Trial("megatron", megatron(ep=2, pp=2), routing="empty-expert"),
    Trial("megatron", megatron(ep=2, pp=2, vpp=2, replicas=2), {**FOUR_LAYERS, **SIGMOID}, 4),
    Trial("megatron", megatron(ep=2), {"router_normalize": False, "aux_loss_coeff": 0.02}),
]
"""Every kind of pipeline, replicas with and without sharded state, recomputation, forced routing, router losses."""


@pytest.mark.parametrize("trial", NATIVE, ids=str)
def test_megatron_core_equals_the_reference(trial: Trial, pool: RankPool) -> None:
    report = check(trial, pool)
    assert report.trainer == "native"
    assert report.flips <= 1


def test_megatron_core_equals_the_reference_in_bf16(pool: RankPool) -> None:
    layout = megatron(ep=2, pp=2, vpp=2, replicas=2, recompute="redispatch")
    check(Trial("megatron", layout, {**FOUR_LAYERS, **SIGMOID, **SHARED}, 4, dtype="bf16"), pool)


def test_the_plan_of_megatron_equals_the_reference(pool: RankPool) -> None:
    report = check(Trial("megatron", megatron(ep=2, pp=2)), pool, trainer="plan")
    assert report.trainer == "plan"


def test_nothing_of_megatron_core_stays_in_a_rank(pool: RankPool) -> None:
    trial = Trial("megatron", megatron(ep=2, pp=2))
    check(trial, pool)
    before = num_threads(pool)
    check(trial, pool)
    # A process group has threads, and is kept by a trainer that is. Fewer are left where other tests' go with it.
    assert all(one <= other for one, other in zip(num_threads(pool), before, strict=True))


def num_threads(pool: RankPool) -> list[int]:
    return [psutil.Process(pid).num_threads() for pid in pool.pids]


def turns_on_rank(job: Job) -> tuple[int, list[tuple[str, int, int]]]:
    """A rank's number in the plan, and what megatron-core's schedule does on it: (F or B, chunk, micro-batch)."""
    heard: list[tuple[str, int, int]] = []
    trainer = open_trainer(job, OptimizerSettings(), on_turn=lambda *turn: heard.append(turn))
    trainer.step(0)
    return trainer.rank, heard


def turns_of(plan: Plan, group: str) -> Iterator[tuple[str, int, int]]:
    """The same of a plan's text: a group's attention passes, those of one chunk and micro-batch taken together."""
    layers = [layer for layer, home in enumerate(plan.placement.attention) if home == group]
    breaks = [layer for before, layer in pairwise(layers) if layer != before + 1]

    def chunk(layer: int) -> int:
        return sum(layer >= first for first in breaks)

    passes = [a for a in plan.queues[group, "compute"] if a.kind is Kind.ATTENTION and a.pass_ in (Pass.F, Pass.B)]
    for turn, _ in groupby(passes, key=lambda a: (a.pass_.name, chunk(a.layer), a.microbatch)):
        yield turn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        ({"pp": 2, "vpp": 2, "ep": 2, "replicas": 2}, 6),
        ({"pp": 2, "vpp": 2, "ep": 2, "replicas": 2, "microbatch_group": 3}, 6),
        ({"pp": 4, "ep": 2}, 6),
        ({"pp": 4, "vpp": 2, "ep": 2}, 8),
    ],
    ids=["pp2 vpp2 ep2 dp2", "pp2 vpp2 ep2 dp2 groups of 3", "pp4", "pp4 vpp2"],
)
def test_megatron_core_goes_in_the_order_of_our_plan(layout: dict[str, int], microbatches: int, pool: RankPool) -> None:
    model = Model(**{**SMALL.model_dump(), "num_layers": 8})
    case = make_case("megatron", model, microbatches=microbatches, **megatron(**layout))
    plan = Plan.parse(str(plan_of(case)))
    heard = dict(pool.run(turns_on_rank, Job.of(case, "synthetic", trainer="native"), world_size=8))
    assert sorted(heard) == list(range(8))
    for rank, turns in heard.items():
        group = next(one for one in plan.placement.groups if rank % plan.placement.size in one.ranks)
        assert turns == list(turns_of(plan, group.name)), f"rank {rank}"
        assert len(turns) == 2 * microbatches * layout.get("vpp", 1)


def by(trial: Measurement) -> str:
    """What trained."""
    return str(trial.provenance["execution"]["trainer"])


def test_a_run_of_megatron_core_is_a_trial_that_says_so(pool: RankPool) -> None:
    case = Trial("megatron", megatron(ep=2)).case()
    trial = measure(case, steps=3, pool=pool, data="synthetic").trial
    plan = measure(case, steps=3, pool=pool, data="synthetic", trainer="plan").trial
    assert (trial.status, by(trial), by(plan)) == ("ok", "native", "plan")
    assert trial.command.endswith("--trainer native")
    assert trial.metrics["step_time_s"] > 0
    assert trial.metrics["mfu"] is None  # a CPU has no peak
    assert trial.samples["loss"] == pytest.approx(plan.samples["loss"], rel=1e-5)
    assert trial.samples["grad_norm"] == pytest.approx(plan.samples["grad_norm"], rel=1e-4)
    assert trial.samples["load_imbalance"] == plan.samples["load_imbalance"]


TIMED = [
    Trial("megatron", megatron(ep=2, pp=2), {**DENSE_FIRST, **SHARED}),
    Trial("megatron", megatron(ep=2, pp=2, vpp=2), FOUR_LAYERS, 4),
    Trial("megatron-overlap", {"ep": 2, "copies": "expert"}, FOUR_LAYERS, 3, dtype="bf16"),
]


@pytest.mark.parametrize("trial", TIMED, ids=str)
def test_megatron_core_has_a_timeline(trial: Trial, pool: RankPool) -> None:
    """What the plan has of attention, experts, head and all-to-alls, each once, with the bytes of the plan's run."""
    case = trial.case()
    native, plan = (
        measure(case, steps=2, pool=pool, data="synthetic", trainer=trainer, keep_timeline=True)
        for trainer in ("native", "plan")
    )
    assert native.trial.status == "ok", native.trial.message
    found, expected = native.timeline, plan.timeline
    assert found is not None
    assert expected is not None
    assert (found.source, found.queues) == ("measured", expected.queues)
    assert (found.end_s >= found.start_s).all()
    assert (found.start_s >= 0).all()
    kinds = [Kind.ATTENTION, Kind.EXPERT, Kind.DISPATCH, Kind.COMBINE, Kind.HEAD, Kind.UPDATE]

    def seen(timeline: Timeline) -> dict[tuple[int, int, int], tuple[int, float]]:
        """(rank, queue, action) -> how often, and bytes; weight gradients are within megatron-core's backward."""
        columns = unpack(timeline.code)
        chosen = np.isin(columns.kind, kinds) & (columns.pass_ != Pass.W) & (timeline.op != Op.RECV)
        rows = zip(
            *(getattr(timeline, name)[chosen].tolist() for name in ("rank", "queue", "code", "bytes")), strict=True
        )
        met: dict[tuple[int, int, int], tuple[int, float]] = {}
        for rank, queue, code, num_bytes in rows:
            times, _ = met.get((rank, queue, code), (0, 0.0))
            met[rank, queue, code] = times + 1, num_bytes
        return met

    native_seen, plan_seen = seen(found), seen(expected)
    assert native_seen.keys() == plan_seen.keys()
    assert {times for times, _ in native_seen.values()} == {1}
    element = {"fp32": 4, "bf16": 2}[trial.dtype]
    for key, (_, num_bytes) in native_seen.items():
        kind, pass_ = view(key[2]).kind, view(key[2]).pass_
        row = case.model.hidden_size * element
        if kind is Kind.COMBINE:
            assert num_bytes == plan_seen[key][1]
        elif kind is Kind.DISPATCH:
            # Beside a row: the plan's pairs are of row and weight; megatron-core sends the weight, and sorts by expert.
            rows = num_bytes / (row + 4)
            assert rows == plan_seen[key][1] / (row + (8 if pass_ is Pass.F else 4))
    assert sum(num_bytes for _, num_bytes in native_seen.values()) > 0
    # In time, each rank's attention follows the plan.
    for rank in np.unique(found.rank).tolist():
        order = [
            [int(code) for code, k, p in sorted_rows(timeline, rank) if k == Kind.ATTENTION and p in (Pass.F, Pass.B)]
            for timeline in (found, expected)
        ]
        assert order[0] == order[1], rank
    trace = to_chrome(found, title="megatron-core", placement=plan_of(case).placement)
    assert len(trace["traceEvents"]) > len(found)
    assert native.trial.metrics["compute_s"] > 0
    assert native.trial.metrics["send_s"] > 0


def sorted_rows(timeline: Timeline, rank: int) -> list[tuple[int, int, int]]:
    """(code, kind, pass) of a rank's operations, by their starts."""
    own = np.flatnonzero(timeline.rank == rank)
    own = own[np.argsort(timeline.start_s[own], kind="stable")]
    columns = unpack(timeline.code[own])
    return list(zip(timeline.code[own].tolist(), columns.kind.tolist(), columns.pass_.tolist(), strict=True))


def test_its_step_is_drawn_from_the_command_line(tmp_path: Path) -> None:
    options = ["megatron", "--model", "tiny", "--ranks", "2", "--layout", "ep=2", "copies=expert"]
    options += ["--out", str(tmp_path / "step.json"), "--trainer", "native"]
    facts = call_json("trace", *options, "--executed")
    assert facts["kind"] == "measured"
    names = [event["name"] for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]]
    assert "attn:B3.1" in names
    assert not any("W3" in name for name in names)  # these are within megatron-core's backward
    assert "trainer: 'native'" in call("trace", *options, "--cluster", "h800x1", code=2).stderr


def test_a_recomputed_layer_is_seen_twice(pool: RankPool) -> None:
    case = Trial("megatron", megatron(ep=2, recompute="redispatch")).case()
    found = measure(case, steps=2, pool=pool, data="synthetic", keep_timeline=True).timeline
    assert found is not None
    passes = [p for _, kind, p in sorted_rows(found, 0) if kind == Kind.EXPERT]
    assert sorted(passes) == sorted([Pass.F, Pass.R, Pass.B] * (2 * SMALL.num_layers))


REFUSED = [
    ({"router_score": "sigmoid", "router_normalize": False}, "learned", "model.router_normalize"),
    ({"top_k": 1}, "learned", "model.top_k"),
    ({"aux_loss_coeff": 0.1}, "hot-rank", "workload.routing"),
    ({"window_pattern": (4, 0)}, "learned", "model.window_pattern"),
]


def refused_case(changes: dict[str, Any], routing: str) -> Case:
    return Trial("megatron", megatron(ep=2), changes, routing=routing).case()


@pytest.mark.parametrize(("changes", "routing", "field"), REFUSED)
def test_what_megatron_core_would_compute_otherwise_is_refused(
    changes: dict[str, Any], routing: str, field: str, pool: RankPool
) -> None:
    case = refused_case(changes, routing)
    with pytest.raises(BadInput, match="megatron-core itself") as caught:
        verify(case, pool)
    assert caught.value.field == field
    assert trainer_of(case, "plan") == "plan"


@pytest.mark.parametrize("offload", ["state", "activations", "all"])
def test_offload_is_the_plans_alone(offload: str) -> None:
    case = Trial("megatron", megatron(ep=2, offload=offload)).case()
    with pytest.raises(BadInput, match=r"layout.offload.*megatron-core itself"):
        trainer_of(case)
    assert trainer_of(case, "plan") == "plan"


def test_a_system_without_code_of_its_own_has_its_plan_alone() -> None:
    assert trainers_of(systems()["megatron"]) == ("native", "plan")
    assert trainers_of(systems()["ep"]) == ("plan",)
    with pytest.raises(BadInput, match=r"trainer.*'native'.*ep has no code of its own"):
        trainer_of(make_case("ep"), "native")
    with pytest.raises(BadInput, match=r"trainer.*'megatron'"):
        trainer_of(make_case("ep"), "megatron")


def overlapped(**layout: Any) -> dict[str, Any]:
    return {"ep": 2, "copies": "expert", **layout}


@pytest.mark.parametrize(
    "trial",
    [
        Trial("megatron-overlap", overlapped(), SHARED, 3, dtype="bf16"),
        Trial("megatron-overlap", overlapped(pp=2, vpp=2), {**FOUR_LAYERS, **SIGMOID}, 4, dtype="bf16"),
        Trial("megatron-overlap", overlapped(mbs=2), DENSE_FIRST, 2, routing="hot-rank", dtype="bf16"),
    ],
    ids=str,
)
def test_combined_1f1b_equals_the_reference(trial: Trial, pool: RankPool) -> None:
    report = check(trial, pool, trainer="native")
    assert report.trainer == "native"


STREAMS = {"attn": "compute", "mlp": "compute", "moe_dispatch": "all-to-all", "moe_combine": "all-to-all"}
KINDS = {"attn": Kind.ATTENTION, "mlp": Kind.EXPERT, "moe_dispatch": Kind.DISPATCH, "moe_combine": Kind.COMBINE}


def nodes_on_rank(job: Job) -> tuple[int, dict[str, list[str]]]:
    """A rank's number in the plan, and the order in which combined 1F1B runs its layers' nodes, by stream."""
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    heard: dict[str, list[str]] = {"compute": [], "all-to-all": []}

    def listening(method: Any, word: str) -> Any:
        def run(node: Any, *args: Any) -> Any:
            if node.name in KINDS:
                heard[STREAMS[node.name]].append(f"{KINDS[node.name].name}:{word}")
            return method(node, *args)

        return run

    trainer = open_trainer(job, OptimizerSettings())
    forward, backward = ScheduleNode._forward, ScheduleNode._backward
    ScheduleNode._forward, ScheduleNode._backward = listening(forward, "F"), listening(backward, "B")
    try:
        trainer.step(0)
    finally:
        ScheduleNode._forward, ScheduleNode._backward = forward, backward
    return trainer.rank, heard


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"pp": 2, "vpp": 2, "replicas": 2}], ids=["one stage", "pp2 vpp2"])
def test_combined_1f1b_goes_in_the_order_of_our_plan(layout: dict[str, int], pool: RankPool) -> None:
    """Which nodes follow which on either stream; weight gradients are within a node of megatron-core's."""
    case = Trial("megatron-overlap", overlapped(**layout), {"num_layers": 8}, 4, dtype="bf16").case()
    plan = Plan.parse(str(plan_of(case)))
    job = Job.of(case, "synthetic", trainer="native")
    for rank, heard in pool.run(nodes_on_rank, job, world_size=job.world_size):
        group = next(one.name for one in plan.placement.groups if rank % plan.placement.size in one.ranks)
        for stream, nodes in heard.items():
            ours = [a for a in plan.queues[group, stream] if a.kind in KINDS.values() and a.pass_ is not Pass.W]
            assert nodes == [f"{a.kind.name}:{a.pass_.name}" for a in ours], f"rank {rank}, {stream}"


@pytest.mark.parametrize(
    ("layout", "dtype", "field"),
    [
        ({}, "fp32", "workload.dtype"),
        ({"ep": 1}, "bf16", "layout.ep"),
        ({"ep": 4}, "bf16", "layout.ep"),
        ({"copies": "rank"}, "bf16", "layout.copies"),
        ({"recompute": "full"}, "bf16", "layout.recompute"),
        ({"pp": 2}, "bf16", "layout.vpp"),
    ],
)
def test_what_combined_1f1b_cannot_do_is_refused(
    layout: dict[str, Any], dtype: str, field: str, pool: RankPool
) -> None:
    case = Trial("megatron-overlap", overlapped(**layout), FOUR_LAYERS, 2, dtype=dtype).case()
    with pytest.raises(BadInput, match="combined 1F1B") as caught:
        verify(case, pool, trainer="native")
    assert caught.value.field == field


def test_combined_1f1b_is_the_plan_unless_told(pool: RankPool) -> None:
    assert check(Trial("megatron-overlap", overlapped()), pool).trainer == "plan"
