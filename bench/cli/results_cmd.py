"""`moebench results`: list, show, compare and move trials."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli.groups import KnownVerbs
from bench.cli.options import Json, Results

if TYPE_CHECKING:
    from bench.trial import Trial

Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="FIELD=VALUE",
        help="Only trials of these; several values of a field are alternatives. "
        "Fields: system, model, cluster, source, status, case_id, seq_len, dtype, routing.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(metavar="TRIAL", help="Name of a trial or its beginning, or a file.")]
FIELDS = ("system", "model", "cluster", "source", "status", "case_id", "seq_len", "dtype", "routing")


def register(app: typer.Typer) -> None:
    """Adds the group `results`."""
    group = typer.Typer(cls=KnownVerbs, help="List, show, compare and move trials.", no_args_is_help=True)
    group.command("list", epilog="Example: moebench results list --where system=ep")(list_trials)
    group.command("show", epilog="Example: moebench results show 3f1c --samples")(show)
    group.command("export", epilog="Example: moebench results export trials.csv")(export)
    group.command("archive", epilog="Example: moebench results archive trials.tar.gz")(archive)
    group.command("import", epilog="Example: moebench results import trials.tar.gz")(take_in)
    group.command("diff", epilog="Example: moebench results diff 3f1c 8a02")(diff)
    app.add_typer(group, name="results")


add_verbs = register


def list_trials(where: Where = None, results: Results = None, json: Json = False) -> None:
    """List the trials of the results folder and of the published ones, oldest first."""
    from bench.cli.output import print_json, print_table

    rows = []
    for path, trial in sorted(_chosen(results, where), key=lambda pair: pair[1].created):
        case = trial.case
        rows.append(
            {
                "trial": path.stem,
                "created": trial.created.strftime("%Y-%m-%d %H:%M"),
                "source": trial.source,
                "status": trial.status,
                "system": case.system,
                "model": case.model.name,
                "cluster": case.cluster.name,
                "seq_len": case.workload.seq_len,
                "layout": trial.layout,
                "tokens_per_s": trial.metrics.get("tokens_per_s"),
                "verdict": trial.telemetry.get("verdict"),
            }
        )
    if json:
        print_json({"kind": "results", "trials": rows})
    elif rows:
        print_table(f"{len(rows)} trials", list(rows[0]), [list(row.values()) for row in rows])
    else:
        typer.echo("no trials")


def show(
    name: Name,
    samples: Annotated[bool, typer.Option("--samples", help="Every sample of every step as well.")] = False,
    results: Results = None,
    json: Json = False,
) -> None:
    """Show one trial: what was run, what came out, on what."""
    from bench.cli.output import print_facts, print_json, print_table

    path, trial = _one(name, results)
    if json:
        content = trial.model_dump(mode="json")
        if not samples:
            content = {key: value for key, value in content.items() if key not in ("samples", "telemetry_samples")}
        print_json({"kind": "trial", "trial": path.stem, **content})
        return
    case = trial.case
    print_facts(
        path.stem,
        {
            "source": trial.source,
            "status": trial.status,
            "message": trial.message or None,
            "case": f"{case.system} {case.model.name} on {case.cluster.name}",
            "layout": trial.layout,
            "workload": " ".join(f"{key}={value}" for key, value in case.workload.model_dump().items()),
            "created": trial.created.isoformat(timespec="seconds"),
            "command": trial.command,
            "file": path,
        },
    )
    for title, facts in (
        ("metrics", trial.metrics),
        ("steady state", trial.steady),
        ("telemetry", trial.telemetry),
        ("provenance", trial.provenance),
    ):
        if facts:
            print_table(title, ["", title], list(_leaves(facts)))
    if samples:
        for title, columns in (("samples", trial.samples), ("telemetry samples", trial.telemetry_samples)):
            if columns:
                from itertools import zip_longest

                print_table(title, list(columns), list(zip_longest(*columns.values())))


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A table .csv or .parquet, or .jsonl with all series.")],
    where: Where = None,
    results: Results = None,
    json: Json = False,
) -> None:
    """Write trials as a table, one row a trial, or as whole records, one line a trial."""
    from bench.results import archive

    _said("exported", archive.export((trial for _, trial in _chosen(results, where)), file), file, json)


def archive(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="The archive, which must not exist.")],
    where: Where = None,
    results: Results = None,
    json: Json = False,
) -> None:
    """Write trials with all that belongs to them into one file, for another machine or for good."""
    from bench.errors import BadInput
    from bench.results import archive as archives

    if not file.name.endswith((".tar.gz", ".tgz")):
        raise BadInput("file", str(file), "a name that ends in .tar.gz")
    _said("archived", archives.archive(_chosen(results, where), file), file, json)


def take_in(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="An archive, a folder of trials or a record.")],
    results: Results = None,
    json: Json = False,
) -> None:
    """Keep the trials of an archive or a folder. A trial that is there stays as it is."""
    from bench.cli.output import print_json, require_folder
    from bench.results import LOCAL, Store
    from bench.results.archive import take_in as keep

    kept = LOCAL if results is None else results
    require_folder("results", kept)
    done = keep(source, Store(kept))
    if json:
        print_json({"kind": "imported", "new": done.new, "known": done.known, "results": str(kept)})
    else:
        typer.echo(f"{done.new} new trials, {done.known} that were there, in {kept}")


def diff(left: Name, right: Name, results: Results = None, json: Json = False) -> None:
    """Show what tells two trials apart: case, layout, numbers, code and machine. Exit code 1 where anything does."""
    from bench.cli.output import print_json, print_table
    from bench.results.difference import differences

    (a, first), (b, second) = _one(left, results), _one(right, results)
    found = differences(first, second)
    if json:
        print_json({"kind": "diff", "left": a.stem, "right": b.stem, "differences": [one._asdict() for one in found]})
    elif found:
        print_table(f"{a.stem} and {b.stem}", ["field", "left", "right", "right / left"], found)
    else:
        typer.echo("no difference")
    if found:
        raise typer.Exit(1)


def _said(verb: str, count: int, file: Path, json: bool) -> None:
    from bench.cli.output import print_json

    if json:
        print_json({"kind": verb, "trials": count, "file": str(file)})
    else:
        typer.echo(f"{verb} {count} trials: {file}")


def _chosen(results: Path | None, where: list[str] | None) -> "list[tuple[Path, Trial]]":
    from bench.results import LOCAL, PUBLISHED, read_trials

    wanted = _wanted(where or [])
    pairs = read_trials([LOCAL if results is None else results, PUBLISHED])
    return [pair for pair in pairs if all(_field(pair[1], field) in values for field, values in wanted.items())]


def _wanted(pairs: list[str]) -> dict[str, set[str]]:
    """Field -> allowed values. Raises BadInput."""
    from bench.errors import BadInput, unknown

    found: dict[str, set[str]] = {}
    for pair in pairs:
        field, equals, value = pair.partition("=")
        if not equals:
            raise BadInput("where", pair, "FIELD=VALUE")
        if field not in FIELDS:
            raise unknown("where", field, FIELDS)
        found.setdefault(field, set()).add(value)
    return found


def _field(trial: "Trial", name: str) -> str:
    case = trial.case
    if name in ("source", "status", "case_id"):
        return str(getattr(trial, name))
    if name == "system":
        return case.system
    if name in ("model", "cluster"):
        return str(getattr(case, name).name)
    return str(getattr(case.workload, name))


def _one(name: str, results: Path | None) -> "tuple[Path, Trial]":
    """The trial whose name begins so. Raises BadInput where none or several do."""
    from bench.errors import BadInput
    from bench.results import LOCAL, PUBLISHED, read_trial
    from bench.results.files import json_files

    if name.endswith(".json"):
        path = Path(name)
        try:
            return path, read_trial(path)
        except OSError as error:
            raise BadInput("trial", name, f"a file that can be read ({error.strerror})") from None
    files = list(json_files([LOCAL if results is None else results, PUBLISHED]))
    found = [path for path in files if path.stem.startswith(name)]
    exact = [path for path in found if path.stem == name]
    if len(exact or found) != 1:
        allowed = ", ".join(path.stem for path in found[:5]) if found else "a trial; see `moebench results list`"
        raise BadInput("trial", name, f"one of {allowed}" if found else allowed)
    path = (exact or found)[0]
    return path, read_trial(path)


def _leaves(facts: Any, name: str = "") -> Any:
    """(dotted name, value) of everything in nested mappings."""
    if isinstance(facts, dict):
        for key, value in facts.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, facts
