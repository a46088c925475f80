"""Rails and incast: what bytes to another rail and many sources of one port cost, by hand."""

from typing import Any

import numpy as np
import pytest
from cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.action import Action, Kind, Pass
from bench.assumptions import ASSUMPTIONS, get_assumptions
from bench.case import Case
from bench.cost import Costs
from bench.predict import costs_of, predict
from bench.system import plan_of

DISPATCH = Action(Kind.DISPATCH)


def costs(case: Case, *overrides: str) -> Costs:
    return costs_of(case, plan_of(case).placement, get_assumptions("datasheet", overrides))


def all_to_all(**layout: Any) -> Case:
    return make_case("ep", "qwen3-235b", cluster="h800x2", seq_len=128, ep=16, **layout)


def test_of_eight_ranks_on_the_other_node_seven_are_on_other_rails() -> None:
    message = costs(all_to_all()).message(DISPATCH)
    assert message.cross_rail_bytes.sum() == pytest.approx(message.nic_bytes.sum() * 7 / 8)
    assert (message.cross_rail_bytes[3, 8:] > 0).tolist() == [n != 3 for n in range(8)]
    assert not message.cross_rail_bytes[3, :8].any()


def test_gpus_that_have_one_nic_are_on_one_rail() -> None:
    case = all_to_all()
    halved = case.cluster.model_copy(update={"nics_per_node": 4})
    message = costs(case.model_copy(update={"cluster": halved})).message(DISPATCH)
    assert (message.cross_rail_bytes[3, 8:] > 0).tolist() == [n // 2 != 1 for n in range(8)]


def test_bytes_to_another_rail_go_at_their_share_of_the_rate() -> None:
    plain, slower = costs(all_to_all()).ports(DISPATCH), costs(all_to_all(), "cross_rail=0.5").ports(DISPATCH)
    # One of eight at the whole rate, seven at half of it.
    assert slower.nic_send_s == pytest.approx(plain.nic_send_s * (1 + 7 * 2) / 8)
    assert slower.nic_receive_s == pytest.approx(plain.nic_receive_s * (1 + 7 * 2) / 8)
    assert slower.nvlink_send_s == pytest.approx(plain.nvlink_send_s)


def test_a_row_a_node_and_a_residual_between_whole_nodes_stay_on_their_rails() -> None:
    once = costs(all_to_all(copies="node")).message(Action(Kind.COMBINE, Pass.F))
    assert once.nic_bytes.any()
    assert not once.cross_rail_bytes.any()
    case = make_case("disagmoe", cluster="h800x4", attention_ranks=8, expert_ranks=8, groups=2)
    residual = costs(case).message(Action(Kind.RESIDUAL))
    assert residual.nic_bytes.any()
    assert not residual.cross_rail_bytes.any()


def test_a_port_loses_time_for_every_doubling_of_its_sources() -> None:
    plain, lossy = costs(all_to_all()).ports(DISPATCH), costs(all_to_all(), "incast=0.1").ports(DISPATCH)
    # Eight sources on the other node are three doublings.
    assert lossy.nic_receive_s == pytest.approx(plain.nic_receive_s * 1.3)
    assert lossy.nic_send_s == pytest.approx(plain.nic_send_s)
    one_source = make_case("disagmoe", cluster="h800x4", attention_ranks=8, expert_ranks=8, groups=2)
    residual = Action(Kind.RESIDUAL)
    assert costs(one_source, "incast=0.5").transfer_s(residual) == costs(one_source).transfer_s(residual)


def test_nothing_is_lost_by_default() -> None:
    for name in ASSUMPTIONS:
        assumed = get_assumptions(name)
        assert (assumed.cross_rail, assumed.incast) == (1.0, 0.0)
        case = all_to_all()
        found = costs_of(case, plan_of(case).placement, assumed)
        rate = case.cluster.nic_bytes_per_s_per_gpu * assumed.nic_all_to_all
        for axis, column in ((1, "nic_send_s"), (0, "nic_receive_s")):
            expected = found.message(DISPATCH).nic_bytes.sum(axis=axis) / rate
            np.testing.assert_array_equal(getattr(found.ports(DISPATCH), column), expected)


@given(st.floats(0.05, 1), st.floats(0.05, 1), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["rank", "node"]))
@settings(max_examples=40, deadline=None)
def test_more_loss_never_takes_less_time(rail: float, other: float, incast: float, more: float, copies: str) -> None:
    (slow, fast), (little, much) = sorted((rail, other)), sorted((incast, more))
    case = all_to_all(copies=copies)
    worse = costs(case, f"cross_rail={slow!r}", f"incast={much!r}").ports(DISPATCH)
    better = costs(case, f"cross_rail={fast!r}", f"incast={little!r}").ports(DISPATCH)
    assert all((a >= b).all() for a, b in zip(worse, better, strict=True))


def test_a_step_bound_by_its_nics_takes_longer() -> None:
    case = make_case("disagmoe", cluster="h800x2", seq_len=4096, attention_ranks=8, expert_ranks=8)
    times = [
        predict(case, get_assumptions("datasheet", overrides)).timeline.step_time_s
        for overrides in ((), ("incast=0.1",), ("incast=0.1", "cross_rail=0.5"))
    ]
    assert times[0] < times[1] < times[2]
