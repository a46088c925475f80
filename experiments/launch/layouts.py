"""Layouts of the cases that are to be run: given ones, or those that the simulator finds best."""

from collections.abc import Callable, Sequence

from bench.case import Case, CaseSpec
from bench.tune import DEFAULT_BUDGET
from experiments.launch.kept import adopt
from experiments.launch.ledger import Ledger
from experiments.launch.work import Settings, Task


def with_layouts(
    specs: Sequence[CaseSpec], ledger: Ledger, progress: Callable[[int, int, str], None]
) -> tuple[list[CaseSpec], dict[str, float]]:
    """Cases, and the bytes of the fullest GPU by case id, as simulated; what is simulated for it is kept as trials.

    A spec for which no layout fits stays a spec. Raises BadInput for a case that cannot be.
    """
    settings = Settings(budget=DEFAULT_BUDGET)
    tasks = [Task(spec, settings) for spec in specs]
    ledger.make()
    adopt(ledger, tasks, retry_failed=False)
    cases: list[CaseSpec] = []
    memory: dict[str, float] = {}
    for number, task in enumerate(tasks):
        progress(number, len(tasks), task.label)
        trial = ledger.trial(task.key)
        if trial is None:
            trial = task.run()
            ledger.commit(task.key, trial)
        case = trial.case if trial.status == "ok" else task.spec
        cases.append(case)
        peak = trial.metrics.get("peak_memory_bytes")
        if isinstance(case, Case) and peak is not None:
            memory[case.id] = peak
    return cases, memory
