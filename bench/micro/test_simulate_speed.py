"""How many operations on ranks the simulator plays per second: ``pytest bench/micro --benchmark-enable -s``."""

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
from bench.system import plan_of

SEQ_LEN = 4096
# Ranks over which a micro-batch is dealt, micro-batches, layout.
LAYOUTS = {
    "ep": Layout(replicas=1, ep=16, pp=8, vpp=2),
    "disagmoe": Layout(replicas=1, attention_ranks=16, expert_ranks=16, groups=4, round_length=16),
}


def lowered(system: str, routing: str, microbatches: int) -> tuple[Program, Costs]:
    """Qwen3-235B on 128 H800."""
    workload = Workload(seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * 16 * microbatches, routing=routing)
    spec = CaseSpec(model=get_model("qwen3-235b"), cluster=get_cluster("h800x16"), workload=workload, system=system)
    case = spec.with_layout(LAYOUTS[system])
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
