"""`moebench figure`: runs what a figure is missing, keeps the trials, draws it, and says what came out."""

import importlib
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
    check: Annotated[
        bool,
        typer.Option("--check", help="Take no published trial, and compare the outcome with the published one."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Draw a figure: run what is missing, write trials, and draw PDF, PNG and CSV. Exit code 1 where a check fails."""
    from bench.assumptions import DEFAULT_ASSUMPTIONS, get_assumptions
    from bench.cli.output import print_json, print_table, require_folder, working
    from bench.results import LOCAL
    from experiments import Request, get_experiment
    from experiments._published import differences, published_table

    experiment = get_experiment(name)
    get_assumptions(assumptions or DEFAULT_ASSUMPTIONS)
    kept = LOCAL if results is None else results
    require_folder("results", kept)
    require_folder("out", out)
    published = published_table(name) if check else None
    with working(name) as advance:
        evidence = experiment.run(Request(kept, quick, advance, fresh=check, assumptions=assumptions))
    files = draw(name, evidence, out)
    failures = list(evidence.failures)
    if published is not None:
        failures += differences(evidence.data, published)
    if json:
        print_json(_described(name, evidence, failures, files, kept))
    else:
        for table in evidence.tables:
            print_table(table.title, table.columns, table.rows)
        typer.echo(f"wrote {', '.join(str(path) for path in files)}; trials in {kept}")
        if published is not None and not failures:
            typer.echo(f"{name}: the same as published, cell by cell")
    for failure in failures:
        typer.echo(f"moebench: failed: {failure}", err=True)
    if failures:
        raise typer.Exit(1)


def draw(name: str, evidence: "Evidence", out: Path) -> list[Path]:
    """Writes the figure's PDF and PNG, and a CSV file of what is drawn."""
    from bench.errors import BadInput
    from paper_figs.style import save

    module = evidence.figure or name.replace("-", "_")
    drawing = importlib.import_module(f"paper_figs.{module}").draw(**evidence.drawn)
    table = out / f"{name}.csv"
    try:
        files = [*save(drawing, out, name), table]
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
