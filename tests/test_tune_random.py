"""Layouts drawn at random from what a system declares, and steps from them, do not beat what the search finds."""

import pytest

from bench.assumptions import get_assumptions
from bench.case import Layout
from bench.micro import drawn
from experiments import fig7

NUM_DRAWN = 24
MARGIN = 0.02
ASSUMED = get_assumptions("h200-measured")


@pytest.mark.slow
@pytest.mark.parametrize("system", fig7.SYSTEMS)
def test_random_layouts_do_not_beat_the_search(system: str) -> None:
    found = drawn.beside_drawn(fig7.spec_of("deepseek-moe-16b", 16384, system), ASSUMED, NUM_DRAWN)
    assert found is not None
    assert 0 < found.num_simulated <= NUM_DRAWN
    assert found.ratio <= 1 + MARGIN, str(found.fastest)


def test_a_search_that_is_beaten_is_seen() -> None:
    spec = fig7.spec_of("deepseek-moe-16b", 16384, "dualpipe-v")
    found = drawn.beside_drawn(spec, ASSUMED, NUM_DRAWN, budget=1)
    assert found is not None and found.fastest is not None and found.ratio > 1


def test_draws_are_the_same_for_a_seed() -> None:
    spec = fig7.spec_of("deepseek-moe-16b", 16384, "dualpipe-v")
    one, again, other = (list(drawn.drawn(spec, seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert all(isinstance(layout, Layout) for layout in one)
