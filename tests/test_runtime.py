"""Programs executed by real ranks: the loss and every gradient are the reference's, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import make_case  # noqa: E402
from random_plans import random_plan  # noqa: E402
from ranks import Run, error_of_step, step_on_rank, step_that_waits_for_receives, step_with_fault  # noqa: E402

from bench.action import Kind, Pass, at_microbatch, view  # noqa: E402
from bench.case import Batch  # noqa: E402
from bench.edges import Rows, ends  # noqa: E402
from bench.errors import BadInput  # noqa: E402
from bench.execute.pool import RankError, RankPool  # noqa: E402
from bench.execute.record import StepResult, merge_timeline, traffic  # noqa: E402
from bench.execute.runtime import Worker  # noqa: E402
from bench.execute.transport import Channel, GlooTransport  # noqa: E402
from bench.models import get_model  # noqa: E402
from bench.program import Op, Program  # noqa: E402

Outcomes = list[tuple[StepResult, dict[str, torch.Tensor]]]

CASES = [
    "disagmoe tiny microbatches=2",
    "disagmoe tiny groups=2 attention_ranks=2 expert_ranks=1 copies=rank",
    "disagmoe tiny groups=2 attention_ranks=2 expert_ranks=1 copies=expert round_length=2",
    "disagmoe tiny groups=2 attention_ranks=1 expert_ranks=2 recompute=full",
    "disagmoe tiny-shared groups=2 attention_ranks=1 expert_ranks=2 shared_on=expert mbs=2",
    "disagmoe tiny-shared attention_ranks=2 expert_ranks=4 shared_on=expert copies=expert recompute=full",
    "disagmoe tiny-shared groups=2 layers_per_chunk=2 attention_ranks=1 expert_ranks=2",
    "disagmoe tiny-sigmoid groups=2 head_group=1 microbatches=8 round_length=4",
    "disagmoe tiny replicas=2 attention_ranks=1 expert_ranks=2",
    "ep tiny microbatches=1",
    "ep tiny ep=2",
    "ep tiny-shared ep=2 pp=2 copies=expert",
    "ep tiny-sigmoid ep=2 pp=2 vpp=2",
    "ep tiny ep=2 replicas=2 recompute=full",
    "disagmoe tiny groups=2 recompute=redispatch deferred_w=2",
    "megatron-overlap tiny-shared ep=2 pp=2 vpp=2",
    "dualpipe-v tiny ep=2 pp=2 vpp=2 microbatches=8",
    "dualpipe tiny-shared ep=2 pp=2 microbatches=4 recompute=redispatch",
    "dualpipe tiny ep=1 pp=4 microbatches=8 copies=expert",
    "dualpipe tiny-sigmoid ep=1 pp=2 replicas=2 microbatches=4",
    "tutel tiny-shared ep=4 copies=expert chunks=4 microbatches=2",
]


def parse(text: str) -> Run:
    system, model, *pairs = text.split()
    layout = {key: int(word) if word.isdigit() else word for key, word in (pair.split("=") for pair in pairs)}
    return Run.of(make_case(system, model, **layout))


def execute(pool: RankPool, run: Run) -> Outcomes:
    return pool.run(step_on_rank, run, world_size=run.world_size)


def assert_is_reference(run: Run, outcomes: Outcomes) -> None:
    """Gradients are shares of a sum: over data ranks, expert ranks with shared experts, and replicas."""
    expected = run.reference()
    loss = sum(result.loss for result, _ in outcomes)
    assert abs(loss - expected.loss) <= 1e-6 * expected.loss
    total: dict[str, torch.Tensor] = {}
    for _, grads in outcomes:
        for name, grad in grads.items():
            total[name] = total[name] + grad if name in total else grad
    assert total.keys() == expected.grads.keys()
    floor = 1e-4 * sum(grad.norm().item() for grad in expected.grads.values()) / len(expected.grads)
    for name, grad in expected.grads.items():
        error = (total[name] / run.steps - grad).norm() / (grad.norm() + floor)
        assert error <= 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("text", CASES)
def test_every_layout_computes_what_the_reference_computes(pool: RankPool, text: str) -> None:
    run = parse(text)
    assert_is_reference(run, execute(pool, run))


@pytest.mark.parametrize("seed", range(12))
def test_any_placement_and_any_order_computes_the_same(pool: RankPool, seed: int) -> None:
    model = get_model("tiny-shared" if seed % 2 else "tiny-sigmoid")
    plan = random_plan(model, num_microbatches=3, seed=seed)
    batch = Batch(num_replicas=1, num_microbatches=3, num_ranks=plan.placement.data_ranks, mbs=1)
    run = Run.of_plan(plan, model, batch, seq_len=8)
    assert_is_reference(run, execute(pool, run))


@pytest.mark.parametrize("seed", range(6))
def test_any_placement_in_two_directions_computes_the_same(pool: RankPool, seed: int) -> None:
    """On the middle one of three groups both directions meet at one copy of a part."""
    model = get_model("tiny-shared" if seed % 2 else "tiny-sigmoid")
    plan = random_plan(model, num_microbatches=4, seed=seed, directions=2)
    batch = Batch(num_replicas=1, num_microbatches=4, num_ranks=plan.placement.data_ranks, mbs=1)
    run = Run.of_plan(plan, model, batch, seq_len=8)
    assert_is_reference(run, execute(pool, run))


def forced_experts(run: Run, experts: list[int]) -> dict[int, torch.Tensor]:
    """Every token of every MoE layer takes these experts, beginning with a different one."""
    model, length = run.program.model, run.seq_len
    places = torch.arange(run.batch.num_sequences * length)[:, None] + torch.arange(model.top_k)
    ids = torch.tensor(experts)[places % len(experts)].view(run.batch.num_sequences, length, model.top_k)
    return dict.fromkeys(range(model.num_dense_layers, model.num_layers), ids)


@pytest.mark.parametrize("copies", ["expert", "rank"])
@pytest.mark.parametrize("system", ["disagmoe tiny attention_ranks=2 expert_ranks=2 groups=2", "ep tiny ep=2 pp=2"])
@pytest.mark.parametrize("experts", [[0, 1], [0, 2, 3, 7]], ids=["ranks without tokens", "experts without tokens"])
def test_forced_experts_may_leave_others_without_tokens(
    pool: RankPool, system: str, copies: str, experts: list[int]
) -> None:
    run = parse(f"{system} copies={copies} microbatches=2")
    run = run.with_(forced=forced_experts(run, experts))
    outcomes = execute(pool, run)
    assert_is_reference(run, outcomes)
    load = np.zeros(run.program.model.num_experts, dtype=int)
    for rank, (result, _) in enumerate(outcomes):
        for layer, counts in result.load.items():
            home = run.program.plan.placement.by_name[run.program.plan.placement.home(Kind.EXPERT, layer)]
            first = (rank - home.first) * len(counts)
            load[first : first + len(counts)] += counts
    assert np.flatnonzero(load).tolist() == experts
    assert load.sum() == run.batch.num_sequences * run.seq_len * 2 * run.program.model.num_layers


def test_gradients_of_steps_add_up_until_they_are_used(pool: RankPool) -> None:
    run = parse("disagmoe tiny attention_ranks=1 expert_ranks=2 microbatches=2").with_(steps=3)
    assert_is_reference(run, execute(pool, run))


@pytest.mark.parametrize("text", [CASES[1], CASES[2], CASES[4], CASES[10], CASES[11], CASES[12], CASES[17]])
def test_traffic_is_that_of_the_programs_volumes(pool: RankPool, text: str) -> None:
    run = parse(text)
    results = [result for result, _ in execute(pool, run)]
    program = run.program
    assert traffic(program, results) == closed_form(run, results)
    received = sum(r.bytes[program.op[r.ops] == Op.RECV].sum() for r in results)
    assert received == sum(traffic(program, results).values())


def closed_form(run: Run, results: list[StepResult]) -> dict[Channel, int]:
    """Rows by loops over tokens, times the symbolic widths."""
    program, placement = run.program, run.program.plan.placement
    total: dict[Channel, int] = {}
    for template, volume in zip(program.templates, program.volumes, strict=True):
        if not volume.terms:
            continue
        for m in range(0, run.batch.num_microbatches, placement.directions):
            action = view(int(at_microbatch(template, m)))
            source, target = (placement.by_name[name].ranks for name in ends(placement, action))
            channel = Channel.of(action, placement, 0)
            for term in volume.terms:
                width = term.hidden * program.model.hidden_size * 4 + term.extra_bytes
                num_rows = sum(
                    rows_between(run, results, term.rows, action, i, j)
                    for i, s in enumerate(source)
                    for j, t in enumerate(target)
                    if s != t
                )
                total[channel] = total.get(channel, 0) + num_rows * width
    return total


def rows_between(run: Run, results: list[StepResult], rows: Rows, action, i: int, j: int) -> int:  # type: ignore[no-untyped-def]
    tokens = run.batch.mbs * run.seq_len
    if rows is Rows.TOKENS:
        return tokens if i == j else 0
    placement, model = run.program.plan.placement.seen_by(action.microbatch), run.program.model
    outward = (action.kind is Kind.DISPATCH) == (action.pass_ is Pass.F)
    data_rank, expert_rank = (i, j) if outward else (j, i)
    holder = placement.by_name[placement.attention[action.layer]].first + data_rank
    ids = results[holder].expert_ids[action.layer, action.microbatch].chunk(run.program.plan.chunks)
    num_ranks = placement.by_name[placement.home(Kind.EXPERT, action.layer)].size
    per_rank = model.num_experts // num_ranks
    there = [[e for e in chosen if e // per_rank == expert_rank] for chosen in ids[action.chunk].tolist()]
    if placement.shared_on == "expert" and model.num_shared_experts:
        for token, chosen in enumerate(there):
            if (data_rank * tokens + token) % num_ranks == expert_rank:
                chosen.append(model.num_experts)
    if rows is Rows.COPIES and run.program.plan.copies == "rank":
        return sum(bool(chosen) for chosen in there)
    return sum(len(chosen) for chosen in there)


def test_receives_are_posted_while_the_computation_before_them_runs(pool: RankPool) -> None:
    run = parse("disagmoe tiny groups=2 microbatches=4 round_length=4")
    assert pool.run(step_that_waits_for_receives, run, world_size=run.world_size) == [0, 0, 3, 0]


@pytest.mark.parametrize("text", [CASES[1], CASES[8], CASES[12]])
def test_timeline_respects_queues_dependencies_and_messages(pool: RankPool, text: str) -> None:
    run = parse(text)
    program = run.program
    results = [result for result, _ in execute(pool, run)]
    timeline = merge_timeline(program, results)
    assert timeline.source == "measured"
    assert len(timeline) == sum(len(result.ops) for result in results)
    assert (timeline.ready_s <= timeline.start_s).all()
    assert (timeline.start_s <= timeline.end_s).all()
    at = 0
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for result in results:
        for k in result.ops.tolist():
            spans[result.rank, k] = (timeline.start_s[at], timeline.end_s[at])
            at += 1
    for result in results:
        for q in set(program.queue_of()[result.ops].tolist()):
            ends_s = [spans[result.rank, k][1] for k in range(program.queue_ptr[q], program.queue_ptr[q + 1])]
            assert ends_s == sorted(ends_s)
        for k in result.ops.tolist():
            if program.op[k] == Op.COMPUTE:
                assert all(spans[result.rank, d][1] <= spans[result.rank, k][0] for d in program.waits_for(k))
    begun = {(r.rank, k): t + r.base_s for r in results for k, t in zip(r.ops.tolist(), r.begun_s, strict=True)}
    first = min(result.base_s for result in results)
    for senders, rank, k in messages(program, results):
        left = min(begun[sender, int(program.partner[k])] for sender in senders) - first
        assert left - 1e-9 <= spans[rank, k][0] <= spans[rank, k][1]


def messages(program: Program, results: list[StepResult]) -> Iterator[tuple[list[int], int, int]]:
    """(sending ranks, receiving rank, RECV) of every message."""
    place = program.plan.placement
    for result in results:
        first = result.rank // place.size * place.size
        for k in result.ops[program.op[result.ops] == Op.RECV].tolist():
            source, target = (place.by_name[name] for name in ends(place, program.action(k)))
            senders = [first + rank for rank in source.ranks]
            if program.action(k).kind in (Kind.HOP, Kind.RESIDUAL):
                senders = [senders[result.rank - first - target.first]]
            yield senders, result.rank, k


@pytest.mark.parametrize(("rank", "part"), [(0, (Kind.ATTENTION, 0)), (3, (Kind.EXPERT, 1))])
def test_an_error_names_its_operation_and_ends_the_step_everywhere(
    pool: RankPool, rank: int, part: tuple[Kind, int]
) -> None:
    run = parse("disagmoe tiny groups=2 microbatches=4")
    errors = pool.run(error_of_step, run, rank, part, "raises", world_size=run.world_size)
    word = {Kind.ATTENTION: "attn", Kind.EXPERT: "expert"}[part[0]]
    operation = f"{run.program.plan.placement.home(*part)} {word}:F{part[1]}.0"
    assert errors.pop(rank) == f"rank {rank}, {operation}: ArithmeticError: made to fail"
    assert all("PeerError" in error for error in errors)
    # The ranks are still there, and so is what they talk over.
    assert_is_reference(run, execute(pool, run))


def test_the_rank_that_knows_why_is_heard_first(pool: RankPool) -> None:
    run = parse("disagmoe tiny groups=2 microbatches=4")
    with pytest.raises(RankError, match=r"(?s)^rank 3 failed.*ArithmeticError: made to fail"):
        pool.run(step_with_fault, run, 3, (Kind.EXPERT, 1), "raises", world_size=run.world_size)


def test_a_step_that_hangs_says_where(pool: RankPool) -> None:
    run = parse("ep tiny microbatches=1").with_(timeout_s=5.0)
    with pytest.raises(RankError) as caught:
        pool.run(step_with_fault, run, 0, (Kind.HEAD, 0), "hangs", world_size=run.world_size)
    assert "TimeoutError: no end within 5 s" in str(caught.value)
    assert "S0 head:F0.0" in str(caught.value)


def worker_of(run: Run, rank: int = 0) -> Worker:
    arguments = {"seq_len": 8, "device": torch.device("cpu"), "dtype": torch.float32, "seed": 0}
    return Worker(run.program, run.batch, rank, transport=GlooTransport.__new__(GlooTransport), **arguments)  # type: ignore[arg-type]


def test_a_worker_refuses_what_is_not_its_programs() -> None:
    run = parse("disagmoe tiny microbatches=2")
    with pytest.raises(BadInput, match="rank"):
        worker_of(run, rank=2)
    by_node = replace(run.program, plan=replace(run.program.plan, copies="node"))
    with pytest.raises(BadInput, match=r"plan.copies"):
        worker_of(run.with_(program=by_node))
    with pytest.raises(BadInput, match="2 micro-batches"):
        worker_of(run.with_(batch=run.batch._replace(num_microbatches=4)))
