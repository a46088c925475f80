"""A system's own planner, as `moebench plan` calls it: its neighbours simulated, or trained on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from bench.cli import options
from bench.errors import BadInput, unknown

if TYPE_CHECKING:
    from bench.case import CaseSpec
    from bench.evaluate import CostModel

REFINE = ("simulate", "run", "none")
DEFAULT_RANKS, DEFAULT_STEPS = 4, 8


@dataclass(frozen=True)
class Here:
    """What `--refine run` trains on, and where its trials are kept. None where it was not asked for."""

    ranks: int | None
    device: str | None
    steps: int | None
    results: Path | None

    def require_unused(self) -> None:
        """Raises BadInput for what was given, where nothing is trained."""
        for name, value in vars(self).items():
            if value is not None:
                given = str(value) if isinstance(value, Path) else value
                raise BadInput(f"--{name}", given, "nothing without --refine run, which trains on this machine")


@dataclass(frozen=True)
class Refining:
    """How a planner times the neighbours of its split. `run`: on what, None where they are simulated or left alone."""

    how: str
    budget: int | None
    time_limit_s: float | None
    run: "Run | None"


@dataclass(frozen=True)
class Run:
    """Processes of this machine that train a layout, for how long, and where trials are kept."""

    ranks: int
    device: Literal["cpu", "cuda"]
    steps: int
    results: Path

    @classmethod
    def of(cls, here: Here) -> "Run":
        """With what is not given filled in. Raises BadInput."""
        from bench.cli.output import require_folder
        from bench.cli.training import require_torch
        from bench.results import LOCAL

        steps = options.at_least_one("steps", DEFAULT_STEPS if here.steps is None else here.steps)
        results = LOCAL if here.results is None else here.results
        ranks = DEFAULT_RANKS if here.ranks is None else here.ranks
        found = cls(ranks, options.device_of(here.device or "cpu"), steps, results)
        require_torch()
        require_folder("results", results)
        return found


def way_of(word: str | None) -> str:
    """The word of `--refine`. Raises BadInput."""
    if word is not None and word not in REFINE:
        raise unknown("--refine", word, REFINE)
    return word or "simulate"


def planner_of(system: str, method: str, option: str, value: object) -> Callable[..., Any]:
    """A system's own planner. Raises BadInput where it has none, naming the option that asked for it."""
    from bench.system import get_system, systems

    found: Callable[..., Any] | None = getattr(get_system(system), method, None)
    if found is None:
        able = ", ".join(name for name, each in systems().items() if hasattr(each, method))
        raise BadInput(option, value, f"nothing for {system}; it is for a system with a planner of its own: {able}")
    return found


def explained(spec: "CaseSpec", costs: "CostModel", refining: Refining) -> Any:
    """A planner's choice and its reasons; see `explain_choice`."""
    from bench.cli.output import working
    from bench.results import Store
    from bench.timing import running

    plan = partial(_limited("explain", spec, costs, refining), refinement=refining.how != "none")
    run = refining.run
    if run is None:
        with working(f"planning {spec.system}") as advance:
            return plan(progress=advance)
    with working(f"planning {spec.system} on {run.ranks} ranks of this machine", lines=True) as advance:
        advance(0, 0, "starting them")
        with running(run.ranks, run.device, run.steps, Store(run.results).write) as evaluate:
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
    planner = planner_of(spec.system, method, "system", spec.system)
    return partial(planner, spec=spec, assumptions=costs.values, **limits)


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
