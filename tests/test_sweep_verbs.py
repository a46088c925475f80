"""What can be asked of sweeps on this machine: a dry run, `moebench status`, `logs` and `cancel`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import PATIENCE_S, PATIENT, ROOT, RUN, events, job_of, launch, ranks_of, started, task, wait_until

from bench.case import CaseSpec
from bench.trial import content_id
from experiments.launch import sweeps
from experiments.launch.ledger import Ledger
from experiments.launch.work import Settings, Task


def begin(results: Path, verb: str, *options: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "bench.cli", verb, "--results", str(results), *options]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.Popen(words, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ask(results: Path, verb: str, *options: str, code: int = 0) -> str:
    process = begin(results, verb, *options)
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err
    return out or err


@pytest.mark.slow
def test_a_dry_run_says_what_every_run_asks_for_and_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    options = (*RUN, "2", "--repeats", "2", "--time", "00:05:00", "--dry-run", "--json")
    out, err = launch(tmp_path / "r", *options, cases=1, TINY_RANKS="2").communicate(timeout=200)
    found = json.loads(out)
    assert [run["run"] for run in found["runs"]] == ["ep tiny cpu2x2 8x16", "ep tiny cpu2x2 8x16 #2"], err
    for run in found["runs"]:
        assert (run["nodes"], run["ranks"], run["time_limit_s"], run["gpu_hours"]) == (1, 2, 300, 0)
        assert run["memory_bytes"] > 0
    assert found["scripts"] == []
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_status_and_logs_of_what_is_done(tmp_path: Path) -> None:
    _, err = launch(tmp_path, "--executor", "local", "--jobs", "1", cases=3).communicate(timeout=200)
    shown = ask(tmp_path, "status", "--watch")
    assert "tiny-simulate: 3 of 3" in shown and "ok" in shown and "left" not in shown, err
    standing = json.loads(ask(tmp_path, "status", "tiny-simulate", "--json"))
    assert (standing["counts"], standing["done"], standing["eta_s"], standing["cancelled"]) == ({"ok": 3}, 3, 0, False)
    case_id = next(iter(tmp_path.glob("*-simulated-*.json"))).name.partition("-")[0]
    (job,) = json.loads(ask(tmp_path, "logs", case_id[:8], "--json"))["jobs"]
    assert Path(job["script"]).is_file() and all(Path(path).is_file() for path in job["logs"])
    assert str(job["script"]) in ask(tmp_path, "logs", case_id)
    assert ask(tmp_path, "cancel") == "tiny-simulate: cancelled 0 jobs\n"
    assert json.loads(ask(tmp_path, "status", "--json"))["cancelled"] is False  # there was nothing to cancel


def test_a_case_whose_layout_was_searched_for_is_found_by_the_id_of_its_record(ledger: Ledger) -> None:
    spec = CaseSpec.make(**{name: getattr(task().spec, name) for name in CaseSpec.model_fields})
    one = Task(spec, Settings(budget=4))
    folder = job_of(ledger, one)
    sweeps.register(ledger, "x-simulate", [one], accounting=False)
    trial = one.run()
    assert trial.status == "ok" and ledger.commit(one.key, trial)
    assert trial.case_id != content_id(spec)
    (((found,), where, element),) = sweeps.logs_of(ledger, trial.case_id[:8])
    assert (found.key, where.path, element) == (one.key, folder.path, 0)


@pytest.mark.slow
def test_a_job_that_ends_without_a_word_is_shown_with_its_log_and_script(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('executor = "local"\nmax_attempts = 1\nsetup = ["exit 3"]\n')
    out, err = launch(tmp_path / "r", "--site", str(site), cases=1).communicate(timeout=PATIENCE_S)
    assert "the job failed (exit code 3); 1 of 1 attempts" in out, err
    for words, name in ((f"  log {tmp_path}", "_0_0_log.err"), (f"  script {tmp_path}", "script.sh")):
        (line,) = [line for line in out.splitlines() if line.startswith(words)]
        assert line.endswith(name) and Path(line.split()[-1]).is_file()


@pytest.mark.slow
def test_a_log_that_repeats_share_is_shown_once(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    options = (*RUN, "2", "--repeats", "2", "--pack")
    out, err = launch(tmp_path, *options, cases=1).communicate(timeout=200)
    assert "2 ok" in out, err
    case_id = next(iter(tmp_path.glob("*-measured-*.json"))).name.partition("-")[0]
    shown = ask(tmp_path, "logs", case_id)
    assert shown.startswith("ep tiny cpu2x2 4x16\nep tiny cpu2x2 4x16 #2\n  script ")
    assert shown.count("  script ") == 1
    (job,) = json.loads(ask(tmp_path, "logs", case_id, "--json"))["jobs"]
    assert job["runs"] == ["ep tiny cpu2x2 4x16", "ep tiny cpu2x2 4x16 #2"]


@pytest.mark.slow
def test_a_dry_run_without_slurm_shows_the_script_and_what_it_could_not_check(tmp_path: Path) -> None:
    options = ("--executor", "slurm", "--partition", "any", "--jobs", "2")
    nowhere = {"PATH": str(tmp_path)}
    out, err = launch(tmp_path / "r", *options, "--dry-run", **nowhere).communicate(timeout=200)
    assert "#SBATCH --partition=any" in out and "#SBATCH --array=0-1%2" in out
    assert err == (
        "moebench: partition, nodes and time limit are not checked: that takes a machine with Slurm; there is no "
        "sbatch here\n"
    )
    out, err = launch(tmp_path / "r", *options, **nowhere).communicate(timeout=200)
    assert not out and err.startswith("moebench: --executor: 'slurm' is not valid; allowed: a machine with Slurm")
    assert not (tmp_path / "r").exists()


def test_status_tells_a_job_that_is_starting_from_one_that_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm here says how its job stands
    ledger, tasks = Ledger(tmp_path), [task(0), task(1)]
    ledger.make()
    folder = job_of(ledger, *tasks)
    sweeps.register(ledger, "x", tasks, False)
    assert sweeps.standing(ledger, "x").waiting == {"in a job that is starting": 2}
    events(folder, tasks[0])
    now = sweeps.standing(ledger, "x")
    assert now.counts == {"running": 1, "waiting": 1} and now.waiting == {"behind others in a running job": 1}


@PATIENT
@pytest.mark.slow
def test_who_watches_a_sweep_sees_it_cancelled(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    sweep = launch(tmp_path, *RUN, "100000", cases=1)
    try:
        wait_until(lambda: started(tmp_path))
        running = json.loads(ask(tmp_path, "status", "--json"))
        assert (running["counts"], len(running["running"]), running["cancelled"]) == ({"running": 1}, 1, False)
        watcher = begin(tmp_path, "status", "--watch")
        assert json.loads(ask(tmp_path, "cancel", "--json")) == {"kind": "cancel", "name": "tiny-run", "jobs": 1}
        shown, _ = watcher.communicate(timeout=PATIENCE_S)
        _, err = sweep.communicate(timeout=PATIENCE_S)
    finally:
        sweep.kill()
    assert watcher.returncode == 0 and "cancelled; `moebench sweep` goes on with it" in shown
    assert sweep.returncode == 1 and "the sweep was cancelled" in err
    wait_until(lambda: not ranks_of(tmp_path))


@pytest.mark.parametrize(
    ("verb", "options", "line"),
    [
        ("status", (), "--results: "),
        ("cancel", ("nothing",), "--results: "),
        ("logs", ("abc",), "case: 'abc' is not valid; allowed: the beginning of the id of a case in a sweep"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(tmp_path: Path, verb: str, options: tuple[str, ...], line: str) -> None:
    said = ask(tmp_path / "absent", verb, *options, code=2)
    assert said.startswith(f"moebench: {line}") and said.count("\n") == 1
    assert not (tmp_path / "absent").exists()
