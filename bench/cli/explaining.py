"""`moebench explain` and `new-system`: what bounds a step, and a schedule file to start from."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import options
from bench.cli.asking import Asked, asks
from bench.cli.pairs import PairsCommand

if TYPE_CHECKING:
    from bench.case import Case
    from bench.evaluate import CostModel
    from bench.explain import Explanation


def add_verbs(app: typer.Typer) -> None:
    example = "moebench explain ep --model qwen3-30b --cluster h800x4 --seq-len 8192 --layout ep=16 pp=2"
    app.command("explain", cls=PairsCommand, epilog=f"Example: {example}")(explain)
    app.command("new-system", epilog="Example: moebench new-system pingpong")(new_system)


@asks
def explain(asked: Asked, json: options.Json = False) -> None:
    """Say what bounds a simulated step: its critical path, the busiest resource, the gap to the bound, what would help.

    Without a layout the system is tuned.
    """
    from bench.cli.output import print_json
    from bench.explain import explain as explain_step

    costs = asked.costs()
    found, _ = asked.found(costs)
    explained = explain_step(found, costs.values)
    if json:
        print_json({**explained.described(), "assumptions": costs.label})
    else:
        _show_explanation(found.case, explained, costs)


def _show_explanation(case: "Case", explained: "Explanation", costs: "CostModel") -> None:
    from bench.cli.output import print_facts, print_table

    step = explained.step_time_s
    group, resource, used = explained.busiest
    print_facts(
        f"simulated: {case.system} for {case.model.name} on {case.cluster.name}",
        {
            "layout": str(case.layout) or "defaults",
            "step ms": step * 1e3,
            "bound ms": explained.bound_s * 1e3,
            "bound by": explained.bound_by,
            "busiest resource": f"{resource} of {group}, {used:.1%} of the step",
            "assumptions": costs.label,
        },
    )

    def share(seconds: float) -> str:
        return f"{seconds / step:.1%}"

    print_table(
        "critical path: what the end of the step waited for, one thing after the other",
        ("what", "ms", "of step", "times"),
        [(part.what, part.seconds * 1e3, share(part.seconds), part.times) for part in explained.path],
    )
    print_table(
        "busiest rank of each group: seconds in use over the step",
        ("group", *explained.RESOURCES),
        [(use.group, *(share(seconds) for seconds in use.seconds)) for use in explained.uses],
    )
    print_table(
        f"from an even share of the work to the step, on rank {explained.rank}",
        ("cause", "ms", "of step"),
        [(cause, seconds * 1e3, share(seconds)) for cause, seconds in explained.gap],
    )
    print_table(
        "what would help: the step simulated again without it",
        ("without", "step ms", "faster by", "note"),
        [
            (change.without, change.step_time_s * 1e3, f"{step / change.step_time_s - 1:.1%}", change.note)
            for change in explained.changes[:3]
        ],
    )


def new_system(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the system.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.py", help="Where it goes. Default: NAME.py.", show_default=False),
    ] = None,
) -> None:
    """Write a schedule file to start from: a small pipeline that checks, verifies and runs as it is."""
    from bench.scaffold import write_system

    path = write_system(name, out)
    shown = path if path.is_absolute() else f"./{path}"
    typer.echo(f"wrote {path}; try: moebench verify {shown} --model tiny --ranks 4 --layout ep=2 pp=2")
