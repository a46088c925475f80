"""What lies ahead of an operation: never more than it turns out to be, and close enough to be of use."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.assumptions import get_assumptions
from bench.case import Case
from bench.cost import Costs
from bench.errors import BadInput
from bench.lower import lower
from bench.predict import costs_of, predict
from bench.program import Program
from bench.simulate import least_peak_bytes, peak_bytes, simulate, time_step
from bench.simulate.run import least_ahead_s
from bench.system import get_system, plan_of
from bench.timeline import Timeline
from experiments import fig7
from tests.cases import cases

ASSUMED = get_assumptions("h200-measured")
BELOW = 1 - 1e-6


def drawn(system: str, number: int) -> list[Case]:
    """Layouts of its space that can be."""
    spec = fig7.spec_of("deepseek-moe-16b", 32768, system)
    layouts = list(dict.fromkeys(get_system(system).space(spec)))
    found = []
    for layout in random.Random(1).sample(layouts, len(layouts)):
        try:
            plan_of(spec.with_layout(layout))
        except BadInput:
            continue
        found.append(spec.with_layout(layout))
        if len(found) == number:
            break
    return found


def lowered(case: Case) -> Program:
    return lower(plan_of(case), case.model)


def ahead_by_task(program: Program, costs: Costs, timeline: Timeline) -> NDArray[np.float64]:
    sizes = np.array([group.size // timeline.stands_for for group in program.plan.placement.groups])
    return np.repeat(least_ahead_s(program, costs), sizes[program.group])


@pytest.mark.parametrize("system", fig7.SYSTEMS)
def test_no_operation_has_less_ahead_than_was_said_before(system: str) -> None:
    shares = []
    for case in drawn(system, 6):
        program = lowered(case)
        costs = costs_of(case, program.plan.placement, ASSUMED)
        timeline = simulate(program, costs)
        ahead_s = ahead_by_task(program, costs, timeline)
        assert (timeline.start_s + ahead_s <= timeline.step_time_s * (1 + 1e-9)).all()
        shares.append(ahead_s.max() / timeline.step_time_s)
    assert max(shares) > 0.9
    assert min(shares) > 0.5


@pytest.mark.parametrize("system", fig7.SYSTEMS)
def test_a_step_is_timed_or_left_as_its_limit_says(system: str) -> None:
    for case in drawn(system, 3):
        program = lowered(case)
        costs = costs_of(case, program.plan.placement, ASSUMED)
        timeline = simulate(program, costs)
        for limit_s in (float("inf"), timeline.step_time_s):
            found = time_step(program, costs, limit_s)
            assert found is not None
            assert found.step_time_s == timeline.step_time_s
            np.testing.assert_array_equal(found.peak_bytes, peak_bytes(program, costs, timeline))
        assert time_step(program, costs, BELOW * timeline.step_time_s) is None


@settings(max_examples=30, deadline=None)
@given(cases())
def test_where_ranks_differ_none_has_less_ahead(case: Case) -> None:
    skewed = case.model_copy(update={"workload": case.workload.model_copy(update={"routing": "zipf:1"})})
    program = lowered(skewed)
    costs = costs_of(skewed, program.plan.placement, ASSUMED)
    timeline = simulate(program, costs)
    ahead_s = ahead_by_task(program, costs, timeline)
    assert (timeline.start_s + ahead_s <= timeline.step_time_s * (1 + 1e-9)).all()


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from(["balanced", "zipf:1"]))
def test_no_step_needs_less_memory_than_its_order_does(case: Case, routing: str) -> None:
    routed = case.model_copy(update={"workload": case.workload.model_copy(update={"routing": routing})})
    program = lowered(routed)
    costs = costs_of(routed, program.plan.placement, ASSUMED)
    peak = peak_bytes(program, costs, simulate(program, costs)).max()
    assert least_peak_bytes(program, costs) <= peak * (1 + 1e-12)


@pytest.mark.parametrize("system", fig7.SYSTEMS)
def test_what_the_order_needs_is_most_of_the_activations(system: str) -> None:
    case = drawn(system, 1)[0]
    found = predict(case, ASSUMED)
    static = found.peak_memory_bytes - found.memory_parts["activations and messages"]
    least = least_peak_bytes(found.program, found.costs)
    assert least - static > 0.5 * (found.peak_memory_bytes - static)


def test_memory_is_that_of_the_timeline() -> None:
    case = drawn("disagmoe", 1)[0]
    found = predict(case, ASSUMED)
    step = time_step(found.program, found.costs)
    assert step is not None
    assert step.peak_bytes.max() == found.peak_memory_bytes
