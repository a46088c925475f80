"""Scaling: four models on 1 to 128 nodes of 8 H800, weak and strong. Simulated.

Weak: 2^15 tokens a GPU and step. Strong: 2^22 tokens a step, which at 16 nodes is the same. 4K tokens a sequence, bf16,
balanced routing. What does not fit in memory on few nodes is part of the result.
"""

from bench.case import CaseSpec, Workload
from bench.clusters import get_cluster
from bench.evaluate import CostModel
from bench.models import get_model
from bench.trial import Trial
from experiments import Evidence, Request, Table
from experiments._sweep import sweep
from experiments.fig7 import rate, said, table_of

SUMMARY = "weak and strong scaling of ep and disagmoe, 4 models on 1 to 128 nodes of 8 H800 (simulated)"
SYSTEMS = ("ep", "disagmoe")
MODELS = ("qwen3-30b", "gpt-oss-120b", "qwen3-235b", "deepseek-v3")
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
QUICK_MODELS, QUICK_NODES = MODELS[:1], (4, 16)
SEQ_LEN = 4096
STRONG_BATCH_TOKENS = 1 << 22
WEAK_TOKENS_PER_GPU = 1 << 15
MODES = ("weak", "strong")


def specs(quick: bool = False) -> list[CaseSpec]:
    """Every system for every model, number of nodes and mode, each once."""
    found = [
        _spec(model, num_nodes, mode, system)
        for model in (QUICK_MODELS if quick else MODELS)
        for num_nodes in (QUICK_NODES if quick else NODES)
        for mode in MODES
        for system in SYSTEMS
    ]
    return list(dict.fromkeys(found))


def _spec(model: str, num_nodes: int, mode: str, system: str) -> CaseSpec:
    cluster = get_cluster(f"h800x{num_nodes}")
    tokens = WEAK_TOKENS_PER_GPU * cluster.num_gpus if mode == "weak" else STRONG_BATCH_TOKENS
    workload = Workload(seq_len=SEQ_LEN, global_batch_tokens=tokens, dtype="bf16", routing="balanced")
    return CaseSpec(model=get_model(model), cluster=cluster, workload=workload, system=system)


def run(request: Request) -> Evidence:
    """Simulates the cells that are missing. Cells that do not fit in memory are results; errors are failures."""
    store = request.store()
    return evidence(sweep(specs(request.quick), CostModel.named(request.assumptions), store, request.progress))


def evidence(trials: list[Trial]) -> Evidence:
    """What the cells show together: a row for every cell and mode it belongs to."""
    import pandas as pd

    trials = sorted(trials, key=lambda trial: (MODELS.index(trial.case.model.name), trial.case.cluster.num_nodes))
    data = table_of(trials)
    weak = data["global_batch_tokens"] == WEAK_TOKENS_PER_GPU * data["num_gpus"]
    strong = data["global_batch_tokens"] == STRONG_BATCH_TOKENS
    parts = [data[chosen].assign(mode=mode) for mode, chosen in zip(MODES, (weak, strong), strict=True)]
    table = pd.concat(parts, ignore_index=True)
    failures = [
        f"{t.case.system} {t.case.model.name} {t.case.cluster.name}: {t.message}" for t in trials if t.status == "error"
    ]
    return Evidence({"frame": table}, table, [_table(trials, mode) for mode in MODES], failures)


def _table(trials: list[Trial], mode: str) -> Table:
    by_spec = {trial.spec: trial for trial in trials}
    shown = {(spec.model.name, spec.cluster.num_nodes): spec for spec in by_spec}
    rows = []
    for model, num_nodes in sorted(shown, key=lambda key: (MODELS.index(key[0]), key[1])):
        here = [by_spec.get(_spec(model, num_nodes, mode, system)) for system in SYSTEMS]
        if None in here:
            continue
        rates = [rate(trial) for trial in here]
        words = [f"{one:,.0f}" if one else said(t) for one, t in zip(rates, here, strict=True) if t is not None]
        speedup = f"{rates[1] / rates[0]:.2f}x" if rates[0] and rates[1] else None
        rows.append([model, num_nodes, *words, speedup])
    columns = ["model", "nodes", *(f"{system} tokens/s/GPU" for system in SYSTEMS), f"{SYSTEMS[1]} over {SYSTEMS[0]}"]
    return Table(f"simulated {mode} scaling, {SEQ_LEN} tokens a sequence", columns, rows)
