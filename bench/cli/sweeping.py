"""`moebench status`, `cancel`, `logs` and `site init`: sweeps that were started, and the file of a cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.cli.groups import KnownVerbs

if TYPE_CHECKING:
    from experiments.launch.sweeps import Standing

MAX_SHOWN_FAILURES = 20
MAX_SHOWN_RANKS = 16
WATCH_S = 2.0

SweepName = Annotated[
    str | None, typer.Argument(metavar="SWEEP", help="Name of a sweep; by default the newest.", show_default=False)
]


def add_verbs(app: typer.Typer) -> None:
    app.command("status", epilog="Example: moebench status --watch")(status)
    app.command("cancel", epilog="Example: moebench cancel fig7-simulate")(cancel)
    app.command("logs", epilog="Example: moebench logs 3f1c")(logs)
    site = typer.Typer(cls=KnownVerbs, help="Settings of a cluster.", no_args_is_help=True)
    site.command("init", epilog="Example: moebench site init --out site.toml")(site_init)
    app.add_typer(site, name="site")


def failure_fields(failure: Any) -> dict[str, Any]:
    fields = {name: None if value is None else str(value) for name, value in failure._asdict().items()}
    return fields | {"last_actions": list(failure.last_actions)}


def show_failures(failures: list[Any]) -> None:
    from experiments.launch.sweeps import tail

    for failure in failures[:MAX_SHOWN_FAILURES]:
        typer.echo(f"{failure.status}: {failure.label} (case {failure.case_id}): {failure.message[:300]}")
        for line in shortened(failure.last_actions):
            typer.echo(f"  {line}")
        if failure.log is not None:
            for line in tail(failure.log):
                typer.echo(f"    {line[:200]}")
            typer.echo(f"  log {failure.log}")
        if failure.script is not None:
            typer.echo(f"  script {failure.script}")
    if len(failures) > MAX_SHOWN_FAILURES:
        typer.echo(f"and {len(failures) - MAX_SHOWN_FAILURES} more; --json shows all")


def shortened(lines: Sequence[str]) -> list[str]:
    """What ranks did, as much as fits on a screen."""
    rest = len(lines) - MAX_SHOWN_RANKS
    return [*(line[:200] for line in lines[:MAX_SHOWN_RANKS]), *([f"and {rest} ranks more"] if rest > 0 else [])]


def status(
    name: SweepName = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again until all is done or cancelled.")] = False,
    results: options.Results = None,
    json: options.Json = False,
) -> None:
    """Show how a sweep stands: what is done, runs and waits, what failed and where its log is."""
    import time

    from bench.cli.output import print_json
    from experiments.launch.sweeps import standing

    ledger = _ledger(results)
    if json:
        print_json(_standing_fields(standing(ledger, name)))
        return
    if not watch:
        _show_standing(standing(ledger, name))
        return
    from rich.live import Live

    try:
        with Live(refresh_per_second=4) as live:
            while True:
                now = standing(ledger, name)
                live.update(_drawn(now))
                if now.is_over:
                    break
                time.sleep(WATCH_S)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    show_failures(now.failures)


def _ledger(results: Path | None) -> Any:
    from bench.results import LOCAL
    from experiments.launch.ledger import Ledger

    return Ledger(LOCAL if results is None else results)


def _standing_fields(now: "Standing") -> dict[str, Any]:
    return {
        "kind": "status",
        "name": now.name,
        "total": now.total,
        "done": now.done,
        "counts": dict(sorted(now.counts.items())),
        "running": [{"run": label, "where": place} for label, place in now.running],
        "waiting": dict(now.waiting),
        "eta_s": now.eta_s,
        "trouble": now.trouble,
        "cancelled": now.withdrawn,
        "failures": [failure_fields(failure) for failure in now.failures],
    }


def _show_standing(now: "Standing") -> None:
    from rich.console import Console

    Console().print(_drawn(now))
    show_failures(now.failures)


def _drawn(now: "Standing") -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("state")
    table.add_column("runs", justify="right")
    for state, number in sorted(now.counts.items()):
        table.add_row(Text(state), str(number))
    lines = [f"running: {label} ({place})" for label, place in now.running[:10]]
    lines += [f"waiting: {number} {why}" for why, number in now.waiting.items()]
    lines += [f"Slurm does not answer: {now.trouble}"] if now.trouble else []
    lines += ["cancelled; `moebench sweep` goes on with it"] if now.withdrawn else []
    lines += [f"about {now.eta_s / 60:.1f} minutes left"] if now.eta_s and not now.withdrawn else []
    bar = ProgressBar(total=max(1, now.total), completed=now.done, width=60)
    head = Text(f"{now.name}: {now.done} of {now.total}")  # a table's own title is broken to its width
    return Group(head, table, bar, Text("\n".join(["", *lines])))  # a bar ends no line


def cancel(name: SweepName = None, results: options.Results = None, json: options.Json = False) -> None:
    """Stop a sweep and cancel its jobs. What has a result keeps it; the sweep can be run again."""
    from bench.cli.output import print_json
    from experiments.launch.slurm_state import SlurmError
    from experiments.launch.sweeps import withdraw

    try:
        chosen, number = withdraw(_ledger(results), name)
    except SlurmError as error:
        typer.echo(f"moebench: Slurm did not cancel every job: {error}; try again", err=True)
        raise typer.Exit(1) from None
    if json:
        print_json({"kind": "cancel", "name": chosen, "jobs": number})
    else:
        typer.echo(f"{chosen}: cancelled {number} jobs")


def logs(
    case: Annotated[str, typer.Argument(metavar="CASE", help="The beginning of a case id.", show_default=False)],
    results: options.Results = None,
    json: options.Json = False,
) -> None:
    """Show of every start of a case its script, logs with their last lines, and what each rank did last."""
    from bench.cli.output import print_json
    from experiments.launch.flights import last_actions
    from experiments.launch.sweeps import logs_of, tail

    found = logs_of(_ledger(results), case)
    if json:
        rows = [
            {
                "runs": [task.label for task in tasks],
                "logs": [str(path) for path in folder.logs(element)],
                "script": str(folder.script()),
                "last_actions": last_actions(folder, element, tasks[0]),
            }
            for tasks, folder, element in found
        ]
        print_json({"kind": "logs", "jobs": rows})
        return
    if not found:
        typer.echo("it ran inside the sweep's own process, or has not run: there is no log")
    for tasks, folder, element in found:
        typer.echo("\n".join([*(task.label for task in tasks), f"  script {folder.script()}"]))
        for line in shortened(last_actions(folder, element, tasks[0])):
            typer.echo(f"  {line}")
        for path in folder.logs(element):
            typer.echo(f"  log {path}")
            for line in tail(path, 20):
                typer.echo(f"    {line}")


def site_init(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Default: the user's own.", show_default=False)
    ] = None,
) -> None:
    """Write a site file with every setting explained, to be edited."""
    from experiments.launch.site import default_path, write_template

    path = default_path() if out is None else out
    write_template(path)
    typer.echo(f"wrote {path}")
