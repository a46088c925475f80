"""SMs that communication takes are charged in the share of a step's computing time in which transfers run."""

from dataclasses import replace

import pytest
from cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import metrics
from bench.action import Action, Kind
from bench.assumptions import get_assumptions
from bench.case import Case
from bench.predict import Prediction, costs_of, predict
from bench.simulate import simulate

PLAIN = get_assumptions("h200-measured")


def taxed(case: Case, num_sms: int) -> Prediction:
    return predict(case, PLAIN.with_overrides([f"communication_sms={num_sms}"]))


def overlapping(system: str = "disagmoe") -> Case:
    ours = {"attention_ranks": 8, "expert_ranks": 8, "groups": 2, "round_length": 4}
    shape = ours if system == "disagmoe" else {"ep": 8}
    return make_case(system, "qwen3-30b", cluster="h800x4", seq_len=4096, microbatches=8, **shape)


def test_nothing_is_charged_where_nothing_runs_beside_computation() -> None:
    case = make_case("ep", "qwen3-30b", cluster="h800x1", seq_len=4096, ep=8)
    assert metrics.taxed_share(predict(case, PLAIN).timeline) == 0
    assert taxed(case, 40).timeline.step_time_s == predict(case, PLAIN).timeline.step_time_s


@pytest.mark.parametrize("system", ["disagmoe", "megatron-overlap"])
def test_a_step_is_charged_the_share_in_which_transfers_run(system: str) -> None:
    case = overlapping(system)
    free, found = predict(case, PLAIN), taxed(case, 20)
    share = found.costs.taxed_share
    assert 0.05 < share < 1
    assert share == pytest.approx(metrics.taxed_share(found.timeline), abs=0.02)
    always = costs_of(case, found.program.plan.placement, PLAIN.with_overrides(["communication_sms=20"]))
    most = simulate(found.program, always).step_time_s
    assert free.timeline.step_time_s < found.timeline.step_time_s < most


def test_without_such_sms_the_costs_are_those_of_the_case() -> None:
    case = overlapping()
    found = predict(case, PLAIN)
    assert found.costs is costs_of(case, found.program.plan.placement, PLAIN)
    assert PLAIN.communication_sms == get_assumptions("datasheet").communication_sms == 0


@given(st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_a_larger_share_is_never_faster(one: float, other: float) -> None:
    case = make_case("ep", "qwen3-30b", cluster="h800x1", seq_len=4096, ep=8)
    found = predict(case, PLAIN)
    costs = costs_of(case, found.program.plan.placement, PLAIN.with_overrides(["communication_sms=20"]))
    little, much = (replace(costs, taxed_share=share) for share in sorted((one, other)))
    for kind in (Kind.ATTENTION, Kind.EXPERT, Kind.HEAD):
        assert (little.seconds(Action(kind)) <= much.seconds(Action(kind))).all()
