"""Regimes: where disaggregation pays. Speed-up of `disagmoe` over the best colocated system, cell by cell. Simulated.

Three maps around one point (Qwen3-30B on 4 nodes of 8 H800, 2^20 tokens a step): network bandwidth against sequence
length, experts against top-k, and nodes against network bandwidth. Every system of a cell is tuned by the search of
`moebench tune` with its budget; the colocated system that is fastest in a cell is the one compared with. A budget is
less than a whole search: a speed-up within a few per cent of 1 says that neither side is clearly ahead.

Compared are the colocated systems that overlap. `ep` and `megatron` are such a system without its overlap: neither is
the fastest in a cell of Figure 7.
"""

from typing import TYPE_CHECKING, NamedTuple

from bench.case import CaseSpec, Workload
from bench.clusters import Cluster, get_cluster
from bench.evaluate import CostModel
from bench.models import Model, get_model
from bench.trial import Trial
from bench.tune import DEFAULT_BUDGET
from experiments import Evidence, Request, Table
from experiments._sweep import sweep

if TYPE_CHECKING:
    from pandas import DataFrame

SUMMARY = "where disagmoe beats the best colocated system: NIC bandwidth, length, top-k, experts, nodes (simulated)"
OURS = "disagmoe"
COLOCATED = ("megatron-overlap", "tutel", "comet", "dualpipe", "dualpipe-v")
MODEL, CLUSTER, GLOBAL_BATCH_TOKENS = "qwen3-30b", "h800x4", 1 << 20
MARKED = {
    "qwen3-235b": "Qwen3",
    "gpt-oss-120b": "GPT-OSS",
    "deepseek-moe-16b": "DS-MoE",
    "deepseek-v3": "DS-V3",
}
QUICK_BUDGET = 6


class Point(NamedTuple):
    """Where a cell lies. nic_bytes_per_s is one NIC's, of which there is one for each GPU."""

    nic_bytes_per_s: float = 50e9
    seq_len: int = 8192
    top_k: int = 8
    num_experts: int = 128
    num_nodes: int = 4


class Map(NamedTuple):
    """One panel: two fields of `Point` and their values; the others stay as they are."""

    name: str
    x: str
    x_values: tuple[float, ...]
    y: str
    y_values: tuple[float, ...]

    def points(self) -> list[Point]:
        return [Point(**{**Point()._asdict(), self.x: x, self.y: y}) for y in self.y_values for x in self.x_values]


MAPS = (
    Map("network", "seq_len", (2048, 4096, 8192, 16384, 32768), "nic_bytes_per_s", (12.5e9, 25e9, 50e9, 100e9)),
    Map("experts", "top_k", (2, 4, 6, 8), "num_experts", (64, 128, 256)),
    Map("nodes", "num_nodes", (2, 4, 8), "nic_bytes_per_s", (12.5e9, 25e9, 50e9, 100e9)),
)
QUICK_MAPS = (Map("network", "seq_len", (4096, 16384), "nic_bytes_per_s", (12.5e9, 50e9)),)


def maps(quick: bool = False) -> tuple[Map, ...]:
    return QUICK_MAPS if quick else MAPS


def specs(quick: bool = False) -> list[CaseSpec]:
    """Every system at every point, each once."""
    points = dict.fromkeys(point for each in maps(quick) for point in each.points())
    return [spec_at(point, system) for point in points for system in (OURS, *COLOCATED)]


def spec_at(point: Point, system: str) -> CaseSpec:
    workload = Workload(seq_len=point.seq_len, global_batch_tokens=GLOBAL_BATCH_TOKENS, dtype="bf16")
    return CaseSpec(model=_model(point), cluster=_cluster(point), workload=workload, system=system)


def _model(point: Point) -> Model:
    base = get_model(MODEL)
    if (point.top_k, point.num_experts) == (base.top_k, base.num_experts):
        return base
    name = f"{MODEL}-top{point.top_k}-of{point.num_experts}"
    fields = {"name": name, "top_k": point.top_k, "num_experts": point.num_experts}
    return Model.from_fields({**base.model_dump(), **fields})


def _cluster(point: Point) -> Cluster:
    name = f"h800x{point.num_nodes}-nic{point.nic_bytes_per_s / 1e9:g}"
    fields = {"name": name, "num_nodes": point.num_nodes, "nic_bytes_per_s": point.nic_bytes_per_s}
    return get_cluster(CLUSTER).model_copy(update=fields)


def run(request: Request) -> Evidence:
    """Simulates the cells that are missing. A cell where one side does not fit is a result; errors are failures."""
    store = request.store()
    wanted = specs(request.quick)
    budget = QUICK_BUDGET if request.quick else DEFAULT_BUDGET
    model = CostModel.named(request.assumptions)
    trials = dict(zip(wanted, sweep(wanted, model, store, request.progress, budget=budget), strict=True))
    return evidence(trials, maps(request.quick), model.label, budget)


def evidence(trials: dict[CaseSpec, Trial], panels: tuple[Map, ...], assumptions: str, budget: int) -> Evidence:
    """What the cells show together."""
    import pandas as pd

    data = pd.DataFrame([_cell(panel, point, trials) for panel in panels for point in panel.points()])
    failures = [f"{t.case.system} {t.case.model.name}: {t.message}" for t in trials.values() if t.status == "error"]
    marks = [
        {"label": label, "top_k": get_model(name).top_k, "num_experts": get_model(name).num_experts}
        for name, label in MARKED.items()
    ]
    drawn = {"frame": data, "marks": marks, "assumptions": assumptions, "budget": budget}
    return Evidence(drawn, data, [_summary(data, budget), _extremes(data)], failures)


def _cell(panel: Map, point: Point, trials: dict[CaseSpec, Trial]) -> dict[str, object]:
    rates = {system: _rate(trials[spec_at(point, system)]) for system in (OURS, *COLOCATED)}
    colocated = {system: rate for system in COLOCATED if (rate := rates[system]) is not None}
    best = max(colocated, key=lambda system: colocated[system], default=None)
    ours = rates[OURS]
    return {
        "panel": panel.name,
        "x": panel.x,
        "y": panel.y,
        **point._asdict(),
        "source": "simulated",
        "best_colocated": best,
        "tokens_per_s_per_gpu": ours,
        "colocated_tokens_per_s_per_gpu": colocated.get(best) if best else None,
        "speedup": ours / colocated[best] if ours is not None and best else None,
    }


def _rate(trial: Trial) -> float | None:
    return trial.metrics.get("tokens_per_s_per_gpu") if trial.status == "ok" else None


def _summary(data: "DataFrame", budget: int) -> Table:
    rows = []
    for name, some in data.groupby("panel", sort=False):
        known = some["speedup"].dropna()
        won = int((known > 1).sum())
        low, high = (known.min(), known.max()) if len(known) else (None, None)
        rows.append([name, len(some), won, len(some) - len(known), low, high])
    columns = ["map", "cells", f"{OURS} faster", "one side does not fit", "lowest speed-up", "highest"]
    title = f"{OURS} over the best of {', '.join(COLOCATED)} (simulated; at most {budget} layouts a system and cell)"
    return Table(title, columns, rows)


def _extremes(data: "DataFrame") -> Table:
    columns = ["panel", *Point._fields, "best_colocated", "speedup"]
    ordered = data.dropna(subset=["speedup"]).sort_values("speedup", ascending=False)
    rows = ordered.iloc[[*range(min(3, len(ordered))), *range(max(3, len(ordered) - 3), len(ordered))]]
    return Table("where it pays most and least", columns, rows[columns].to_numpy().tolist())
