"""Layouts of the cases that are to be run: given ones, or the best, as simulated, of what can be executed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.case import Case, CaseSpec
from bench.errors import BadInput
from bench.predict import predict
from bench.system import get_system
from bench.trial import Trial
from bench.tune import DEFAULT_BUDGET
from experiments.launch.kept import adopt
from experiments.launch.ledger import Ledger
from experiments.launch.work import Settings, Task


@dataclass
class Chosen:
    """What is to be run. no_layout: a trial for each spec for which none fits. refused: specs that cannot be executed,
    with the reason.
    """

    cases: list[Case] = field(default_factory=list)
    no_layout: list[Trial] = field(default_factory=list)
    refused: list[tuple[CaseSpec, str]] = field(default_factory=list)


def with_layouts(specs: Sequence[CaseSpec], ledger: Ledger, progress: Callable[[int, int, str], None]) -> Chosen:
    """Cases of the specs. What is simulated for them is kept.

    Raises BadInput for a case that cannot be, or where none is left.
    """
    never = {spec: _never(spec) for spec in specs}
    tasks = {
        spec: Task(spec, Settings(budget=DEFAULT_BUDGET, fixed=fixed_for(spec)))
        for spec in specs
        if not isinstance(spec, Case) and not never[spec]
    }
    if tasks:
        ledger.make()
        adopt(ledger, tasks.values(), retry_failed=False)
    found = Chosen()
    for number, spec in enumerate(specs):
        progress(number, len(specs), spec.system)
        trial = _tuned(tasks[spec], ledger) if spec in tasks else None
        case = spec if trial is None else trial.case
        if never[spec]:
            found.refused.append((spec, never[spec]))
        elif trial is not None and trial.status != "ok":
            found.no_layout.append(trial)
        elif isinstance(case, Case):
            why = _refusal(case)
            if why:
                found.refused.append((case, why))
            else:
                found.cases.append(case)
    if not found.cases:
        reasons = [*(why for _, why in found.refused), *(trial.message for trial in found.no_layout), "it has none"]
        raise BadInput("experiment", f"{len(specs)} cases", f"at least one that can be executed ({reasons[0]})")
    return found


def _never(spec: CaseSpec) -> str:
    """Why no layout of the spec can be executed, "" where one may be."""
    from bench.execute.support import unsupported

    if "modelled-only" in getattr(get_system(spec.system), "traits", ()):
        return f"{spec.system} is modelled only"
    return next(iter(unsupported(spec.model)), "")


def _refusal(case: Case) -> str:
    """Why a case cannot be executed, "" where it can."""
    from bench.execute.job import Job

    try:
        plan = Job.of(case).program.plan
    except BadInput as error:
        return str(error)
    return "one row a node is only modelled" if plan.copies == "node" else ""


def fixed_for(spec: CaseSpec) -> tuple[str, ...]:
    """What the search for a layout that is to be executed may not choose: one row a node is only modelled."""
    copies = {layout.copies for layout in get_system(spec.system).space(spec)}
    return ("copies=rank",) if "rank" in copies and "node" in copies else ()


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
