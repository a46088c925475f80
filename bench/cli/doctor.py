"""`moebench doctor`: what of this machine works."""

from typing import Annotated

import typer

from bench.cli.options import Json, Results


def register(app: typer.Typer) -> None:
    """Adds the verb `doctor`."""
    app.command("doctor", epilog="Example: moebench doctor --json")(doctor)


add_verbs = register


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Start no processes and compile nothing: less is found out.")
    ] = False,
    results: Results = None,
    json: Json = False,
) -> None:
    """Say what of this machine works, what does not, and what to do.

    The exit code is 0 where everything will work, as far as it was tried, else a sum: 8 simulate will not, 16 run
    --device cpu will not, 32 run --device cuda will not, 64 sweep --executor slurm will not.
    """
    from dataclasses import asdict

    from bench.cli.output import print_json, print_table
    from bench.doctor import ABILITIES, examine
    from bench.results import LOCAL

    report = examine(LOCAL if results is None else results, quick)
    if json:
        abilities = {
            one.name: {"works": report.works(one), "lacks": report.missing(one), "not_tried": report.untried(one)}
            for one in ABILITIES
        }
        checks = [asdict(check) for check in report.checks.values()]
        print_json({"kind": "doctor", "exit_code": report.exit_code, "abilities": abilities, "checks": checks})
    else:
        rows = [(check.name, check.state, check.found, check.advice) for check in report.checks.values()]
        print_table("this machine", ["", "state", "found", "what to do"], rows)
        words = {True: "yes", False: "no", None: "not tried"}
        works = [
            (
                one.name,
                words[report.works(one)],
                *(", ".join(of(one)) or "nothing" for of in (report.missing, report.untried)),
            )
            for one in ABILITIES
        ]
        print_table("what will work", ["", "works", "lacks", "not tried"], works)
    if report.exit_code:
        raise typer.Exit(report.exit_code)
