"""Writes the generated tables of docs/architecture.md, docs/gpus.md and docs/planner.md: `python tools/doc_tables.py`.

A test checks that they are as made. A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``. Those of
docs/gpus.md are of what is published: `moebench figure h200x2 --out results/published/h200x2` writes it again, and
so do `megatron-ratio`, `levers` and `costs`, with folders of their own.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEPTH = (
    *("replicas=1", "attention_ranks=16", "expert_ranks=8", "groups=5", "round_length=40", "cp=4", "head_group=4"),
    *("copies=node", "recompute=redispatch", "offload=state"),
)
PUBLISHED = ROOT / "results" / "published" / "h200x2"
sys.path.insert(0, str(ROOT))

import pandas as pd  # noqa: E402

from bench.action import TRANSFERS, Kind, Pass  # noqa: E402
from bench.assumptions import get_assumptions  # noqa: E402
from bench.case import Layout  # noqa: E402
from bench.clusters import get_cluster  # noqa: E402
from bench.edges import edges, ends  # noqa: E402
from bench.evaluate import CostModel  # noqa: E402
from bench.models import get_model  # noqa: E402
from bench.placement import Group, Placement  # noqa: E402
from bench.predict import predict  # noqa: E402
from bench.system import System, systems, trainers_of  # noqa: E402
from experiments import costs, fig7, levers, megatron_ratio  # noqa: E402
from experiments._beside import tables as tables_of_runs  # noqa: E402
from systems.disagmoe.planner.roofline import SIDES, roofline  # noqa: E402


def tables_of_architecture() -> dict[str, str]:
    return {"systems": systems_table(), "volumes": volumes_table()}


def tables_of_gpus() -> dict[str, str]:
    """Speed, predictions, and where the time of a step goes, as the published files have them."""
    rows = pd.read_csv(PUBLISHED / "h200x2.csv")
    speed, beside = (
        table(tuple(one.columns), [tuple(map(_cell, row)) for row in one.rows]) for one in tables_of_runs(rows)
    )
    found = {"speed": speed, "beside": beside, "operations": operations_table()}
    return found | {"ratios": _spread(rows), "kernels": kernels_table(), **of_one_host()}


def tables_of_planner() -> dict[str, str]:
    return {"roofline": roofline_table(), "depth": depth_table()}


PAGES: dict[Path, Callable[[], dict[str, str]]] = {
    ROOT / "docs" / "architecture.md": tables_of_architecture,
    ROOT / "docs" / "gpus.md": tables_of_gpus,
    ROOT / "docs" / "planner.md": tables_of_planner,
}
"""Every page with tables, and what makes them by name."""


def roofline_table() -> str:
    """Of one model at its shortest and longest length, for every way of copying."""
    lines = []
    points = roofline(
        get_model("qwen3-235b"),
        get_cluster("h800x16"),
        (4096, 32768),
        get_assumptions("datasheet"),
        copies=("expert", "rank", "node"),
    )
    for each in sorted(points, key=lambda point: SIDES.index(point.side)):
        numbers = (each.intensity, each.ridge)
        lines.append((each.side, each.copies, str(each.seq_len), *(f"{n:,.0f}" for n in numbers), each.bound_by))
    return table(("side", "a copy per", "tokens", "FLOPs a byte", "ridge", "bound by"), lines)


def depth_table() -> str:
    """The refined plan of one cell of Figure 7 with as many expert groups as attention groups, fewer, and more."""
    spec = fig7.spec_of("qwen3-235b", 32768, fig7.OURS)
    lines = []
    for depth in (None, 4, 6):
        layout = Layout.from_pairs([*DEPTH, f"expert_groups={depth or 'none'}"])
        found = predict(spec.with_layout(layout), CostModel.named().values)
        used = found.program.plan.placement.size
        lines.append((f"{layout.groups}:{depth or layout.groups}", str(used), f"{found.step_time_s:.2f}"))
    return table(("attention : expert groups", "GPUs used", "step s"), lines)


def operations_table() -> str:
    """Seconds of a rank's operations in a step, measured and simulated, summed over passes."""
    rows = pd.read_csv(PUBLISHED / "operations.csv")
    rows = rows[rows["simulated_ms"].notna()]  # the simulator has one of ranks that are alike
    rows["what"] = rows["kind"].where(rows["op"] == "compute", rows["op"])
    of_transfers = rows["op"].isin(("send", "recv"))
    rows.loc[of_transfers, "what"] = rows["op"] + " " + rows["kind"]
    lines = []
    for (system, rank, what), some in rows.groupby(["system", "rank", "what"], sort=False):
        measured, simulated = some["measured_ms"].sum(), some["simulated_ms"].sum()
        if simulated > 0:
            words = (f"{measured:.1f}", f"{simulated:.1f}", f"{simulated / measured:.2f}")
            lines.append((f"`{system}`", str(rank), what, *words))
    return table(("system", "rank", "operations", "ms in a step", "simulated ms", "simulated over measured"), lines)


def of_one_host() -> dict[str, str]:
    """Of `ep` from our plan and of megatron-core itself; of recomputation and offload; of single operations."""
    single = costs.published().data
    found = {
        "megatron": megatron_ratio.shown(pd.read_csv(megatron_ratio.FOLDER / "megatron-ratio.csv")),
        "levers": levers.shown(pd.read_csv(levers.FOLDER / "levers.csv")),
        "single": costs.shown_single(single),
        "step": costs.shown_step(single),
    }
    return {name: table(tuple(one.columns), [tuple(map(str, row)) for row in one.rows]) for name, one in found.items()}


KERNELS = {
    "matrix products": "nvjet|GemmUniversal|xmma_gemm",
    "attention (torch's flash attention)": "flash",
    "NCCL, waiting for the peer included": "nccl",
    "optimizer, norm of the gradients": "multi_tensor",
    "norms": "layer_norm|GammaBeta",
    "element by element, copies, reductions, gathers": "elementwise|Memcpy|reduce_kernel|indexFunc|gather|CatArray",
    "this harness's own (SwiGLU, rotation, sums of rows)": "^_[a-z]+",
}


def kernels_table() -> str:
    """Kernels of a rank in a step by what they do: the first of `KERNELS` that fits."""
    rows = pd.read_csv(PUBLISHED / "kernels.csv").set_index("kernel")
    whole, span_ms = rows.loc["all"], rows.loc["first to last", "ms"]
    rows, lines = rows.drop(["all", "first to last"]), []
    for words, pattern in KERNELS.items():
        fits = rows.index.str.contains(pattern)
        lines.append((words, f"{rows[fits]['number'].sum():,.0f}", f"{rows[fits]['ms'].sum():.0f}"))
        rows = rows[~fits]
    listed = pd.read_csv(PUBLISHED / "kernels.csv").iloc[2:]
    listed = listed[~listed["kernel"].isin(rows.index)]
    rest = whole - listed[["number", "ms"]].sum()
    lines.append(("all others", f"{rest['number']:,.0f}", f"{rest['ms']:.0f}"))
    lines.append(("all", f"{whole['number']:,.0f}", f"{whole['ms']:.0f}"))
    lines.append(("from the first one's begin to the last one's end", "", f"{span_ms:.0f}"))
    return table(("kernels of an `ep` step", "number", "ms"), lines)


def _spread(rows: "pd.DataFrame") -> str:
    """Ranges over all rows, and the shares of disagmoe."""
    lines: list[tuple[str, ...]] = []
    for column, words in (
        ("predicted_over_measured", "simulated over measured step time"),
        ("predicted_over_measured_memory", "simulated over measured peak memory"),
    ):
        values = rows[column]
        lines.append((words, *_range(values, "{:.2f}")))
    twice = rows[rows["rounds"] > 1]
    lines.append(
        ("slower over faster of two rounds", *_range(twice["step_time_high_s"] / twice["step_time_low_s"], "{:.2f}"))
    )
    ours = rows[(rows["system"] == "disagmoe") & ~rows["serial"]]
    for transport, some in ours.groupby("transport", sort=False):
        for column, words in (("hidden_share", "hidden share"), ("fraction_of_bound", "share of the bound")):
            lines.append((f"`disagmoe` over `{transport}`: {words}", *_range(some[column], "{:.0%}")))
    serial = rows[(rows["system"] == "disagmoe") & rows["serial"]]
    lines.append(("`disagmoe`, serial: ms of transfers", *_range(serial["send_s"] * 1e3, "{:.0f}")))
    points = serial["step_time_s"] / serial["send_s"]
    lines.append(("points of the hidden share that one percent of the step is", *_range(points, "{:.0f}")))
    return table(("over all rows", "least", "median", "most"), lines)


def _range(values: "pd.Series[float]", form: str) -> tuple[str, ...]:
    return tuple(form.format(value) for value in (values.min(), values.median(), values.max()))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}"
    return "" if value is None else str(value)


def systems_table() -> str:
    rows = [
        (
            f"`{system.name}`",
            system.summary,
            traits(system),
            ", ".join(trainers_of(system)),
            " ".join(f"`{field}`" for field in sorted(system.fields)),
        )
        for system in systems().values()
    ]
    return table(("system", "what it is", "traits", "trainers", "layout fields"), rows)


def traits(system: System) -> str:
    """What sets its plans apart from those that can be executed and leave the model as it is."""
    return ", ".join(getattr(system, "traits", ())) or "none"


def volumes_table() -> str:
    """Transfers of layer 0 and the hop behind it, on a placement where everything moves on."""
    model = get_model("tiny").model_copy(update={"num_layers": 2})
    groups = tuple(Group(name, i, 1) for i, name in enumerate(("E", "A0", "F0", "A1", "F1")))
    apart = Placement(groups, "E", "A1", ("A0", "A1"), ("F0", "F1"), ("A1", "A1"))
    found = {
        edge.via: edge for edge in edges(model, apart, "redispatch") if edge.via is not None and edge.via.layer == 0
    }
    rows = []
    for via in sorted(found, key=lambda action: (action.kind, "FRBW".index(action.pass_.name))):
        assert via.kind in TRANSFERS
        source, target = ends(apart, via)
        rows.append((f"`{via.word}` {via.pass_.name}", source, target, f"`{found[via].volume}`"))
    assert {Kind.DISPATCH, Kind.HOP} <= {via.kind for via in found} and Pass.R in {via.pass_ for via in found}
    return table(("transfer", "from", "to", "bytes"), rows)


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written(page: str, tables: Mapping[str, str]) -> str:
    """The page with every table made anew."""
    for name, text in tables.items():
        marked = re.compile(f"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        page, number = marked.subn(lambda match, text=text: match[1] + text + match[2], page)
        assert number == 1, f"{number} places for the table {name}"
    return page


if __name__ == "__main__":
    for path, made in PAGES.items():
        path.write_text(written(path.read_text(encoding="utf-8"), made()), encoding="utf-8")
