"""`moebench figure`: runs what a figure is missing, keeps the trials, draws it, and says what came out."""

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options

if TYPE_CHECKING:
    from experiments import Evidence


def add_verbs(app: typer.Typer) -> None:
    app.command("figure", epilog="Example: moebench figure fig7 --quick --out out")(figure)


def figure(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Figure; see `moebench list experiments`.", show_default=False)
    ],
    results: options.Results = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the figure's files go.")] = Path("out"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cells or steps: to see that it works.")] = False,
    assumptions: options.AssumptionSet = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cpu|cuda", help="For a figure that is measured here.", show_default=False),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Run all of it anew (without --results) and compare it with what is published."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Draw a figure: run what is missing, write trials, and draw PDF, PNG and CSV. Exit code 1 where a check fails."""
    from bench.assumptions import DEFAULT_ASSUMPTIONS, get_assumptions
    from bench.cli.output import print_json, print_table, require_folder, working
    from bench.errors import BadInput
    from bench.results import LOCAL
    from experiments import Request, get_experiment
    from experiments._published import differences, published_table

    experiment = get_experiment(name)
    if assumptions is not None and "(simulated)" not in experiment.SUMMARY:
        raise BadInput("assumptions", assumptions, f"none: {name} is measured")
    known = getattr(experiment, "DEVICES", ())
    if device is not None and device not in known:
        raise BadInput("device", device, " or ".join(known) or f"none: {name} does not choose one")
    get_assumptions(assumptions or DEFAULT_ASSUMPTIONS)
    require_folder("out", out)
    published = published_table(name) if check else None
    with _kept(LOCAL if results is None and not check else results) as kept, working(name) as advance:
        require_folder("results", kept)
        evidence = experiment.run(Request(kept, quick, advance, fresh=check, assumptions=assumptions, device=device))
    files = draw(name, evidence, out, f"{name}-quick" if quick else name)
    failures = list(evidence.failures)
    if published is not None:
        failures += differences(evidence.data, published)
    if json:
        print_json(_described(name, evidence, failures, files, kept))
    else:
        for table in evidence.tables:
            print_table(table.title, table.columns, table.rows)
        where = f"; trials in {kept}" if kept.exists() else ""
        if quick:
            typer.echo("quick: a few cells, steps and layouts, to see that it works; not a result")
        typer.echo(f"wrote {', '.join(str(path) for path in files)}{where}")
        if published is not None and not failures:
            typer.echo(f"{name}: the same as published, cell by cell")
    for failure in failures:
        typer.echo(f"moebench: failed: {failure}", err=True)
    if failures:
        raise typer.Exit(1)


@contextmanager
def _kept(folder: Path | None) -> Iterator[Path]:
    """The folder for trials; for none given, one that is gone afterwards."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="moebench-check-") as temporary:
        yield Path(temporary)


def draw(name: str, evidence: "Evidence", out: Path, stem: str | None = None) -> list[Path]:
    """Writes the figure's PDF and PNG, and a CSV file of what is drawn, named `stem` (default: the figure's name)."""
    from bench.errors import BadInput
    from paper_figs.style import save

    module = evidence.figure or name.replace("-", "_")
    drawing = importlib.import_module(f"paper_figs.{module}").draw(**evidence.drawn)
    table = out / f"{stem or name}.csv"
    try:
        files = [*save(drawing, out, stem or name), table]
        table.write_text(evidence.data.to_csv(index=False, lineterminator="\n"), encoding="utf-8")
    except OSError as error:
        raise BadInput("out", str(out), f"a directory that can be written ({error.strerror})") from None
    return files


def _described(
    name: str, evidence: "Evidence", failures: list[str], files: list[Path], results: Path
) -> dict[str, Any]:
    return {
        "kind": "figure",
        "name": name,
        "files": [str(path) for path in files],
        "results": str(results),
        "tables": [
            {"title": t.title, "columns": list(t.columns), "rows": [list(row) for row in t.rows]}
            for t in evidence.tables
        ],
        "failures": failures,
    }
