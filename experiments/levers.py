"""What a layout may save memory with, and what that costs: recomputation and offload, measured, predictions beside.

`ep` trains the same model on one GPU, so that nothing crosses a link to another, with one lever at a time. Rounds of
all levers follow one another. Predictions are of the default assumptions and of tensors alone, which is what torch's
allocator counts: the reserve that a layout also has to leave is in neither.

With `--device cpu` the same path runs with a tiny model: to see that it works, and no result. Where there is no GPU,
the published trials are drawn again.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bench.assumptions import DEFAULT_ASSUMPTIONS, get_assumptions
from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.models import get_model
from bench.predict import GIB, predict
from bench.results import PUBLISHED, Store
from bench.trial import Trial
from experiments import Evidence, Request, Table
from experiments._rounds import interleaved, measured_or_published, median_of, pair_of_processes, row_of, tensor_bytes

if TYPE_CHECKING:
    from pandas import DataFrame

SUMMARY = "time and memory of recomputation and offload on one GPU, predictions beside (measured)"
DEVICES = ("cuda", "cpu")
LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "redispatch": {"recompute": "redispatch"},
    "full recompute": {"recompute": "full"},
    "offload state": {"offload": "state"},
    "offload activations": {"offload": "activations"},
    "offload all": {"offload": "all"},
}
LAYERS, SEQUENCES, SEQ_LEN, STEPS, ROUNDS = 4, 8, 4096, 6, 3
FOLDER = PUBLISHED / "levers"


def cases(device: Literal["cpu", "cuda"]) -> list[Case]:
    """One a lever, in their order."""
    if device == "cpu":
        model, cluster = get_model("tiny"), pair_of_processes()
        work = Workload(seq_len=64, global_batch_tokens=64 * 8, dtype="fp32", routing="balanced")
    else:
        name = f"qwen3-30b-{LAYERS}-layers"
        model = get_model("qwen3-30b").model_copy(update={"name": name, "num_layers": LAYERS})
        cluster = get_cluster("h200x1gpu")
        work = Workload(seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * SEQUENCES, dtype="bf16", routing="balanced")
    spec = CaseSpec(model=model, cluster=cluster, workload=work, system="ep")
    ranks = cluster.num_gpus
    return [spec.with_layout(Layout(ep=ranks, mbs=2, copies="rank", **lever)) for lever in LEVERS.values()]


def run(request: Request) -> Evidence:
    """Measures; or draws the published trials where no device was asked for and there is no GPU."""
    return evidence(measured_or_published(request, FOLDER, lambda device: _measured(request, device)))


def _measured(request: Request, device: Literal["cpu", "cuda"]) -> Iterable[Trial]:
    from bench.execute.pool import RankPool
    from bench.measured import measure

    store, chosen = Store(request.results), cases(device)
    rounds, steps = (1, 3) if request.quick else (ROUNDS, STEPS)
    with RankPool(chosen[0].cluster.num_gpus, device) as pool:
        for place in interleaved(request, list(LEVERS), rounds):
            trial = measure(
                chosen[place], steps=steps, device=device, data="synthetic", weights="device", pool=pool
            ).trial
            store.write(trial)
            yield trial


def evidence(trials: Iterable[Trial]) -> Evidence:
    """What the trials of all rounds say; a run that did not end well is a failure."""
    trials = list(trials)
    rows = table(trials)
    failures = [f"{lever_of(one)}: {one.status}: {one.message}" for one in trials if one.status != "ok"]
    return Evidence({"frame": rows}, rows, [shown(rows)] if len(rows) else [], failures)


def lever_of(trial: Trial) -> str:
    """The name of the lever that a trial's layout has."""
    case = trial.case
    assert isinstance(case, Case)
    chosen = {name: getattr(case.layout, name) for name in ("recompute", "offload")}
    plain = {"recompute": "none", "offload": "none"}
    return next(name for name, lever in LEVERS.items() if {**plain, **lever} == chosen)


def table(trials: Iterable[Trial]) -> "DataFrame":
    """One row a lever, in their order: medians over the steady steps of all rounds, and what is predicted."""
    import pandas as pd

    by_lever: dict[str, list[Trial]] = {name: [] for name in LEVERS}
    for trial in trials:
        if trial.status == "ok":
            by_lever[lever_of(trial)].append(trial)
    return pd.DataFrame([_row(lever, rounds) for lever, rounds in by_lever.items() if rounds])


def _row(lever: str, rounds: Sequence[Trial]) -> dict[str, Any]:
    case = rounds[0].case
    assert isinstance(case, Case)
    found = predict(case, get_assumptions(DEFAULT_ASSUMPTIONS))
    gpus = rounds[0].provenance["execution"].get("gpus", 0)
    row = row_of(rounds, case.cluster.num_gpus, {"lever": lever, "gpus": gpus})
    return row | {
        "peak_memory_bytes": median_of(rounds, "peak_memory_bytes"),
        "predicted_step_time_s": found.step_time_s,
        "predicted_peak_memory_bytes": tensor_bytes(found),
        "assumptions": DEFAULT_ASSUMPTIONS,
    }


def shown(rows: "DataFrame") -> Table:
    """Rows as of `table`, for people."""
    columns = (
        *("lever", "step ms", "rounds", "predicted ms", "predicted/measured"),
        *("peak GiB", "predicted GiB", "predicted/measured memory"),
    )
    lines = []
    for row in rows.to_dict("records"):
        step, guess = row["step_time_s"], row["predicted_step_time_s"]
        peak, full = row["peak_memory_bytes"], row["predicted_peak_memory_bytes"]
        spread = f"{row['step_time_low_s'] * 1e3:.0f} to {row['step_time_high_s'] * 1e3:.0f}"
        seen = bool(peak) and peak == peak  # none on CPUs
        lines.append(
            [
                *(row["lever"], f"{step * 1e3:.0f}", spread, f"{guess * 1e3:.0f}", f"{guess / step:.2f}"),
                *(f"{peak / GIB:.1f}" if seen else "", f"{full / GIB:.1f}", f"{full / peak:.2f}" if seen else ""),
            ]
        )
    first = rows.iloc[0]
    return Table(
        f"measured: {first['model']} on {first['cluster']}, {first['system']}, one lever at a time", columns, lines
    )
