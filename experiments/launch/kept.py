"""Results that are there already, from sweeps and from figures: what they answer is not run again."""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.case import Case
from bench.errors import BadInput
from bench.provenance import code_digest
from bench.results import PUBLISHED, read_trial, read_trials
from bench.trial import FINISHED, Trial, content_id
from experiments.launch.ledger import Ledger
from experiments.launch.work import Task

_CASE_ID = re.compile(rb'"case_id": ?"(\w+)"')
_DIGEST = re.compile(rb'"code_digest": ?"(\w+)"')


def adopt(ledger: Ledger, tasks: Iterable[Task], retry_failed: bool) -> None:
    """Marks tasks as done whose result lies in the results folder or comes with the code.

    Tasks whose record cannot be read are opened again, and with `retry_failed` those that failed.
    """
    ledger.recover()
    tasks = list(tasks)
    done, by_answer = ledger.done(), _index(ledger, tasks)
    for task in tasks:
        if task.key in done:
            trial = ledger.trial(task.key)
            # A record that cannot be read, such as one of a newer version, answers nothing.
            if trial is None or (retry_failed and trial.status not in FINISHED):
                ledger.reopen(task.key)
            continue
        path, found = by_answer.get(_question(task), (None, None))
        if path is not None and found is not None and (found.status in FINISHED or not retry_failed):
            with contextlib.suppress(OSError, BadInput):  # one whose series are gone is no result
                ledger.commit(task.key, read_trial(path))


def _index(ledger: Ledger, tasks: Sequence[Task]) -> dict[str, tuple[Path, Trial]]:
    """Records, without series, by what they answer; of several the newest. Some that answer no task are left out."""
    places = [ledger.results, PUBLISHED] if ledger.results.exists() else [PUBLISHED]
    found: dict[str, tuple[Path, Trial]] = {}
    trials = read_trials(places, series=False, wanted=_may_answer(tasks))
    for path, trial in sorted(trials, key=lambda one: one[1].created):
        if trial.source == "simulated" and trial.status in FINISHED:
            found[_simulated(trial)] = path, trial
        elif trial.source == "measured" and trial.provenance.get("task"):
            found[trial.provenance["task"]] = path, trial
    return found


def _may_answer(tasks: Sequence[Task]) -> Callable[[bytes], bool]:
    """Whether a record may answer a task, by its text: parsing hundreds of records takes longer than a small sweep.

    A case is answered by its own records, a run by its task's; a spec by a record of any layout.
    """
    any_layout = any(not isinstance(task.spec, Case) for task in tasks)
    ids = {content_id(task.spec) for task in tasks}
    digests = {code_digest(task.spec.system) for task in tasks if task.settings.backend == "simulate"}

    def may(text: bytes) -> bool:
        case_id, digest = (found and found[1].decode() for found in (_CASE_ID.search(text), _DIGEST.search(text)))
        if case_id is None:
            return True  # whoever reads it says what it is
        return (digest is None or digest in digests) and (any_layout or case_id in ids)

    return may


def _question(task: Task) -> str:
    if task.settings.backend == "run":
        return task.key
    search: list[object] = [] if isinstance(task.spec, Case) else [task.settings.budget, list(task.settings.fixed)]
    values = task.settings.costs.values.model_dump(mode="json")
    return _words(content_id(task.spec), code_digest(task.spec.system), values, search)


def _simulated(trial: Trial) -> str:
    tuned = bool(trial.search)
    search = [trial.search.get("budget"), trial.search.get("fixed")] if tuned else []
    case_id = content_id(trial.spec) if tuned else trial.case_id
    return _words(case_id, trial.code_digest, trial.assumption_values, search)


def _words(*facts: object) -> str:
    return json.dumps(facts, sort_keys=True)
