"""How many operations on ranks the simulator plays per second: ``pytest bench/micro --benchmark-enable -s``."""

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.assumptions import get_assumptions
from bench.case import CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.cost import Costs
from bench.lower import lower
from bench.models import get_model
from bench.program import Program
from bench.simulate import peak_bytes, simulate
from bench.simulate.loops import always_compile
from bench.system import plan_of

SEQ_LEN = 4096
# Ranks over which a micro-batch is dealt, micro-batches, layout.
LAYOUTS = {
    "ep": Layout(replicas=1, ep=16, pp=8, vpp=2),
    "disagmoe": Layout(replicas=1, attention_ranks=16, expert_ranks=16, groups=4, round_length=16),
}


def lowered(
    system: str, routing: str, microbatches: int, num_layers: int = 94, layout: Layout | None = None
) -> tuple[Program, Costs]:
    """Qwen3-235B, or its first layers, on 128 H800."""
    workload = Workload(seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * 16 * microbatches, routing=routing)
    model = get_model("qwen3-235b").model_copy(update={"num_layers": num_layers})
    spec = CaseSpec(model=model, cluster=get_cluster("h800x16"), workload=workload, system=system)
    case = spec.with_layout(layout or LAYOUTS[system])
    program = lower(plan_of(case), case.model)
    return program, Costs(case, program.plan.placement, assumptions=get_assumptions("h200-measured"))


@pytest.mark.parametrize("system", sorted(LAYOUTS))
@pytest.mark.parametrize(("routing", "microbatches"), [("balanced", 64), ("zipf:1", 64), ("zipf:1", 256)])
def test_rank_operations_per_second(benchmark: BenchmarkFixture, system: str, routing: str, microbatches: int) -> None:
    program, costs = lowered(system, routing, microbatches)
    timeline = simulate(program, costs)
    peak_bytes(program, costs, timeline)
    benchmark.pedantic(simulate, args=(program, costs), rounds=3)
    if benchmark.stats is not None:
        rate = len(timeline) / benchmark.stats.stats.min
        benchmark.extra_info["rank_operations_per_s"] = rate
        print(f"\n{system} {routing}: {len(timeline)} operations on ranks, {rate / 1e6:.2f} M/s")


@pytest.mark.parametrize("system", sorted(LAYOUTS))
def test_rate_at_a_million_over_that_at_ten_thousand(benchmark: BenchmarkFixture, system: str) -> None:
    """Ranks all differ and share their ports: from a program and its costs to the timeline, warm."""
    small, large = (1, 48 if system == "ep" else 36), (50 if system == "ep" else 36, 94)
    layout = Layout(replicas=1, ep=16) if system == "ep" else LAYOUTS[system]
    rates = []
    always_compile()  # also what would be too little to do
    for microbatches, num_layers in (small, large) if benchmark.enabled else (small,):
        program, costs = lowered(system, "zipf:1", microbatches, num_layers, layout)
        num_operations = len(simulate(program, costs))
        seconds = min(_processor_s(program, costs) for _ in range(7 if (microbatches, num_layers) == small else 3))
        rates.append((num_operations, num_operations / seconds))
    benchmark.pedantic(simulate, args=(program, costs), rounds=1)
    if benchmark.enabled:
        ratio = rates[1][1] / rates[0][1]
        benchmark.extra_info.update(at_10_k=rates[0][1], at_1_m=rates[1][1], ratio=ratio)
        shown = ", ".join(f"{rate / 1e6:.2f} M/s at {number:,} operations" for number, rate in rates)
        print(f"\n{system}: {shown}; ratio {ratio:.2f}")


def _processor_s(program: Program, costs: Costs) -> float:
    begun = time.process_time()
    simulate(program, costs)
    return time.process_time() - begun


FIRST_STEP = """
import sys
import time
from bench.micro.test_simulate_speed import Layout, always_compile, lowered, simulate
program, costs = lowered("ep", "zipf:1", 1, 24, Layout(replicas=1, ep=16))
if sys.argv[1] == "compiled":
    always_compile()
begun = time.perf_counter()
simulate(program, costs)
print(time.perf_counter() - begun)
"""


def test_compile_time_is_paid_once(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Seconds of a first small step: compiled, compiled before and kept, and interpreted as small steps are."""
    if benchmark.disabled:
        pytest.skip("compiles for seconds")
    given = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def first_step(how: str = "compiled") -> float:
        words = [sys.executable, "-c", FIRST_STEP, how]
        done = subprocess.run(words, env=given, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1])

    compiled = first_step()
    kept = benchmark.pedantic(first_step, rounds=1)
    interpreted = first_step("interpreted")
    benchmark.extra_info.update(compiled_s=compiled, kept_s=kept, interpreted_s=interpreted)
    print(
        f"\nfirst step: {compiled:.1f} s with compilation, {kept:.2f} s from the cache, ratio {kept / compiled:.3f}; "
        f"{interpreted:.2f} s interpreted"
    )


# Name, cluster, micro-batches' sequences in the global batch, routing, layout; every one with 64 micro-batches.
COMMANDS = {
    "128 GPUs, every rank": ("h800x16", 16 * 64, "zipf:1", "ep=16 pp=8 recompute=full"),
    "128 GPUs, folded": ("h800x16", 16 * 64, "balanced", "ep=16 pp=8 recompute=full"),
    "2,048 GPUs, every rank of one replica": ("h800x256", 128 * 64, "zipf:0.2", "ep=128 pp=16 recompute=full"),
    "16,384 GPUs, replicas folded": ("h800x2048", 16 * 64 * 128, "zipf:1", "ep=16 pp=8 recompute=full"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_whole_command(benchmark: BenchmarkFixture, name: str) -> None:
    """Seconds and memory of `moebench simulate` for a step of Qwen3-235B, from the start of the process to its end."""
    if benchmark.disabled:
        pytest.skip("starts commands")
    cluster, sequences, routing, layout = COMMANDS[name]
    words = [sys.executable, "-m", "bench.cli", "simulate", "ep", "--model", "qwen3-235b", "--cluster", cluster]
    words += ["--seq-len", str(SEQ_LEN), "--global-batch-tokens", str(SEQ_LEN * sequences), "--routing", routing]
    words += ["--layout", *layout.split()]

    def run() -> tuple[str, float]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    run()  # compiles what is not compiled yet
    shown, processor_s = benchmark.pedantic(run, rounds=1)
    assert benchmark.stats is not None
    seconds = benchmark.stats.stats.min
    # The largest child so far: commands are in the order of their size.
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    folded = " ".join(re.findall(r"folded\s+(.*)", shown))
    benchmark.extra_info.update(processor_s=processor_s, peak_gb_so_far=peak_gb, folded=folded)
    print(f"\n{name}: {seconds:.1f} s, {processor_s:.1f} s of processors, at most {peak_gb:.2f} GB\n  {folded}")
