"""A submission: a fresh folder with all that a job needs and says, and its way into Slurm or onto this machine."""

import json
import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench.provenance import ROOT
from experiments.launch.ledger import Claim, Ledger, read_lines, replace
from experiments.launch.locks import Process
from experiments.launch.pack import Shape
from experiments.launch.site import Site
from experiments.launch.slurm_state import COMMAND_TIMEOUT_S, SlurmError, complaint, plain_env
from experiments.launch.work import Task

MODULE = "experiments.launch.job"
LOCAL_SCRIPT = "script.sh"
SUBMIT_TIMEOUT_S = 2 * COMMAND_TIMEOUT_S


class Start(NamedTuple):
    """A task to be started, as which generation of its claims and which attempt."""

    task: Task
    generation: int
    attempt: int


@dataclass(frozen=True)
class Entry:
    """A task in a job, with the claim under which it runs there."""

    task: Task
    key: str  # of the task when it was claimed: it would change with the code
    generation: int
    attempt: int

    def to_text(self) -> str:
        fields = {"key": self.key, "generation": self.generation, "attempt": self.attempt}
        return json.dumps({**fields, "task": self.task.to_text()})

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> "Entry":
        return cls(Task.parse(fields["task"]), fields["key"], fields["generation"], fields["attempt"])


@dataclass(frozen=True)
class JobRecord:
    """What a job's folder says of it. name: of the folder and, in Slurm, of the job; never used twice."""

    name: str
    executor: str
    results: str
    shape: Shape
    minutes: int
    max_attempts: int
    heartbeat_s: float
    num_elements: int

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "JobRecord | None":
        try:
            fields = json.loads((folder / "job").read_text())
        except (FileNotFoundError, ValueError):  # not written, or lost with the power
            return None
        return cls(**{**fields, "shape": Shape(**fields["shape"])})


class JobFolder:
    """The files of one job. Elements are the places of its array."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, element: int) -> list[Entry]:
        return [Entry.parse(line) for line in read_lines(self.path / f"tasks.{element}")]

    def events_path(self, element: int) -> Path:
        return self.path / f"events.{element}"

    def events(self, element: int) -> list[dict[str, Any]]:
        """What the job's first rank wrote: job-start, case-start, case-end."""
        return read_lines(self.events_path(element))

    def recorder(self, element: int, restart: int, rank: int) -> Path:
        """File in which a rank notes what it does, see `bench.execute.flight`; every start of the job has its own."""
        return self.path / f"flight.{element}.{restart}.{rank}"

    def restarts(self, element: int) -> list[int]:
        """Numbers of the starts that left such files, the last one last."""
        return sorted({int(path.name.split(".")[2]) for path in self.path.glob(f"flight.{element}.*")})

    def last_sign(self, element: int) -> float | None:
        """When the element ended, or last showed that it lives, by the clock of the file system."""
        for path in (self.path / f"ended.{element}", self.events_path(element)):
            try:
                return path.stat().st_mtime
            except OSError:
                continue
        return None

    def was_running(self, element: int, key: str) -> bool:
        """Whether a task had been started and not ended when the element was last heard of."""
        mine = [event["event"] for event in self.events(element) if event.get("key") == key]
        return bool(mine) and mine[-1] == "case-start"

    def ended(self, element: int) -> int | None:
        """Exit code of an element that came to its end; None where it did not, or not yet."""
        try:
            return int((self.path / f"ended.{element}").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return None

    def failure(self, element: int, key: str) -> dict[str, Any] | None:
        """The exception that a rank of the element raised in a task; the first, where several did.

        One that only says that another rank was lost tells no cause: it counts for nothing, and the job's end decides.
        """
        found = [line for path in self.path.glob(f"failed.{element}.*") for line in read_lines(path)]
        own = [line for line in found if line["key"] == key and not line.get("lost_peer")]
        return min(own, key=lambda line: line["time"], default=None)

    def submitted(self) -> str | None:
        """What Slurm, or this host, calls the job: its id, or the processes that control it."""
        try:
            return (self.path / "submitted").read_text().strip()
        except FileNotFoundError:
            return None

    def logs(self, element: int) -> list[Path]:
        """Files of the ranks' output, errors first, lower ranks first."""
        found = [*self.path.glob(f"*_{element}_*_log.err"), *self.path.glob(f"*_{element}_*_log.out")]
        return sorted(found, key=lambda path: (path.suffix, _rank_of(path)))

    def script(self) -> Path:
        """What was given to Slurm, or is run on this machine."""
        return next(iter(sorted(self.path.glob("*_submission.sh"))), self.path / LOCAL_SCRIPT)

    def launch_line(self) -> str:
        """Of a local job: the shell line of a rank; the word ELEMENT in it stands for the element."""
        return (self.path / LOCAL_SCRIPT).read_text()

    def drop(self, word: str) -> None:
        """Notes that the job will not be run: ``refused`` by Slurm, or ``withdrawn`` by its user."""
        replace(self.path / "dropped", word + "\n")

    def dropped(self) -> str:
        """Why the job is not to be run, "" where it is."""
        try:
            return (self.path / "dropped").read_text().strip()
        except FileNotFoundError:
            return ""


def _rank_of(path: Path) -> int:
    return int(path.name.rsplit("_", 2)[1])


def new_name(experiment: str) -> str:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"moebench-{experiment}-{stamp}-{uuid.uuid4().hex[:8]}"


def prepare(
    ledger: Ledger, name: str, wanted: Sequence[Sequence[Start]], shape: Shape, minutes: int, site: Site
) -> JobRecord | None:
    """Makes the folder of a job and claims its tasks, of which others may have got hold in the meantime.

    Args:
        wanted: for each element what it is to start.
    Returns None where no task was left to run.
    """
    folder = ledger.jobs / name
    folder.mkdir()
    owner, element = Process.current(), 0
    for pack in wanted:
        lines = []
        for task, generation, attempt in pack:
            if ledger.claim(Claim(task.key, generation, attempt, owner, name, element)):
                lines.append(Entry(task, task.key, generation, attempt).to_text())
        if lines:
            replace(folder / f"tasks.{element}", "\n".join(lines) + "\n")
            element += 1
    if not element:
        return None
    record = record_of(ledger, name, shape, minutes, site, element)
    replace(folder / "job", record.to_text())
    return record


def record_of(ledger: Ledger, name: str, shape: Shape, minutes: int, site: Site, num_elements: int) -> JobRecord:
    return JobRecord(
        name=name,
        executor=site.executor,
        results=str(ledger.results),
        shape=shape,
        minutes=minutes,
        max_attempts=site.max_attempts,
        heartbeat_s=site.heartbeat_s,
        num_elements=num_elements,
    )


def command(folder: Path, site: Site) -> str:
    """The command of one rank."""
    return f"{site.python or shlex.quote(sys.executable)} -u -m {MODULE} {shlex.quote(str(folder))}"


def slurm_executor(folder: Path, record: JobRecord, site: Site) -> Any:
    """submitit's executor, with all that a job of ours needs; its scripts run `MODULE` and not a pickle."""
    from submitit.slurm.slurm import SlurmExecutor

    class Executor(SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 2  # a dry run writes its script where there is no Slurm, too

    executor = Executor(folder, python=site.python)
    executor.update_parameters(**_parameters(folder, record, site))
    executor.parameters["map_count"] = record.num_elements
    return executor


def _parameters(folder: Path, record: JobRecord, site: Site) -> dict[str, Any]:
    shape = record.shape
    # One rank's failure is the run's; a rank that is done early, or has no part in the case, is none.
    srun_args = ["--kill-on-bad-exit=1", "--wait=0", *site.srun_args]
    if site.cpus_per_task:
        srun_args.append(f"--cpus-per-task={site.cpus_per_task}")  # srun does not take it from the job
    fields: dict[str, Any] = {
        "job_name": record.name,
        "time": record.minutes,
        "nodes": shape.nodes,
        "ntasks_per_node": shape.ranks_per_node,
        "array_parallelism": site.jobs or 256,
        "setup": [f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}", *site.setup],
        # Says how it ended to whom Slurm does not: without accounting an ended job is forgotten after minutes.
        "teardown": ["code=$?", f'echo "$code" > {shlex.quote(str(folder))}/ended.$SLURM_ARRAY_TASK_ID', "exit $code"],
        "srun_args": srun_args,
        "wckey": None,
        "signal_delay_s": 30,
        "additional_parameters": {"requeue": True, **site.sbatch},
    }
    for key in ("partition", "account", "qos", "constraint", "exclude", "cpus_per_task", "mem"):
        fields[key] = getattr(site, key)
    fields["exclusive"] = site.exclusive or None
    if shape.device == "cuda" and site.gpu_request == "gpus-per-node":
        fields["gpus_per_node"] = shape.ranks_per_node
    if shape.device == "cuda" and site.gpu_request == "gres":
        fields["gres"] = f"gpu:{shape.ranks_per_node}"
    return fields


def script_text(folder: Path, record: JobRecord, site: Site) -> str:
    """The sbatch script that would go out."""
    return str(slurm_executor(folder, record, site)._make_submission_file_text(command(folder, site), record.name))


def submit_slurm(folder: Path, record: JobRecord, site: Site) -> str:
    """Hands a job to Slurm and returns its id. Raises SlurmError with what sbatch says."""
    script = folder / "unsent_submission.sh"
    script.write_text(script_text(folder, record, site))
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, check=False, env=plain_env(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SlurmError(f"sbatch: no answer for {SUBMIT_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise SlurmError(complaint(done.stderr) or f"sbatch: exit code {done.returncode}")
    job_id = done.stdout.strip().partition(";")[0]
    replace(folder / "submitted", job_id + "\n")
    script.rename(folder / f"{job_id}_submission.sh")
    return job_id


def submit_local(folder: Path, record: JobRecord, site: Site) -> None:
    """Starts a process for every element, which outlives this one; it starts the ranks and keeps the time limit."""
    controllers = []
    env = {**plain_env(), "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    replace(folder / LOCAL_SCRIPT, "\n".join([*site.setup, f"exec {command(folder, site)} ELEMENT", ""]))
    for element in range(record.num_elements):
        words = [sys.executable, "-m", "experiments.launch.controller", str(folder), str(element)]
        with (folder / f"controller.{element}.log").open("ab") as log:
            process = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        controllers.append(Process.of(process.pid).fields())
    replace(folder / "submitted", json.dumps(controllers) + "\n")
