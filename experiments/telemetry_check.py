"""Whether telemetry can be trusted, on one GPU: energy two ways, the sampler's cost, and a real run with its telemetry.

1. 30 s of a load that comes and goes: the energy counter against integrated power, within 5 %.
2. Training steps with the sampler on and off in turn, in one process: its cost as a ratio, under 1 %.
3. A training run, kept as a trial with its telemetry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.models import Model
from bench.results import Store
from bench.steady import Interval, median_interval
from bench.telemetry import Session
from bench.telemetry.energy import counted, integrated, points, resolution_s
from experiments import Evidence, Request, Table
from experiments._rounds import known_gpu

SUMMARY = "telemetry of one GPU: energy two ways, the sampler's cost, and a run (measured)"
LOAD_S, QUICK_LOAD_S = 30.0, 8.0
COST_S, QUICK_COST_S = 36.0, 8.0
STEPS, QUICK_STEPS = 32, 8
LOAD_HZ, RUN_HZ = 20.0, 10.0
SAME_ENERGY, MOST_OVERHEAD = 0.05, 0.01
BLOCK_S = 0.4
MIN_QUADS = 3
COPY_BYTES = 1 << 30
RUN_TOKENS, COST_TOKENS = 1 << 17, 1 << 13

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


class Ratios(NamedTuple):
    """Step times against each other, one value for each four neighbouring blocks of `steps` steps.

    cost: with the sampler over without. noise: of the two blocks without it, the later over the earlier.
    """

    cost: list[float]
    noise: list[float]
    steps: int


def case_of(gpu: str, tokens: int, routing: str) -> Case:
    """A model that takes some tens of milliseconds for 8192 tokens on one large GPU."""
    workload = Workload(seq_len=2048, global_batch_tokens=tokens, dtype="bf16", routing=routing)
    spec = CaseSpec(model=MODEL, cluster=get_cluster(f"{gpu}x1gpu"), workload=workload, system="ep")
    return spec.with_layout(Layout(replicas=1, ep=1, mbs=4))


def load_gpu(seconds: float, hz: float) -> Load:
    """On a rank with a GPU: half a second of matrix products, a quarter of a second of nothing, and so on."""
    import torch

    from bench.telemetry.session import gpu_of_rank

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
    there = host.to("cuda")
    a @ a  # the first product loads libraries, which takes seconds
    torch.cuda.synchronize()
    with Session(0, gpu_of_rank("cuda"), hz, max_share=None) as session:
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


def step_ratios(case: Case, hz: float, seconds: float, block_s: float = BLOCK_S) -> Ratios:
    """On a rank: short blocks of steps with the sampler (A) and without (B), as A B B A and B A A B in turn.

    In the sums of such four, a drift that is even over them takes no side. The first step of a block is not timed: a
    sample may still be under way in it.
    """
    from contextlib import nullcontext

    from bench.execute.job import Job
    from bench.execute.rank import rank_device
    from bench.execute.sync import OptimizerSettings
    from bench.execute.trainer import RankTrainer
    from bench.telemetry.session import gpu_of_rank

    trainer, number = RankTrainer(Job.of(case), OptimizerSettings()), 0

    def take(steps: int) -> float:
        nonlocal number
        start = time.perf_counter()
        for _ in range(steps):
            trainer.step(number)
            trainer.gradients.norm.item()  # waits for the device
            number += 1
        return time.perf_counter() - start

    with Session(0, gpu_of_rank(rank_device().type), hz) as session:
        take(5)
        steps = max(3, round(5 * block_s / take(5)))

        def block(sampled: bool) -> float:
            with nullcontext() if sampled else session.paused():
                take(1)
                return take(steps)

        block(False), block(True)
        cost: list[float] = []
        noise: list[float] = []
        begun = time.perf_counter()
        while len(cost) < MIN_QUADS or time.perf_counter() - begun < seconds:
            outer = len(cost) % 2 == 0
            times = [(sampled, block(sampled)) for sampled in (outer, not outer, not outer, outer)]
            on, off = ([took for sampled, took in times if sampled is wanted] for wanted in (True, False))
            cost.append(sum(on) / sum(off))
            noise.append(off[1] / off[0])
    return Ratios(cost, noise, steps)


def run(request: Request) -> Evidence:
    """Raises BadInput where there is no GPU that NVML reads."""
    from bench.execute.pool import RankPool
    from bench.measured import measure

    gpu, quick = known_gpu(), request.quick
    with RankPool(1, "cuda") as pool:
        request.progress(0, 3, "energy two ways")
        (load,) = pool.run(load_gpu, QUICK_LOAD_S if quick else LOAD_S, LOAD_HZ)
        request.progress(1, 3, "the sampler's cost")
        even = case_of(gpu, COST_TOKENS, "balanced")
        (ratios,) = pool.run(step_ratios, even, RUN_HZ, QUICK_COST_S if quick else COST_S)
        request.progress(2, 3, "a run")
        case, steps = case_of(gpu, RUN_TOKENS, "learned"), QUICK_STEPS if quick else STEPS
        trial = measure(case, steps=steps, device="cuda", pool=pool, telemetry_hz=RUN_HZ).trial
    Store(request.results).write(trial)
    failures = _energy_failures(load) + _cost_failures(median_interval(ratios.cost))
    if trial.status != "ok":
        failures.append(f"the run: {trial.status}: {trial.message}")
    drawn = {"load": load_frame(load), "joules": load.joules, "trial": trial}
    return Evidence(drawn, load_frame(load), _tables(load, ratios, trial), failures)


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
    most = 1 + MOST_OVERHEAD
    if cost.high <= most:
        return []
    span = f"{cost.median:.4f} of those without ({cost.low:.4f} to {cost.high:.4f}), allowed {most}"
    if cost.low > most:
        return [f"steps with the sampler take {span}"]
    return [f"too few or too uneven steps to tell the sampler's cost: {span}"]


def _tables(load: Load, ratios: Ratios, trial: Any) -> list[Table]:
    counter = load.joules["energy_j"]
    energies: list[list[object]] = [
        [field, joules, None if joules is None or not counter else joules / counter, load.absent.get(field, "")]
        for field, joules in load.joules.items()
    ]
    cells: list[list[object]] = []
    for words, values in (("with the sampler / without", ratios.cost), ("without, later / earlier", ratios.noise)):
        found = median_interval(values)
        cells += [
            [f"step time {words}, median of {len(values)}", found.median],
            ["  95 % interval, low", found.low],
            ["  95 % interval, high", found.high],
        ]
    cells += [
        ["steps a block", ratios.steps],
        ["energy counter changes every (s)", load.counter_resolution_s],
        ["PCIe bytes counted / copied", load.pcie_counted_over_copied],
    ]
    telemetry = trial.telemetry
    sampler = telemetry.get("sampler", {})
    facts: list[list[object]] = [
        ["trial", trial.name],
        ["verdict", telemetry.get("verdict")],
        ["step time, median (s)", trial.metrics.get("step_time_s")],
        ["tokens/s", trial.metrics.get("tokens_per_s")],
        ["J per token", trial.metrics.get("joules_per_token")],
        ["counter energy (J)", telemetry.get("counter_energy_j")],
        ["integrated power (J)", telemetry.get("power_energy_j")],
        ["mean power (W)", telemetry.get("mean_power_w_per_gpu")],
        ["sampler, share of processor time", sampler.get("cpu_fraction")],
        ["sampler, share of time spent reading", sampler.get("read_fraction")],
        *([f"absent: {name}", reason] for name, reason in telemetry.get("absent", {}).items()),
    ]
    readings: list[list[object]] = [
        [name, one["every"], one["cpu_s"] * 1e3] for name, one in sampler.get("readings", {}).items()
    ]
    return [
        Table("measured: energy of the load", ["by", "J", "over the counter's", "absent because"], energies),
        Table("measured: the sampler", ["", "value"], cells),
        Table("measured: the run", ["", "value"], facts),
        Table("measured: readings in the run", ["first field", "every ... samples", "processor ms each"], readings),
    ]
