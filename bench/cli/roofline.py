"""`moebench roofline`: attention and experts on the compute-communication roofline, as a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.cli import options
from bench.cli.pairs import PairsCommand


def register(app: typer.Typer) -> None:
    """Adds the verb roofline."""
    example = "moebench roofline --model qwen3-235b --cluster h800x16 --seq-len 4096,8192,16384,32768"
    app.command("roofline", cls=PairsCommand, epilog=f"Example: {example}")(roofline)


add_verbs = register


def roofline(
    model: options.Model_,
    cluster: options.Cluster_,
    seq_len: Annotated[
        str, typer.Option("--seq-len", metavar="TOKENS,...", help="Sequence lengths in tokens, ascending.")
    ],
    top_k: Annotated[str | None, options.word("--top-k", "K,...", "Experts a token. Default: the model's.")] = None,
    copies: Annotated[
        str, typer.Option("--copies", metavar="WAY,...", help="A copy of a token per: expert, rank, node.")
    ] = "rank",
    expert_ranks: Annotated[
        int | None,
        options.number("--expert-ranks", "Ranks that share the experts. Default: 16, or as many as divide them.", "N"),
    ] = None,
    dtype: options.Dtype = "bf16",
    assumptions: options.AssumptionSet = None,
    set_: options.Setting = None,
    out: Annotated[Path | None, options.word("--out", "DIR", "Where picture (PDF, PNG) and CSV file go.")] = None,
    json: options.Json = False,
) -> None:
    """Show what limits attention and experts: FLOPs, bytes, intensity, ridge, and which side of it they are on."""
    from bench.cli.output import print_json, require_folder
    from bench.clusters import get_cluster
    from bench.errors import BadInput, unknown
    from bench.models import get_model
    from systems.disagmoe.planner import roofline as planner

    ways = [word.strip() for word in copies.split(",")]
    for way in ways:
        if way not in ("expert", "rank", "node"):
            raise unknown("copies", way, ("expert", "rank", "node"))
    top_ks = _numbers("top-k", top_k) if top_k is not None else []
    for field, given in (("copies", ways), ("top-k", top_ks)):
        if len(set(given)) < len(given):
            raise BadInput(field, ",".join(map(str, given)), "each once")
    costs = options.cost_model(assumptions, set_)
    place = get_cluster(cluster)
    if out is not None:
        require_folder("out", out)
    points = planner.roofline(
        get_model(model),
        place,
        _numbers("seq-len", seq_len),
        costs.values,
        top_ks=top_ks,
        copies=ways,
        expert_ranks=expert_ranks,
        dtype=dtype,
    )
    rows = [_row(point, place.name, costs.label) for point in points]
    files = [] if out is None else _write(rows, out)
    if json:
        print_json({"kind": "roofline", "points": rows, "files": [str(path) for path in files]})
        return
    _show(rows, f"roofline of {model} on {cluster} (simulated; assumptions: {costs.label})")
    if files:
        typer.echo(f"wrote {', '.join(str(path) for path in files)}")


def _numbers(field: str, text: str) -> list[int]:
    """Raises BadInput for a word that is no whole number."""
    from bench.errors import BadInput

    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise BadInput(field, text, "whole numbers with commas between them") from None


def _row(point: Any, cluster: str, assumptions: str) -> dict[str, Any]:
    from dataclasses import asdict

    numbers = {name: getattr(point, name) for name in ("intensity", "ridge", "position", "attainable_flops_per_s")}
    return {**asdict(point), **numbers, "bound_by": point.bound_by, "cluster": cluster, "assumptions": assumptions}


def _show(rows: Sequence[dict[str, Any]], title: str) -> None:
    from bench.cli.output import print_table

    columns = ["side", "tokens", "top-k", "copies", "MFLOP/token", "KB sent/token", "FLOP/byte", "ridge"]
    columns += ["of ridge", "bound by", "TFLOP/s/GPU"]
    print_table(
        title,
        columns,
        [
            [
                row["side"],
                row["seq_len"],
                row["top_k"],
                row["copies"],
                row["flops"] / 1e6,
                row["sent_bytes"] / 1e3,
                row["intensity"],
                row["ridge"],
                row["position"],
                row["bound_by"],
                row["attainable_flops_per_s"] / 1e12,
            ]
            for row in rows
        ],
    )


def _write(rows: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """A picture for each top-k and way of copying, and one CSV file with all rows."""
    import pandas as pd

    from paper_figs.roofline import draw
    from paper_figs.style import save

    frame = pd.DataFrame(rows)
    groups = frame.groupby(["top_k", "copies"], sort=False)
    files: list[Path] = []
    for (top_k, way), some in groups:
        stem = "roofline" if len(groups) == 1 else f"roofline-top{top_k}-{way}"
        files += save(draw(some), out, stem)
    table = out / "roofline.csv"
    table.write_text(frame.to_csv(index=False, lineterminator="\n"), encoding="utf-8")
    return [*files, table]
