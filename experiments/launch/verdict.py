"""What to do with a task that somebody has claimed: wait, start it again, or give it its final record."""

import time
from dataclasses import dataclass, replace
from typing import Literal

from bench.trial import Status
from experiments.launch.controller import TIMED_OUT
from experiments.launch.ledger import Claim, Ledger
from experiments.launch.locks import STALE_BEATS, Process
from experiments.launch.slurm_state import HELD_BY_FAILURE, Queue, Seen
from experiments.launch.submission import JobFolder, JobRecord

CONFIRM_S = 3.0
"""An end counts once it was seen twice this far apart: Slurm queues a job again a moment after it failed."""

# Ends that this process does not learn from Slurm.
ENDED, LOST, DROPPED = "ENDED", "LOST", "DROPPED"

WHY = {
    "TIMEOUT": "reached its time limit",
    "DEADLINE": "reached its deadline",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost its node",
    "BOOT_FAIL": "lost its node",
    "OUT_OF_MEMORY": "ran out of host memory",
    "FAILED": "failed",
    "COMPLETED": "ended without a record",
    LOST: "vanished",
    HELD_BY_FAILURE: "could not be started by Slurm",
}
STATUS: dict[str, Status] = {"TIMEOUT": "timeout", "DEADLINE": "timeout", "OUT_OF_MEMORY": "oom"}


@dataclass(frozen=True)
class Verdict:
    """what: ``wait``, ``again`` (as number `attempt`) or ``final`` (with `status` and `message`)."""

    what: Literal["wait", "again", "final"]
    attempt: int = 1
    status: Status = "error"
    message: str = ""
    stuck: str = ""
    """Id of a waiting job that will never start and has to be cancelled first."""


WAIT = Verdict("wait")


class Judge:
    """Remembers between looks when an end was first seen."""

    def __init__(self, ledger: Ledger, max_attempts: int, confirm_s: float = CONFIRM_S) -> None:
        self.ledger, self.max_attempts, self.confirm_s = ledger, max_attempts, confirm_s
        self._first_seen: dict[tuple[str, int], tuple[str, float]] = {}

    def decide(self, claim: Claim, queue: Queue) -> Verdict:
        """For a task without a final record."""
        if self.ledger.closed(claim):
            return Verdict("again")
        if not claim.job:
            if self.ledger.beats.alive(claim.owner):
                return WAIT
            return self._again(claim, True, claim.attempt, "the process that ran it died", "error")
        folder = JobFolder(self.ledger.jobs / claim.job)
        seen = self.view(claim, folder, queue)
        if seen is None:
            return WAIT
        if not (seen.is_over or seen.starts_never or seen.reason == HELD_BY_FAILURE):
            self._first_seen.pop((claim.job, claim.element), None)
            return WAIT
        if seen.state == DROPPED:
            return Verdict("again", claim.attempt)
        if seen.starts_never:
            return Verdict("final", message=f"Slurm will never start it: {seen.reason}", stuck=seen.job_id)
        if not self._confirmed(claim, seen):
            return WAIT
        return self._ended(claim, folder, seen)

    def view(self, claim: Claim, folder: JobFolder, queue: Queue) -> Seen | None:
        """The claim's element; None where nothing can be said for now. An end that is told here is only a claim."""
        if folder.dropped():
            return Seen("", DROPPED)
        record, submitted = JobRecord.read(folder.path), folder.submitted()
        if record is None or submitted is None:
            known = queue.jobs.get((claim.job, claim.element))
            if known is not None:
                return known
            if claim.owner == Process.current() or self.ledger.beats.alive(claim.owner) or not queue.answered:
                return None  # it is about to be submitted
            return self._silent(folder, claim.element, record) if record is not None else Seen("", DROPPED)
        if record.executor == "local":
            return self._local(folder, claim.element, submitted)
        known = queue.jobs.get((claim.job, claim.element))
        if known is not None or not queue.answered:
            return known
        if folder.ended(claim.element) is not None:
            return Seen(submitted, ENDED)
        return self._silent(folder, claim.element, record)

    def _silent(self, folder: JobFolder, element: int, record: JobRecord) -> Seen | None:
        """Of a job that Slurm does not know: lost, unless it still shows signs of life."""
        age = self.ledger.beats.age_s(folder.events_path(element))
        if age is None:
            return Seen("", DROPPED if folder.submitted() is None else LOST)
        return None if age < STALE_BEATS * record.heartbeat_s else Seen("", LOST)

    def _local(self, folder: JobFolder, element: int, submitted: str) -> Seen | None:
        import json

        code = folder.ended(element)
        controller = Process.parse(json.loads(submitted)[element])
        if code is not None:
            state = "TIMEOUT" if code == TIMED_OUT else "FAILED" if code else "COMPLETED"
            return Seen(str(controller.pid), state)
        if not controller.is_here:
            record = JobRecord.read(folder.path)
            return None if record is None else self._silent(folder, element, record)
        return Seen(str(controller.pid), "RUNNING" if controller.runs_here() else LOST)

    def _confirmed(self, claim: Claim, seen: Seen) -> bool:
        """Seen before, long enough ago, and nothing else since."""
        place, now = (claim.job, claim.element), time.monotonic()
        state, since = self._first_seen.setdefault(place, (seen.state, now))
        if state != seen.state:
            self._first_seen[place] = (seen.state, now)
            since = now
        return now - since >= self.confirm_s

    def _ended(self, claim: Claim, folder: JobFolder, seen: Seen) -> Verdict:
        events = folder.events(claim.element)
        starts = sum(event["event"] == "case-start" and event["key"] == claim.key for event in events)
        failure = folder.failure(claim.element, claim.key)
        if failure is not None:
            return Verdict("final", status=failure["status"], message=f"rank {failure['rank']}: {failure['message']}")
        if seen.state == "CANCELLED":
            when = "while it ran" if starts else "before it started"
            return Verdict("final", message=f"the job was cancelled {when}")
        # A job that dies before any task is the fault of all of them; otherwise of the one that was running.
        at_fault = bool(starts) or not any(event["event"] == "case-start" for event in events)
        cause = HELD_BY_FAILURE if seen.reason == HELD_BY_FAILURE else seen.state
        code = folder.ended(claim.element)
        why = f"the job {WHY.get(cause, f'ended as {cause}')}{_exit_words(code)}"
        status = "died" if cause == "FAILED" and starts else STATUS.get(cause, "error")
        verdict = self._again(claim, at_fault, claim.attempt + max(0, starts - 1), why, status)
        return replace(verdict, stuck=seen.job_id) if cause == HELD_BY_FAILURE else verdict

    def _again(self, claim: Claim, at_fault: bool, used: int, why: str, status: Status) -> Verdict:
        if not at_fault:
            return Verdict("again", claim.attempt, message=why)
        if used >= self.max_attempts:
            return Verdict("final", status=status, message=f"{why}; {used} of {self.max_attempts} attempts")
        return Verdict("again", used + 1, message=why)


def _exit_words(code: int | None) -> str:
    if not code or code == TIMED_OUT:
        return ""
    return f" (signal {code - 128})" if code > 128 else f" (exit code {code})"
