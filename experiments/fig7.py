"""Figure 7: training throughput of every system on 16 x 8 H800, three models, 4K to 32K tokens. Simulated.

The paper's global batch is not known to us. Ours is 2^22 tokens a step for every model, length and system, which is the
usual order for models of this size; only the number of sequences differs between the lengths. bf16, balanced routing.
Every system's layout is found by the same search with the same budget. Speed-ups are over `megatron`, the paper's
baseline (megatron-core's interleaved 1F1B, serial all-to-alls, one row per token and expert), and over the overlap
system that is fastest in the cell. `ep` is the same serial order with the dispatch copies that the others may choose.
"""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from bench.case import CaseSpec, Workload
from bench.clusters import CLUSTERS, Cluster, get_cluster
from bench.evaluate import CostModel
from bench.models import get_model
from bench.results import frame
from bench.trial import Trial
from experiments import Evidence, Request, Table
from experiments._paper import claims
from experiments._sweep import sweep
from results.paper import CLUSTER, MODELS, SEQ_LENS

if TYPE_CHECKING:
    from pandas import DataFrame

SUMMARY = "throughput of every system, 3 models x 4K to 32K tokens on 16 x 8 H800 (simulated)"
BASELINE, OURS = "megatron", "disagmoe"
OVERLAP = ("tutel", "comet", "megatron-overlap", "dualpipe", "dualpipe-v")
SYSTEMS = (BASELINE, "ep", *OVERLAP, OURS)
GLOBAL_BATCH_TOKENS = 1 << 22
QUICK_MODELS, QUICK_SEQ_LENS = MODELS[:1], SEQ_LENS[:2]
QUICK_BUDGET = 2

RUN_RANKS, RUN_SEQ_LENS, RUN_BATCH_TOKENS = 2, (16, 32), 1 << 9

Cells = dict[tuple[str, int], dict[str, Trial]]
"""Trials by system, by model and sequence length."""


def specs(quick: bool = False) -> list[CaseSpec]:
    """What is compared: every system for every model and length. `quick` takes the first model and two lengths."""
    return [
        spec_of(model, seq_len, system)
        for model in (QUICK_MODELS if quick else MODELS)
        for seq_len in (QUICK_SEQ_LENS if quick else SEQ_LENS)
        for system in SYSTEMS
    ]


def quick_runs() -> list[CaseSpec]:
    """What runs anywhere: every system with a tiny model on a few processes of the CPU, at two lengths."""
    fields = {**CLUSTERS["cpu"].model_dump(), "gpus_per_node": RUN_RANKS, "nics_per_node": RUN_RANKS}
    cluster = Cluster.from_fields({**fields, "name": f"cpu{RUN_RANKS}"})
    found = []
    for seq_len, system in product(RUN_SEQ_LENS, SYSTEMS):
        work = Workload(seq_len=seq_len, global_batch_tokens=RUN_BATCH_TOKENS, dtype="fp32", routing="balanced")
        found.append(CaseSpec(model=get_model("tiny"), cluster=cluster, workload=work, system=system))
    return found


def spec_of(model: str, seq_len: int, system: str) -> CaseSpec:
    """One bar of the figure."""
    work = Workload(seq_len=seq_len, global_batch_tokens=GLOBAL_BATCH_TOKENS, dtype="bf16", routing="balanced")
    return CaseSpec(model=get_model(model), cluster=get_cluster(CLUSTER), workload=work, system=system)


def run(request: Request) -> Evidence:
    """Simulates the cells that are missing. Cells that do not fit in memory are results; errors are failures."""
    return evidence(trials(request))


def trials(request: Request) -> list[Trial]:
    """A trial for every spec."""
    model, wanted = CostModel.named(request.assumptions), specs(request.quick)
    if request.quick:
        return sweep(wanted, model, request.store(), request.progress, budget=QUICK_BUDGET)
    return sweep(wanted, model, request.store(), request.progress)


def evidence(trials: Sequence[Trial]) -> Evidence:
    """What the cells show together."""
    data = table_of(trials)
    failures = [
        f"{t.case.system} {t.case.model.name} {t.case.workload.seq_len}: {t.message}"
        for t in trials
        if t.status == "error"
    ]
    drawn = {"frame": data, "ours": OURS, "baseline": BASELINE, "overlap": OVERLAP}
    tables = [_throughput(trials), _speedups(trials), _layouts(trials), _paper()]
    return Evidence(drawn, data, tables, failures)


def table_of(trials: Sequence[Trial]) -> "DataFrame":
    """The trials as a table, with how the search of each ended: `search_complete`, and `search_budget` where not."""
    data = frame(trials)
    complete = [bool(trial.search.get("complete", True)) for trial in trials]
    data["search_complete"] = complete
    ends = [None if whole else trial.search.get("budget") for whole, trial in zip(complete, trials, strict=True)]
    data["search_budget"] = ends
    return data


def cells_of(trials: Sequence[Trial]) -> Cells:
    """In the order of the trials."""
    cells: Cells = {}
    for trial in trials:
        key = (trial.case.model.name, trial.case.workload.seq_len)
        cells.setdefault(key, {})[trial.case.system] = trial
    return cells


def rate(trial: Trial | None) -> float | None:
    """Tokens/s per allocated GPU; None where there is no step."""
    return trial.metrics.get("tokens_per_s_per_gpu") if trial is not None and trial.status == "ok" else None


def fastest(cell: dict[str, Trial], systems: Sequence[str]) -> str | None:
    """The fastest of `systems` in a cell; None where none fits."""
    rates = {system: found for system in systems if (found := rate(cell.get(system))) is not None}
    return max(rates, key=lambda system: rates[system], default=None)


def speedup(cell: dict[str, Trial], over: Sequence[str], ours: str = OURS) -> float | None:
    """Throughput of `ours` over the fastest of `over`; None where one side does not fit."""
    best, mine = fastest(cell, over), rate(cell.get(ours))
    theirs = rate(cell[best]) if best is not None else None
    return mine / theirs if mine and theirs else None


def said(trial: Trial) -> str:
    """For a cell without a step, why: a search that was broken off is no proof that nothing fits."""
    if trial.status == "infeasible" and not trial.search.get("complete", True):
        return f"no layout found in {trial.search.get('budget')}"
    if trial.status != "infeasible":
        return trial.status
    return "does not fit" if "missing_gib" in trial.metrics else "no layout possible"


def _throughput(trials: Sequence[Trial]) -> Table:
    cells = cells_of(trials)
    shown = list(dict.fromkeys(trial.case.system for trial in trials))
    rows = []
    for (model, seq_len), cell in cells.items():
        found = [(cell[system], rate(cell[system])) for system in shown if system in cell]
        rows.append([model, seq_len, *(said(trial) if value is None else f"{value:,.0f}" for trial, value in found)])
    source, cluster, batch = (
        " and ".join(sorted({str(of(trial)) for trial in trials}))
        for of in (
            lambda trial: trial.source,
            lambda trial: trial.case.cluster.name,
            lambda trial: f"{trial.case.workload.global_batch_tokens:,}",
        )
    )
    title = f"{source} tokens/s/GPU on {cluster}, global batch {batch} tokens"
    return Table(title, ["model", "tokens", *shown], rows)


def _speedups(trials: Sequence[Trial]) -> Table:
    rows = []
    for (model, seq_len), cell in cells_of(trials).items():
        ours = cell.get(OURS)
        ratios = [speedup(cell, over) for over in ((BASELINE,), OVERLAP)]
        shares = [ours.metrics.get(name) if rate(ours) and ours else None for name in ("mfu", "fraction_of_bound")]
        words = [
            *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            fastest(cell, OVERLAP),
            *("-" if share is None else f"{100 * share:.1f} %" for share in shares),
        ]
        rows.append([model, seq_len, *words])
    columns = ["model", "tokens", f"over {BASELINE}", "over best overlap", "which is", "MFU", "of its bound"]
    return Table(f"{OURS}: speed-ups, model FLOP utilisation, share of its own bound", columns, rows)


def _layouts(trials: Sequence[Trial]) -> Table:
    rows = [
        [
            t.case.model.name,
            t.case.workload.seq_len,
            t.case.system,
            t.layout,
            t.message or f"{(t.metrics.get('peak_memory_bytes') or 0) / 2**30:.1f} GiB a GPU",
        ]
        for t in trials
    ]
    return Table("layouts", ["model", "tokens", "system", "layout", "memory"], rows)


def _paper() -> Table:
    rows = [[claim.says, claim.source] for claim in claims() if claim.measure == "speedup"]
    return Table("reported by the paper, on hardware; `moebench claims` judges it", ["DisagMoE has", "source"], rows)
