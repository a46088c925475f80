"""`moebench sweep` and what belongs to it: an experiment's cases on this machine or on Slurm, watched and resumed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options, sweeping
from bench.cli.sweeping import failure_fields, show_failures

if TYPE_CHECKING:
    from bench.case import CaseSpec
    from bench.trial import Trial
    from experiments.launch.outcome import Event, Outcome
    from experiments.launch.site import Site
    from experiments.launch.slurm_state import ClusterFacts
    from experiments.launch.watch import Plan

EXECUTORS = ("inprocess", "debug", "local", "slurm")

SiteFile = Annotated[
    Path | None,
    typer.Option(
        "--site", metavar="FILE", help="Settings of the cluster; see `moebench site init`.", show_default=False
    ),
]


def _text(name: str, metavar: str, help_: str) -> Any:
    return typer.Option(name, metavar=metavar, help=help_, show_default=False)


def _number(name: str, help_: str) -> Any:
    return typer.Option(name, metavar="NUMBER", parser=options.whole_number, help=help_, show_default=False)


def register(app: typer.Typer) -> None:
    """Adds the verbs sweep, status, cancel, logs and site."""
    example = "moebench sweep fig7 --executor slurm --partition gpu --dry-run"
    app.command("sweep", epilog=f"Example: {example}")(sweep)
    sweeping.add_verbs(app)


add_verbs = register


def sweep(
    experiment: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE.py", help="Experiment, or a file with `specs(quick)`.", show_default=False),
    ],
    executor: Annotated[str | None, _text("--executor", "|".join(EXECUTORS), "Where. Default: inprocess.")] = None,
    backend: Annotated[str, typer.Option("--backend", metavar="simulate|run", help="What.")] = "simulate",
    partition: Annotated[str | None, _text("--partition", "NAME", "Slurm partition.")] = None,
    account: Annotated[str | None, _text("--account", "NAME", "Slurm account.")] = None,
    qos: Annotated[str | None, _text("--qos", "NAME", "Slurm quality of service.")] = None,
    time: Annotated[str | None, _text("--time", "HH:MM:SS", "Time limit of one run. Default: 00:30:00.")] = None,
    max_nodes: Annotated[int | None, _number("--max-nodes", "Refuse cases that need more nodes.")] = None,
    gpus_per_node: Annotated[int | None, _number("--gpus-per-node", "Ranks of a run on one node.")] = None,
    setup: Annotated[Path | None, _text("--setup", "FILE", "Shell lines that every job runs first.")] = None,
    only: Annotated[list[str] | None, _text("--only", "FIELD=VALUE,...", "Fewer cases.")] = None,
    repeats: Annotated[int, _number("--repeats", "Runs of each case.")] = 1,
    jobs: Annotated[int | None, _number("--jobs", "Jobs at a time.")] = None,
    pack: Annotated[bool, typer.Option("--pack", help="Runs of one shape share an allocation, in rounds.")] = False,
    steps: Annotated[int, _number("--steps", "Optimizer steps of a run.")] = 20,
    quick: Annotated[bool, typer.Option("--quick", help="The experiment's fewer cases.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run again what failed.")] = False,
    out: Annotated[Path | None, _text("--out", "DIR", "Draw the experiment's figure there, at the end.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and submit nothing.")] = False,
    site: SiteFile = None,
    results: options.Results = None,
    json: options.Json = False,
) -> None:
    """Run the cases of an experiment that have no result yet. An option with the value none overrides the site file.

    Run it again to go on where it stopped. Exit code 1 where a case failed or has no result.
    """
    from bench.cli.output import require_folder
    from bench.results import LOCAL
    from experiments.launch.ledger import Ledger
    from experiments.launch.site import load
    from experiments.launch.work import Settings

    given = {
        "executor": executor,
        "partition": partition,
        "account": account,
        "qos": qos,
        "time": time,
        "max_nodes": max_nodes,
        "gpus_per_node": gpus_per_node,
        "jobs": jobs,
        "setup": _lines(setup),
    }
    if steps < 1:
        from bench.errors import BadInput

        raise BadInput("steps", steps, "at least 1")
    chosen = load(site, given)
    kept = LOCAL if results is None else results
    require_folder("results", kept)
    settings = Settings(backend=_backend(backend, pack), steps=steps, budget=_budget(backend))
    ledger = Ledger(kept)
    words = ",".join(sorted(only or []))
    if out is not None:
        require_folder("out", out)
        _require_figure(experiment, only)
    facts, unchecked = _cluster(chosen, dry_run)
    plan = _plan(experiment, quick, only or [], settings, repeats, chosen, pack, ledger, words, facts)
    if dry_run:
        _preview(plan, ledger, unchecked, json)
        return
    outcome = _run(plan, ledger, retry_failed, json)
    if out is not None and not outcome.open:
        stem = "-".join([experiment, *(["run"] if backend == "run" else []), *(["quick"] if quick else [])])
        _draw(experiment, plan, outcome, out, stem, json)
    if outcome.failed or outcome.open:
        raise typer.Exit(1)


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


def _budget(backend: str) -> int | None:
    from bench.tune import DEFAULT_BUDGET

    return DEFAULT_BUDGET if backend == "simulate" else None


def _lines(setup: Path | None) -> tuple[str, ...] | None:
    from bench.errors import BadInput

    if setup is None:
        return None
    if str(setup) == "none":
        return ()
    try:
        return tuple(setup.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput("setup", str(setup), f"a text file that can be read ({reason})") from None


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


def _plan(
    experiment: str,
    quick: bool,
    only: list[str],
    settings: Any,
    repeats: int,
    site: "Site",
    pack: bool,
    ledger: Any,
    words: str,
    facts: "ClusterFacts | None",
) -> "Plan":
    """What is to be run, checked."""
    from experiments.launch import choose, layouts, preview
    from experiments.launch.pack import require_here, require_machine
    from experiments.launch.sweeps import name_of
    from experiments.launch.watch import Plan

    left_out: list[Trial] = []
    specs = choose.only(choose.specs_of(experiment, quick, settings.backend), only)
    if settings.backend == "run":
        from bench.cli.output import working

        require_machine(specs, site, _smaller(experiment, quick))
        if facts is not None:
            preview.require_nodes(specs, site, facts)
        with working("layouts") as advance:
            chosen = layouts.with_layouts(specs, ledger, advance)
        left_out = chosen.no_layout
        _say_left_out([*chosen.refused, *((trial.case, trial.message) for trial in left_out)])
        specs = list(chosen.cases)
    tasks = choose.tasks_of(specs, settings, repeats)
    require_here(tasks, site)
    if facts is not None:
        preview.require_possible(tasks, site, facts, pack)
    name = name_of(experiment, settings.backend, words)
    return Plan(name, name.split("-")[0], tasks, site, pack, facts, left_out)


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


def _preview(plan: "Plan", ledger: Any, unchecked: str, json: bool) -> None:
    from bench.cli.output import print_json, print_table
    from experiments.launch.preview import runs, scripts
    from experiments.launch.site import clock

    found = runs(plan.tasks, plan.site)
    texts = scripts(plan.experiment, plan.tasks, ledger, plan.site, plan.pack) if plan.site.executor == "slurm" else []
    gib = [None if run.memory_bytes is None else run.memory_bytes / 2**30 for run in found]
    if json:
        rows = [
            {
                "run": run.task.label,
                "nodes": run.nodes,
                "ranks": run.ranks,
                "memory_bytes": run.memory_bytes,
                "time_limit_s": 60 * run.minutes,
                "gpu_hours": run.gpu_hours,
            }
            for run in found
        ]
        print_json({"kind": "dry-run", "name": plan.name, "runs": rows, "scripts": texts, "unchecked": unchecked})
        return
    if unchecked:
        typer.echo(f"moebench: {unchecked}", err=True)
    columns = ["run", "nodes", "ranks", "memory GiB", "time limit", "GPU-hours"]
    rows_shown = [
        [run.task.label, run.nodes, run.ranks, size, clock(run.minutes), run.gpu_hours]
        for run, size in zip(found, gib, strict=True)
    ]
    print_table(f"dry run of {plan.name}: nothing is submitted", columns, rows_shown)
    typer.echo(f"{len(found)} runs, at most {sum(run.gpu_hours for run in found):,.1f} GPU-hours")
    for text in texts:
        typer.echo("\n" + text.rstrip())


def _require_figure(experiment: str, only: list[str] | None) -> None:
    from bench.errors import BadInput
    from experiments import get_experiment

    if only:
        raise BadInput("out", str(only[0]), "without --only: a figure needs all cases")
    if experiment.endswith(".py") or not hasattr(get_experiment(experiment), "evidence"):
        raise BadInput("out", experiment, "an experiment that draws a figure of its trials, such as fig7")


def _draw(experiment: str, plan: "Plan", outcome: "Outcome", out: Path, stem: str, json: bool) -> None:
    """The figure of an experiment, of repeats the one with the middle speed; `stem`: name of its files."""
    from bench.cli.figures import draw
    from experiments import get_experiment
    from experiments.launch.layouts import not_run

    trials = [*outcome.middle(), *map(not_run, plan.left_out)]
    files = draw(experiment, get_experiment(experiment).evidence(trials), out, stem)
    if not json:
        typer.echo(f"wrote {', '.join(str(path) for path in files)}")


def _run(plan: "Plan", ledger: Any, retry_failed: bool, json: bool) -> "Outcome":
    from bench.cli.output import print_json
    from experiments.launch import sweeps
    from experiments.launch.kept import adopt
    from experiments.launch.watch import Sweep

    ledger.make()
    adopt(ledger, plan.tasks, retry_failed)
    sweeps.register(ledger, plan.name, list(plan.tasks), bool(plan.facts and plan.facts.accounting))
    try:
        outcome = Sweep(plan, ledger, _quiet if json else _tell).run()
    except KeyboardInterrupt:
        typer.echo(
            f"moebench: stopped watching {plan.name}; jobs go on. The same command watches again; "
            f"`moebench status {plan.name}` shows how it stands, `moebench cancel {plan.name}` stops it",
            err=True,
        )
        raise typer.Exit(130) from None
    failures = [sweeps.failure_of(ledger, task, task.key, trial) for task, trial in outcome.failed]
    if json:
        print_json(_described(outcome, failures))
    else:
        _show_end(outcome, failures, len(plan.tasks), ledger)
    return outcome


def _quiet(_: "Event") -> None:
    pass


def _tell(event: "Event") -> None:
    place = f"[{event.done}/{event.total}]"
    if event.trial is None:
        typer.echo(f"{place} {event.text}")
        return
    step = event.trial.metrics.get("step_time_s")
    what = f"{step:.4g} s a step" if event.trial.status == "ok" and step else event.trial.message
    typer.echo(f"{place} {event.trial.status:<10} {event.text}  {what[:160]}")


def _described(outcome: "Outcome", failures: list[Any]) -> dict[str, Any]:
    return {
        "kind": "sweep",
        "name": outcome.name,
        "statuses": dict(sorted(outcome.statuses.items())),
        "new": outcome.new,
        "open": [task.label for task in outcome.open],
        "refused": outcome.refused,
        "cancelled": outcome.withdrawn,
        "failures": [failure_fields(failure) for failure in failures],
    }


def _show_end(outcome: "Outcome", failures: list[Any], total: int, ledger: Any) -> None:
    counted = ", ".join(f"{number} {status}" for status, number in sorted(outcome.statuses.items())) or "no result"
    typer.echo(f"{outcome.name}: {total} runs, {outcome.new} new: {counted}; trials in {ledger.results}")
    show_failures(failures)
    if outcome.open:
        why = f"Slurm refused: {outcome.refused}" if outcome.refused else "the sweep was cancelled"
        typer.echo(f"moebench: {len(outcome.open)} runs have no result: {why}", err=True)
