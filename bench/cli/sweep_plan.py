"""What `moebench sweep` is about to run: its cases with their layouts, checked against this machine or the cluster."""

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from bench.case import CaseSpec
    from bench.cli.sweep import Asked
    from bench.trial import Trial
    from experiments.launch.ledger import Ledger
    from experiments.launch.site import Site
    from experiments.launch.slurm_state import ClusterFacts
    from experiments.launch.watch import Plan
    from experiments.launch.work import Settings


def planned(asked: "Asked", site: "Site", ledger: "Ledger") -> "tuple[Plan, str]":
    """What is to be run, checked, and what a dry run could not check. Raises BadInput."""
    from experiments.launch import choose, preview
    from experiments.launch.pack import require_here
    from experiments.launch.sweeps import name_of
    from experiments.launch.watch import Plan

    settings = _settings(asked)
    facts, unchecked = _cluster(site, asked.dry_run)
    only = asked.only or []
    specs = choose.only(choose.specs_of(asked.experiment, asked.quick, settings.backend), only)
    left_out: list[Trial] = []
    if settings.backend == "run":
        specs, left_out = _executable(specs, asked, site, ledger, facts)
    tasks = choose.tasks_of(specs, settings, asked.repeats)
    require_here(tasks, site)
    if facts is not None:
        preview.require_possible(tasks, site, facts, asked.pack)
    name = name_of(asked.experiment, settings.backend, ",".join(sorted(only)))
    return Plan(name, name.split("-")[0], tasks, site, asked.pack, facts, left_out), unchecked


def _settings(asked: "Asked") -> "Settings":
    from bench.tune import DEFAULT_BUDGET
    from experiments.launch.work import Settings

    budget = DEFAULT_BUDGET if asked.backend == "simulate" else None
    return Settings(backend=_backend(asked.backend, asked.pack), steps=asked.steps, budget=budget)


def _executable(
    specs: "list[CaseSpec]", asked: "Asked", site: "Site", ledger: "Ledger", facts: "ClusterFacts | None"
) -> "tuple[list[CaseSpec], list[Trial]]":
    """Specs with the layouts in which they are to run, and trials of those that fit in none. Raises BadInput."""
    from bench.cli.output import working
    from experiments.launch import layouts, preview
    from experiments.launch.pack import require_machine

    require_machine(specs, site, _smaller(asked.experiment, asked.quick))
    if facts is not None:
        preview.require_nodes(specs, site, facts)
    with working("layouts") as advance:
        chosen = layouts.with_layouts(specs, ledger, advance)
    _say_left_out([*chosen.refused, *((trial.case, trial.message) for trial in chosen.no_layout)])
    return list(chosen.cases), chosen.no_layout


def _backend(word: str, pack: bool) -> Any:
    from bench.errors import BadInput, unknown
    from experiments.launch.work import BACKENDS

    if word not in BACKENDS:
        raise unknown("backend", word, BACKENDS)
    if pack and word == "simulate":
        raise BadInput("pack", True, "with --backend run; simulated cases are packed by themselves")
    if word == "run":
        from bench.cli.training import require_torch

        require_torch()
    return word


def _cluster(site: "Site", dry_run: bool) -> "tuple[ClusterFacts | None, str]":
    """What Slurm says of itself, where it is asked; and why it could not be, which a dry run goes on without.

    Raises BadInput.
    """
    from bench.errors import BadInput
    from experiments.launch.slurm_state import cluster_facts

    if site.executor != "slurm":
        return None, ""
    try:
        return cluster_facts(), ""
    except BadInput as error:
        if not dry_run:
            raise
        return None, f"partition, nodes and time limit are not checked: that takes {error.allowed}"


def _smaller(experiment: str, quick: bool) -> str:
    from experiments.launch.choose import module_of

    has_one = not quick and hasattr(module_of(experiment), "quick_runs")
    return "; --quick trains small cases on processes of the CPU" if has_one else ""


def _say_left_out(specs: "list[tuple[CaseSpec, str]]") -> None:
    """A line for each reason."""
    by_reason: dict[tuple[str, str, str], int] = {}
    for spec, why in specs:
        place = (f"{spec.system} {spec.model.name}", spec.cluster.name, why)
        by_reason[place] = by_reason.get(place, 0) + 1
    for (what, cluster, why), number in by_reason.items():
        times = f" ({number} cases)" if number > 1 else ""
        typer.echo(f"moebench: left out: {what} {cluster}{times}: {why}", err=True)
