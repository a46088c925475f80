"""`moebench trace`: one step, simulated or executed, as Chrome/Perfetto JSON and as a drawn timeline."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from bench.cli import executed, options, trace_analyze
from bench.cli.asking import Asked, asks
from bench.cli.pairs import PairsCommand

if TYPE_CHECKING:
    from bench.case import Case
    from bench.placement import Placement
    from bench.timeline import Timeline


EXAMPLE = "Example: moebench trace disagmoe --model tiny --executed --ranks 4 --out out/disagmoe.json"


class StepByDefault(TyperGroup):
    """A group whose first command is meant where none is named: ``trace ep ...`` is ``trace step ep ...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def add_verbs(app: typer.Typer) -> None:
    group = typer.Typer(
        cls=StepByDefault,
        help="Trace a step (`moebench trace SYSTEM ...`; options: `moebench trace step --help`), or analyze traces.",
        epilog=EXAMPLE,
        no_args_is_help=True,
    )
    group.command("step", cls=PairsCommand, epilog=EXAMPLE)(trace)
    trace_analyze.register(group)
    app.add_typer(group, name="trace")


@asks
def trace(
    asked: Asked,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE.json", help="The trace; .json.gz is compressed. The drawing goes beside it."
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            help="Cluster of a simulated step; executed: as for run.",
            show_default=False,
        ),
    ] = None,
    seq_len: options.SeqLen = 64,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="bf16|fp32", help="Default: bf16 simulated, fp32 executed.", show_default=False
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            "--routing", metavar="ROUTING", help="Default: balanced simulated, learned executed.", show_default=False
        ),
    ] = None,
    executed: Annotated[
        bool, typer.Option("--executed", help="Trace a step that is run on this machine, after warming up.")
    ] = False,
    ranks: options.Ranks = 4,
    device: options.Device = "cpu",
    trainer: options.Trainer_ = None,
    json: options.Json = False,
) -> None:
    """Trace one optimizer step: a file for https://ui.perfetto.dev or chrome://tracing, and a drawing (PNG, PDF)."""
    _require_out(out)
    if executed:
        asked = replace(asked, dtype=dtype or "fp32", routing=routing or "learned")
        traced = _executed(asked, ranks, device, trainer)
    else:
        _require_simulated(cluster, trainer)
        traced = _simulated(replace(asked, dtype=dtype or "bf16", routing=routing or "balanced"))
    _tell(traced.case, traced.timeline, write(*traced, out), json)


class Traced(NamedTuple):
    """A step of a case, with the groups that its ranks are in."""

    case: "Case"
    timeline: "Timeline"
    placement: "Placement"


def _require_out(out: Path) -> None:
    from bench.cli.output import require_folder
    from bench.errors import BadInput

    if not out.name.endswith((".json", ".json.gz")):
        raise BadInput("out", str(out), "a name that ends in .json or .json.gz")
    require_folder("out", out.parent)


def _require_simulated(cluster: str | None, trainer: str | None) -> None:
    """Raises BadInput where the options are not those of a simulated step."""
    from bench.errors import BadInput

    if trainer is not None:
        raise BadInput("trainer", trainer, "none without --executed: what is simulated is the plan")
    if cluster is None:
        raise BadInput("cluster", None, "a cluster to simulate, or --executed")


def _simulated(asked: Asked) -> Traced:
    found, _ = asked.found(asked.costs())
    return Traced(found.case, found.timeline, found.program.plan.placement)


def _executed(asked: Asked, ranks: int, device: str, trainer: str | None) -> Traced:
    from bench.cli.training import require_torch
    from bench.system import plan_of

    case = executed.run_case(
        *(asked.system, asked.model, ranks, device, asked.seq_len, asked.global_batch_tokens),
        *(asked.dtype, asked.routing, asked.seed, asked.layout, asked.cluster),
    )
    require_torch()
    from bench.execute.train import executed_timeline

    timeline = executed_timeline(case, device=options.device_of(device), trainer=trainer)
    return Traced(case, timeline, plan_of(case).placement)


def _tell(case: "Case", timeline: "Timeline", files: list[Path], json: bool) -> None:
    from bench.cli.output import print_json

    if not json:
        typer.echo(f"{timeline.source} step of {timeline.step_time_s:.4g} s; wrote {', '.join(map(str, files))}")
        return
    print_json(
        {
            "kind": timeline.source,
            "system": case.system,
            "case_id": case.id,
            "step_time_s": timeline.step_time_s,
            "num_operations": len(timeline),
            "clock_error_s": timeline.clock_error_s,
            "files": [str(file) for file in files],
        }
    )


def write(case: "Case", timeline: "Timeline", placement: "Placement", out: Path) -> list[Path]:
    """The trace, and its drawing beside it."""
    from bench.trace import write_chrome
    from paper_figs import timeline as drawing
    from paper_figs.style import save

    title = f"{case.system} {case.model.name} {case.layout}".strip()
    out.parent.mkdir(parents=True, exist_ok=True)
    write_chrome(out, timeline, title=title, placement=placement)
    stem = out.name.removesuffix(".gz").removesuffix(".json")
    return [out, *save(drawing.draw([(title, timeline, placement)]), out.parent, stem)]
