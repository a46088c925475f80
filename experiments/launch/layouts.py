"""Layouts of the cases that are to be run: given ones, or those that the simulator finds best."""

from collections.abc import Callable, Sequence

from bench.case import Case, CaseSpec
from bench.errors import BadInput
from bench.tune import DEFAULT_BUDGET
from experiments.launch.kept import adopt
from experiments.launch.ledger import Ledger
from experiments.launch.work import Settings, Task


def with_layouts(
    specs: Sequence[CaseSpec], ledger: Ledger, progress: Callable[[int, int, str], None]
) -> tuple[list[Case], dict[str, float], list[str]]:
    """Cases; bytes of the fullest GPU by case id, as simulated; and a line for each spec for which no layout fits.

    What is simulated for it is kept as trials. Raises BadInput for a case that cannot be, or where none is left.
    """
    settings = Settings(budget=DEFAULT_BUDGET)
    tasks = [Task(spec, settings) for spec in specs]
    ledger.make()
    adopt(ledger, tasks, retry_failed=False)
    cases: list[Case] = []
    memory: dict[str, float] = {}
    left_out: list[str] = []
    for number, task in enumerate(tasks):
        progress(number, len(tasks), task.label)
        trial = ledger.trial(task.key)
        if trial is None:
            trial = task.run()
            ledger.commit(task.key, trial)
        case = task.spec if isinstance(task.spec, Case) else trial.case
        if not isinstance(case, Case) or (trial.status != "ok" and case != task.spec):
            left_out.append(f"{task.label}: {trial.message}")
            continue
        cases.append(case)
        peak = trial.metrics.get("peak_memory_bytes")
        if peak is not None:
            memory[case.id] = peak
    if not cases:
        raise BadInput("experiment", left_out[0] if left_out else "", "at least one case for which a layout fits")
    return cases, memory, left_out
