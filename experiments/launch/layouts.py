"""Layouts of the cases that are to be run: given ones, or those that the simulator finds best."""

from collections.abc import Callable, Sequence

from bench.case import Case, CaseSpec
from bench.errors import BadInput
from bench.predict import predict
from bench.trial import Trial
from bench.tune import DEFAULT_BUDGET
from experiments.launch.kept import adopt
from experiments.launch.ledger import Ledger
from experiments.launch.work import Settings, Task


def with_layouts(
    specs: Sequence[CaseSpec], ledger: Ledger, progress: Callable[[int, int, str], None]
) -> tuple[list[Case], list[Trial]]:
    """Cases, and a trial for each spec for which no layout fits. What is simulated for it is kept.

    Raises BadInput for a case that cannot be, or where none is left.
    """
    settings = Settings(budget=DEFAULT_BUDGET)
    tasks = {spec: Task(spec, settings) for spec in specs if not isinstance(spec, Case)}
    if tasks:
        ledger.make()
        adopt(ledger, tasks.values(), retry_failed=False)
    cases: list[Case] = []
    left_out: list[Trial] = []
    for number, spec in enumerate(specs):
        progress(number, len(specs), spec.system)
        if isinstance(spec, Case):
            cases.append(spec)
            continue
        trial = _tuned(tasks[spec], ledger)
        if trial.status == "ok" and isinstance(trial.case, Case):
            cases.append(trial.case)
        else:
            left_out.append(trial)
    if not cases:
        why = left_out[0].message if left_out else "it has none"
        raise BadInput("experiment", f"{len(specs)} cases", f"at least one for which a layout fits ({why})")
    return cases, left_out


def _tuned(task: Task, ledger: Ledger) -> Trial:
    trial = ledger.trial(task.key)
    if trial is None:
        trial = task.run()
        ledger.commit(task.key, trial)
    return trial


def not_run(trial: Trial) -> Trial:
    """What stands among measured trials for a case that the simulator has found not to fit."""
    held = {name: trial.metrics[name] for name in ("peak_memory_bytes", "missing_gib") if name in trial.metrics}
    return Trial.make(
        case=trial.case,
        source="measured",
        status="infeasible",
        message=trial.message,
        metrics=held,
        command=trial.command,
        provenance=trial.provenance,
    )


def peak_bytes(case: Case, settings: Settings) -> float | None:
    """Bytes of the fullest GPU, as simulated; None where the case cannot be simulated."""
    try:
        return predict(case, settings.costs.values).peak_memory_bytes
    except BadInput:
        return None
