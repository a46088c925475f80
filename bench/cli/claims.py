"""`moebench claims`: the paper's claims, each with its value and verdict here, from trials."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options

if TYPE_CHECKING:
    from experiments._claims import Finding, Ground


def register(app: typer.Typer) -> None:
    """Adds the verb claims."""
    example = "moebench claims --assumptions h200-measured,datasheet"
    app.command("claims", epilog=f"Example: {example}")(claims)


add_verbs = register


def claims(
    assumptions: Annotated[
        str | None,
        typer.Option(
            "--assumptions",
            metavar="SET,...",
            help="Sets of assumptions to judge under. Default: h200-measured; with --published all that are there.",
            show_default=False,
        ),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Judge by the published trials alone; simulate nothing.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="FILE", help="Put that table between a file's marks.", show_default=False),
    ] = None,
    results: options.Results = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cells: to see that it works.")] = False,
    json: options.Json = False,
) -> None:
    """Judge the paper's claims: what each comes to under every set of assumptions, and whether it comes out."""
    from bench.assumptions import DEFAULT_ASSUMPTIONS
    from bench.cli.output import print_json, require_folder
    from bench.results import LOCAL
    from experiments import _claims

    sets = _sets(assumptions)
    if published:
        names = sets or _claims.published_sets() or [DEFAULT_ASSUMPTIONS]
        grounds = {name: _claims.published_ground(name) for name in names}
    else:
        kept = LOCAL if results is None else results
        require_folder("results", kept)
        grounds = _simulated(sets or [DEFAULT_ASSUMPTIONS], kept, quick)
    findings = _claims.judge_all(grounds)
    if into is not None:
        _put(into, _claims.markdown(findings))
    if json:
        print_json({"kind": "claims", "claims": [_described(finding) for finding in findings]})
    elif markdown:
        typer.echo(_claims.markdown(findings), nl=False)
    else:
        _show(findings)


def _sets(words: str | None) -> list[str]:
    """Names of sets, each once. Raises BadInput for an unknown one."""
    from bench.assumptions import get_assumptions

    names = list(dict.fromkeys((words or "").replace(",", " ").split()))
    for name in names:
        get_assumptions(name)
    return names


def _simulated(names: list[str], kept: Path, quick: bool) -> "dict[str, Ground]":
    from bench.cli.output import working
    from experiments import Request, _claims

    with working("claims") as advance:
        return {name: _claims.ground(Request(kept, quick, advance, assumptions=name)) for name in names}


def _put(file: Path, table: str) -> None:
    """Writes the table into `file`. Raises BadInput where it cannot be read, has no marks, or cannot be written."""
    from bench.errors import BadInput
    from experiments._claims import BEGIN, END, with_table

    try:
        text = with_table(file.read_text(encoding="utf-8"), table)
        if text is None:
            raise BadInput("into", str(file), f"a file with the marks {BEGIN} and {END}")
        file.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("into", str(file), f"a text file that can be read and written ({error})") from None


def _show(findings: "list[Finding]") -> None:
    from bench.cli.output import print_table
    from experiments._claims import overall

    rows = [[f.claim.name, f.claim.says, f.assumptions, f.value, f.verdict] for f in findings]
    print_table("claims of the paper, simulated here", ["claim", "the paper says", "under", "here", "verdict"], rows)
    by_claim: dict[str, list[Finding]] = {}
    for finding in findings:
        by_claim.setdefault(finding.claim.name, []).append(finding)
    if len({finding.assumptions for finding in findings}) > 1:
        for name, some in by_claim.items():
            typer.echo(f"{name}: {overall(some)}")


def _described(finding: "Finding") -> dict[str, Any]:
    claim = finding.claim
    return {
        "name": claim.name,
        "says": claim.says,
        "source": claim.source,
        "assumptions": finding.assumptions,
        "value": finding.value,
        "verdict": finding.verdict,
        "cells": dict(finding.cells),
    }
