"""What `moebench sweep` says: before anything runs, while it runs, and at the end."""

from typing import TYPE_CHECKING, Any

import typer

from bench.cli.sweeping import failure_fields, show_failures

if TYPE_CHECKING:
    from experiments.launch.ledger import Ledger
    from experiments.launch.outcome import Event, Failure, Outcome
    from experiments.launch.watch import Plan


def preview(plan: "Plan", ledger: "Ledger", unchecked: str, json: bool) -> None:
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


def quiet(_: "Event") -> None:
    pass


def tell(event: "Event") -> None:
    place = f"[{event.done}/{event.total}]"
    if event.trial is None:
        typer.echo(f"{place} {event.text}")
        return
    step = event.trial.metrics.get("step_time_s")
    what = f"{step:.4g} s a step" if event.trial.status == "ok" and step else event.trial.message
    typer.echo(f"{place} {event.trial.status:<10} {event.text}  {what[:160]}")


def described(outcome: "Outcome", failures: "list[Failure]") -> dict[str, Any]:
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


def show_end(outcome: "Outcome", failures: "list[Failure]", total: int, ledger: "Ledger") -> None:
    counted = ", ".join(f"{number} {status}" for status, number in sorted(outcome.statuses.items())) or "no result"
    typer.echo(f"{outcome.name}: {total} runs, {outcome.new} new: {counted}; trials in {ledger.results}")
    show_failures(failures)
    if outcome.open:
        why = f"Slurm refused: {outcome.refused}" if outcome.refused else "the sweep was cancelled"
        typer.echo(f"moebench: {len(outcome.open)} runs have no result: {why}", err=True)
