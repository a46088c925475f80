"""What the ranks of a launcher's job did last, as their records and `moebench logs` tell it."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from launching import PATIENCE_S, PATIENT, RUN, events, held_in_an_action, job_of, launch, ranks_of, task, wait_until

from bench.execute.flight import Flight, Phase, read_slots
from bench.results import read_trials
from experiments.launch import sweeps
from experiments.launch.flights import last_actions
from experiments.launch.ledger import Ledger
from experiments.launch.submission import JobFolder


def test_the_last_start_speaks_unless_an_earlier_one_is_asked_for(ledger: Ledger) -> None:
    one = task(backend="run")
    folder = job_of(ledger, one)
    assert last_actions(folder, 0, one) == ()
    events(folder, one)
    Flight(folder.recorder(0, 0, 0)).phase(Phase.DONE, 4)
    Flight(folder.recorder(0, 1, 0)).phase(Phase.STARTING)
    assert last_actions(folder, 0, one)[0].startswith("rank 0: setting up, for ")
    assert last_actions(folder, 0, one, before=1) == ("rank 0: after step 5, for 0.0 s",)
    assert last_actions(folder, 0, task()) == ()  # a simulation
    (folder.path / "ended.0").write_text("1\n")
    os.utime(folder.path / "ended.0", (0, time.time() + 100))  # by the clock of the file system
    assert last_actions(folder, 0, one)[0].startswith(("rank 0: setting up, for 99.", "rank 0: setting up, for 100."))


def test_a_task_was_running_until_it_ended(ledger: Ledger) -> None:
    first, second = task(0), task(1)
    folder = job_of(ledger, first, second)
    events(folder, first)
    assert folder.was_running(0, first.key) and not folder.was_running(0, second.key)
    with folder.events_path(0).open("a") as file:
        file.write(json.dumps({"event": "case-end", "key": first.key}) + "\n")
    assert not folder.was_running(0, first.key)


@PATIENT
@pytest.mark.slow
def test_the_record_of_a_killed_rank_has_the_last_actions_of_all(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    site = tmp_path / "site.toml"
    site.write_text("max_attempts = 1\n")
    sweep = launch(tmp_path, *RUN, "100000", "--site", str(site), cases=1, TINY_RANKS="2")
    try:
        wait_until(lambda: _in_steps(tmp_path, 2))
        ranks = [one for one in ranks_of(tmp_path) if "experiments.launch.job" in one.cmdline()]
        last = next(one for one in ranks if one.environ()["SUBMITIT_LOCAL_GLOBALID"] == "1")
        held = held_in_an_action(*_jobs(tmp_path), 1, last)
        last.kill()
        out, err = sweep.communicate(timeout=PATIENCE_S)
    finally:
        sweep.kill()
        sweeps.withdraw(Ledger(tmp_path), None)
    assert sweep.returncode == 1, err
    ((_, trial),) = read_trials([tmp_path])
    assert (trial.status, trial.message) == ("died", "the job failed (signal 9); 1 of 1 attempts")
    assert [line.partition(":")[0] for line in trial.last_actions] == ["rank 0", "rank 1"]
    assert all(re.match(r"rank \d: in step \d+: compute (in|after) ", line) for line in trial.last_actions)
    assert trial.last_actions[1].rpartition(" for ")[0] == held[1].rpartition(" for ")[0]
    assert all(f"  {line[:100]}" in out for line in trial.last_actions)


def _in_steps(results: Path, num_ranks: int) -> bool:
    """Whether every rank of the only job has begun its second step."""
    slots = [read_slots(folder.recorder(0, 0, rank)) for folder in _jobs(results) for rank in range(num_ranks)]
    return bool(slots) and all(one and one[:2] >= (Phase.STEP, 1) for one in slots)


def _jobs(results: Path) -> list[JobFolder]:
    return [JobFolder(path) for path in results.glob("launch/jobs/*")]
