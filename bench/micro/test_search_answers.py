"""How far random layouts beat what the search finds: on cells of Figure 7, for every system.

``pytest bench/micro --benchmark-enable -s -k random_layouts``; `MOEBENCH_DRAWN` layouts that no bound rules out
are simulated a cell and system, 64 unless told. What is timed is the search and the draws together.
"""

import os

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.assumptions import get_assumptions
from bench.micro.drawn import beside_drawn
from bench.micro.test_tune_speed import ASSUMED, SYSTEMS, cell
from results.paper import MODELS

CELLS = [(model, seq_len) for model in MODELS for seq_len in (4096, 32768)]
QUICK_DRAWN = 8
MARGIN = 0.02


@pytest.mark.parametrize("system", SYSTEMS)
def test_random_layouts_beside_the_search(benchmark: BenchmarkFixture, system: str) -> None:
    if not benchmark.enabled and system != "dualpipe-v":
        pytest.skip("minutes; tests/test_tune_random.py has one cell of every system")
    number = int(os.environ.get("MOEBENCH_DRAWN", "64")) if benchmark.enabled else QUICK_DRAWN
    cells = CELLS if benchmark.enabled else CELLS[:1]

    def worst() -> float:
        found = 1.0
        for model, seq_len in cells:
            one = beside_drawn(cell(model, seq_len, system), get_assumptions(ASSUMED), number)
            if one is None:
                print(f"{system} {model} {seq_len}: nothing fits")
                continue
            said = f"{one.num_drawn} drawn, {one.num_simulated} simulated"
            print(f"{system} {model} {seq_len}: {one.ratio:.4f}, {said}{f': {one.fastest}' if one.fastest else ''}")
            found = max(found, one.ratio)
        return found

    ratio = benchmark.pedantic(worst, rounds=1)
    benchmark.extra_info["worst_ratio"] = ratio
    print(f"{system}: the search's answer takes at most {ratio:.4f} times as long as a layout drawn at random")
    assert ratio <= 1 + MARGIN
