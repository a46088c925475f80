"""From a case to a checked program: planning, lowering, checking; in actions a second."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.case import Case, CaseSpec, Layout, Workload
from bench.check import check
from bench.clusters import get_cluster
from bench.lower import lower
from bench.models import get_model
from bench.system import plan_of

SEQ_LEN = 4096
LAYOUTS = {
    "ep": Layout(replicas=1, ep=16, pp=8, vpp=2),
    "disagmoe": Layout(replicas=1, attention_ranks=16, expert_ranks=16, groups=4, round_length=16),
}


def case_of(system: str, microbatches: int) -> Case:
    """Qwen3-235B on 128 H800."""
    workload = Workload(seq_len=SEQ_LEN, global_batch_tokens=SEQ_LEN * 16 * microbatches)
    spec = CaseSpec(model=get_model("qwen3-235b"), cluster=get_cluster("h800x16"), workload=workload, system=system)
    return spec.with_layout(LAYOUTS[system])


@pytest.mark.parametrize("stage", ["plan", "lower", "check"])
@pytest.mark.parametrize("system", sorted(LAYOUTS))
def test_actions_per_second(benchmark: BenchmarkFixture, system: str, stage: str) -> None:
    case = case_of(system, 64 if benchmark.enabled else 16)
    plan = plan_of(case)
    program = lower(plan, case.model)
    calls = {
        "plan": lambda: plan_of(case),
        "lower": lambda: lower(plan, case.model),
        "check": lambda: check(program),
    }
    benchmark.pedantic(calls[stage], rounds=3 if benchmark.enabled else 1)
    if benchmark.stats is not None:
        benchmark.extra_info["operations_per_s"] = program.num_ops / benchmark.stats.stats.median
