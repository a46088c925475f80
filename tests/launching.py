"""Tasks, claims, jobs and sweeps for tests of the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cases import make_case

from bench.trial import Trial
from experiments.launch import site
from experiments.launch.flights import last_actions
from experiments.launch.ledger import Ledger
from experiments.launch.locks import Process
from experiments.launch.outcome import Event
from experiments.launch.pack import SIMULATION
from experiments.launch.slurm_state import Queue, Seen
from experiments.launch.submission import JobFolder, Start, prepare
from experiments.launch.watch import Plan, Sweep
from experiments.launch.work import Settings, Task

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "slurm" / "tiny.py"
SITE = site.Site()


def task(seed: int = 0, repeat: int = 0, backend: str = "simulate", **layout: int) -> Task:
    case = make_case("ep", **layout)
    case = case.model_copy(update={"workload": case.workload.model_copy(update={"seed": seed})})
    return Task(case, Settings(backend=backend), repeat)  # type: ignore[arg-type]


def finished_process() -> Process:
    """A process of this host that has come and gone."""
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process.of(child.pid)
        child.kill()
    return process


def job_of(ledger: Ledger, *tasks: Task, attempt: int = 1) -> JobFolder:
    """A job that Slurm has taken, with one element."""
    wanted = [[Start(one, 1, attempt) for one in tasks]]
    record = prepare(ledger, "moebench-x-1", wanted, SIMULATION, 30, site.Site(executor="slurm"))
    assert record is not None
    folder = JobFolder(ledger.jobs / record.name)
    (folder.path / "submitted").write_text("7\n")
    return folder


def events(folder: JobFolder, *started: Task) -> None:
    lines = [{"event": "job-start"}, *({"event": "case-start", "key": one.key} for one in started)]
    folder.events_path(0).write_text("".join(json.dumps(line) + "\n" for line in lines))


def queue_of(state: str, reason: str = "") -> Queue:
    return Queue(True, {("moebench-x-1", 0): Seen("7_0", state, reason)})


def plan_of(tasks: list[Task], **fields: object) -> Plan:
    return Plan("x-simulate", "x", tasks, site.Site.make(**fields))


def sweep_of(ledger: Ledger, tasks: list[Task], **fields: object) -> tuple[Sweep, list[Event]]:
    news: list[Event] = []
    return Sweep(plan_of(tasks, **fields), ledger, news.append), news


def one_record_each(ledger: Ledger, tasks: list[Task]) -> list[Trial]:
    trials = [Trial.parse(path.read_bytes()) for path in ledger.results.glob("*.json")]
    assert sorted(trial.provenance["task"] for trial in trials) == sorted(one.key for one in tasks)
    return trials


def launch(results: Path, *options: str, cases: int = 4, **env: str) -> subprocess.Popen[str]:
    # A shell that runs the tests in its background has its children ignore Ctrl-C.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom bench.cli import main; main()"
    )
    words = [sys.executable, "-c", program, "sweep", str(TINY), "--results", str(results)]
    return subprocess.Popen(
        [*words, *options],
        cwd=ROOT,
        env={**os.environ, "TINY_CASES": str(cases), "XDG_CONFIG_HOME": str(results / "none"), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


RUN = ("--executor", "local", "--backend", "run", "--steps")


PATIENCE_S = 280.0
"""Of tests that wait for processes: where all goes well they take a small part of it, also on a busy machine."""
PATIENT = pytest.mark.timeout(3 * PATIENCE_S)


def wait_until(true: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def ranks_of(results: Path) -> list[psutil.Process]:
    """Processes of the jobs of a results folder, their controllers among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if any(str(results / "launch" / "jobs") in word for word in words):
                found.append(process)
    return found


def started(results: Path) -> bool:
    return any("case-start" in path.read_text() for path in results.glob("launch/jobs/*/events.0"))


def held_in_an_action(folder: JobFolder, rank: int, process: psutil.Process) -> tuple[str, ...]:
    """Stops a rank of a job's first task in the middle of an action, however this machine shares its time.

    Returns what every rank did last, once the others have come as far as they can without it: into the same step.
    """
    one = folder.entries(0)[0].task
    while True:
        process.suspend()
        wait_until(lambda: _stands_still(process))
        inside = re.match(rf"rank {rank}: (in step \d+: )(.*; )?\w+ in ", last_actions(folder, 0, one)[rank])
        if inside:
            break
        process.resume()
        time.sleep(0.01)
    wait_until(lambda: all(f": {inside[1]}" in line for line in last_actions(folder, 0, one)))
    return last_actions(folder, 0, one)


def _stands_still(process: psutil.Process) -> bool:
    """Whether every thread of a stopped process has stopped, where that can be seen."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
    try:
        states = {path.read_text().rpartition(")")[2].split()[0] for path in threads}
    except FileNotFoundError:  # one that has just ended
        return False
    return process.status() == psutil.STATUS_STOPPED and states <= {"T"}
