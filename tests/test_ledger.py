"""Claims and ends of tasks, and what is taken over or run again."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as changed
from pathlib import Path

import pytest
from launching import events, job_of, queue_of, sweep_of, task

from bench.errors import BadInput
from bench.results import Store, read_trial
from bench.trial import Trial
from experiments.launch.kept import adopt
from experiments.launch.ledger import Claim, Ledger, link_new, mark
from experiments.launch.locks import Process
from experiments.launch.submission import JobRecord
from experiments.launch.verdict import Judge
from experiments.launch.work import Settings, Task


def test_one_of_many_gets_a_claim(ledger: Ledger) -> None:
    claims = [Claim("k", 1, 1, Process.current(), job=str(number)) for number in range(32)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(ledger.claim, claims))
    assert won.count(True) == 1
    assert ledger.claims(["k", "other"]) == {"k": claims[won.index(True)]}


def test_a_claim_that_was_never_written_to_disk_is_taken_over(ledger: Ledger) -> None:
    one = task()
    assert ledger.claim(Claim(one.key, 1, 1, Process.current()))
    (ledger.root / "claims" / f"{one.key}.0001").write_text("")
    (ledger.root / "claims" / f"{one.key}.0001~").write_text("of an editor")
    sweep, _ = sweep_of(ledger, [one])
    assert sweep.run().statuses == {"ok": 1}
    assert [claim.generation for claim in ledger.history(one.key)] == [1, 2]
    job = job_of(ledger, task(1))
    (job.path / "job").write_text("")
    assert JobRecord.read(job.path) is None


def test_a_later_claim_ends_an_earlier_one(ledger: Ledger) -> None:
    for generation in (1, 2):
        assert ledger.claim(Claim("k", generation, 1, Process.current()))
    assert not ledger.holds("k", 1) and ledger.holds("k", 2)
    assert [claim.generation for claim in ledger.history("k")] == [1, 2]


def test_a_task_has_one_record(ledger: Ledger) -> None:
    one = task()
    with ThreadPoolExecutor(8) as pool:
        trials = [one.failed("error", f"attempt {number}") for number in range(8)]
        won = list(pool.map(lambda trial: ledger.commit(one.key, trial), trials))
    assert won.count(True) == 1
    kept = ledger.trial(one.key)
    assert kept is not None and kept.message == trials[won.index(True)].message
    assert len(list(ledger.results.glob("*.json"))) == 1
    assert not ledger.holds(one.key, 1)


def test_a_commit_that_was_cut_short_is_finished(ledger: Ledger) -> None:
    one = task()
    trial = one.run()
    link_new(ledger.root / "done" / one.key, trial.to_text())
    assert not list(ledger.results.glob("*.json"))
    ledger.recover()
    assert Trial.parse(next(ledger.results.glob("*.json")).read_bytes()) == trial
    assert ledger.trial(one.key) == trial


def test_a_record_that_was_removed_is_made_again(ledger: Ledger) -> None:
    one = task()
    ledger.commit(one.key, one.run())
    next(ledger.results.glob("*.json")).unlink()
    ledger.recover()
    assert ledger.done() == set()


def test_results_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="a directory that can be written"):
        Ledger(tmp_path / "file").make()


def test_a_full_disk_names_the_file_and_leaves_nothing_half_written(ledger: Ledger) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))  # writes beyond it fail, as on a full disk
    try:
        with pytest.raises(OSError, match="File too large") as failed:
            ledger.commit(task().key, task().failed("error", "on purpose"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert failed.value.filename == str(ledger.root / "done" / task().key)
    assert not [path for path in ledger.results.rglob("*") if path.is_file()]


def test_a_task_survives_being_written_down() -> None:
    for one in (task(3), task(repeat=2, backend="run"), Task(task().spec, Settings(overrides=("a=1",), budget=4))):
        assert Task.parse(one.to_text()) == one


def test_keys_tell_what_results_depend_on() -> None:
    base = task(backend="run")
    other_steps = changed(base, settings=changed(base.settings, steps=21))
    assert len({base.key, task().key, task(1, backend="run").key, task(0, 1, "run").key, other_steps.key}) == 5


def test_simulated_results_of_others_are_taken_over(ledger: Ledger) -> None:
    one = task()
    Store(ledger.results).write(one.run())
    adopt(ledger, [one, task(1)], retry_failed=False)
    assert ledger.done() == {one.key}


def test_failed_tasks_are_run_again_only_if_asked(ledger: Ledger) -> None:
    one = task()
    ledger.commit(one.key, one.failed("timeout", "too slow"))
    adopt(ledger, [one], retry_failed=False)
    assert ledger.done() == {one.key}
    adopt(ledger, [one], retry_failed=True)
    assert ledger.done() == set()
    assert len(list(ledger.results.glob("*.json"))) == 1


def test_a_task_that_is_opened_again_starts_afresh(ledger: Ledger) -> None:
    one = task()
    events(job_of(ledger, one, attempt=3), one)
    judge = Judge(ledger, 3, confirm_s=0)
    claim = ledger.claims([one.key])[one.key]
    assert judge.decide(claim, queue_of("TIMEOUT")).what == "final"
    ledger.commit(one.key, one.failed("timeout", "too slow"))
    adopt(ledger, [one], retry_failed=True)
    verdict = judge.decide(claim, queue_of("TIMEOUT"))
    assert (verdict.what, verdict.attempt) == ("again", 1)


def test_a_success_does_not_hide_behind_an_earlier_failure(ledger: Ledger) -> None:
    one = task()
    ledger.commit(one.key, one.failed("error", "bad luck"))
    adopt(ledger, [one], retry_failed=True)
    assert ledger.commit(one.key, one.run())
    kept = ledger.trial(one.key)
    assert kept is not None and kept.status == "ok"
    assert len({path.name for path in ledger.results.glob("*.json")}) == 2
    assert kept.name != one.failed("error", "bad luck").name
    adopt(ledger, [one], retry_failed=False)
    assert ledger.trial(one.key) == kept


@pytest.mark.filterwarnings("ignore:not trials")
@pytest.mark.parametrize("damage", ["empty", "cut", "newer"])
def test_an_end_whose_record_cannot_be_read_does_not_stop_the_sweep(ledger: Ledger, damage: str) -> None:
    """What a power failure or another version of the code leaves; the task is run again, and the file stays."""
    one = task()
    ledger.commit(one.key, one.run())
    record = next(ledger.results.glob("*.json"))
    text = record.read_text()
    record.unlink()  # the marker of the end may be the same file
    newer = text.replace('"schema_version": 2', '"schema_version": 99')
    record.write_text({"empty": "", "cut": text[: len(text) // 2], "newer": newer}[damage])
    adopt(ledger, [one], retry_failed=False)
    assert ledger.done() == set()
    assert ledger.commit(one.key, one.run())
    kept = ledger.trial(one.key)
    assert kept is not None and kept.status == "ok"


def test_an_end_that_was_never_written_is_forgotten(ledger: Ledger) -> None:
    one = task()
    (ledger.root / "done" / one.key).touch()
    ledger.recover()
    assert ledger.done() == set()


def test_samples_of_a_run_lie_beside_its_record_as_those_of_a_single_run(ledger: Ledger) -> None:
    one = task(backend="run")
    trial = one.failed("hang", "no answer").model_copy(
        update={"samples": {"loss": [3.0, 2.5]}, "telemetry_samples": {"power_w": [None, 300.0]}}
    )
    assert ledger.commit(one.key, trial)
    (record,) = ledger.results.glob("*.json")
    assert "300.0" not in record.read_text() and len(list(ledger.results.glob("*.parquet"))) == 2
    kept = read_trial(record)
    assert (kept.samples, kept.telemetry_samples) == (trial.samples, trial.telemetry_samples)
    assert (ledger.root / "done" / one.key).read_text() == f"{record.stem}\n"


def test_a_run_with_samples_is_taken_over_with_them(ledger: Ledger) -> None:
    one = task(backend="run")
    trial = mark(one.failed("oom", "too big"), one.key)
    Store(ledger.results).write(trial.model_copy(update={"samples": {"loss": [3.0, 2.5]}}))
    adopt(ledger, [one], retry_failed=False)
    assert ledger.done() == {one.key}
    assert [read_trial(path).samples["loss"] for path in ledger.results.glob("*.json")] == [[3.0, 2.5]]
    for path in ledger.results.glob("*.parquet"):
        path.unlink()
    other = Ledger(ledger.results)
    other.reopen(one.key)
    adopt(other, [one], retry_failed=False)
    assert other.done() == set()
