"""What came of a sweep, and what it says while it goes on."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.case import CaseSpec
from bench.trial import FINISHED, Trial
from experiments.launch.work import Task


class Event(NamedTuple):
    """One line of news. done, total: tasks. trial: the record that came in; None for other news, which `text` says."""

    done: int
    total: int
    text: str
    trial: Trial | None = None


Listener = Callable[[Event], None]


class Failure(NamedTuple):
    """A task whose record says that it failed. log, script: files of its last job, where there was one.

    last_actions: of a run, what its ranks did last, a line each.
    """

    label: str
    case_id: str
    status: str
    message: str
    log: Path | None
    script: Path | None
    last_actions: tuple[str, ...] = ()


@dataclass
class Outcome:
    """statuses: number of records by status. open: tasks without one. refused: what Slurm said to a submission."""

    name: str
    trials: list[tuple[Task, Trial]] = field(default_factory=list)
    open: list[Task] = field(default_factory=list)
    new: int = 0
    refused: str = ""
    withdrawn: bool = False

    @property
    def statuses(self) -> Counter[str]:
        return Counter(trial.status for _, trial in self.trials)

    @property
    def failed(self) -> list[tuple[Task, Trial]]:
        return [(task, trial) for task, trial in self.trials if trial.status not in FINISHED]

    def middle(self) -> list[Trial]:
        """One trial a spec: of repeats the one with the middle speed, where any ran."""
        by_spec: dict[CaseSpec, list[Trial]] = {}
        for task, trial in self.trials:
            by_spec.setdefault(task.spec, []).append(trial)
        found = []
        for trials in by_spec.values():
            ran = sorted((t for t in trials if t.status == "ok"), key=lambda t: t.metrics.get("tokens_per_s") or 0.0)
            found.append(ran[len(ran) // 2] if ran else trials[0])
        return found
