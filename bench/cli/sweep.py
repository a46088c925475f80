"""`moebench sweep`: an experiment's cases on this machine or on Slurm, watched and resumed."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options, sweep_report, sweeping
from bench.cli.asking import asks

if TYPE_CHECKING:
    from experiments.launch.ledger import Ledger
    from experiments.launch.outcome import Outcome
    from experiments.launch.site import Site
    from experiments.launch.watch import Plan

EXECUTORS = "inprocess|debug|local|slurm"

SiteFile = Annotated[
    Path | None,
    typer.Option(
        "--site", metavar="FILE", help="Settings of the cluster; see `moebench site init`.", show_default=False
    ),
]


def add_verbs(app: typer.Typer) -> None:
    """Adds the verbs sweep, status, cancel, logs and site."""
    example = "moebench sweep fig7 --executor slurm --partition gpu --dry-run"
    app.command("sweep", epilog=f"Example: {example}")(sweep)
    sweeping.add_verbs(app)


@dataclass(frozen=True)
class Asked:
    """What `moebench sweep` is asked."""

    experiment: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE.py", help="Experiment, or a file with `specs(quick)`.", show_default=False),
    ]
    executor: Annotated[str | None, options.word("--executor", EXECUTORS, "Where. Default: inprocess.")] = None
    backend: Annotated[str, typer.Option("--backend", metavar="simulate|run", help="What.")] = "simulate"
    partition: Annotated[str | None, options.word("--partition", "NAME", "Slurm partition.")] = None
    account: Annotated[str | None, options.word("--account", "NAME", "Slurm account.")] = None
    qos: Annotated[str | None, options.word("--qos", "NAME", "Slurm quality of service.")] = None
    time: Annotated[str | None, options.word("--time", "HH:MM:SS", "Time limit of one run. Default: 00:30:00.")] = None
    max_nodes: Annotated[str | None, options.word("--max-nodes", "NUMBER", "Refuse cases that need more nodes.")] = None
    gpus_per_node: Annotated[str | None, options.word("--gpus-per-node", "NUMBER", "Ranks of a run on a node.")] = None
    setup: Annotated[Path | None, options.word("--setup", "FILE", "Shell lines that every job runs first.")] = None
    only: Annotated[list[str] | None, options.word("--only", "FIELD=VALUE,...", "Fewer cases.")] = None
    repeats: Annotated[int, options.number("--repeats", "Runs of each case.")] = 1
    jobs: Annotated[str | None, options.word("--jobs", "NUMBER", "Jobs at a time.")] = None
    pack: Annotated[bool, typer.Option("--pack", help="Runs of one shape share an allocation, in rounds.")] = False
    steps: Annotated[int, options.number("--steps", "Optimizer steps of a run.")] = 20
    quick: Annotated[bool, typer.Option("--quick", help="The experiment's fewer cases.")] = False
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run again what failed.")] = False
    out: Annotated[Path | None, options.word("--out", "DIR", "Draw the experiment's figure there, at the end.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and submit nothing.")] = False
    site: SiteFile = None
    results: options.Results = None
    json: options.Json = False

    def settings_of_site(self) -> "Site":
        """The site file with these options put in. Raises BadInput."""
        from experiments.launch.site import load

        words = ("executor", "partition", "account", "qos", "time")
        numbers = ("max_nodes", "gpus_per_node", "jobs")
        given = {name: getattr(self, name) for name in words} | {"setup": _lines(self.setup)}
        return load(self.site, given | {name: _number(name, getattr(self, name)) for name in numbers})

    @property
    def name_of_figure(self) -> str:
        """Of its files, without ending."""
        words = [self.experiment, "run" if self.backend == "run" else "", "quick" if self.quick else ""]
        return "-".join(filter(None, words))


@asks
def sweep(asked: Asked) -> None:
    """Run the cases of an experiment that have no result yet. An option with the value none overrides the site file.

    Run it again to go on where it stopped. Exit code 1 where a case failed or has no result.
    """
    from bench.cli.output import require_folder
    from bench.cli.sweep_plan import planned
    from bench.results import LOCAL
    from experiments.launch.ledger import Ledger

    options.at_least_one("steps", asked.steps)
    site = asked.settings_of_site()
    kept = LOCAL if asked.results is None else asked.results
    require_folder("results", kept)
    if asked.out is not None:
        require_folder("out", asked.out)
        _require_figure(asked.experiment, asked.only)
    ledger = Ledger(kept)
    plan, unchecked = planned(asked, site, ledger)
    if asked.dry_run:
        sweep_report.preview(plan, ledger, unchecked, asked.json)
        return
    outcome = _run(plan, ledger, asked.retry_failed, asked.json)
    if asked.out is not None and not outcome.open:
        _draw(asked, plan, outcome, asked.out)
    if outcome.failed or outcome.open:
        raise typer.Exit(1)


def _number(name: str, word: str | None) -> int | str | None:
    from bench.errors import BadInput

    if word is None or word == "none":
        return word
    try:
        return int(word)
    except ValueError:
        raise BadInput(f"--{name.replace('_', '-')}", word, "a whole number, or none") from None


def _lines(setup: Path | None) -> tuple[str, ...] | None:
    from bench.errors import BadInput

    if setup is None:
        return None
    if str(setup) == "none":
        return ()
    if setup.exists() and not setup.is_file():  # a device may never end
        raise BadInput("setup", str(setup), "a text file that can be read (it is no regular file)")
    try:
        return tuple(setup.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput("setup", str(setup), f"a text file that can be read ({reason})") from None


def _require_figure(experiment: str, only: list[str] | None) -> None:
    from bench.errors import BadInput
    from experiments import get_experiment

    if only:
        raise BadInput("out", str(only[0]), "without --only: a figure needs all cases")
    if experiment.endswith(".py") or not hasattr(get_experiment(experiment), "evidence"):
        raise BadInput("out", experiment, "an experiment that draws a figure of its trials, such as fig7")


def _draw(asked: Asked, plan: "Plan", outcome: "Outcome", out: Path) -> None:
    """The figure of an experiment, of repeats the one with the middle speed."""
    from bench.cli.figures import draw
    from experiments import get_experiment
    from experiments.launch.layouts import not_run

    trials = [*outcome.middle(), *map(not_run, plan.left_out)]
    files = draw(asked.experiment, get_experiment(asked.experiment).evidence(trials), out, asked.name_of_figure)
    if not asked.json:
        typer.echo(f"wrote {', '.join(str(path) for path in files)}")


def _run(plan: "Plan", ledger: "Ledger", retry_failed: bool, json: bool) -> "Outcome":
    from bench.cli.output import print_json
    from experiments.launch import sweeps
    from experiments.launch.kept import adopt
    from experiments.launch.watch import Sweep

    ledger.make()
    adopt(ledger, plan.tasks, retry_failed)
    sweeps.register(ledger, plan.name, list(plan.tasks), bool(plan.facts and plan.facts.accounting))
    try:
        outcome = Sweep(plan, ledger, sweep_report.quiet if json else sweep_report.tell).run()
    except KeyboardInterrupt:
        typer.echo(
            f"moebench: stopped watching {plan.name}; jobs go on. The same command watches again; "
            f"`moebench status {plan.name}` shows how it stands, `moebench cancel {plan.name}` stops it",
            err=True,
        )
        raise typer.Exit(130) from None
    failures = [sweeps.failure_of(ledger, task, task.key, trial) for task, trial in outcome.failed]
    if json:
        print_json(sweep_report.described(outcome, failures))
    else:
        sweep_report.show_end(outcome, failures, len(plan.tasks), ledger)
    return outcome
