"""`moebench tune`: the best layout of a system's space, what came next, and what was rejected and why."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from bench.cli import options
from bench.cli.asking import Asked, asks
from bench.cli.pairs import PairsCommand

if TYPE_CHECKING:
    from bench.tune import Candidate, TuneResult

SHOWN_CANDIDATES = 12
GIB = 2**30


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
        facts |= {"search": "complete" if found.complete else f"ended by its budget of {most} layouts tried"}
        facts |= {"simulated to the end": _simulated(found)}
        facts |= {"assumptions": costs.label}
        print_facts(f"simulated: {spec.system} for {spec.model.name} on {spec.cluster.name}", facts)
        columns = ["layout", "status", "step s", "bound s", "memory GiB", "why"]
        print_table("candidates", columns, [_row(each) for each in _shown(found.candidates)])
        title = "memory against step time: of what was simulated, no layout is faster and needs less"
        print_table(title, columns[:-1], [_row(each)[:-1] for each in _frontier(found.candidates)])
    if found.best is None:
        raise nothing_fits(found, costs, fixed)


def _simulated(found: "TuneResult") -> str:
    """How many of the layouts that were tried; of the others, from where on."""
    from bench.search import SLOWER

    whole = sum(each.step_time_s is not None for each in found.candidates)
    left = found.counts().get("slower", 0)
    return f"{whole} of {whole + left}; {left} left as soon as sure to take {SLOWER - 1:.0%} longer than the best"


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
