"""What bounds a step: the critical path is the step, causes sum to it, and removing what is named helps."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from bench.assumptions import get_assumptions
from bench.case import Case
from bench.critical import CriticalPath
from bench.errors import BadInput
from bench.explain import Explanation, explain
from bench.predict import Prediction, predict
from bench.program import Op
from tests.cases import cases, make_case
from tests.timelines import one_layer

ASSUMED = get_assumptions()


def step(system: str, **layout: Any) -> Prediction:
    return predict(make_case(system, cluster="h800x2", seq_len=512, **layout), ASSUMED)


def explained(system: str, **layout: Any) -> Explanation:
    return explain(step(system, **layout), ASSUMED)


@settings(max_examples=25, deadline=None)
@given(cases())
def test_the_critical_path_covers_the_step_without_gap(case: Case) -> None:
    found = predict(case, ASSUMED)
    path = CriticalPath(found.program, found.costs, found.timeline).whole
    step_s = found.timeline.step_time_s
    assert path[0].start_s == pytest.approx(0.0, abs=1e-9)
    assert path[-1].end_s == step_s
    assert all(one.end_s == pytest.approx(two.start_s, abs=1e-9) for one, two in pairwise(path))
    assert sum(piece.seconds for piece in path) == pytest.approx(step_s, rel=1e-6)
    for piece in path:  # a task is on the path only while it lasts
        assert piece.what or piece.start_s >= found.timeline.start_s[piece.task] - 1e-12
        assert piece.what or piece.end_s <= found.timeline.end_s[piece.task] + 1e-12


@settings(max_examples=15, deadline=None)
@given(cases())
def test_causes_sum_to_the_step(case: Case) -> None:
    found = explain(predict(case, ASSUMED), ASSUMED)
    assert sum(seconds for _, seconds in found.gap) == pytest.approx(found.step_time_s, rel=1e-6)
    assert all(seconds >= -1e-12 for _, seconds in found.gap)
    assert sum(part.seconds for part in found.path) == pytest.approx(found.step_time_s, rel=1e-6)
    assert all(change.step_time_s < found.step_time_s for change in found.changes)
    assert found.bound_s <= found.step_time_s


def test_one_rank_has_nothing_to_wait_for() -> None:
    found = explained("ep", ep=1)
    causes = dict(found.gap)
    assert {cause for cause, seconds in causes.items() if seconds > 1e-9} == {
        "work, dealt evenly over the ranks",
        "overheads of kernels and transfers; SMs lent to transfers",
    }
    assert found.bound_by == "computation"
    assert {part.what for part in found.path} >= {"attn:F", "attn:B", "expert:W", "head:F", "update"}


def test_serial_exchange_is_on_the_path_and_free_communication_takes_it_off() -> None:
    found = explained("ep", ep=8)
    on_path = {part.what: part.seconds for part in found.path}
    assert on_path["dispatch:F"] > 0 and on_path["combine:B latency"] > 0
    free = next(change for change in found.changes if change.without == "communication")
    serial_s = sum(s for what, s in on_path.items() if what.split(":")[0] in ("dispatch", "combine", "sync"))
    assert found.step_time_s - free.step_time_s == pytest.approx(serial_s, rel=1e-3)


def test_a_pipeline_fills_and_drains() -> None:
    causes = {cause.split(":")[0] for cause, seconds in explained("ep", ep=1, pp=4).gap if seconds > 0}
    assert {"fill", "tail"} <= causes


def test_recomputation_and_uneven_routing_are_found() -> None:
    case = make_case("ep", cluster="h800x2", seq_len=512, ep=8, recompute="full")
    work = case.workload.model_copy(update={"routing": "hot-rank"})
    found = explain(predict(case.model_copy(update={"workload": work}), ASSUMED), ASSUMED)
    without = {change.without for change in found.changes}
    assert {"recomputation", "uneven routing"} <= without
    assert dict(found.gap)["imbalance: more work on this rank than on the mean one"] > 0
    assert [c.step_time_s for c in found.changes] == sorted(c.step_time_s for c in found.changes)


def test_between_two_nodes_nics_are_used_and_an_endless_nic_helps() -> None:
    found = explained("disagmoe", attention_ranks=8, expert_ranks=8)
    assert all(use.seconds[0] > 0 for use in found.uses)
    assert "NIC limit" in {change.without for change in found.changes}
    assert found.busiest[1] in Explanation.RESOURCES
    assert 0 < found.busiest[2] <= 1
    inside = explained("ep", ep=8)
    assert all(use.seconds[0] < found.uses[0].seconds[0] for use in inside.uses)


@pytest.mark.parametrize("offload", ["state", "activations"])
def test_the_way_to_the_hosts_memory_is_found(offload: str) -> None:
    there, here = explained("ep", ep=8, offload=offload), explained("ep", ep=8)
    faster = {change.without: change.step_time_s for change in there.changes}
    assert faster["host link limit"] == pytest.approx(here.step_time_s, rel=1e-6)
    assert "host link limit" not in {change.without for change in here.changes}


def test_use_is_what_the_timeline_shows() -> None:
    prediction = step("disagmoe", attention_ranks=2, expert_ranks=2)
    found = explain(prediction, ASSUMED)
    line = prediction.timeline
    computes = np.isin(line.op, (Op.COMPUTE, Op.UPDATE)) & (line.rank == 0)
    assert found.uses[0].seconds[-1] == pytest.approx(float((line.end_s - line.start_s)[computes].sum()))


def test_a_measured_step_is_refused() -> None:
    found = step("ep", ep=2)
    with pytest.raises(BadInput, match="simulated"):
        CriticalPath(found.program, found.costs, one_layer("measured"))
