"""Sweeps by name: what belongs to one, how it stands, and how it is stopped. Looks at files and, once, at the queue."""

import json
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.case import CaseSpec
from bench.errors import BadInput, unknown
from bench.trial import FINISHED, Trial
from experiments.launch.ledger import Claim, Ledger, replace
from experiments.launch.locks import Process
from experiments.launch.outcome import Failure
from experiments.launch.slurm_state import RUNNING, Queue, SlurmError, cancel, look
from experiments.launch.submission import JobFolder, JobRecord
from experiments.launch.verdict import Judge
from experiments.launch.work import Task

TAIL_LINES = 6


@dataclass
class Standing:
    """How a sweep stands.

    counts: tasks by state: statuses of records, then ``running``, ``waiting``, ``missing``. running: label and place of
    what runs. eta_s: seconds left at the pace of the last records; None where there is none. withdrawn: whether
    it was cancelled.
    """

    name: str
    total: int
    counts: Counter[str] = field(default_factory=Counter)
    running: list[tuple[str, str]] = field(default_factory=list)
    waiting: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    trouble: str = ""
    eta_s: float | None = None
    withdrawn: bool = False

    @property
    def is_over(self) -> bool:
        """Whether all is done, or it was cancelled and the last jobs have ended."""
        going_on = self.counts["running"] + self.counts["waiting"]
        return self.done == self.total or (self.withdrawn and not going_on)

    @property
    def done(self) -> int:
        return self.total - sum(self.counts[state] for state in ("running", "waiting", "missing"))


def name_of(experiment: str, backend: str, chosen: str = "") -> str:
    """Of a sweep: the same for the same question, so that running it again goes on with it."""
    import hashlib

    stem = Path(experiment).stem if experiment.endswith(".py") else experiment
    stem = re.sub(r"[^\w.]+", "_", stem)
    told = f"-{hashlib.sha256(chosen.encode()).hexdigest()[:6]}" if chosen else ""
    return f"{stem}-{backend}{told}"


def register(ledger: Ledger, name: str, tasks: list[Task], accounting: bool) -> None:
    """Keeps what belongs to a sweep, and takes back that it was cancelled."""
    lines = [json.dumps({"accounting": accounting, "started": time.time()})]
    lines += [json.dumps({"key": task.key, "task": task.to_text()}) for task in tasks]
    replace(ledger.sweeps / name, "\n".join(lines) + "\n")
    _withdrawal(ledger, name).unlink(missing_ok=True)


def _withdrawal(ledger: Ledger, name: str) -> Path:
    """The file that says that a sweep was cancelled."""
    return ledger.sweeps / f"{name}.withdrawn"


def known(ledger: Ledger) -> list[str]:
    """Names of the sweeps of a results folder, the newest first."""
    if not ledger.sweeps.is_dir():
        return []
    found = [path for path in ledger.sweeps.iterdir() if path.suffix != ".withdrawn" and path.name[0] != "."]
    return [path.name for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def read(ledger: Ledger, name: str | None) -> tuple[str, dict[str, Task], bool]:
    """Name, tasks by key, and whether Slurm's accounting works. Without a name the newest sweep. Raises BadInput."""
    names = known(ledger)
    if not names:
        raise BadInput("results", str(ledger.results), "a folder in which a sweep was started")
    chosen = names[0] if name is None else name
    if chosen not in names:
        raise unknown("sweep", chosen, names)
    path = ledger.sweeps / chosen
    try:
        head, *lines = path.read_text().splitlines()
        tasks = {fields["key"]: Task.parse(fields["task"]) for fields in map(json.loads, lines)}
        return chosen, tasks, bool(json.loads(head)["accounting"])
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, BadInput):
            raise
        again = "a sweep that was kept whole: the same `moebench sweep` once more writes it anew"
        raise BadInput("sweep", str(path), again) from None


def standing(ledger: Ledger, name: str | None) -> Standing:
    """How a sweep stands now. Raises BadInput for an unknown one."""
    chosen, tasks, accounting = read(ledger, name)
    found = Standing(chosen, len(tasks), withdrawn=_withdrawal(ledger, chosen).exists())
    done = ledger.done()
    claims = ledger.claims(tasks)
    for key in tasks.keys() & done:
        trial = ledger.trial(key)
        found.counts["unreadable" if trial is None else trial.status] += 1
        if trial is not None and trial.status not in FINISHED:
            found.failures.append(failure_of(ledger, tasks[key], key, trial))
    open_claims = {key: claim for key, claim in claims.items() if key not in done}
    queue = _queue(ledger, open_claims, accounting)
    found.trouble = queue.trouble
    judge = Judge(ledger, 1)
    for key in tasks.keys() - done:
        _stand(found, tasks[key], open_claims.get(key), ledger, queue, judge)
    found.eta_s = _eta_s(ledger, tasks.keys() & done, found.total - found.done)
    return found


def _queue(ledger: Ledger, claims: dict[str, Claim], accounting: bool) -> Queue:
    names = {claim.job for claim in claims.values() if claim.job}
    records = {name: JobRecord.read(ledger.jobs / name) for name in names}
    slurm = [name for name, record in records.items() if record is not None and record.executor == "slurm"]
    return look(slurm, accounting)


def _stand(found: Standing, task: Task, claim: Claim | None, ledger: Ledger, queue: Queue, judge: Judge) -> None:
    if claim is None:
        found.counts["missing"] += 1
        return
    if not claim.job:
        alive = ledger.beats.alive(claim.owner)
        found.counts["running" if alive else "missing"] += 1
        if alive:
            found.running.append((task.label, f"process {claim.owner.pid} on {claim.owner.host}"))
        return
    folder = JobFolder(ledger.jobs / claim.job)
    seen = judge.view(claim, folder, queue)
    if seen is not None and seen.is_over:
        found.counts["missing"] += 1
        return
    if seen is not None and seen.state not in RUNNING:
        found.counts["waiting"] += 1
        found.waiting[f"{seen.state.lower()}: {seen.reason}"] += 1
        return
    events = folder.events(claim.element)
    if any(event.get("key") == claim.key for event in events):
        found.counts["running"] += 1
        found.running.append((task.label, f"job {seen.job_id} {seen.reason}".strip() if seen else claim.job))
    else:
        begun = any(event["event"] == "case-start" for event in events)
        found.counts["waiting"] += 1
        found.waiting["behind others in a running job" if begun else "in a job that is starting"] += 1


def _eta_s(ledger: Ledger, done: set[str], left: int) -> float | None:
    """From the pace of the last records, up to twenty."""
    times = sorted((ledger.root / "done" / key).stat().st_mtime for key in done)[-20:]
    if left == 0:
        return 0.0
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    return left * (times[-1] - times[0]) / (len(times) - 1)


def failure_of(ledger: Ledger, task: Task, key: str, trial: Trial) -> Failure:
    """A failed task with the files of its last job."""
    log = script = None
    claim = ledger.claims([key]).get(key)
    if claim is not None and claim.job:
        folder = JobFolder(ledger.jobs / claim.job)
        logs = folder.logs(claim.element)
        log, script = next((path for path in logs if path.stat().st_size), next(iter(logs), None)), folder.script()
    return Failure(task.label, trial.case_id, trial.status, trial.message, log, script, tuple(trial.last_actions))


def tail(path: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that say something."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-num_lines:]


def logs_of(ledger: Ledger, case: str) -> list[tuple[list[Task], JobFolder, int]]:
    """Jobs that ran a case: (its repeats there, folder, element), the last start last. `case`: the beginning of a case
    id or key.

    Raises BadInput where no sweep of the results folder has it.
    """
    found = {}
    for name in known(ledger):
        try:
            tasks = read(ledger, name)[1]
        except BadInput:
            continue  # a damaged sweep hides no other's logs
        for key, task in tasks.items():
            ids = (key, getattr(task.spec, "id", ""))
            if any(one.startswith(case) for one in ids) or ledger.name_of_record(key).startswith(case):
                found[key] = task
    if not found:
        raise BadInput("case", case, "the beginning of the id of a case in a sweep; see `moebench status`")
    ran: dict[tuple[str, int, CaseSpec], list[Task]] = {}
    for key, task in found.items():
        for claim in ledger.history(key):
            if claim.job:
                ran.setdefault((claim.job, claim.element, task.spec), []).append(task)
    return [(tasks, JobFolder(ledger.jobs / job), element) for (job, element, _), tasks in ran.items()]


def withdraw(ledger: Ledger, name: str | None) -> tuple[str, int]:
    """Stops a sweep: its process, if one runs, goes no further, and its jobs are cancelled. Name and number of jobs.

    A sweep whose runs all have their records stays as it is.

    Raises BadInput for an unknown sweep, SlurmError where Slurm does not cancel.
    """
    chosen, tasks, _ = read(ledger, name)
    claims = ledger.claims(unfinished := tasks.keys() - ledger.done())
    if not unfinished:
        return chosen, 0
    _withdrawal(ledger, chosen).touch()
    jobs = sorted({claim.job for claim in claims.values() if claim.job})
    trouble: SlurmError | None = None
    num_cancelled = 0
    for job in jobs:
        folder = JobFolder(ledger.jobs / job)
        if folder.dropped():
            continue
        folder.drop("withdrawn")  # ranks that are about to start a case look here
        num_cancelled += 1
        try:
            _cancel(folder)
        except SlurmError as error:
            trouble = error
    if trouble is not None:
        raise trouble
    return chosen, num_cancelled


def _cancel(folder: JobFolder) -> None:
    record, submitted = JobRecord.read(folder.path), folder.submitted()
    if record is None:
        return
    if record.executor == "slurm":
        cancel([record.name])
        return
    for fields in json.loads(submitted or "[]"):
        controller = Process.parse(fields)
        if controller.is_here and controller.runs_here():
            os.kill(controller.pid, signal.SIGTERM)
