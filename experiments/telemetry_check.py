"""Whether telemetry can be trusted, on one GPU: energy two ways, the sampler's cost, and a real run with its telemetry.

1. 30 s of a load that comes and goes: the energy counter against integrated power, within 5 %.
2. Training steps with the sampler on and off in turn, in one process: its cost as a ratio, under 1 %.
3. A training run, kept as a trial with its telemetry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import GPUS, get_cluster
from bench.devices import gpu_facts
from bench.errors import BadInput
from bench.models import Model
from bench.results import Store
from bench.steady import Interval, median_interval
from bench.telemetry import Session
from bench.telemetry.energy import counted, integrated, points, resolution_s
from experiments import Evidence, Request, Table

SUMMARY = "telemetry of one GPU: energy two ways, the sampler's cost, and a run (measured)"
LOAD_S, QUICK_LOAD_S = 30.0, 8.0
STEPS, QUICK_STEPS = 60, 20
LOAD_HZ, RUN_HZ = 20.0, 10.0
SAME_ENERGY, MOST_OVERHEAD = 0.05, 0.01
BLOCKS, QUICK_BLOCKS, STEPS_A_BLOCK = 24, 8, 8
COPY_BYTES = 1 << 30

MODEL = Model(
    name="telemetry-check",
    num_layers=4,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    num_experts=16,
    top_k=4,
    expert_hidden_size=1024,
    vocab_size=256,
)


@dataclass(frozen=True)
class Load:
    """The load's samples, and energies in joules over its time by each way that the device has."""

    columns: dict[str, list[float | None]]
    absent: dict[str, str]
    facts: dict[str, Any]
    start_s: float
    end_s: float
    joules: dict[str, float | None]
    counter_resolution_s: float | None
    pcie_counted_over_copied: float | None


def case_of(gpu: str, tokens: int = 1 << 15) -> Case:
    """A model that takes some tens of milliseconds a step on one large GPU."""
    workload = Workload(seq_len=2048, global_batch_tokens=tokens, dtype="bf16", routing="learned")
    spec = CaseSpec(model=MODEL, cluster=get_cluster(f"{gpu}x1gpu"), workload=workload, system="ep")
    return spec.with_layout(Layout(replicas=1, ep=1, mbs=4))


def load_gpu(seconds: float, hz: float) -> Load:
    """On a rank with a GPU: half a second of matrix products, a quarter of a second of nothing, and so on."""
    import torch

    from bench.telemetry.session import gpu_of_rank

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
    there = host.to("cuda")
    torch.cuda.synchronize()
    with Session(0, gpu_of_rank("cuda"), hz) as session:
        copied_from = time.perf_counter()
        there.copy_(host)
        torch.cuda.synchronize()
        time.sleep(0.5)
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            until = time.perf_counter() + 0.5
            while time.perf_counter() < until:
                a @ a
                torch.cuda.synchronize()
            time.sleep(0.25)
        end = time.perf_counter()
    columns = session.result.samples.columns
    counted_bytes = counted(columns, "pcie_rx_bytes", max(copied_from - 0.2, points(columns, "time_s")[0][0]), start)
    return Load(
        columns=columns,
        absent=session.result.samples.absent,
        facts=session.result.facts,
        start_s=start,
        end_s=end,
        joules={
            "energy_j": counted(columns, "energy_j", start, end),
            "power_instant_w": integrated(columns, "power_instant_w", start, end),
            "power_w": integrated(columns, "power_w", start, end),
        },
        counter_resolution_s=resolution_s(columns, "energy_j"),
        pcie_counted_over_copied=None if counted_bytes is None else counted_bytes / COPY_BYTES,
    )


def step_ratios(case: Case, hz: float, blocks: int, steps: int) -> list[float]:
    """On a rank: time of steps with the sampler over time without, for pairs of neighbouring blocks of `steps` steps.

    The order within a pair changes from pair to pair, so that drift does not look like a cost.
    """
    import contextlib

    from bench.execute.job import Job
    from bench.execute.rank import rank_device
    from bench.execute.sync import OptimizerSettings
    from bench.execute.trainer import RankTrainer
    from bench.telemetry.session import gpu_of_rank

    trainer, number = RankTrainer(Job.of(case), OptimizerSettings()), 0

    def block(sampled: bool) -> float:
        nonlocal number
        context = Session(0, gpu_of_rank(rank_device().type), hz) if sampled else contextlib.nullcontext()
        with context:
            start = time.perf_counter()
            for _ in range(steps):
                trainer.step(number)
                trainer.gradients.norm.item()  # waits for the device
                number += 1
            return time.perf_counter() - start

    block(False), block(True)  # warm-up
    ratios = []
    for pair in range(blocks // 2):
        order = (True, False) if pair % 2 else (False, True)
        times = {sampled: block(sampled) for sampled in order}
        ratios.append(times[True] / times[False])
    return ratios


def run(request: Request) -> Evidence:
    """Raises BadInput where there is no GPU that NVML reads."""
    from bench.execute.pool import RankPool
    from bench.measured import measure

    gpu = _known_gpu()
    case, quick = case_of(gpu), request.quick
    with RankPool(1, "cuda") as pool:
        request.progress(0, 3, "energy two ways")
        (load,) = pool.run(load_gpu, QUICK_LOAD_S if quick else LOAD_S, LOAD_HZ)
        request.progress(1, 3, "the sampler's cost")
        (ratios,) = pool.run(step_ratios, case, RUN_HZ, QUICK_BLOCKS if quick else BLOCKS, STEPS_A_BLOCK)
        request.progress(2, 3, "a run")
        trial = measure(
            case, steps=QUICK_STEPS if quick else STEPS, device="cuda", pool=pool, telemetry_hz=RUN_HZ
        ).trial
    Store(request.results).write(trial)
    cost = median_interval(ratios)
    failures = _energy_failures(load) + _cost_failures(cost)
    if trial.status != "ok":
        failures.append(f"the run: {trial.status}: {trial.message}")
    drawn = {"load": load_frame(load), "joules": load.joules, "trial": trial}
    return Evidence(drawn, load_frame(load), _tables(load, cost, trial), failures)


def _known_gpu() -> str:
    facts = gpu_facts()
    names = facts.get("gpus", [])
    if not names:
        raise BadInput("device", facts.get("absent", "no GPU"), "a GPU that NVML reads")
    known = next((gpu for gpu in GPUS if gpu in names[0].lower().split()), None)
    if known is None:
        raise BadInput("device", names[0], f"a GPU that is known: {', '.join(GPUS)}")
    return known


def load_frame(load: Load) -> Any:
    """The load's samples as a table, seconds from its start."""
    import pandas as pd

    names = ("time_s", "power_w", "power_instant_w", "energy_j", "sm_clock_mhz", "temperature_c", "gpu_utilisation")
    frame = pd.DataFrame({name: load.columns[name] for name in names if name in load.columns}, dtype=float)
    return frame.assign(time_s=frame["time_s"] - load.start_s)


def _energy_failures(load: Load) -> list[str]:
    counter = load.joules["energy_j"]
    if counter is None:
        return [f"the energy counter was not read: {load.absent.get('energy_j')}"]
    found = []
    for field in ("power_instant_w", "power_w"):
        joules = load.joules[field]
        # The average over a second lags behind; where there is nothing better it has to do.
        if joules is not None:
            if abs(joules / counter - 1) > SAME_ENERGY:
                ratio = f"{joules / counter:.3f} of the counter's {counter:.0f} J"
                found.append(f"integrated {field} is {ratio}, allowed within {SAME_ENERGY:.0%}")
            return found
    return ["no power was read"]


def _cost_failures(cost: Interval) -> list[str]:
    if cost.median - 1 <= MOST_OVERHEAD:
        return []
    span = f"{cost.low:.4f} to {cost.high:.4f}"
    return [f"steps with the sampler take {cost.median:.4f} of those without ({span}), allowed {1 + MOST_OVERHEAD}"]


def _tables(load: Load, cost: Interval, trial: Any) -> list[Table]:
    counter = load.joules["energy_j"]
    energies: list[list[object]] = [
        [field, joules, None if joules is None or not counter else joules / counter, load.absent.get(field, "")]
        for field, joules in load.joules.items()
    ]
    cells: list[list[object]] = [
        ["step time with the sampler / without, median", cost.median],
        ["  interval, low", cost.low],
        ["  interval, high", cost.high],
        ["energy counter changes every (s)", load.counter_resolution_s],
        ["PCIe bytes counted / copied", load.pcie_counted_over_copied],
    ]
    telemetry = trial.telemetry
    facts: list[list[object]] = [
        ["trial", trial.name],
        ["verdict", telemetry.get("verdict")],
        ["step time, median (s)", trial.metrics.get("step_time_s")],
        ["tokens/s", trial.metrics.get("tokens_per_s")],
        ["J per token", trial.metrics.get("joules_per_token")],
        ["counter energy (J)", telemetry.get("counter_energy_j")],
        ["integrated power (J)", telemetry.get("power_energy_j")],
        ["mean power (W)", telemetry.get("mean_power_w_per_gpu")],
        ["sampler, share of processor time", telemetry.get("sampler", {}).get("cpu_fraction")],
        ["sampler, share of time spent reading", telemetry.get("sampler", {}).get("read_fraction")],
        *([f"absent: {name}", reason] for name, reason in telemetry.get("absent", {}).items()),
    ]
    return [
        Table("measured: energy of the load", ["by", "J", "over the counter's", "absent because"], energies),
        Table("measured: the sampler", ["", "value"], cells),
        Table("measured: the run", ["", "value"], facts),
    ]
