"""A study: systems along one axis, everything else held; the search of Figure 7, with its budget, for every cell."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.case import CaseSpec, Workload
from bench.clusters import get_cluster
from bench.evaluate import CostModel
from bench.models import Model, get_model
from bench.results import frame
from bench.trial import Trial
from bench.tune import DEFAULT_BUDGET
from experiments import Evidence, Request, Table
from experiments._sweep import Job, sweep_jobs
from experiments.fig7 import BASELINE, OURS, OVERLAP, fastest, rate, said, speedup

if TYPE_CHECKING:
    from pandas import DataFrame

QUICK_BUDGET = 2
COMPARED = (BASELINE, "megatron-overlap", "dualpipe-v", OURS)
"""Enough to see `ep`, the overlap systems that are usually fastest, and `disagmoe`."""


class Cell(NamedTuple):
    """One point of a line: the panel and the place on the axis; fixed: layout fields that are not searched."""

    panel: str
    x: float
    spec: CaseSpec
    fixed: tuple[str, ...] = ()


class Axis(NamedTuple):
    """What a study varies. log: the axis doubles; words: how a place is named where its number will not do."""

    label: str
    log: bool = True
    words: Mapping[float, str] = {}


def spec(
    system: str, model: str | Model, cluster: str = "h800x16", seq_len: int = 8192, global_batch_tokens: int = 1 << 22
) -> CaseSpec:
    """bf16, balanced routing."""
    work = Workload(seq_len=seq_len, global_batch_tokens=global_batch_tokens, dtype="bf16", routing="balanced")
    found = get_model(model) if isinstance(model, str) else model
    return CaseSpec(model=found, cluster=get_cluster(cluster), workload=work, system=system)


def study(request: Request, cells: Sequence[Cell], axis: Axis) -> Evidence:
    """Tunes what is missing. What does not fit is a result; errors are failures."""
    return evidence(cells, trials_of(request, cells), axis)


def trials_of(request: Request, cells: Sequence[Cell]) -> list[Trial]:
    """A trial for every cell."""
    model = CostModel.named(request.assumptions)
    jobs = [Job(cell.spec, model, cell.fixed) for cell in cells]
    budget = QUICK_BUDGET if request.quick else DEFAULT_BUDGET
    return sweep_jobs(jobs, request.store(), request.progress, budget=budget)


def evidence(cells: Sequence[Cell], trials: Sequence[Trial], axis: Axis) -> Evidence:
    """What the cells show together: rates along the axis, and the factors between systems."""
    data = table_of(cells, trials)
    failures = [
        f"{t.case.system} {c.panel} {c.x:g}: {t.message}"
        for c, t in zip(cells, trials, strict=True)
        if t.status == "error"
    ]
    drawn = {"frame": data, "label": axis.label, "log": axis.log, "words": dict(axis.words)}
    drawn |= {"ours": OURS, "baseline": BASELINE, "overlap": OVERLAP}
    return Evidence(drawn, data, [_rates(cells, trials, axis), _layouts(cells, trials, axis)], failures, "study")


def table_of(cells: Sequence[Cell], trials: Sequence[Trial]) -> "DataFrame":
    """The trials as a table with panel, x and what was fixed."""
    data = frame(trials)
    data.insert(0, "panel", [cell.panel for cell in cells])
    data.insert(1, "x", [cell.x for cell in cells])
    data["fixed"] = [" ".join(cell.fixed) for cell in cells]
    return data


def _rates(cells: Sequence[Cell], trials: Sequence[Trial], axis: Axis) -> Table:
    places: dict[tuple[str, float], dict[str, Trial]] = {}
    for cell, trial in zip(cells, trials, strict=True):
        places.setdefault((cell.panel, cell.x), {})[trial.case.system] = trial
    systems = list(dict.fromkeys(trial.case.system for trial in trials))
    over = {f"{OURS} over {BASELINE}": (BASELINE,), "over best overlap": OVERLAP}
    others = {name: those for name, those in over.items() if set(those) & set(systems)}
    rows = []
    for (panel, x), here in places.items():
        rates = [(here.get(system), rate(here.get(system))) for system in systems]
        words = ["-" if trial is None else said(trial) if value is None else f"{value:,.0f}" for trial, value in rates]
        ratios = [speedup(here, those) for those in others.values()]
        shown = ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
        rows.append([panel, axis.words.get(x, f"{x:,.0f}"), *words, *shown, *[fastest(here, systems)] * bool(others)])
    columns = ["", axis.label, *systems, *others, *["fastest"] * bool(others)]
    return Table("simulated tokens/s/GPU", columns, rows)


def _layouts(cells: Sequence[Cell], trials: Sequence[Trial], axis: Axis) -> Table:
    rows = [
        [cell.panel, axis.words.get(cell.x, f"{cell.x:,.0f}"), trial.case.system, trial.layout or trial.message]
        for cell, trial in zip(cells, trials, strict=True)
    ]
    return Table("layouts", ["", axis.label, "system", "layout"], rows)
