"""`ep` from our plan beside megatron-core itself: the same model, layout, batch, experts' choices, kernels and GPUs.

A round runs both one after the other, each in fresh processes, and rounds follow one another, so that what drifts meets
both. Attention, linears, grouped products, SwiGLU and cross-entropy are the same functions on either side; schedule,
dispatcher, gradient buffers and optimizer of megatron-core are its own. With one GPU nothing crosses a link; with two
and more, experts are spread over as many as are a power of two.

With `--device cpu` the same path runs with a tiny model on two processes: to see that it works, and no result. Where
there is no GPU, the published trials are drawn again.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.models import get_model
from bench.predict import GIB
from bench.results import PUBLISHED, Store
from bench.trial import Trial
from experiments import Evidence, Request, Table
from experiments._rounds import interleaved, measured_or_published, median_of, num_gpus, pair_of_processes, row_of

if TYPE_CHECKING:
    from pandas import DataFrame

SUMMARY = "step time of `ep` from our plan over that of megatron-core itself, on the GPUs of one host (measured)"
DEVICES = ("cuda", "cpu")
SYSTEMS = {"ep": "plan", "megatron": "native"}
MOST = 1.05  # what `ep` may take of megatron-core's step
LAYERS, SEQUENCES, SEQ_LEN, STEPS, ROUNDS = 4, 16, 4096, 10, 3
FOLDER = PUBLISHED / "megatron-ratio"


def cases(device: Literal["cpu", "cuda"], gpus: int) -> list[Case]:
    """One a system. megatron-core's router has no load-balancing loss where the workload forces experts."""
    if device == "cpu":
        model, cluster, ranks = get_model("tiny"), pair_of_processes(), 2
        work = Workload(seq_len=64, global_batch_tokens=64 * 8, dtype="fp32", routing="balanced")
    else:
        ranks = 1 << (gpus.bit_length() - 1)
        name = f"qwen3-30b-{LAYERS}-layers"
        model = get_model("qwen3-30b").model_copy(update={"name": name, "num_layers": LAYERS})
        cluster = get_cluster(f"h200x{ranks}gpu")
        work = Workload(
            seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * SEQUENCES * ranks, dtype="bf16", routing="balanced"
        )
    model = model.model_copy(update={"aux_loss_coeff": 0.0})
    layout = Layout(ep=ranks, mbs=2, copies="expert")
    return [
        CaseSpec(model=model, cluster=cluster, workload=work, system=system).with_layout(layout) for system in SYSTEMS
    ]


def run(request: Request) -> Evidence:
    """Measures; or draws the published trials where no device was asked for and there is no GPU."""
    return evidence(measured_or_published(request, FOLDER, lambda device: _measured(request, device, num_gpus())))


def _measured(request: Request, device: Literal["cpu", "cuda"], gpus: int) -> Iterable[Trial]:
    from bench.measured import measure

    store, chosen = Store(request.results), cases(device, gpus)
    rounds, steps = (1, 3) if request.quick else (ROUNDS, STEPS)
    for place in interleaved(request, [case.system for case in chosen], rounds):
        case = chosen[place]
        trial = measure(
            case,
            steps=steps,
            device=device,
            data="synthetic",
            weights="device",
            trainer=SYSTEMS[case.system],
        ).trial
        store.write(trial)
        yield trial


def evidence(trials: Iterable[Trial]) -> Evidence:
    """What the trials of all rounds say; a run that did not end well is a failure."""
    trials = list(trials)
    rows = table(trials)
    failures = [f"{one.case.system}: {one.status}: {one.message}" for one in trials if one.status != "ok"]
    on_gpus = any((one.provenance["execution"].get("gpus") or 0) > 0 for one in trials)
    ratio = rows.loc[rows["system"] == "ep", "over_megatron"].max() if len(rows) else float("nan")
    if on_gpus and not ratio <= MOST:
        failures.append(f"ep takes {ratio:.2f} of megatron-core's step, aim {MOST}")
    return Evidence({"frame": rows}, rows, [shown(rows)] if len(rows) else [], failures)


def table(trials: Iterable[Trial]) -> "DataFrame":
    """One row a system: medians over the steady steps of all rounds, and its step over megatron-core's."""
    import pandas as pd

    by_system: dict[str, list[Trial]] = {name: [] for name in SYSTEMS}
    for trial in trials:
        if trial.status == "ok":
            by_system[trial.case.system].append(trial)
    rows = [_row(rounds) for rounds in by_system.values() if rounds]
    step_s = {row["system"]: row["step_time_s"] for row in rows}
    for row in rows:
        row["over_megatron"] = row["step_time_s"] / step_s["megatron"] if "megatron" in step_s else None
    return pd.DataFrame(rows)


def _row(rounds: list[Trial]) -> dict[str, Any]:
    how = rounds[0].provenance["execution"]
    row = row_of(rounds, how["ranks"], {"trainer": how["trainer"]}, {"gpus": how.get("gpus", 0)})
    return row | {"peak_memory_bytes": median_of(rounds, "peak_memory_bytes")}


def shown(rows: "DataFrame") -> Table:
    """Rows as of `table`, for people."""
    columns = ("model", "system", "trainer", "GPUs", "layout", "step ms", "rounds", "tokens/s/GPU", "MFU", "peak GiB")
    lines = []
    for row in rows.to_dict("records"):
        spread = f"{row['step_time_low_s'] * 1e3:.1f} to {row['step_time_high_s'] * 1e3:.1f}"
        peak = row["peak_memory_bytes"]
        lines.append(
            [
                *(row[name] for name in ("model", "system", "trainer", "gpus", "layout")),
                f"{row['step_time_s'] * 1e3:.1f}",
                spread,
                f"{row['tokens_per_s_per_gpu']:,.0f}",
                f"{row['mfu']:.1%}",
                "" if peak is None or peak != peak else f"{peak / GIB:.1f}",
                "" if row["over_megatron"] is None else f"{row['over_megatron']:.3f}",
            ]
        )
    return Table("measured, medians over the steps of all rounds", (*columns, "over megatron's step"), lines)
