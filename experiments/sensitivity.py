"""Which assumptions decide: every field of the cost model, and some settings, one at a time. Simulated.

One cell a model: 8K tokens on 16 x 8 H800, as in Figure 7. The layouts are those that the search found under the
default values; they are held, so that a bar shows what one assumption does and not what another layout does. Then
`disagmoe` over `ep`, and over the overlap system that is fastest in the cell, is computed again with each field at its
low and at its high end. A setting that no longer fits in memory is drawn as such: its step is simulated all the same.
One that the held layout cannot have (its micro-batches do not divide) is left out.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.case import Case, Layout, Workload
from bench.errors import BadInput
from bench.evaluate import CostModel
from bench.trial import Trial
from experiments import Evidence, Request, Table, fig7
from experiments._sweep import Job, sweep, sweep_jobs
from results.paper import MODELS

if TYPE_CHECKING:
    from pandas import DataFrame

SUMMARY = "which assumptions decide the speed-ups: each varied alone, one cell a model (simulated)"
SEQ_LEN = 8192
OURS, BASELINE, OVERLAP = fig7.OURS, fig7.BASELINE, fig7.OVERLAP


class Range(NamedTuple):
    """Ends of what is plausible, and why."""

    low: float
    high: float
    why: str


RANGES: dict[str, Range] = {
    "gemm": Range(0.6, 0.9, "a large GEMM that is throttled or badly shaped; the best published kernels"),
    "grouped_gemm": Range(0.4, 0.85, "few rows an expert; as good as a dense GEMM"),
    "grouped_gemm_backward": Range(0.3, 0.8, "as above; weight gradients have short rows"),
    "attention_forward": Range(0.45, 0.75, "FlashAttention-2; FlashAttention-3 (arXiv 2407.08608)"),
    "attention_backward": Range(0.35, 0.65, "the same"),
    "attention_half_span": Range(0.0, 2500.0, "no loss on short spans; twice the measured"),
    "attention_backward_factor": Range(2.0, 3.0, "no scores computed again; kernels that compute more of them again"),
    "hbm": Range(0.7, 0.95, "strided access; streaming"),
    "optimizer": Range(0.5, 0.95, "many small tensors; one fused kernel"),
    "nvlink": Range(0.6, 1.0, "small messages; the data sheet"),
    "nic_all_to_all": Range(0.5, 1.0, "NCCL's all-to-all over many nodes; the data sheet"),
    "nic_many_to_many": Range(0.5, 1.0, "incast; the data sheet"),
    "nic_collective": Range(0.5, 1.0, "small buckets; the data sheet"),
    "cross_rail": Range(0.5, 1.0, "spines for half of the traffic; full bisection bandwidth"),
    "incast": Range(0.0, 0.1, "no loss; a tenth for each doubling of the sources"),
    "transfer_s": Range(5e-6, 100e-6, "one-sided writes; a cold start with a synchronisation"),
    "kernel_s": Range(0.0, 6e-6, "CUDA graphs; launches from Python"),
    "communication_sms": Range(0, 20, "copy engines or the NIC's own DMA; kernels as DeepEP's"),
    "saturating_sms": Range(10, 40, "half and twice of DeepEP's; fused kernels alone"),
    "tensor_exposed": Range(0.3, 1.0, "exchanged in pieces beside the GEMMs; one after the other"),
    "ring_exposed": Range(0.0, 1.0, "copy engines; nothing hidden"),
    "host_link": Range(0.3, 0.9, "memory of another socket; one GPU at a time"),
    "context_bytes": Range(600 << 20, 3 << 30, "kernels loaded as they are used; more libraries than were measured"),
    "communicator_bytes": Range(0, 2**31, "one-sided writes into registered tensors; NVLink to seven peers"),
    "fragmentation": Range(0.0, 0.15, "a static plan of all tensors; the allocator without expandable segments"),
}
SETTINGS: dict[str, tuple[str, ...]] = {
    "copies": ("expert", "rank", "node"),
    "recompute": ("none", "redispatch", "full"),
    "ranks_over_nodes": ("packed", "strided"),
    "global batch": ("2097152", "8388608"),
}
QUICK_FIELDS = ("grouped_gemm", "nic_many_to_many")


class Variation(NamedTuple):
    """One field or setting at one value."""

    field: str
    value: str


def variations(model: CostModel, quick: bool = False) -> list[Variation]:
    """All that are simulated besides the default itself."""
    fields = QUICK_FIELDS if quick else tuple(RANGES)
    found = []
    for field in fields:
        whole = isinstance(getattr(model.values, field), int)
        found += [Variation(field, str(int(end) if whole else end)) for end in RANGES[field][:2]]
    if quick:
        return found
    return found + [Variation(key, word) for key, words in SETTINGS.items() for word in words]


def job_of(case: Case, model: CostModel, variation: Variation) -> Job | None:
    """The case with that changed; None where it is so already."""
    if variation.field in RANGES:
        return Job(case, CostModel.named(model.name, (*model.overrides, f"{variation.field}={variation.value}")))
    if variation.field == "global batch":
        work = {**case.workload.model_dump(), "global_batch_tokens": int(variation.value)}
        return Job(case.model_copy(update={"workload": Workload.make(**work)}), model)
    layout = Layout.from_pairs([f"{variation.field}={variation.value}"], case.layout)
    return None if layout == case.layout else Job(case.with_layout(layout), model)


def run(request: Request) -> Evidence:
    """Tunes the cells that are missing, then simulates the variations that are. Errors are failures."""
    model, store = CostModel.named(request.assumptions), request.store()
    names = MODELS[:1] if request.quick else MODELS
    specs = [fig7.spec_of(name, SEQ_LEN, system) for name in names for system in fig7.SYSTEMS]
    if request.quick:
        tuned = sweep(specs, model, store, request.progress, budget=fig7.QUICK_BUDGET)
    else:
        tuned = sweep(specs, model, store, request.progress)
    cases = held(tuned)
    jobs: dict[tuple[str, str, Variation], Job] = {}
    for (name, role), case in cases.items():
        for variation in variations(model, request.quick):
            job = job_of(case, model, variation)
            if job is not None:
                jobs[name, role, variation] = job
    trials = sweep_jobs(list(jobs.values()), store, request.progress)
    return evidence(tuned, dict(zip(jobs, trials, strict=True)), model)


def held(tuned: Sequence[Trial]) -> dict[tuple[str, str], Case]:
    """The cases that are varied, by model and role: ours, baseline, overlap (the fastest); those that fit."""
    cases = {}
    for (name, _), cell in fig7.cells_of(tuned).items():
        roles = {"ours": OURS, "baseline": BASELINE, "overlap": fig7.fastest(cell, OVERLAP)}
        for role, system in roles.items():
            case = cell[system].case if system in cell else None
            if system is not None and isinstance(case, Case) and cell[system].status == "ok":
                cases[name, role] = case
    return cases


def evidence(tuned: Sequence[Trial], varied: Mapping[tuple[str, str, Variation], Trial], model: CostModel) -> Evidence:
    """Ratios of step rates for every variation, beside those of the default."""
    import pandas as pd

    rows = []
    default = {key: _rate(trial) for key, trial in _default(tuned).items()}
    for name in dict.fromkeys(name for name, _ in default):
        for over in ("baseline", "overlap"):
            base = _ratio(default.get((name, "ours")), default.get((name, over)))
            if base is None:
                continue
            for variation in dict.fromkeys(key[2] for key in varied if key[0] == name):
                sides = {role: varied.get((name, role, variation)) for role in ("ours", over)}
                rates = {r: default[name, r] if t is None else _rate(t) for r, t in sides.items()}
                rows.append(
                    {
                        "model": name,
                        "over": over,
                        "field": variation.field,
                        "value": variation.value,
                        "default_ratio": base,
                        "ratio": _ratio(rates["ours"], rates[over]),
                        "fits": all(trial is None or trial.status == "ok" for trial in sides.values()),
                        "source": "simulated",
                        "assumptions": model.label,
                    }
                )
    columns = ["model", "over", "field", "value", "default_ratio", "ratio", "fits", "source", "assumptions"]
    data = pd.DataFrame(rows, columns=columns)
    failures = [
        f"{name} {role} {variation.field}={variation.value}: {trial.message}"
        for (name, role, variation), trial in varied.items()
        if trial.status == "error" and not trial.message.startswith(BadInput.__name__)
    ]
    names = {name: case.system for (name, role), case in held(tuned).items() if role == "overlap"}
    drawn = {"frame": data, "ours": OURS, "baseline": BASELINE, "overlap": names}
    return Evidence(drawn, data, [_table(data), _ranges(model)], failures)


def _default(tuned: Sequence[Trial]) -> dict[tuple[str, str], Trial]:
    by_case = {trial.case_id: trial for trial in tuned}
    return {key: by_case[case.id] for key, case in held(tuned).items()}


def _rate(trial: Trial) -> float | None:
    """Of a step that does not fit as well: what is compared is time."""
    return trial.metrics.get("tokens_per_s_per_gpu") if trial.status in ("ok", "infeasible") else None


def _ratio(mine: float | None, theirs: float | None) -> float | None:
    return mine / theirs if mine and theirs else None


def _table(data: "DataFrame") -> Table:
    rows = []
    for (name, over, field), some in data.groupby(["model", "over", "field"], sort=False):
        known = some["ratio"].dropna()
        if len(known):
            base = float(some["default_ratio"].iloc[0])
            spread = max(known.max(), base) - min(known.min(), base)
            turns = (min(known.min(), base) - 1) * (max(known.max(), base) - 1) < 0
            ends = (float(known.min()), float(known.max()))
            rows.append([name, over, field, base, *ends, spread, "yes" if turns else ""])
    rows.sort(key=lambda row: (row[0], row[1], -float(row[6])))
    columns = ["model", "over", "field", "default", "lowest", "highest", "spread", "changes the winner"]
    return Table(f"{OURS}: speed-up with one thing changed", columns, rows)


def _ranges(model: CostModel) -> Table:
    rows = [[field, getattr(model.values, field), low, high, why] for field, (low, high, why) in RANGES.items()]
    return Table("what is varied", ["field", model.name, "low", "high", "why these"], rows)
