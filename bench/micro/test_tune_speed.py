"""How many layouts of a system's space the tuner bounds per second, in time and in memory, on one core.

``pytest bench/micro --benchmark-enable -s -k layouts_bounded``. Screened is the whole space of each cell of Figure 7,
from the enumeration of the layouts on; what the cells share (placements, parameters) is found once, as in a sweep.
"""

import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.assumptions import get_assumptions
from bench.case import CaseSpec, Workload
from bench.clusters import get_cluster
from bench.models import get_model
from bench.tune import screen
from results.paper import CLUSTER, MODELS, SEQ_LENS

SYSTEMS = ("megatron", "ep", "tutel", "comet", "megatron-overlap", "dualpipe", "dualpipe-v", "disagmoe")
ASSUMED = "h200-measured"


def cell(model: str, seq_len: int, system: str) -> CaseSpec:
    work = Workload(seq_len=seq_len, global_batch_tokens=1 << 22)
    return CaseSpec(model=get_model(model), cluster=get_cluster(CLUSTER), workload=work, system=system)


@pytest.mark.parametrize("system", SYSTEMS)
def test_layouts_bounded_per_second(benchmark: BenchmarkFixture, system: str) -> None:
    assumptions = get_assumptions(ASSUMED)
    cells = [cell(model, seq_len, system) for model in MODELS for seq_len in SEQ_LENS]
    cells = cells if benchmark.enabled else cells[:1]
    spent = [0.0]

    def bound_all() -> int:
        begun = time.process_time()
        found = [screen(spec, assumptions) for spec in cells]
        spent[0] = time.process_time() - begun
        return sum(len(may_win) + len(cannot) for may_win, cannot in found)

    num_layouts = benchmark.pedantic(bound_all, rounds=1)
    assert num_layouts > len(cells)
    if benchmark.enabled:
        benchmark.extra_info.update(layouts=num_layouts, layouts_per_processor_s=num_layouts / spent[0])
        print(f"\n{system}: {num_layouts} layouts of {len(cells)} cells, {num_layouts / spent[0]:,.0f} a second")
