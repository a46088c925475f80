"""Simulates what is missing of many specs, in several processes; every trial is kept as soon as it is there."""

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context

from bench.case import CaseSpec
from bench.evaluate import CostModel, failed_trial, simulate_trial
from bench.provenance import code_digest
from bench.results import Store
from bench.trial import Trial
from bench.tune import DEFAULT_BUDGET
from experiments import Progress

MAX_WORKERS = 8


def sweep(
    specs: Sequence[CaseSpec],
    model: CostModel,
    store: Store,
    progress: Progress,
    *,
    budget: int | None = DEFAULT_BUDGET,
    num_workers: int | None = None,
) -> list[Trial]:
    """A tuned trial for every spec, in their order: of `store` where the same code made one, else made now.

    Raises BadInput where a trial cannot be written.
    """
    found = {spec: reusable(store, spec, model, budget) for spec in specs}
    missing = [spec for spec in specs if found[spec] is None]
    progress(len(specs) - len(missing), len(specs), "found")
    if missing:
        workers = num_workers or min(os.cpu_count() or 1, MAX_WORKERS, len(missing))
        others = set(active_children())
        # spawn: a forked copy of a process that has threads may hang.
        with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_end_when_interrupted) as executor:
            jobs = {executor.submit(_simulate, spec, model, budget): spec for spec in missing}
            try:
                for number, job in enumerate(as_completed(jobs), 1 + len(specs) - len(missing)):
                    spec = jobs[job]
                    trial = Trial.parse(job.result())
                    store.write(trial)
                    found[spec] = trial
                    progress(number, len(specs), f"{spec.system} {spec.model.name} {spec.workload.seq_len}")
            except BaseException:
                # Whoever stops a sweep does not want to wait for the cells under way.
                for worker in set(active_children()) - others:
                    worker.terminate()
                executor.shutdown(wait=False, cancel_futures=True)
                raise
    return [trial for trial in (found[spec] for spec in specs) if trial is not None]


def reusable(store: Store, spec: CaseSpec, model: CostModel, budget: int | None) -> Trial | None:
    """A kept trial that would come out again: same spec, code, assumptions and search."""
    digest, values = code_digest(spec.system), model.values.model_dump(mode="json")

    def matches(trial: Trial) -> bool:
        same_search = trial.search.get("budget", "none") == budget and trial.search.get("fixed") == []
        return trial.code_digest == digest and trial.assumption_values == values and same_search

    return store.find(spec, matches)


def _end_when_interrupted() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _simulate(spec: CaseSpec, model: CostModel, budget: int | None) -> str:
    """In a worker: the trial as text. What goes wrong is a trial too."""
    try:
        return simulate_trial(spec, model, budget=budget).to_text()
    except Exception as error:
        return failed_trial(spec, model, error).to_text()
