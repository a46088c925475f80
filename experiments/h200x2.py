"""Systems side by side on two H200 of one host: real shapes with as many layers as fit, measured.

Every system has the same model, global batch and experts' choices (balanced), and both GPUs. A round runs all of them
one after the other, each for a few steps from fresh weights, and the rounds follow one another, so that what drifts
(temperature, clocks) meets all alike. Of each round the steps after the first count. The network is dialled by what
carries the same messages: NCCL with the usual thread blocks, NCCL capped at two of them, copy engines. Within a round
NCCL goes first, and a transport that hung once is left alone. A trial is written when its
run ends. Beside every measured step stands the one simulated with `h200-measured` costs, as it comes out.

With `--device cpu` the same path runs with a tiny model on two processes: to see that it works, and no result. Where
there are not two GPUs, the published trials are drawn again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.assumptions import DEFAULT_ASSUMPTIONS, get_assumptions
from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import Cluster, get_cluster
from bench.errors import BadInput
from bench.hiding import hidden_share, work
from bench.limits import least_bytes
from bench.lower import lower
from bench.models import Model, get_model
from bench.predict import GIB, costs_of, predict
from bench.results import PUBLISHED, Store
from bench.serial import serialised
from bench.system import get_system, plan_of
from bench.transports import NCCL_BLOCKS
from bench.trial import Trial
from experiments import Evidence, Request
from experiments._beside import tables
from experiments._rounds import median_of, num_gpus, pair_of_processes, published_in, row_of, tensor_bytes

if TYPE_CHECKING:
    from pandas import DataFrame

SUMMARY = "systems side by side on two H200: real shapes, three transports, predictions beside (measured)"
DEVICES = ("cuda", "cpu")
NUM_RANKS = 2
# Of a GPU's memory, what the lower bound of the memory model may take: activations of more micro-batches, buffers of
# transports and fragments come on top.
ROOM = 0.85
MODELS = ("qwen3-30b", "gpt-oss-120b", "deepseek-moe-16b")
MOST_LAYERS = 8  # a step of about a second: enough of them in the time there is
GIVE_UP_S = 60  # without a sign of life from a rank
# What the executor has no code for, taken away: shapes and sizes stay.
PLAIN: dict[str, dict[str, Any]] = {
    "gpt-oss-120b": {
        "window_pattern": (),
        "attention_bias": False,
        "attention_sinks": False,
        "router_linear_bias": False,
        "activation": "swiglu",
        "expert_bias": False,
    },
}
NOT_AT_THIS_SCALE = (
    "disagmoe with p = 2 across GPUs (four GPUs); M != N (three); dualpipe-v on a model of fewer than four layers"
)


class Entry(NamedTuple):
    """One bar of a panel."""

    system: str
    layout: Layout
    transport: str
    serial: bool = False

    @property
    def label(self) -> str:
        return f"{self.system}, {self.transport}" + (", serial" if self.serial else "")


@dataclass(frozen=True)
class Setting:
    """What is run and where."""

    device: str
    models: tuple[Model, ...]
    cluster: Cluster
    workload: Workload
    entries: tuple[Entry, ...]
    rounds: int
    steps: int


EP, OVERLAP, TUTEL = Layout(ep=2, mbs=2), Layout(ep=2, mbs=2), Layout(ep=2, mbs=2, chunks=2)
V, DISAGMOE = Layout(pp=2, vpp=2, mbs=2), Layout(attention_ranks=1, expert_ranks=1, mbs=2, round_length=2, deferred_w=2)
SYSTEMS = (
    ("ep", EP),
    ("megatron-overlap", OVERLAP),
    ("tutel", TUTEL),
    ("dualpipe-v", V),
    ("disagmoe", DISAGMOE),
)
ON_EVERY_TRANSPORT = ("ep", "megatron-overlap", "disagmoe")
# In the order of rows and bars; the first of a device is every system's.
DIAL = {"cuda": ("nccl", "nccl:2", "copy"), "cpu": ("gloo", "host")}
TRANSPORTS = (*DIAL["cuda"], *DIAL["cpu"])


def entries(device: str) -> tuple[Entry, ...]:
    """Every system over the device's first transport, some over the others as well."""
    first, *others = DIAL[device]
    found = [Entry(name, layout, first) for name, layout in SYSTEMS]
    found += [Entry(name, layout, each) for each in others for name, layout in SYSTEMS if name in ON_EVERY_TRANSPORT]
    # What the overlap is measured by.
    found += [Entry("disagmoe", DISAGMOE, transport, serial=True) for transport in DIAL[device]]
    return tuple(sorted(found, key=lambda entry: DIAL[device].index(entry.transport)))


def setting(device: str, quick: bool) -> Setting:
    """Two H200, or two processes of this machine."""
    if device == "cpu":
        work = Workload(seq_len=64, global_batch_tokens=64 * 16, dtype="fp32", routing="balanced")
        models = (get_model("tiny"), get_model("tiny-shared"))[: 1 if quick else 2]
        return Setting(device, models, pair_of_processes(), work, entries(device), 1 if quick else 2, 3)
    cluster = get_cluster("h200x2gpu")
    work = Workload(seq_len=4096, global_batch_tokens=4096 * 16, dtype="bf16", routing="balanced")
    chosen = entries(device)
    models = tuple(shape(name, cluster, work, chosen) for name in MODELS[: 1 if quick else None])
    return Setting(device, models, cluster, work, chosen, rounds=1 if quick else 2, steps=4)


def shape(name: str, cluster: Cluster, work: Workload, chosen: Sequence[Entry]) -> Model:
    """A model's shape with as many layers, up to `MOST_LAYERS`, as all systems that can be planned have room for."""
    room = ROOM * cluster.gpu.memory_bytes
    for layers in range(MOST_LAYERS, 0, -1):
        model = get_model(name).model_copy(
            update={"name": f"{name}-{layers}-layers", "num_layers": layers, **PLAIN.get(name, {})}
        )
        if all(_least_bytes(model, cluster, work, entry) <= room for entry in chosen):
            return model
    raise BadInput("model", name, f"one of which a layer fits in {room / GIB:.0f} GiB")


def _least_bytes(model: Model, cluster: Cluster, work: Workload, entry: Entry) -> float:
    case = case_of(model, cluster, work, entry)
    try:
        placement = get_system(entry.system).placement(case)
    except BadInput:  # not with so few layers
        return 0.0
    return least_bytes(case, placement, costs_of(case, placement, get_assumptions()))


def case_of(model: Model, cluster: Cluster, work: Workload, entry: Entry) -> Case:
    return CaseSpec(model=model, cluster=cluster, workload=work, system=entry.system).with_layout(entry.layout)


def run(request: Request) -> Evidence:
    """Measures; or draws the published trials where no device was asked for and there are no two GPUs."""
    device = request.device or ("cuda" if num_gpus() >= NUM_RANKS else None)
    if device is None:
        published = published_in(PUBLISHED / "h200x2")
        if not published:
            raise BadInput("device", "no two GPUs", "cpu (--device cpu), or a host with two GPUs")
        return evidence(published, "")
    chosen = setting(device, request.quick)
    trials, absent = measured(chosen, request)
    return evidence(trials, absent)


def measured(chosen: Setting, request: Request) -> tuple[list[Trial], str]:
    """The trials of all rounds, and what cannot be planned at this scale, in words."""
    from bench.execute.pool import RankPool
    from bench.measured import measure

    cells, refused = [], []
    for model in chosen.models:
        for entry in chosen.entries:
            case = case_of(model, chosen.cluster, chosen.workload, entry)
            try:
                get_system(entry.system).plan(case)
            except BadInput as error:
                refused.append(f"{entry.label} for {model.name}: {error}")
                continue
            cells.append((entry, case))
    order = [entry.transport for entry in chosen.entries]
    cells.sort(key=lambda cell: order.index(cell[0].transport))
    store, trials, hung = Store(request.results), [], set()
    with RankPool(NUM_RANKS, chosen.device, timeout_s=GIVE_UP_S) as pool:  # type: ignore[arg-type]
        for number in range(chosen.rounds):
            for place, (entry, case) in enumerate(cells):
                what = f"round {number + 1}, {case.model.name}, {entry.label}"
                if entry.transport in hung:
                    refused.append(f"{what}: {entry.transport} hung before")
                    continue
                request.progress(number * len(cells) + place, chosen.rounds * len(cells), what)
                done = measure(
                    case,
                    steps=chosen.steps,
                    device=chosen.device,  # type: ignore[arg-type]
                    transport=entry.transport,
                    data="synthetic",
                    weights="device",
                    serial=entry.serial,
                    pool=pool,
                )
                store.write(done.trial)
                trials.append(done.trial)
                if done.trial.status == "hang":
                    hung.add(entry.transport)
    return trials, "; ".join(refused)


def evidence(trials: Sequence[Trial], absent: str) -> Evidence:
    """What the trials of all rounds say, with predictions beside.

    A cell without a run that ended well is a failure; where others of a cell did, one that did not is in the caption.
    """
    rows = table(trials)
    seen = {_cell(trial) for trial in trials if trial.status == "ok"}
    others = [trial for trial in trials if trial.status != "ok"]
    failures = [f"{_label(one)} for {one.case.model.name}: {one.message}" for one in others if _cell(one) not in seen]
    lost = [f"{_label(one)} for {one.case.model.name} ({one.status})" for one in others if _cell(one) in seen]
    note = f"Not at this scale: {NOT_AT_THIS_SCALE}." + (f" Refused: {absent}." if absent else "")
    if lost:
        note += f" Of {len(trials)} runs, did not end well and left out: {', '.join(lost)}."
    return Evidence({"frame": rows, "note": note}, rows, tables(rows), failures)


def _cell(trial: Trial) -> tuple[str, str]:
    return trial.case.model.name, _label(trial)


def table(trials: Iterable[Trial]) -> "DataFrame":
    """One row a model, system and transport: medians over the steps of all rounds, and what is predicted.

    Rows stand in the order of `MODELS`, `SYSTEMS` and `TRANSPORTS`, in whatever order the trials come.
    """
    import pandas as pd

    cells: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.status == "ok":
            cells.setdefault(_cell(trial), []).append(trial)
    rows = sorted((_row(rounds) for rounds in cells.values()), key=_place)
    return pd.DataFrame([row | _hidden(row, rows) for row in rows])


def _place(row: dict[str, Any]) -> tuple[int, str, int, int, bool]:
    model = row["model"]
    number = next((i for i, name in enumerate(MODELS) if model.startswith(name)), len(MODELS))
    systems = [name for name, _ in SYSTEMS]
    return number, model, systems.index(row["system"]), TRANSPORTS.index(row["transport"]), row["serial"]


def _transport(execution: dict[str, Any]) -> str:
    """What carried a trial's payload, as it is asked for: with NCCL's thread blocks where these are not the usual."""
    name, blocks = str(execution["transport"]), execution.get("nccl_blocks", NCCL_BLOCKS)
    return name if blocks == NCCL_BLOCKS else f"{name}:{blocks}"


def _label(trial: Trial) -> str:
    how = trial.provenance["execution"]
    return f"{trial.case.system}, {_transport(how)}" + (", serial" if how["serial"] else "")


def _hidden(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Shares of the transfers that a row hides, where it ran without overlap as well."""
    alike = ("model", "system", "transport", "layout")
    serial = [one for one in rows if one["serial"] and all(one[name] == row[name] for name in alike)]
    if not serial or row["serial"]:
        return {"hidden_share": None, "predicted_hidden_share": None}
    there = serial[0]
    return {
        "hidden_share": hidden_share(there["step_time_s"], row["step_time_s"], there["send_s"]),
        "predicted_hidden_share": hidden_share(
            there["predicted_step_time_s"], row["predicted_step_time_s"], there["predicted_send_s"]
        ),
    }


def _row(rounds: Sequence[Trial]) -> dict[str, Any]:
    from bench.simulate import simulate

    first = rounds[0]
    case = first.case
    assert isinstance(case, Case)
    how = first.provenance["execution"]
    found = predict(case, get_assumptions(DEFAULT_ASSUMPTIONS))
    timeline = found.timeline
    if how["serial"]:
        timeline = simulate(lower(serialised(plan_of(case), case.model), case.model), found.costs)
    simulated = work(timeline)
    row = row_of(rounds, case.cluster.num_gpus, {"transport": _transport(how), "serial": how["serial"]})
    for name in ("fraction_of_bound", "overlapped_fraction", "send_s", "peak_memory_bytes"):
        row[name] = median_of(rounds, name)
    peak, tensors = row["peak_memory_bytes"], tensor_bytes(found)
    return row | {
        "predicted_step_time_s": simulated.step_s,
        "predicted_over_measured": simulated.step_s / row["step_time_s"],
        "predicted_send_s": simulated.send_s,
        "predicted_fraction_of_bound": simulated.fraction_of_bound,
        "predicted_peak_memory_bytes": tensors,
        "predicted_over_measured_memory": tensors / peak if peak else None,
        "assumptions": DEFAULT_ASSUMPTIONS,
    }
