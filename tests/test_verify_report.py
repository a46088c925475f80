"""What a verification says of a step that went well, and of steps that were spoilt."""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple

import pytest

from bench.errors import BadInput
from bench.execute.pool import RankPool

torch = pytest.importorskip("torch")

from verify_trials import FOUR_LAYERS, SHARED, Trial, af, ep  # noqa: E402

from bench.execute.job import Job  # noqa: E402
from bench.execute.verify import RankOutcome, ReferenceStep, holders, step_on_rank, verify  # noqa: E402


class Finished(NamedTuple):
    reference: ReferenceStep
    outcomes: list[RankOutcome]


@pytest.fixture(scope="module")
def finished(pool: RankPool) -> Finished:
    """A step that went well: two replicas of everything, nothing sharded away."""
    trial = Trial("disagmoe", af(1, 2, replicas=2, shard_state=False), SHARED)
    job = Job.of(trial.case(), "synthetic")
    reference = ReferenceStep(job)
    return Finished(reference, pool.run(step_on_rank, job, reference.settings, world_size=job.world_size))


def spoilt(finished: Finished) -> list[RankOutcome]:
    return copy.deepcopy(finished.outcomes)


def test_the_report_says_ok_in_a_few_lines(finished: Finished) -> None:
    report = finished.reference.compare(finished.outcomes)
    assert report.ok
    assert report.problems == ()
    assert "ok" in str(report).splitlines()[0]
    rows = report.table()
    assert len(rows) == len(report.parameters)
    assert {len(row) for row in rows} == {len(report.COLUMNS)}
    assert rows[0][0] == report.worst.name


def test_a_slightly_wrong_gradient_is_found(finished: Finished) -> None:
    outcomes = spoilt(finished)
    for outcome in outcomes:
        for grad in (g for name, g in outcome.grads.items() if name == "layers.1.experts.2.fc2"):
            grad *= 1 + 3e-5
    report = finished.reference.compare(outcomes)
    assert [line.split(":")[0] for line in report.problems] == ["layers.1.experts.2.fc2"]
    assert not report.ok


def test_copies_that_differ_in_one_bit_are_found(finished: Finished) -> None:
    outcomes = spoilt(finished)
    weight = outcomes[3].weights["head.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(10.0))
    (problem,) = finished.reference.compare(outcomes).problems
    assert problem == "head.weight: differs between ranks 0, 3"


def test_misplaced_parameters_are_found(finished: Finished) -> None:
    outcomes = spoilt(finished)
    outcomes[1].grads["embed.weight"] = outcomes[0].grads["embed.weight"]
    outcomes[1].weights["embed.weight"] = outcomes[0].weights["embed.weight"]
    for outcome in outcomes:
        outcome.grads.pop("layers.0.experts.1.fc1", None)
    problems = finished.reference.compare(outcomes).problems
    assert problems == (
        "embed.weight: on ranks (0, 1, 3), and should be on (0, 3)",
        "layers.0.experts.1.fc1: on ranks (), and should be on (1, 4)",
    )


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [("loss", 1e-5, "loss: error"), ("grad_norm", 1e-3, "gradient norm: error"), ("loss", float("nan"), "loss: error")],
)
def test_wrong_numbers_are_found(finished: Finished, field: str, change: float, words: str) -> None:
    outcomes = spoilt(finished)
    outcomes[0] = dataclasses.replace(outcomes[0], **{field: getattr(outcomes[0], field) * (1 + change)})
    (problem,) = finished.reference.compare(outcomes).problems
    assert problem.startswith(words)


def test_a_step_of_the_wrong_length_is_found(finished: Finished) -> None:
    """Clipping left out, for one: weights move twice as far."""
    reference, outcomes = finished
    unclipped = dataclasses.replace(reference.settings, max_norm=1e9)
    try:
        reference.settings, right = unclipped, reference.settings
        problems = reference.compare(outcomes).problems
    finally:
        reference.settings = right
    assert any("weight error" in line for line in problems)


def test_expert_choices_that_differ_are_counted_and_limited(finished: Finished) -> None:
    outcomes = spoilt(finished)
    ids = next(iter(outcomes[0].expert_ids.values()))
    ids[:, :6] = (ids[:, :6] + 2) % 4
    report = finished.reference.compare(outcomes)
    assert report.replayed
    assert report.flips > report.tolerance.most_flips(report.num_choices)
    assert any("expert choices differ" in line for line in report.problems)


def test_holders_are_what_the_placement_says() -> None:
    trial = Trial("disagmoe", af(1, 2, 2, replicas=2, shared_on="expert", cluster="h800x2"), SHARED)
    job = Job.of(trial.case(), "synthetic")
    found = holders(job.case.model, job.program.plan.placement, 2)
    # A replica's ranks: A0 = 0, A1 = 1, F0 = 2..3, F1 = 4..5; the second replica begins at 6.
    assert found["embed.weight"] == (0, 6)
    assert found["layers.1.attention.qkv.weight"] == (1, 7)
    assert found["layers.0.shared.fc1"] == (2, 3, 8, 9)
    assert found["layers.1.experts.3.fc2"] == (5, 11)


def test_two_directions_have_holders_at_both_ends() -> None:
    trial = Trial("dualpipe", ep(ep=2, pp=4, replicas=2, cluster="h800x2"), FOUR_LAYERS, 8)
    job = Job.of(trial.case(), "synthetic")
    found = holders(job.case.model, job.program.plan.placement, 2)
    # A replica's ranks: S0 = 0..1, S1 = 2..3, S2 = 4..5, S3 = 6..7; the second replica begins at 8.
    assert found["embed.weight"] == found["head.weight"] == (0, 1, 6, 7, 8, 9, 14, 15)
    assert found["layers.1.attention.qkv.weight"] == (2, 3, 4, 5, 10, 11, 12, 13)
    assert found["layers.2.experts.3.fc1"] == (3, 5, 11, 13)


def test_bad_cases_are_refused(pool: RankPool) -> None:
    with pytest.raises(BadInput, match="at least 12"):
        verify(Trial("disagmoe", af(2, 4, 2, cluster="h800x2")).case(), pool)
    with pytest.raises(BadInput, match="dtype"):
        verify(Trial("ep", ep(ep=1)).case(), pool, dtype="fp8")
    with pytest.raises(BadInput, match="copies"):
        verify(Trial("disagmoe", af(2, 2, copies="node")).case(), pool)
    with pytest.raises(BadInput, match="attention_bias"):
        verify(Trial("ep", ep(ep=1), {"attention_bias": True}).case(), pool)
    with pytest.raises(BadInput, match=r"'comet' .* its plan is modelled-only"):
        verify(Trial("comet", ep(ep=2, chunks=8, comm_sms=4)).case(), pool)
    with pytest.raises(BadInput, match=r"layout\.chunks: 3 .* a divisor of a micro-batch's 16 tokens"):
        verify(Trial("tutel", ep(ep=2, chunks=3)).case(), pool)
