"""`moebench trace analyze`: where the time went in a torch-profiler trace of any trainer."""

from pathlib import Path
from typing import Annotated

import typer

from bench.cli.options import Json

_EXAMPLE = "Example: moebench trace analyze rank0.json.gz rank1.json.gz --out out/trace.png"

Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...", help="Traces, one a rank (.json or .json.gz), or directories of them.", show_default=False
    ),
]
Kernels = Annotated[
    Path | None,
    typer.Option(
        "--kernels",
        metavar="FILE.toml",
        help="More kernel names, tried before the built-in ones.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.png", help="Draw it; a PDF goes beside it.", show_default=False),
]


def register(group: typer.Typer) -> None:
    """Adds the verb `analyze`."""
    group.command("analyze", epilog=_EXAMPLE)(analyze)


def analyze(
    files: Files,
    kernels: Kernels = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Say where each GPU's and stream's time went: compute, communication, overlapped, exposed, idle; classes; phases.

    Exit code 2 where a file is not a whole trace, or several ranks took part and no communication was recognised.
    """
    from bench.cli.output import print_json, print_table, require_folder
    from bench.errors import BadInput
    from bench.kineto import analyze_traces, read_table, trace_files
    from bench.kineto.report import as_json, tables

    if out is not None:
        if out.suffix != ".png":
            raise BadInput("out", str(out), "a name that ends in .png")
        require_folder("out", out.parent)
    table = read_table(kernels)
    analysis = analyze_traces([file for path in files for file in trace_files(path)], table)
    drawn = []
    if out is not None:
        from paper_figs.style import save
        from paper_figs.trace_analysis import draw

        drawn = [str(path) for path in save(draw(analysis), out.parent, out.stem)]
    for warning in analysis.warnings:
        typer.echo(f"moebench: warning: {warning}", err=True)
    if json:
        print_json({**as_json(analysis), "files": drawn})
        return
    for one in tables(analysis):
        print_table(one.title, one.columns, one.rows)
    if drawn:
        typer.echo(f"wrote {', '.join(drawn)}")
