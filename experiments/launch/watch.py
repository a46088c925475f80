"""A sweep: looks at what is claimed and done, starts what is missing, and goes on until every task has its record.

All it knows is on disk, so one that was killed goes on where it stopped, and two at once share the work.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.trial import Trial
from experiments.launch.flights import last_actions
from experiments.launch.ledger import Claim, Ledger, mark, replace
from experiments.launch.locks import Process
from experiments.launch.outcome import Event, Listener, Outcome
from experiments.launch.pack import Shape, minutes, packs, shape_of
from experiments.launch.site import Site
from experiments.launch.slurm_state import ClusterFacts, Queue, SlurmError, cancel_element, look
from experiments.launch.submission import JobFolder, JobRecord, Start, new_name, prepare, submit_local, submit_slurm
from experiments.launch.verdict import Judge, Verdict
from experiments.launch.work import Task, status_of

MAX_REFUSALS = 4
LOCAL_POLL_S = 0.1
RECORDS_POLL_S = 1.0
RESTS_PER_LOOK = 10
"""How many times the processor time of a look at everything is rested after it, at least: looks are not the work."""


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    name: of the sweep. facts: of the Slurm cluster, for the executor ``slurm``. left_out: trials of specs that cannot
    be run, since no layout fits.
    """

    name: str
    experiment: str
    tasks: Sequence[Task]
    site: Site
    pack: bool = False
    facts: ClusterFacts | None = None
    left_out: Sequence[Trial] = ()


class Sweep:
    """One process's part in a sweep."""

    def __init__(self, plan: Plan, ledger: Ledger, listen: Listener) -> None:
        self.plan, self.ledger, self.listen = plan, ledger, listen
        self.site = plan.site
        self.by_key = {task.key: task for task in plan.tasks}
        self.judge = Judge(ledger, self.site.max_attempts)
        self.outcome = Outcome(plan.name)
        self._reported: set[str] = set()
        self._told: set[tuple[str, int]] = set()
        self._refusals, self._not_before = 0, 0.0
        self._trouble, self._said_who = "", False
        self._look_s = 0.0

    def run(self) -> Outcome:
        """Returns once every task has its record, Slurm has refused for good, or the sweep was withdrawn.

        Raises KeyboardInterrupt as it comes; jobs go on.
        """
        self.ledger.beats.start()
        self._collect(news=False)
        try:
            while self._open():
                if self._withdrawn():
                    self.outcome.withdrawn = True
                    break
                began = time.process_time()
                started = self._step()
                self._look_s = time.process_time() - began
                if self.outcome.refused:
                    break
                self._collect()
                if not started:
                    self._rest()
        finally:
            self.ledger.beats.stop()
        self._conclude()
        return self.outcome

    def _open(self) -> list[str]:
        return [key for key in self.by_key if key not in self._reported]

    def _withdrawn(self) -> bool:
        return (self.ledger.sweeps / f"{self.plan.name}.withdrawn").exists()

    def _rest(self) -> None:
        """Until the next look at the queue. Records are looked for more often: that asks nothing of Slurm."""
        pause = {"slurm": self.site.poll_s, "local": LOCAL_POLL_S}.get(self.site.executor, 1.0)
        end = time.monotonic() + max(pause, RESTS_PER_LOOK * self._look_s)
        while self._open() and not self._withdrawn() and (left := end - time.monotonic()) > 0:
            time.sleep(min(RECORDS_POLL_S, left))
            self._collect()

    def _collect(self, news: bool = True) -> None:
        """Takes note of records that have come in."""
        for key in sorted(self.ledger.done() & self.by_key.keys() - self._reported):
            trial = self.ledger.trial(key)
            if trial is None:
                continue
            self._reported.add(key)
            self.outcome.trials.append((self.by_key[key], trial))
            if news:
                self.outcome.new += 1
                self.listen(Event(len(self._reported), len(self.by_key), self.by_key[key].label, trial))

    def _conclude(self) -> None:
        order = {key: number for number, key in enumerate(self.by_key)}
        self.outcome.trials.sort(key=lambda pair: order[pair[0].key])
        self.outcome.open = [self.by_key[key] for key in self._open()]

    def _say(self, text: str) -> None:
        self.listen(Event(len(self._reported), len(self.by_key), text))

    def _step(self) -> bool:
        """One look at everything; True where tasks were run here."""
        claims = self.ledger.claims(self._open())
        queue = self._look(claims)
        ready: list[Start] = []
        for key in self._open():
            claim = claims.get(key)
            verdict = Verdict("again", 1) if claim is None else self.judge.decide(claim, queue)
            if verdict.what == "wait" or not self._cleared(self.by_key[key], verdict):
                continue
            task, generation = self.by_key[key], 1 if claim is None else claim.generation + 1
            if verdict.what == "again":
                if verdict.message and verdict.attempt > 1 and (key, generation) not in self._told:
                    self._told.add((key, generation))  # it may have to wait for a free place
                    self._say(f"{task.label}: {verdict.message}; attempt {verdict.attempt} of {self.site.max_attempts}")
                ready.append(Start(task, generation, verdict.attempt))
            else:
                last = () if claim is None else self._last_actions(task, claim)
                self.ledger.commit(key, task.failed(verdict.status, verdict.message, last))
        if not ready:
            self._say_who_works(claims)
            return False
        if self.site.executor in ("inprocess", "debug"):
            return self._run_here(ready)
        self._submit(ready, claims)
        return False

    def _last_actions(self, task: Task, claim: Claim) -> tuple[str, ...]:
        """What the ranks did last, of a task that was running when its job ended."""
        folder = JobFolder(self.ledger.jobs / claim.job)
        running = bool(claim.job) and folder.was_running(claim.element, claim.key)
        return last_actions(folder, claim.element, task) if running else ()

    def _look(self, claims: dict[str, Claim]) -> Queue:
        names = {claim.job for claim in claims.values() if claim.job}
        slurm = {name for name in names if self._is_slurm(name)}
        if not slurm:
            return Queue(True)
        queue = look(slurm, self.plan.facts.accounting if self.plan.facts else False)
        if queue.trouble != self._trouble:
            self._trouble = queue.trouble
            self._say(f"Slurm does not answer, waiting: {queue.trouble}" if queue.trouble else "Slurm answers again")
        return queue

    def _is_slurm(self, name: str) -> bool:
        record = JobRecord.read(self.ledger.jobs / name)
        return record is not None and record.executor == "slurm"

    def _cleared(self, task: Task, verdict: Verdict) -> bool:
        """Cancels a job that is stuck; False where Slurm does not do it."""
        if verdict.stuck:
            try:
                cancel_element(verdict.stuck)
            except SlurmError as error:
                self._say(f"{task.label}: {error}")
                return False
        return True

    def _say_who_works(self, claims: dict[str, Claim]) -> None:
        """Once, where others have all that is left."""
        own = Process.current()
        others = {
            claim.job or f"process {claim.owner.pid} on {claim.owner.host}"
            for claim in claims.values()
            if claim.owner != own
        }
        if others and not self._said_who:
            self._said_who = True
            self._say(f"waiting for what others have begun: {', '.join(sorted(others)[:3])}")

    def _run_here(self, ready: Sequence[Start]) -> bool:
        """Runs tasks in this process, each claimed just before. Debugging lets errors through."""
        ran = False
        for task, generation, attempt in ready:
            if not self.ledger.claim(Claim(task.key, generation, attempt, Process.current())):
                continue
            ran = True
            try:
                trial = task.run()
            except Exception as error:
                if self.site.executor == "debug":
                    self.ledger.commit(task.key, task.failed(status_of(error), f"{type(error).__name__}: {error}"))
                    raise
                trial = task.failed(status_of(error), f"{type(error).__name__}: {error}")
            made = self.ledger.commit(task.key, trial)
            self._note(task, mark(trial, task.key) if made else self.ledger.trial(task.key))
        return ran

    def _note(self, task: Task, trial: Trial | None) -> None:
        """As `_collect`, for one task that was just done."""
        if trial is not None:
            self._reported.add(task.key)
            self.outcome.trials.append((task, trial))
            self.outcome.new += 1
            self.listen(Event(len(self._reported), len(self.by_key), task.label, trial))

    def _submit(self, ready: Sequence[Start], claims: dict[str, Claim]) -> None:
        if time.monotonic() < self._not_before:
            return
        by_shape: dict[Shape, list[Start]] = {}
        for one in ready:
            by_shape.setdefault(shape_of(one.task, self.site), []).append(one)
        starting = {one.task.key for one in ready}
        busy = {key: claim for key, claim in claims.items() if key not in starting}
        slots = self._free_slots(busy)
        for shape, ones in sorted(by_shape.items()):
            wanted = {one.task.key: one for one in ones}
            dealt = packs([one.task for one in ones], shape, self.site, self.plan.pack)
            chosen = [[wanted[task.key] for task in pack] for pack in dealt][:slots]
            slots -= len(chosen)
            for chunk in self._chunks(chosen, shape):
                if not self._send(chunk, shape):
                    return

    def _free_slots(self, busy: dict[str, Claim]) -> int:
        """Jobs that may be started now: on this machine as many as asked for at a time, on Slurm all."""
        if self.site.executor == "slurm":
            return len(self.by_key)
        places = {(claim.job, claim.element) for claim in busy.values() if claim.job}
        running = sum(JobFolder(self.ledger.jobs / job).ended(element) is None for job, element in places)
        most = self.site.jobs or (1 if self.plan.tasks[0].settings.backend == "run" else len(self.by_key))
        return max(0, most - running)

    def _chunks(self, wanted: list[list[Start]], shape: Shape) -> list[list[list[Start]]]:
        """Below the largest array, and of one time limit each."""
        most = self.plan.facts.max_array_size - 1 if self.plan.facts else max(1, len(wanted))
        by_limit: dict[int, list[list[Start]]] = {}
        for pack in wanted:
            by_limit.setdefault(minutes([one.task for one in pack], shape, self.site), []).append(pack)
        return [same[i : i + most] for same in by_limit.values() for i in range(0, len(same), most)]

    def _send(self, chunk: list[list[Start]], shape: Shape) -> bool:
        """One submission; False where it was refused."""
        name = new_name(self.plan.experiment)
        limit = minutes([one.task for one in chunk[0]], shape, self.site)
        record = prepare(self.ledger, name, chunk, shape, limit, self.site)
        if record is None:
            return True
        folder = self.ledger.jobs / name
        if self.site.executor == "local":
            submit_local(folder, record, self.site)
            return True
        try:
            job_id = submit_slurm(folder, record, self.site)
        except SlurmError as error:
            return self._refused(name, str(error))
        self._refusals = 0
        self._say(f"submitted job {job_id}: {sum(map(len, chunk))} runs in {record.num_elements} elements")
        return True

    def _refused(self, name: str, why: str) -> bool:
        """sbatch failed; the job may be there all the same, where only the answer was lost."""
        folder = JobFolder(self.ledger.jobs / name)
        queue = look([name], False)
        if queue.answered and queue.jobs:
            seen = next(iter(queue.jobs.values()))
            replace(folder.path / "submitted", seen.job_id.partition("_")[0] + "\n")
            return True
        folder.drop("refused")
        self._refusals += 1
        if self._refusals >= MAX_REFUSALS:
            self.outcome.refused = why
            return False
        pause = min(300.0, self.site.poll_s * 2**self._refusals)
        self._not_before = time.monotonic() + pause
        self._say(f"Slurm refused a job, next try in {pause:.0f} s: {why}")
        return False
