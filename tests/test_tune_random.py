"""Layouts drawn at random from what a system declares do not beat what the search finds for it."""

import random

import pytest

from bench.assumptions import get_assumptions
from bench.errors import BadInput
from bench.predict import predict
from bench.system import get_system
from bench.tune import tune
from experiments import fig7

NUM_DRAWN = 24
MARGIN = 0.02


@pytest.mark.slow
@pytest.mark.parametrize("system", fig7.SYSTEMS)
def test_random_layouts_do_not_beat_the_search(system: str) -> None:
    spec = fig7.spec_of("deepseek-moe-16b", 16384, system)
    assumptions = get_assumptions("h200-measured")
    layouts = list(dict.fromkeys(get_system(system).space(spec)))
    best = tune(spec, assumptions).best
    assert best is not None
    for layout in random.Random(0).sample(layouts, min(NUM_DRAWN, len(layouts))):
        try:
            found = predict(spec.with_layout(layout), assumptions, rough=True)
        except BadInput:
            continue
        if not found.missing_bytes:
            assert found.step_time_s >= (1 - MARGIN) * best.step_time_s, str(layout)
