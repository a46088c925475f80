"""Simulates what is missing of many jobs, in several processes; every trial is kept as soon as it is there."""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import NamedTuple

from bench.case import Case, CaseSpec
from bench.evaluate import CostModel, failed_trial, simulate_trial
from bench.execute.parent import end_with_parent
from bench.provenance import code_digest
from bench.results import Store
from bench.trial import FINISHED, Trial, content_id
from bench.tune import DEFAULT_BUDGET
from experiments import Progress

MAX_WORKERS = 8
COLLECT_AFTER = 200_000
"""New objects after which a worker looks for cycles: a search makes many objects and hardly a cycle, and looking as
often as usual takes a tenth of its time."""


class Job(NamedTuple):
    """A spec to tune, with the ``key=value`` layout fields that are fixed; or a case to simulate as it is."""

    spec: CaseSpec
    model: CostModel
    fixed: tuple[str, ...] = ()


def sweep(
    specs: Sequence[CaseSpec],
    model: CostModel,
    store: Store,
    progress: Progress,
    *,
    budget: int | None = DEFAULT_BUDGET,
    num_workers: int | None = None,
) -> list[Trial]:
    """`sweep_jobs` for specs under one cost model with nothing fixed."""
    jobs = [Job(spec, model) for spec in specs]
    return sweep_jobs(jobs, store, progress, budget=budget, num_workers=num_workers)


def sweep_jobs(
    jobs: Sequence[Job],
    store: Store,
    progress: Progress,
    *,
    budget: int | None = DEFAULT_BUDGET,
    num_workers: int | None = None,
) -> list[Trial]:
    """A trial for every job, in their order: of `store` where the same code made one, else made now.

    Raises BadInput where a trial cannot be written.
    """
    found = _kept(jobs, store, budget)
    missing = [job for job in dict.fromkeys(jobs) if job not in found]
    progress(len(jobs) - len(missing), len(jobs), "found")
    if missing:
        workers = num_workers or min(os.cpu_count() or 1, MAX_WORKERS, len(missing))
        others = set(active_children())
        # spawn: a forked copy of a process that has threads may hang.
        with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin) as executor:
            under_way = {executor.submit(_simulate, job, budget): job for job in missing}
            try:
                for number, done in enumerate(as_completed(under_way), 1 + len(jobs) - len(missing)):
                    job = under_way[done]
                    trial = Trial.parse(done.result())
                    store.write(trial)
                    found[job] = trial
                    progress(number, len(jobs), f"{job.spec.system} {job.spec.model.name} {job.spec.workload.seq_len}")
            except BaseException:
                # Whoever stops a sweep does not want to wait for the cells under way.
                for worker in set(active_children()) - others:
                    worker.terminate()
                executor.shutdown(wait=False, cancel_futures=True)
                raise
    return [found[job] for job in jobs]


def reusable(store: Store, spec: CaseSpec, model: CostModel, budget: int | None) -> Trial | None:
    """A kept trial that would come out again: same spec, code, assumptions and search."""
    job = Job(spec, model)
    return _kept([job], store, budget).get(job)


def _kept(jobs: Sequence[Job], store: Store, budget: int | None) -> dict[Job, Trial]:
    """The newest finished trial of each job that would come out again."""
    by_id: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in reversed(store.trials()):
        if trial.status in FINISHED:
            by_id[trial.case_id].append(trial)
            if isinstance(trial.case, Case):
                by_id[content_id(trial.spec)].append(trial)
    found = {}
    for job in jobs:
        same = (trial for trial in by_id[content_id(job.spec)] if _comes_out_again(trial, job, budget))
        kept = next(same, None)
        if kept is not None:
            found[job] = kept
    return found


def _comes_out_again(trial: Trial, job: Job, budget: int | None) -> bool:
    if isinstance(job.spec, Case):
        same_search = trial.search == {}
    else:
        same_search = trial.search.get("budget", "none") == budget and trial.search.get("fixed") == list(job.fixed)
    same_values = trial.assumption_values == job.model.values.model_dump(mode="json")
    return same_search and same_values and trial.code_digest == code_digest(job.spec.system)


def _begin() -> None:
    """In a worker: it ends when interrupted, and with the process that started it."""
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


def _simulate(job: Job, budget: int | None) -> str:
    """In a worker: the trial as text. What goes wrong is a trial too."""
    try:
        return simulate_trial(job.spec, job.model, fixed=job.fixed, budget=budget).to_text()
    except Exception as error:
        return failed_trial(job.spec, job.model, error).to_text()
