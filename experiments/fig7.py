"""Figure 7: training throughput of every system on 16 x 8 H800, three models, 4K to 32K tokens. Simulated.

The paper's global batch is not known to us. Ours is 2^22 tokens a step for every model, length and system, which is the
usual order for models of this size; only the number of sequences differs between the lengths. bf16, balanced routing.
Every system's layout is found by the same search with the same budget.
"""

from bench.case import CaseSpec, Workload
from bench.clusters import get_cluster
from bench.evaluate import CostModel
from bench.models import get_model
from bench.results import PUBLISHED, Store, frame
from bench.trial import Trial
from experiments import Evidence, Request, Table
from experiments._sweep import sweep
from results.paper import CLUSTER, MODELS, SEQ_LENS, SPEEDUPS

SUMMARY = "throughput of ep and disagmoe, 3 models x 4K to 32K tokens on 16 x 8 H800 (simulated)"
SYSTEMS = ("ep", "disagmoe")
BASELINE, OURS = SYSTEMS
GLOBAL_BATCH_TOKENS = 1 << 22
QUICK_MODELS, QUICK_SEQ_LENS = MODELS[:1], SEQ_LENS[:2]


def specs(quick: bool = False) -> list[CaseSpec]:
    """What is compared: every system for every model and length. `quick` takes the first model and two lengths."""
    return [
        CaseSpec(
            model=get_model(model),
            cluster=get_cluster(CLUSTER),
            workload=Workload(
                seq_len=seq_len, global_batch_tokens=GLOBAL_BATCH_TOKENS, dtype="bf16", routing="balanced"
            ),
            system=system,
        )
        for model in (QUICK_MODELS if quick else MODELS)
        for seq_len in (QUICK_SEQ_LENS if quick else SEQ_LENS)
        for system in SYSTEMS
    ]


def run(request: Request) -> Evidence:
    """Simulates the cells that are missing. Cells that do not fit in memory are results; errors are failures."""
    store = Store(request.results, also=[PUBLISHED])
    return evidence(sweep(specs(request.quick), CostModel.named(), store, request.progress))


def evidence(trials: list[Trial]) -> Evidence:
    """What the cells show together."""
    data = frame(trials)
    failures = [
        f"{t.case.system} {t.case.model.name} {t.case.workload.seq_len}: {t.message}"
        for t in trials
        if t.status == "error"
    ]
    return Evidence({"frame": data}, data, [_throughput(trials), _layouts(trials), _paper()], failures)


def _throughput(trials: list[Trial]) -> Table:
    cells = {(t.case.model.name, t.case.workload.seq_len, t.case.system): t for t in trials}
    rows = []
    for model, seq_len in dict.fromkeys(key[:2] for key in cells):
        here = [cells[model, seq_len, system] for system in SYSTEMS]
        rates = [trial.metrics.get("tokens_per_s_per_gpu") if trial.status == "ok" else None for trial in here]
        speedup = f"{rates[1] / rates[0]:.2f}x" if rates[0] and rates[1] else None
        shares = [trial.metrics.get("mfu") if trial.status == "ok" else None for trial in here]
        shown = [_rate(trial) for trial in here]
        rows.append([model, seq_len, *shown, speedup, *(None if s is None else f"{100 * s:.1f} %" for s in shares)])
    title = f"simulated throughput on {CLUSTER}, global batch {GLOBAL_BATCH_TOKENS:,} tokens"
    columns = [
        "model",
        "tokens",
        *(f"{s} tokens/s/GPU" for s in SYSTEMS),
        f"{OURS} over {BASELINE}",
        *(f"{s} MFU" for s in SYSTEMS),
    ]
    return Table(title, columns, rows)


def _rate(trial: Trial) -> str:
    rate = trial.metrics.get("tokens_per_s_per_gpu")
    return f"{rate:,.0f}" if trial.status == "ok" and rate is not None else trial.status


def _layouts(trials: list[Trial]) -> Table:
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
    return Table(
        "reported by the paper, on hardware; for comparison", ["speedup of DisagMoE"], [[str(s)] for s in SPEEDUPS]
    )
