"""Whole sweeps on this machine."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from cases import make_case
from launching import (
    PATIENCE_S,
    PATIENT,
    RUN,
    finished_process,
    launch,
    one_record_each,
    ranks_of,
    started,
    sweep_of,
    task,
    wait_until,
)

from bench.errors import BadInput
from bench.trial import Trial
from experiments.launch import sweeps
from experiments.launch.ledger import Claim, Ledger
from experiments.launch.submission import JobFolder
from experiments.launch.work import Settings, Task


def test_a_sweep_runs_what_is_missing_and_nothing_twice(ledger: Ledger) -> None:
    tasks = [task(seed) for seed in range(5)]
    sweep, news = sweep_of(ledger, tasks[:3])
    assert sweep.run().statuses == {"ok": 3}
    assert [(event.done, event.total) for event in news] == [(1, 3), (2, 3), (3, 3)]
    again, news = sweep_of(ledger, tasks)
    outcome = again.run()
    assert (outcome.statuses, outcome.new, len(news)) == ({"ok": 5}, 2, 2)
    one_record_each(ledger, tasks)


def test_what_goes_wrong_is_a_record_and_the_others_go_on(ledger: Ledger) -> None:
    wrong = Task(make_case("ep", ep=3), Settings())
    tasks = [wrong, task()]
    sweep, _ = sweep_of(ledger, tasks)
    outcome = sweep.run()
    assert outcome.statuses == {"ok": 1, "error": 1}
    ((failed, trial),) = outcome.failed
    assert failed == wrong and "BadInput" in trial.message


def test_debugging_lets_errors_through(ledger: Ledger) -> None:
    sweep, _ = sweep_of(ledger, [Task(make_case("ep", ep=3), Settings())], executor="debug")
    with pytest.raises(BadInput):
        sweep.run()


def test_a_task_that_waits_for_a_place_is_spoken_of_once(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    one = task()
    ledger.claim(Claim(one.key, 1, 1, finished_process()))
    sweep, news = sweep_of(ledger, [one], executor="local", jobs=1)
    monkeypatch.setattr(sweep, "_free_slots", lambda busy: 0)
    for _ in range(3):
        assert not sweep._step()
    assert [event.text for event in news] == [f"{one.label}: the process that ran it died; attempt 2 of 3"]


def test_work_of_a_dead_process_is_taken_over_and_not_for_ever(ledger: Ledger) -> None:
    tasks = [task(0), task(1)]
    ledger.claim(Claim(tasks[0].key, 1, 1, finished_process()))
    ledger.claim(Claim(tasks[1].key, 1, 3, finished_process()))
    sweep, _ = sweep_of(ledger, tasks)
    outcome = sweep.run()
    assert outcome.statuses == {"ok": 1, "error": 1}
    assert outcome.failed[0][1].message == "the process that ran it died; 3 of 3 attempts"


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_work_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    both = [launch(tmp_path, "--json", cases=40) for _ in range(2)]
    done = tmp_path / "launch" / "done"
    end = time.monotonic() + 100
    while not (done.exists() and any(done.iterdir())) and time.monotonic() < end:
        time.sleep(0.01)
    both[0].kill()
    both[0].wait()
    out, err = both[1].communicate(timeout=200)
    assert both[1].returncode == 0, err
    assert json.loads(out)["statuses"] == {"ok": 40}
    trials = [Trial.parse(path.read_bytes()) for path in tmp_path.glob("*.json")]
    assert len({trial.provenance["task"] for trial in trials}) == len(trials) == 40


@pytest.mark.slow
def test_the_local_executor_runs_packs_in_processes_of_their_own(tmp_path: Path) -> None:
    out, err = launch(tmp_path, "--executor", "local", "--jobs", "2", "--json", cases=6).communicate(timeout=200)
    assert json.loads(out)["statuses"] == {"ok": 6}, err
    ledger = Ledger(tmp_path)
    (job,) = ledger.jobs.iterdir()
    folder = JobFolder(job)
    end = time.monotonic() + 60  # records come before the processes that made them have ended
    while None in (ended := [folder.ended(element) for element in (0, 1)]) and time.monotonic() < end:
        time.sleep(0.05)
    assert ended == [0, 0]
    standing = sweeps.standing(ledger, None)
    assert (standing.name, standing.done, standing.total) == ("tiny-simulate", 6, 6)
    case_id = next(iter(sweeps.read(ledger, None)[1].values())).spec.id  # type: ignore[attr-defined]
    (((one,), found, element),) = sweeps.logs_of(ledger, case_id[:8])
    assert one.label.startswith("ep tiny") and found.path == job and found.logs(element)


@PATIENT
@pytest.mark.slow
def test_ctrl_c_leaves_jobs_running_and_the_same_command_watches_again(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    first = launch(tmp_path, *RUN, "30", cases=1)
    wait_until(lambda: started(tmp_path))
    (rank,) = [one for one in ranks_of(tmp_path) if "experiments.launch.job" in one.cmdline()]
    rank.suspend()  # so that it does not end by itself
    try:
        first.send_signal(signal.SIGINT)
        _, err = first.communicate(timeout=PATIENCE_S)
        assert first.returncode == 130 and "jobs go on" in err and err.count("\n") == 1
        assert rank.is_running() and rank in ranks_of(tmp_path)
    finally:
        rank.resume()
    out, err = launch(tmp_path, *RUN, "30", "--json", cases=1).communicate(timeout=PATIENCE_S)
    assert json.loads(out)["statuses"] == {"ok": 1}, err
    assert [path.name.split(".")[1] for path in (tmp_path / "launch" / "claims").iterdir()] == ["0001"]
    wait_until(lambda: not ranks_of(tmp_path))


@PATIENT
@pytest.mark.slow
def test_a_killed_local_rank_is_replaced_and_a_cancelled_sweep_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    process = launch(tmp_path, *RUN, "100000", cases=1, TINY_RANKS="2")
    wait_until(lambda: started(tmp_path))
    rank = next(one for one in ranks_of(tmp_path) if "experiments.launch.job" in one.cmdline())
    rank.kill()
    wait_until(lambda: len(list(tmp_path.glob("launch/jobs/*/submitted"))) == 2)
    ledger = Ledger(tmp_path)
    assert sweeps.withdraw(ledger, None) == ("tiny-run", 1)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and "the sweep was cancelled" in err
    assert "the job failed (signal 9); attempt 2 of 3" in out
    wait_until(lambda: not ranks_of(tmp_path))
    assert not list(tmp_path.glob("*.json"))


def test_bad_input_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    wrong = tmp_path / "site.toml"
    wrong.write_text("colour = 1\n")
    for options, line in {
        ("--executor", "slurm", "--only", "model=x"): "",
        ("--executor", "pbs"): "--executor: 'pbs'",
        ("--backend", "guess"): "backend: 'guess' is not valid; allowed: simulate, run",
        ("--repeats", "0"): "repeats: 0",
        ("--only", "model=x"): "--only: 'model=x' is not valid; allowed: model=tiny",
        ("--site", str(wrong)): "site.colour",
        ("--pack",): "pack: True",
    }.items():
        process = launch(tmp_path / "r", *options)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 2 and out == ""
        assert line in err and err.count("\n") == 1 and err.startswith("moebench: ")
    assert not (tmp_path / "r").exists()
