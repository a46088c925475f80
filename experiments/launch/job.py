"""What a rank of a job runs: ``python -m experiments.launch.job FOLDER [ELEMENT]``.

The tasks of the element run one after the other. Rank 0 decides which still have to, keeps a journal, shows that the
job lives, and commits the records.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench.execute.parent import end_with_parent
from bench.trial import Trial
from experiments.launch.flights import last_actions
from experiments.launch.ledger import Ledger
from experiments.launch.ranks import JoinedRanks
from experiments.launch.submission import Entry, JobFolder, JobRecord
from experiments.launch.work import status_of

LOST_PEER_S = 5.0
"""By which a rank that only lost another one lets whoever knows of that one's end draw the conclusion first."""


class Journal:
    """Events of a job's element, one JSON object a line; its file's time shows that the job lives."""

    def __init__(self, folder: JobFolder, element: int, interval_s: float) -> None:
        self.path = folder.events_path(element)
        self._interval_s = interval_s
        threading.Thread(target=self._beat, daemon=True).start()

    def write(self, event: str, **fields: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")

    def _beat(self) -> None:
        while True:
            time.sleep(self._interval_s)
            if self.path.exists():
                os.utime(self.path)


def main(arguments: list[str]) -> int:
    from submitit import JobEnvironment

    # submitit's scripts warn with this signal before the end; what is kept does not depend on a warning.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    environment = JobEnvironment()
    folder = JobFolder(Path(arguments[0]))
    element = int(arguments[1]) if len(arguments) > 1 else int(environment.array_task_id or 0)
    record = JobRecord.read(folder.path)
    assert record is not None, "a job has a record"
    if environment.cluster == "local":
        end_with_parent(os.getppid())
    if environment.global_rank >= record.shape.num_ranks:
        return 0  # ranks are asked for in whole nodes
    Element(environment, folder, element, record).run()
    return 0


class Element:
    """One rank's part in one element of a job."""

    def __init__(self, environment: Any, folder: JobFolder, element: int, record: JobRecord) -> None:
        self.folder, self.element, self.record = folder, element, record
        self.rank = environment.global_rank
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.ledger = Ledger(Path(record.results))
        self.journal: Journal | None = None
        if self.rank == 0:
            (folder.path / f"ended.{element}").unlink(missing_ok=True)  # of the start before this one
            self.journal = Journal(folder, element, record.heartbeat_s)
            self.journal.write("job-start", host=environment.hostname, job=environment.job_id, restart=self.restart)
        self.ranks: JoinedRanks | None = None
        if any(entry.task.settings.backend == "run" for entry in folder.entries(element)):
            meeting = folder.path / f"rendezvous.{element}.{self.restart}"
            device: Literal["cpu", "cuda"] = "cuda" if record.shape.device == "cuda" else "cpu"
            recorder = partial(folder.recorder, element, self.restart)
            self.ranks = JoinedRanks(environment, meeting, record.shape.num_ranks, device, recorder)

    def run(self) -> None:
        for number, entry in enumerate(self.folder.entries(self.element)):
            if self._starts(number, entry):
                self._do(entry)

    def _starts(self, number: int, entry: Entry) -> bool:
        if self.ranks is None:
            return self._due(entry)
        return bool(self.ranks.agree(f"start-{number}", lambda: "yes" if self._due(entry) else "") == "yes")

    def _due(self, entry: Entry) -> bool:
        """On rank 0: whether the task still is this job's, and may be tried once more."""
        key = entry.key
        if self.folder.dropped() or not self.ledger.holds(key, entry.generation):
            return False
        events = self.folder.events(self.element)
        starts = sum(event["event"] == "case-start" and event["key"] == key for event in events)
        if entry.attempt + starts > self.record.max_attempts:
            last = last_actions(self.folder, self.element, entry.task, before=self.restart)
            self._commit(entry, entry.task.failed("error", f"the job ended {starts} times while this ran", last))
            return False
        assert self.journal is not None
        self.journal.write("case-start", key=key)
        return True

    def _do(self, entry: Entry) -> None:
        try:
            trial = entry.task.run(self.ranks)
        except Exception as error:
            traceback.print_exc()
            status, message = status_of(error), f"{type(error).__name__}: {error}"
            if self.record.shape.num_ranks > 1:
                # The other ranks are waiting somewhere: the job ends here, and whoever watches it draws the conclusion.
                sys.stderr.flush()
                lost = _lost_peer(error)
                if lost:
                    time.sleep(LOST_PEER_S)
                self._note_failure(entry, status, message, lost)
                os._exit(1)
            trial = entry.task.failed(status, message)
        if self.rank == 0:
            self._commit(entry, trial)

    def _commit(self, entry: Entry, trial: Trial) -> None:
        kept = self.ledger.commit(entry.key, trial)
        assert self.journal is not None
        self.journal.write("case-end", key=entry.key, status=trial.status, kept=kept)

    def _note_failure(self, entry: Entry, status: str, message: str, lost_peer: bool) -> None:
        note = {"key": entry.key, "time": time.time(), "status": status, "message": message[:2000], "rank": self.rank}
        note["lost_peer"] = lost_peer
        (self.folder.path / f"failed.{self.element}.{self.rank}").write_text(json.dumps(note) + "\n")


def _lost_peer(error: BaseException) -> bool:
    from bench.execute.transport import lost_peer  # loads torch, which a simulation goes without

    return lost_peer(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
