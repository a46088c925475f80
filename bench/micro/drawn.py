"""Layouts drawn at random beside what the search finds: how much faster the fastest of them is."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout
from bench.errors import BadInput
from bench.limits import Limits
from bench.predict import quick_step
from bench.system import KnowsMoves, get_system
from bench.tune import DEFAULT_BUDGET, tune

MOST_MOVES = 3
"""From a layout of the space, up to so many steps are taken."""


class Drawn(NamedTuple):
    """How a search's answer stands beside layouts drawn at random.

    ratio: step time of the search's answer over that of the fastest of them; 1 where none is faster.
    fastest: that layout, None where none is faster.
    num_drawn, num_simulated: those that a bound on time or memory rules out are drawn and not simulated.
    """

    ratio: float
    fastest: Layout | None
    num_drawn: int
    num_simulated: int


def beside_drawn(
    spec: CaseSpec, assumptions: Assumptions, number: int, seed: int = 0, budget: int = DEFAULT_BUDGET
) -> Drawn | None:
    """None where the search finds nothing that fits.

    Args:
        number: layouts that are simulated, at the most.
        budget: of the search.
    """
    best = tune(spec, assumptions, budget=budget).best
    if best is None:
        return None
    limits = Limits(spec, assumptions)
    fastest_s, fastest, num_drawn, num_simulated = best.step_time_s, None, 0, 0
    for layout in drawn(spec, seed):
        if num_simulated == number:
            break
        num_drawn += 1
        case = spec.with_layout(layout)
        try:
            bound_s = limits.of(case).step_s
            if bound_s is None or bound_s >= fastest_s:
                continue
            num_simulated += 1
            found = quick_step(case, assumptions, fastest_s)
        except BadInput:
            continue
        if found.peak_memory_bytes <= spec.cluster.gpu.memory_bytes and (found.step_time_s or fastest_s) < fastest_s:
            fastest_s, fastest = found.step_time_s or fastest_s, layout
    return Drawn(best.step_time_s / fastest_s, fastest, num_drawn, num_simulated)


def drawn(spec: CaseSpec, seed: int = 0) -> Iterator[Layout]:
    """Every layout of the system's space in a random order; from every second one, a few random steps on instead."""
    chance, system = random.Random(seed), get_system(spec.system)
    space = list(dict.fromkeys(system.space(spec)))
    chance.shuffle(space)
    for place, layout in enumerate(space):
        if place % 2 and isinstance(system, KnowsMoves):
            yield _moved(spec, system, layout, chance)
        else:
            yield layout


def _moved(spec: CaseSpec, system: KnowsMoves, layout: Layout, chance: random.Random) -> Layout:
    for _ in range(chance.randint(1, MOST_MOVES)):
        layout = chance.choice(list(system.moves(spec, layout)) or [layout])
    return layout
