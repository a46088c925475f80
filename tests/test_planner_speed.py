"""The planner's programme for 2,048 GPUs: CPU seconds of its candidates, of the solver, and of both."""

import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.assumptions import get_assumptions
from bench.case import CaseSpec, Workload
from bench.clusters import get_cluster
from bench.models import get_model
from systems.disagmoe.planner import tokens
from systems.disagmoe.planner.allocation import Allocation, allocate
from systems.disagmoe.planner.choices import Choices
from systems.disagmoe.planner.problem import problem
from systems.disagmoe.planner.reference import Option, Reference

ASSUMED = get_assumptions("datasheet")
NUM_GPUS = 2048
FEW = Choices(groups=(4,), recompute=("redispatch",), copies=("node",))
WORK = {"qwen3-235b": (4096, 4096), "gpt-oss-120b": (8192, 7680), "deepseek-v3": (32768, 2048)}
"""Tokens of a sequence, and sequences, by model: few divisors, many, and sequences long enough to be shared."""

pytestmark = pytest.mark.benchmark(timer=time.process_time)


def spec_of(model: str, num_gpus: int) -> CaseSpec:
    seq_len, sequences = WORK[model]
    workload = Workload(seq_len=seq_len, global_batch_tokens=seq_len * sequences)
    cluster = get_cluster(f"h800x{num_gpus // 8}")
    return CaseSpec(model=get_model(model), cluster=cluster, workload=workload, system="disagmoe")


@pytest.mark.parametrize("model", sorted(WORK))
def test_seconds_of_the_whole_programme(benchmark: BenchmarkFixture, model: str) -> None:
    """Its candidates and its solution; first in this file, so that nothing is remembered of these models' costs."""
    import scipy.optimize  # noqa: F401 - not what is timed

    spec, choices = spec_of(model, NUM_GPUS), None if benchmark.enabled else FEW

    def solved() -> Allocation:
        return allocate(problem(spec, ASSUMED, choices))

    found = benchmark.pedantic(solved, rounds=1)
    assert found.proven
    if benchmark.stats is not None:
        benchmark.extra_info["candidates_per_s"] = len(found.problem) / benchmark.stats.stats.median


@pytest.mark.parametrize("model", sorted(WORK))
def test_seconds_to_solve(benchmark: BenchmarkFixture, model: str) -> None:
    programme = problem(spec_of(model, NUM_GPUS), ASSUMED, None if benchmark.enabled else FEW)
    found = benchmark.pedantic(allocate, args=(programme,), rounds=5 if benchmark.enabled else 1)
    assert found.proven
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.median
        benchmark.extra_info.update(candidates=len(programme), candidates_per_s=len(programme) / seconds)


def test_what_options_agree_on_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies by way of nodes compute what copies to ranks do; ranks that share tokens send them as one would."""
    priced: list[Option] = []

    def counted(spec: CaseSpec, option: Option, assumptions: object) -> Reference:
        priced.append(option)
        return Reference(spec, option, assumptions)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens, "Reference", counted)
    tokens._prices.cache_clear()
    options = [
        Option(8, recompute, copies=copies, cp=cp, offload=offload)
        for recompute in ("none", "full")
        for copies in ("rank", "node")
        for cp in (1, 2, 4)
        for offload in ("none", "state")
    ]
    found = tokens.costs_of_options(spec_of("qwen3-235b", 64), options, ASSUMED)
    assert len(found) == len(options) == 24
    # Computation of three ways to share and two to recompute; transfers of two ways to copy.
    assert len(priced) == 6 + 2
    tokens._prices.cache_clear()


@pytest.mark.parametrize("model", ["gpt-oss-120b", "deepseek-v3"])
def test_what_is_priced_once_is_what_each_option_costs(model: str) -> None:
    """Against every layer of a reference of the option's own."""
    spec = spec_of(model, 64)
    for option in (
        Option(8, "redispatch", copies="node", cp=4, shared_on="expert" if model == "deepseek-v3" else "attention"),
        Option(4, "full", copies="expert", tp=2),
    ):
        at, found = Reference(spec, option, ASSUMED), tokens.token_costs(spec, option, ASSUMED)
        kept = {"A": 0.0, "F": 0.0}
        compute = {"A": 0.0, "F": 0.0}
        for layer in range(spec.model.num_layers):
            for action in at.costs.actions_of(at.costs.tally.likenesses[at.costs.tally.of_layer[0, layer + 1]]):
                if action.kind.name in ("ATTENTION", "EXPERT", "JOIN"):
                    side = at.side(action)
                    compute[side] += float(at.costs.seconds(action).max()) * at.per_token[side]
                    if action.pass_.name == "F":
                        kept[side] += float(at.costs.held_bytes(tokens.Held.FORWARD, action).max()) * at.per_token[side]
        for side, name in (("A", "attention"), ("F", "expert")):
            mine = getattr(found, name)
            assert mine.compute_s[:-1].sum() == pytest.approx(compute[side], rel=1e-9)
            assert mine.kept_bytes[:-1].sum() == pytest.approx(kept[side], rel=1e-9)
