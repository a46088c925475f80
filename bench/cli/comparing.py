"""`moebench compare`: one's own schedule beside all others."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.cli.asking import Asked, asks
from bench.cli.executed import local_cluster
from bench.cli.options import RUN_MICROBATCHES
from bench.cli.pairs import PairsCommand

if TYPE_CHECKING:
    from bench.case import Case, CaseSpec
    from bench.compare import Compared, Ran
    from bench.evaluate import CostModel

DEFAULT_AGAINST = "ep,disagmoe"


def add_verbs(app: typer.Typer) -> None:
    example = "moebench compare ./mine.py --against ep,disagmoe --model qwen3-30b --cluster h800x4 --seq-len 8192"
    app.command("compare", cls=PairsCommand, epilog=f"Example: {example}")(compare)


def _number(name: str, help_: str) -> Any:
    return typer.Option(name, metavar="NUMBER", parser=options.whole_number, help=help_)


@asks
def compare(
    asked: Asked,
    system: Annotated[
        str,
        typer.Argument(
            metavar="FILE|SYSTEM", help="Schedule: a Python file, a plan's text (.txt), or a name.", show_default=False
        ),
    ],
    against: Annotated[
        str, typer.Option("--against", metavar="SYSTEM,...", help="Systems beside it; a name's beginning will do.")
    ] = DEFAULT_AGAINST,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="KEY=VALUE ...",
            help="Layout of the first, simulated as it is; what is not named has its default. The others are tuned.",
            show_default=False,
        ),
    ] = None,
    budget: options.Budget = None,
    run: Annotated[bool, typer.Option("--run", help="Verify and run each on this machine as well.")] = False,
    ranks: options.Ranks = 4,
    device: options.Device = "cpu",
    run_model: Annotated[str, typer.Option("--run-model", metavar="NAME|FILE", help="Model of --run.")] = "tiny",
    run_seq_len: Annotated[int, _number("--run-seq-len", "Sequence length of --run, in tokens.")] = 64,
    steps: Annotated[int, _number("--steps", "Optimizer steps of --run.")] = 5,
    results: options.Results = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the pictures go.")] = Path("out"),
    json: options.Json = False,
) -> None:
    """Compare a schedule with other systems: all tuned alike and simulated, and with --run verified and run.

    Draws one timeline a system on one scale. With --run, each system takes of its layouts for this machine's ranks the
    one that moves between groups most often. Exit code 1 where a system does not verify or run, or the first does not
    fit.
    """
    from bench.cli.output import print_json, require_folder
    from bench.compare import resolve
    from bench.results import LOCAL, Store

    most = options.budget_of(budget)
    options.at_least_one("steps", steps)
    kept = LOCAL if results is None else results
    require_folder("results", kept)
    require_folder("out", out)
    costs = asked.costs()
    names = list(dict.fromkeys([resolve(system), *map(resolve, filter(None, against.split(",")))]))
    specs = [asked.spec(name) for name in names]
    given = options.layout_of(names[0], layout)
    if given is not None:
        specs[0] = specs[0].with_layout(given)
    cases = run_cases(names, run_model, ranks, device, run_seq_len, asked.seed) if run else []
    entries, files = _simulated(specs, costs, most, out)
    store = Store(kept)
    written = [store.write(entry.trial) for entry in entries]
    if not json:
        _show(entries, costs)
    ran = _ran(cases, steps, device, out, files) if cases else []
    written += [store.write(one.trial) for one in ran]
    if json:
        print_json(_described(entries, ran, files, kept))
    else:
        _show_runs(ran)
        typer.echo(f"wrote {', '.join(map(str, files))}; {len(written)} trials in {kept}")
    if not _say_faults(entries, ran):
        raise typer.Exit(1)


def _say_faults(entries: "list[Compared]", ran: "list[Ran]") -> bool:
    """What went wrong, on stderr; whether all of --run went well, and the first system fits."""
    for entry in entries:
        if entry.fault is not None:
            typer.echo(f"moebench: {entry.label}: {entry.fault}\n{getattr(entry.fault, 'grid', '')}".rstrip(), err=True)
    failed = [one for one in ran if not one.ok]
    for one in failed:
        reasons = [*one.report.problems[:3], *([one.trial.message] if one.trial.status != "ok" else [])]
        typer.echo(f"moebench: {one.label}: {'; '.join(reasons)}", err=True)
    return not failed and entries[0].best is not None


def run_cases(names: list[str], model: str, ranks: int, device: str, seq_len: int, seed: int) -> "list[Case]":
    """What --run executes: the same small work for all, in the layout that tries most of each schedule.

    Says which are not run, whose plans are modelled only. Raises BadInput where a schedule is for more ranks.
    """
    from bench.cli.training import require_torch
    from bench.compare import sequences_for, trying_layout
    from bench.plan import obstacles
    from bench.system import get_system, plan_of

    require_torch()
    here = local_cluster(ranks, options.device_of(device))
    dtype = "fp32" if device == "cpu" else "bf16"
    cases = []
    executed = [name for name in names if not _not_run(name, obstacles(getattr(get_system(name), "traits", ())))]
    tokens = sequences_for(executed, ranks, RUN_MICROBATCHES * ranks) * seq_len
    for name in executed:
        spec = options.spec_of(name, model, here, seq_len, tokens, dtype, "learned", seed)
        case = spec.with_layout(trying_layout(spec))
        if not _not_run(name, plan_of(case).obstacles):
            cases.append(case)
    return cases


def _not_run(name: str, traits: Sequence[str]) -> bool:
    """Says why a system is not run, where it is not."""
    if traits:
        typer.echo(f"moebench: {name} is not run: its plan is {', '.join(traits)}", err=True)
    return bool(traits)


def _simulated(
    specs: "list[CaseSpec]", costs: "CostModel", budget: int, out: Path
) -> "tuple[list[Compared], list[Path]]":
    from bench.cli.output import working
    from bench.compare import compare as compare_specs

    with working("tuning") as advance:
        entries = compare_specs(
            specs, costs, budget=budget, progress=lambda label, done, total: advance(done, total, label)
        )
    panels = [
        (f"{entry.label}\n{entry.best.case.layout}", entry.best.timeline, entry.best.program.plan.placement)
        for entry in entries
        if entry.best is not None
    ]
    return entries, _drawn(panels, out, "compare")


def _drawn(panels: list[Any], out: Path, name: str) -> list[Path]:
    if not panels:
        return []
    from bench.errors import BadInput
    from paper_figs.style import save
    from paper_figs.timeline import draw

    try:
        return list(save(draw(panels), out, name))
    except OSError as error:
        raise BadInput("out", str(out), f"a directory that can be written ({error.strerror})") from None


def _ran(cases: "list[Case]", steps: int, device: str, out: Path, files: list[Path]) -> "list[Ran]":
    from bench.cli.output import working
    from bench.compare import run

    with working("verifying and running") as advance:
        ran = list(
            run(cases, steps=steps, device=device, progress=lambda label, done, total: advance(done, total, label))
        )
    panels = [
        (f"{one.label}\n{one.trial.layout}", one.timeline, one.placement) for one in ran if one.timeline is not None
    ]
    files += _drawn(panels, out, "compare-measured")
    for one in ran:
        if one.timeline is None and one.trial.status == "ok":
            why = "it runs in one process, without a plan"
            typer.echo(f"moebench: {one.label} is not in compare-measured: {why}", err=True)
    return ran


def _show(entries: "list[Compared]", costs: "CostModel") -> None:
    from bench.cli.output import print_table
    from bench.compare import COLUMNS

    case = entries[0].trial.case
    work = f"{case.workload.seq_len} tokens a sequence, {case.workload.global_batch_tokens} a step"
    title = f"simulated: {case.model.name} on {case.cluster.name}, {work}, assumptions {costs.label}"
    print_table(title, COLUMNS, [entry.row(entries[0]) for entry in entries])
    for entry in entries:
        for reason, number in entry.refused[:2]:
            typer.echo(f"{entry.label}: {number} layouts refused: {reason}")
        if not entry.trial.search.get("complete", True):
            typer.echo(f"{entry.label}: the budget ended the search; --budget NUMBER tries more layouts")


def _show_runs(ran: "list[Ran]") -> None:
    from bench.cli.output import print_table
    from bench.compare import RUN_COLUMNS

    if ran:
        case = ran[0].trial.case
        title = f"measured: {case.model.name} on {case.cluster.num_gpus} x {case.cluster.gpu.name}"
        print_table(title, RUN_COLUMNS, [one.row() for one in ran])


def _described(entries: "list[Compared]", ran: "list[Ran]", files: list[Path], kept: Path) -> dict[str, Any]:
    from bench.cli.training import trial_fields
    from bench.cli.verifying import report_fields
    from bench.compare import described

    return {
        "kind": "comparison",
        "simulated": [described(entry) for entry in entries],
        "measured": [{"label": one.label, **trial_fields(one.trial)} for one in ran],
        "verified": [{"label": one.label, **report_fields(one.report)} for one in ran],
        "files": [str(path) for path in files],
        "results": str(kept),
    }
