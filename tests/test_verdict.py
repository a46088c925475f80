"""What follows from what is known of a job."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace as changed

import pytest
from launching import events, finished_process, job_of, queue_of, task

from experiments.launch.ledger import Ledger
from experiments.launch.slurm_state import Queue
from experiments.launch.verdict import Judge


@pytest.mark.parametrize(
    ("state", "reason", "attempt", "expected"),
    [
        ("RUNNING", "", 1, ("wait", "")),
        ("PENDING", "Resources", 1, ("wait", "")),
        ("PENDING", "BeginTime", 3, ("wait", "")),
        ("COMPLETING", "", 1, ("wait", "")),
        ("PENDING", "PartitionTimeLimit", 1, ("final", "Slurm will never start it: PartitionTimeLimit")),
        ("CANCELLED", "", 1, ("final", "the job was cancelled while it ran")),
        ("NODE_FAIL", "", 1, ("again", "the job lost its node")),
        ("PREEMPTED", "", 2, ("again", "the job was preempted")),
        ("TIMEOUT", "", 2, ("again", "the job reached its time limit")),
        ("TIMEOUT", "", 3, ("final", "the job reached its time limit; 3 of 3 attempts")),
        ("OUT_OF_MEMORY", "", 3, ("final", "the job ran out of host memory; 3 of 3 attempts")),
        ("FAILED", "", 3, ("final", "the job failed; 3 of 3 attempts")),
        ("PENDING", "launch failed requeued held", 1, ("again", "the job could not be started by Slurm")),
    ],
)
def test_states_lead_to_verdicts(
    ledger: Ledger, state: str, reason: str, attempt: int, expected: tuple[str, str]
) -> None:
    one = task()
    events(job_of(ledger, one, attempt=attempt), one)
    claim = ledger.claims([one.key])[one.key]
    verdict = Judge(ledger, 3, confirm_s=0).decide(claim, queue_of(state, reason))
    assert (verdict.what, verdict.message) == expected
    if verdict.what == "again":
        assert verdict.attempt == attempt + 1
    statuses = {"TIMEOUT": "timeout", "OUT_OF_MEMORY": "oom", "FAILED": "died"}
    assert verdict.status == (statuses.get(state, "error") if verdict.what == "final" else "error")


def test_an_end_counts_once_it_was_seen_for_a_while(ledger: Ledger) -> None:
    one = task()
    events(job_of(ledger, one), one)
    claim = ledger.claims([one.key])[one.key]
    judge = Judge(ledger, 3, confirm_s=0.05)
    assert judge.decide(claim, queue_of("NODE_FAIL")).what == "wait"
    time.sleep(0.06)
    assert judge.decide(claim, queue_of("PENDING")).what == "wait"  # Slurm has queued it again
    assert judge.decide(claim, queue_of("NODE_FAIL")).what == "wait"
    time.sleep(0.06)
    assert judge.decide(claim, queue_of("NODE_FAIL")).what == "again"


def test_only_the_task_that_ran_is_blamed(ledger: Ledger) -> None:
    ran, waited = task(0), task(1)
    events(job_of(ledger, ran, waited, attempt=3), ran)
    claims, judge = ledger.claims([ran.key, waited.key]), Judge(ledger, 3, confirm_s=0)
    assert judge.decide(claims[ran.key], queue_of("FAILED")).what == "final"
    verdict = judge.decide(claims[waited.key], queue_of("FAILED"))
    assert (verdict.what, verdict.attempt) == ("again", 3)


def test_an_exception_of_a_rank_is_final(ledger: Ledger) -> None:
    one = task()
    folder = job_of(ledger, one)
    events(folder, one)
    notes = [
        {"key": one.key, "time": 2.0, "status": "error", "message": "peer gone", "rank": 0},
        {"key": one.key, "time": 1.0, "status": "oom", "message": "too big", "rank": 3},
    ]
    for note in notes:
        (folder.path / f"failed.0.{note['rank']}").write_text(json.dumps(note) + "\n")
    verdict = Judge(ledger, 3, confirm_s=0).decide(ledger.claims([one.key])[one.key], queue_of("FAILED"))
    assert (verdict.what, verdict.status, verdict.message) == ("final", "oom", "rank 3: too big")


def test_a_rank_that_only_lost_another_does_not_decide(ledger: Ledger) -> None:
    one = task()
    folder = job_of(ledger, one)
    events(folder, one)
    note = {"key": one.key, "time": 1.0, "status": "error", "message": "peer gone", "rank": 0, "lost_peer": True}
    (folder.path / "failed.0.0").write_text(json.dumps(note) + "\n")
    claim = ledger.claims([one.key])[one.key]
    verdict = Judge(ledger, 3, confirm_s=0).decide(claim, queue_of("NODE_FAIL"))
    assert (verdict.what, verdict.attempt, verdict.message) == ("again", 2, "the job lost its node")
    own = {**note, "message": "too big", "rank": 3, "time": 2.0, "lost_peer": False}
    (folder.path / "failed.0.3").write_text(json.dumps(own) + "\n")
    verdict = Judge(ledger, 3, confirm_s=0).decide(claim, queue_of("FAILED"))
    assert (verdict.what, verdict.message) == ("final", "rank 3: too big")


def test_a_job_that_slurm_forgot_is_lost_when_it_stops_beating(ledger: Ledger) -> None:
    one = task()
    folder = job_of(ledger, one)
    events(folder, one)
    claim, judge = ledger.claims([one.key])[one.key], Judge(ledger, 3, confirm_s=0)
    assert judge.decide(claim, Queue(False)).what == "wait"
    assert judge.decide(claim, Queue(True)).what == "wait"
    os.utime(folder.events_path(0), (0, 0))
    assert judge.decide(claim, Queue(False)).what == "wait"
    assert judge.decide(claim, Queue(True)).message == "the job vanished"
    (folder.path / "ended.0").write_text("137\n")
    assert "(signal 9)" in judge.decide(claim, Queue(True)).message


def test_a_job_that_was_never_handed_over_is_made_again_once_its_maker_is_dead(ledger: Ledger) -> None:
    one = task()
    folder = job_of(ledger, one)
    (folder.path / "submitted").unlink()
    claim, judge = ledger.claims([one.key])[one.key], Judge(ledger, 3, confirm_s=0)
    assert judge.decide(claim, Queue(True)).what == "wait"
    orphan = changed(claim, owner=finished_process())
    assert judge.decide(orphan, Queue(False)).what == "wait"
    assert judge.decide(orphan, queue_of("PENDING")).what == "wait"
    verdict = judge.decide(orphan, Queue(True))
    assert (verdict.what, verdict.attempt) == ("again", 1)
