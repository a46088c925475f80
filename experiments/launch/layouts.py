"""Layouts of the cases that are to be run: given ones, or those that the simulator finds best."""

from collections.abc import Callable, Sequence

from bench.case import Case, CaseSpec
from bench.errors import BadInput
from bench.predict import predict
from bench.tune import DEFAULT_BUDGET
from experiments.launch.kept import adopt
from experiments.launch.ledger import Ledger
from experiments.launch.work import Settings, Task


def with_layouts(
    specs: Sequence[CaseSpec], ledger: Ledger, progress: Callable[[int, int, str], None]
) -> tuple[list[Case], list[str]]:
    """Cases, and a line for each spec for which no layout fits. What is simulated for it is kept as trials.

    Raises BadInput for a case that cannot be, or where none is left.
    """
    settings = Settings(budget=DEFAULT_BUDGET)
    tasks = {spec: Task(spec, settings) for spec in specs if not isinstance(spec, Case)}
    if tasks:
        ledger.make()
        adopt(ledger, tasks.values(), retry_failed=False)
    cases: list[Case] = []
    left_out: list[str] = []
    for number, spec in enumerate(specs):
        progress(number, len(specs), spec.system)
        case, why = (spec, "") if isinstance(spec, Case) else _tuned(tasks[spec], ledger)
        if case is None:
            left_out.append(f"{tasks[spec].label}: {why}")
        else:
            cases.append(case)
    if not cases:
        raise BadInput("experiment", left_out[0] if left_out else "", "at least one case for which a layout fits")
    return cases, left_out


def _tuned(task: Task, ledger: Ledger) -> tuple[Case | None, str]:
    trial = ledger.trial(task.key)
    if trial is None:
        trial = task.run()
        ledger.commit(task.key, trial)
    return (trial.case, "") if trial.status == "ok" and isinstance(trial.case, Case) else (None, trial.message)


def peak_bytes(case: Case, settings: Settings) -> float | None:
    """Bytes of the fullest GPU, as simulated; None where the case cannot be simulated."""
    try:
        return predict(case, settings.costs.values).peak_memory_bytes
    except BadInput:
        return None
