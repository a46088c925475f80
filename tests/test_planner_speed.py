"""The planner's programme for 2,048 GPUs: how long its candidates take, and the solver."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.assumptions import get_assumptions
from bench.case import CaseSpec, Workload
from bench.clusters import get_cluster
from bench.models import get_model
from systems.disagmoe.planner.allocation import allocate
from systems.disagmoe.planner.choices import Choices
from systems.disagmoe.planner.problem import problem

ASSUMED = get_assumptions("datasheet")
NUM_GPUS = 2048
FEW = Choices(groups=(4,), recompute=("redispatch",), copies=("node",))
WORK = {"qwen3-235b": (4096, 4096), "gpt-oss-120b": (8192, 7680), "deepseek-v3": (32768, 2048)}
"""Tokens of a sequence, and sequences, by model: few divisors, many, and sequences long enough to be shared."""


def spec_of(model: str, num_gpus: int) -> CaseSpec:
    seq_len, sequences = WORK[model]
    workload = Workload(seq_len=seq_len, global_batch_tokens=seq_len * sequences)
    cluster = get_cluster(f"h800x{num_gpus // 8}")
    return CaseSpec(model=get_model(model), cluster=cluster, workload=workload, system="disagmoe")


@pytest.mark.parametrize("model", sorted(WORK))
def test_seconds_to_solve(benchmark: BenchmarkFixture, model: str) -> None:
    programme = problem(spec_of(model, NUM_GPUS), ASSUMED, None if benchmark.enabled else FEW)
    found = benchmark.pedantic(allocate, args=(programme,), rounds=5 if benchmark.enabled else 1)
    assert found.proven
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.median
        benchmark.extra_info.update(candidates=len(programme), candidates_per_s=len(programme) / seconds)


def test_seconds_to_list_candidates(benchmark: BenchmarkFixture) -> None:
    """With nothing remembered of the costs of a token."""
    choices = None if benchmark.enabled else FEW
    found = benchmark.pedantic(problem, args=(spec_of("qwen3-235b", NUM_GPUS), ASSUMED, choices), rounds=1)
    assert len(found)
    if benchmark.stats is not None:
        benchmark.extra_info["candidates_per_s"] = len(found) / benchmark.stats.stats.median
