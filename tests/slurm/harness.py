"""A Slurm on this host and sweeps on it, for the tests of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from bench.execute.flight import Phase, read_slots
from bench.results import read_trial
from bench.trial import Trial
from experiments.launch.submission import JobFolder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE_S = 240.0
RUN = ("--backend", "run")
HELD = (*RUN, "--steps", "40")
"""Options of runs that are held: long enough that a rank is seen to run and stopped before it ends."""


class Cluster:
    """The Slurm that the tests use, and sweeps on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(root / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MOEBENCH_SITE": str(root / "site.toml"),
        }
        self.sweeps: list[subprocess.Popen[str]] = []
        self.site()

    def site(self, **fields: object) -> None:
        """Writes the site file: short intervals, and what is given."""
        values = {"executor": "slurm", "poll_s": 1.0, "heartbeat_s": 1.0, **fields}
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        (self.root / "site.toml").write_text("\n".join(lines) + "\n")

    def start(self, **settings: str) -> None:
        """settings: variables of start_slurm.sh."""
        # Daemons inherit what they are given: with pipes, waiting for their end would wait for ever.
        with (self.root / "scripts.log").open("ab") as log:
            command = ["bash", str(HERE / "start_slurm.sh"), str(self.root)]
            subprocess.run(command, env={**self.env, **settings}, stdout=log, stderr=log, check=True, timeout=300)

    def command(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop_controller(self) -> None:
        process = psutil.Process(int((self.root / "slurmctld.pid").read_text()))
        process.terminate()
        process.wait(30)

    def start_controller(self, forget: bool = False) -> None:
        if forget:
            shutil.rmtree(self.root / "state")
            (self.root / "state").mkdir()
        with (self.root / "scripts.log").open("ab") as log:
            subprocess.run(["slurmctld", *(["-c"] if forget else [])], env=self.env, stdout=log, stderr=log, check=True)
        wait_until(self.answers)

    def answers(self) -> bool:
        done = subprocess.run(["scontrol", "ping"], env=self.env, capture_output=True, check=False)
        return done.returncode == 0

    @contextlib.contextmanager
    def held(self, number: int = 1) -> Iterator[None]:
        """That many ranks of jobs stand still, each from the beginning of its run on: whatever else this machine does,
        none has ended and none ends."""
        ranks: dict[int, psutil.Process] = {}
        held: set[int] = set()

        def all_held() -> bool:
            if len(ranks) < number:
                ranks.update((rank.pid, rank) for rank in self.ranks())
            for pid, rank in ranks.items():
                if pid not in held and _runs_a_case(rank):
                    rank.suspend()
                    held.add(pid)
            return len(held) >= number

        over = threading.Event()

        def hold_again() -> None:
            """Slurm's signals to a job come with one that lets it go on."""
            while not over.wait(0.005):
                for pid in list(held):
                    with contextlib.suppress(psutil.Error):
                        if ranks[pid].status() != psutil.STATUS_STOPPED:
                            ranks[pid].suspend()

        holding = threading.Thread(target=hold_again, daemon=True)
        try:
            wait_until(all_held, every_s=0.02)
            holding.start()
            yield
        finally:
            over.set()
            if holding.ident is not None:
                holding.join()
            for pid in held:
                with contextlib.suppress(psutil.NoSuchProcess):
                    ranks[pid].resume()

    def ranks(self) -> list[psutil.Process]:
        """The processes that train or simulate in sweeps' jobs on this cluster."""
        found = []
        for process in self.job_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "experiments.launch.job" in process.cmdline() and process.name() != "srun":
                    found.append(process)
        return found

    def job_processes(self) -> list[psutil.Process]:
        """Processes of sweeps' jobs on this cluster, without Slurm's own."""
        found = []
        for process in psutil.process_iter(["name"]):
            try:
                env = process.environ()
            except (psutil.Error, OSError):
                continue
            ours = env.get("SLURM_CONF") == self.env["SLURM_CONF"] and env.get("SLURM_JOB_NAME", "").startswith(
                "moebench"
            )
            if ours and process.info["name"] not in ("slurmstepd", "slurmd", "slurmctld"):
                found.append(process)
        return found


class Sweep:
    """A `moebench sweep` of the tiny cases in a process of its own."""

    def __init__(self, cluster: Cluster, results: Path, *options: str, cases: int, ranks: int = 1, systems: str = "ep"):
        self.cluster, self.results, self.num_tasks = cluster, results, cases * len(systems.split(","))
        self.env = {
            **cluster.env,
            "TINY_CASES": str(cases),
            "TINY_RANKS": str(ranks),
            "TINY_SYSTEMS": systems,
        }
        self.words = [sys.executable, "-m", "bench.cli", "sweep", str(HERE / "tiny.py"), "--results", str(results)]
        self.words += options
        self.process: subprocess.Popen[str] | None = None

    def begin(self) -> Sweep:
        self.process = subprocess.Popen(
            self.words, env=self.env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.cluster.sweeps.append(self.process)
        return self

    def end(self, code: int = 0) -> str:
        """Waits for its end and returns what it said."""
        assert self.process is not None
        said, _ = self.process.communicate(timeout=2 * PATIENCE_S)
        assert self.process.returncode == code, said
        return said

    def run(self, code: int = 0) -> str:
        return self.begin().end(code)

    def ask(self, verb: str, *options: str) -> str:
        """What another verb says of the sweep."""
        return self.cluster.command(*self.words[:3], verb, "--results", str(self.results), *options)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def events(self, kind: str) -> list[dict[str, object]]:
        paths = self.results.glob("launch/jobs/*/events.*")
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]

    def ranks_in(self, phase: Phase) -> list[Path]:
        """Flight recorders of the ranks that have come to a phase."""
        found = self.results.glob("launch/jobs/*/flight.*")
        return [path for path in found if read_slots(path)[:1] == (phase,)]

    def wait_for(self, kind: str, number: int = 1) -> None:
        """Until jobs have written that many events of a kind."""
        wait_until(lambda: len(self.events(kind)) >= number)

    def records(self) -> dict[str, list[Trial]]:
        """Trials by task."""
        found: dict[str, list[Trial]] = {}
        for path in self.results.glob("*.json"):
            trial = read_trial(path)
            found.setdefault(trial.provenance["task"], []).append(trial)
        return found

    def require_complete(self, **statuses: int) -> None:
        """Every case has one record and no more, and nothing that the sweep started is left."""
        records = self.records()
        assert len(records) == self.num_tasks
        assert [len(trials) for trials in records.values()] == [1] * self.num_tasks
        counts: dict[str, int] = {}
        for (trial,) in records.values():
            counts[trial.status] = counts.get(trial.status, 0) + 1
        assert counts == (statuses or {"ok": self.num_tasks})
        kept = [event["key"] for event in self.events("case-end") if event["kept"]]
        assert len(kept) == len(set(kept))
        wait_until(lambda: not self.cluster.job_processes())


def _runs_a_case(rank: psutil.Process) -> bool:
    """Whether the first rank of the process's job has noted that a case has started."""
    folder, element = JobFolder(Path(rank.cmdline()[-1])), int(rank.environ()["SLURM_ARRAY_TASK_ID"])
    return any(event["event"] == "case-start" for event in folder.events(element))


def wait_until(true: Callable[[], bool], patience_s: float = PATIENCE_S, every_s: float = 0.2) -> None:
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(every_s)


def running_slurm(**settings: str) -> Iterator[Cluster]:
    """A Slurm of four nodes while the caller goes on; where there can be none, skips, or fails if one was promised.

    settings: variables of start_slurm.sh.
    """
    programs = ["slurmctld", "munged", *(["slurmdbd", "mariadbd"] if settings.get("ACCOUNTING") == "1" else [])]
    absent = [program for program in programs if shutil.which(program) is None]
    if absent or os.geteuid():
        _go_without(f"needs root and Slurm's packages; absent: {', '.join(absent) or 'nothing'}")
    root = Path(tempfile.mkdtemp(prefix="moebench-slurm-"))
    root.chmod(0o755)  # munged wants its socket to be reached by everybody
    with _stopped_at_the_end(root):
        cluster = Cluster(root)
        cluster.start(**_free_ports(), **settings)
        yield cluster


@contextlib.contextmanager
def _stopped_at_the_end(root: Path) -> Iterator[None]:
    """Stops the daemons and all that uses them when the caller is done, and also when this process is killed."""
    # It waits for the end of its input, which comes in either case.
    script = f'cat; timeout 100 bash "{HERE}/stop_slurm.sh" "{root}"; rm -rf "{root}"'
    env = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}  # by which it finds processes
    nowhere = subprocess.DEVNULL
    stopper = subprocess.Popen(
        ["bash", "-c", script], stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, env=env, start_new_session=True
    )
    try:
        yield
    finally:
        assert stopper.stdin is not None
        stopper.stdin.close()
        stopper.wait(timeout=120)


def _free_ports() -> dict[str, str]:
    """Ports in a row that nobody uses, as variables of start_slurm.sh."""
    names = ("CTLPORT", "DBDPORT", "SQLPORT", "PORT0", "PORT1", "PORT2", "PORT3")
    for first in range(16000 + 100 * (os.getpid() % 100), 32000, 10):
        numbers = range(first, first + len(names))
        with contextlib.ExitStack() as taken:
            try:
                for number in numbers:
                    taken.enter_context(socket.create_server(("127.0.0.1", number)))
            except OSError:
                continue
        return {name: str(number) for name, number in zip(names, numbers, strict=True)}
    raise AssertionError("no free ports")


def _go_without(why: str) -> NoReturn:
    """Where a Slurm was promised, its absence is a failure."""
    if os.environ.get("REQUIRE_SLURM"):
        pytest.fail(why)
    pytest.skip(why)


def emptied(slurm: Cluster) -> Iterator[Cluster]:
    """The Slurm, put in order before a test and emptied after it, also where the test failed half-way."""
    slurm.site()
    yield slurm
    for sweep in slurm.sweeps:
        sweep.kill()  # one that a failed test has left would start jobs again
        sweep.wait()
    slurm.sweeps.clear()
    if not slurm.answers():
        slurm.start_controller()
    subprocess.run(["scancel", "--user", "root"], env=slurm.env, check=False, timeout=60)
    wait_until(lambda: not slurm.command("squeue", "-h"))
    wait_until(lambda: not slurm.job_processes())
