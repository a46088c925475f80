"""Verbs and views that say why: `tune`, and the planner's reasons in `plan`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from bench.cli import options
from bench.cli.asking import Asked, asks
from bench.cli.options import RUN_MICROBATCHES, PairsCommand
from bench.errors import BadInput

if TYPE_CHECKING:
    from bench.case import CaseSpec, Layout
    from bench.evaluate import CostModel
    from bench.tune import Candidate, TuneResult

SHOWN_CANDIDATES = 12
GIB = 2**30
REFINE = ("simulate", "run", "none")


def add_verbs(app: typer.Typer) -> None:
    example = "moebench tune ep --model gpt-oss-120b --cluster h800x16 --seq-len 8192 --layout recompute=full"
    app.command("tune", cls=PairsCommand, epilog=f"Example: {example}")(tune)


@asks
def tune(asked: Asked, budget: options.Budget = None, json: options.Json = False) -> None:
    """Search a system's layouts: winner, runner-up, and what was rejected and why. --layout fixes fields."""
    from bench.cli.output import print_facts, print_json, print_table, working
    from bench.evaluate import nothing_fits
    from bench.tune import tune as search

    spec, costs = asked.spec(), asked.costs()
    fixed = options.words_of(asked.layout)
    most = options.budget_of(budget)
    with working(f"tuning {spec.system}") as advance:
        found = search(
            spec,
            costs.values,
            fixed=fixed,
            budget=most,
            progress=lambda done, left: advance(done, done + left, "layouts"),
        )
    if json:
        print_json({**_result(found), "assumptions": costs.label, "budget": most})
    else:
        best = found.best
        facts: dict[str, object] = {"winner": "nothing fits" if best is None else str(best.case.layout) or "defaults"}
        runner_up = found.runner_up
        facts["runner-up"] = "none" if runner_up is None else str(runner_up.layout) or "defaults"
        facts |= {"candidates": ", ".join(f"{number} {status}" for status, number in found.counts().items())}
        facts |= {"search": "complete" if found.complete else f"ended by its budget of {most} simulations"}
        facts |= {"assumptions": costs.label}
        print_facts(f"simulated: {spec.system} for {spec.model.name} on {spec.cluster.name}", facts)
        columns = ["layout", "status", "step s", "bound s", "memory GiB", "why"]
        print_table("candidates", columns, [_row(each) for each in _shown(found.candidates)])
        title = "memory against step time: of what was simulated, no layout is faster and needs less"
        print_table(title, columns[:-1], [_row(each)[:-1] for each in _frontier(found.candidates)])
    if found.best is None:
        raise nothing_fits(found, costs, fixed)


def _shown(candidates: Sequence["Candidate"]) -> list["Candidate"]:
    """The fastest that fit, and the first of every other status."""
    fit = [each for each in candidates if each.status == "ok"][:SHOWN_CANDIDATES]
    first = {each.status: each for each in reversed(candidates) if each.status != "ok"}
    return [*fit, *first.values()]


def _frontier(candidates: Sequence["Candidate"]) -> list["Candidate"]:
    """Of the layouts with a step time, by step time: those that need less memory than every faster one."""
    timed = [each for each in candidates if each.step_time_s is not None and each.peak_memory_bytes is not None]
    kept: list[Candidate] = []
    for each in sorted(timed, key=lambda each: (each.step_time_s or 0.0, each.peak_memory_bytes or 0.0)):
        if not kept or (each.peak_memory_bytes or 0.0) < (kept[-1].peak_memory_bytes or 0.0):
            kept.append(each)
    return kept


def _row(each: "Candidate") -> list[object]:
    memory = None if each.peak_memory_bytes is None else round(each.peak_memory_bytes / GIB, 1)
    return [str(each.layout) or "defaults", each.status, each.step_time_s, each.bound_s, memory, each.reason]


def _result(found: "TuneResult") -> dict[str, Any]:
    def plain(each: "Candidate | None") -> dict[str, Any] | None:
        if each is None:
            return None
        named = ("status", "step_time_s", "bound_s", "peak_memory_bytes", "reason")
        return {"layout": str(each.layout), **{name: getattr(each, name) for name in named}}

    winner = next((each for each in found.candidates if each.status == "ok"), None)
    return {
        "kind": "simulated",
        "system": found.spec.system,
        "winner": plain(winner),
        "runner_up": plain(found.runner_up),
        "counts": found.counts(),
        "complete": found.complete,
        "candidates": [plain(each) for each in found.candidates],
        "memory_against_time": [plain(each) for each in _frontier(found.candidates)],
    }


@dataclass(frozen=True)
class Refining:
    """How a planner times the neighbours of its split: the options of `moebench plan --refine`."""

    how: str
    ranks: int
    device: Literal["cpu", "cuda"]
    steps: int
    budget: int | None
    time_limit_s: float | None
    results: Path

    @classmethod
    def of(
        cls,
        how: str,
        ranks: int,
        device: str,
        steps: int,
        budget: int | None,
        time_limit_s: float | None,
        results: Path | None,
    ) -> "Refining":
        """Raises BadInput."""
        from bench.errors import unknown
        from bench.results import LOCAL

        if how not in REFINE:
            raise unknown("refine", how, REFINE)
        if budget is not None:
            options.at_least_one("budget", budget)
        options.at_least_one("steps", steps)
        kept = LOCAL if results is None else results
        return cls(how, ranks, options.device_of(device), steps, budget, time_limit_s, kept)

    @property
    def runs(self) -> bool:
        return self.how == "run"

    def require_planned(self, system: str, layout: "Layout | None", schedule: str | None, printed: bool) -> None:
        """Raises BadInput where an option would go unheeded: nothing plans, or it plans something else."""
        from bench.cli.output import require_folder
        from bench.cli.training import require_torch

        if schedule is not None:
            planner_of(system, "explain_schedule")
            what = "nothing beside --seq-len-schedule: every phase is planned, and refined by simulation"
            if layout is not None:
                raise BadInput("--layout", str(layout) or "defaults", what)
            if printed:
                raise BadInput("--print-schedule", True, what)
            if self.how != "simulate":
                raise BadInput("--refine", self.how, what)
        limits = {"--budget": self.budget, "--time-limit": self.time_limit_s}
        for option, limit in limits.items():
            if limit is not None:
                planner_of(system, "explain", option, limit)
                if layout is not None:
                    raise BadInput(option, limit, "nothing beside --layout, with which nothing is planned")
        if self.budget is not None and self.how == "none":
            raise BadInput("--budget", self.budget, "nothing beside --refine none, which times no layouts")
        if not self.runs:
            return
        planner_of(system, "explain")
        if layout is not None or printed:
            raise BadInput("refine", self.how, "simulate with --layout, --seq-len-schedule or --print-schedule")
        require_torch()
        require_folder("results", self.results)

    def spec(
        self, system: str, model: str, cluster: str | None, seq_len: int, batch_tokens: int | None, dtype: str | None
    ) -> "CaseSpec":
        """What is planned: on a cluster, or on this machine's ranks. Raises BadInput."""
        if not self.runs:
            if cluster is None:
                raise BadInput("--cluster", None, "a value (it is required)")
            return options.spec_on(system, model, cluster, seq_len, batch_tokens, dtype or "bf16", "balanced", 0)
        here = options.local_cluster(self.ranks, self.device, cluster)
        tokens = RUN_MICROBATCHES * self.ranks * seq_len if batch_tokens is None else batch_tokens
        chosen = dtype or ("fp32" if self.device == "cpu" else "bf16")
        return options.spec_of(system, model, here, seq_len, tokens, chosen, "learned", 0)


def planner_of(system: str, method: str, option: str = "system", value: object = None) -> Callable[..., Any]:
    """A system's own planner. Raises BadInput where it has none, naming the option that asked for it."""
    from bench.system import get_system, systems

    found: Callable[..., Any] | None = getattr(get_system(system), method, None)
    if found is None:
        able = ", ".join(name for name, each in systems().items() if hasattr(each, method))
        raise BadInput(option, system if value is None else value, f"a system with a planner of its own: {able}")
    return found


def explained(spec: "CaseSpec", costs: "CostModel", refining: Refining) -> Any:
    """A planner's choice and its reasons; see `explain_choice`."""
    from bench.cli.output import working
    from bench.results import Store
    from bench.timing import running

    plan = _limited("explain", spec, costs, refining)
    plan = partial(plan, refinement=refining.how != "none")
    with working(f"planning {spec.system}") as advance:
        if not refining.runs:
            return plan(progress=advance)
        store = Store(refining.results)
        with running(refining.ranks, refining.device, refining.steps, store.write) as evaluate:
            return plan(progress=advance, evaluate=evaluate)


def explained_phases(spec: "CaseSpec", schedule: str, costs: "CostModel", refining: Refining) -> Any:
    """A planner's choice for every phase of a schedule of sequence lengths."""
    from bench.cli.output import working

    plan = _limited("explain_schedule", spec, costs, refining)
    with working(f"planning {spec.system}") as advance:
        return plan(schedule=schedule, progress=advance)


def _limited(method: str, spec: "CaseSpec", costs: "CostModel", refining: Refining) -> Callable[..., Any]:
    """A planner of a spec with the limits that were given."""
    given = {"budget": refining.budget, "time_limit_s": refining.time_limit_s}
    limits = {name: value for name, value in given.items() if value is not None}
    return partial(planner_of(spec.system, method), spec=spec, assumptions=costs.values, **limits)


def explain_choice(explanation: Any, json: bool) -> None:
    """Says a planner's explanation: an object with `sentences`, `tables` and `to_json`."""
    from bench.cli.output import print_json, print_table

    if json:
        print_json(explanation.to_json())
        return
    for sentence in explanation.sentences():
        typer.echo(sentence)
    for table in explanation.tables():
        print_table(*table)
