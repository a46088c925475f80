"""The same plan without overlap: the same actions, it ends, and it takes longer by what was hidden."""

from __future__ import annotations

from typing import Any

import pytest
from cases import cases, make_case
from hypothesis import given, settings

from bench.action import TRANSFERS
from bench.assumptions import get_assumptions
from bench.case import Case
from bench.check import check
from bench.hiding import claims_overlap
from bench.lower import lower
from bench.plan import COMPUTE_STREAM
from bench.predict import costs_of
from bench.serial import serialised
from bench.simulate import simulate
from bench.system import plan_of

SYSTEMS: list[tuple[str, dict[str, Any]]] = [
    ("megatron-overlap", {"ep": 2}),
    ("tutel", {"ep": 2, "chunks": 2}),
    ("dualpipe-v", {"pp": 2, "vpp": 2}),
    ("disagmoe", {"round_length": 2, "deferred_w": 2}),
    ("disagmoe", {"groups": 2, "attention_ranks": 2, "round_length": 4}),
    ("disagmoe", {"recompute": "redispatch"}),
]


@settings(max_examples=25)
@given(cases())
def test_nothing_is_lost_and_it_ends(case: Case) -> None:
    plan = plan_of(case)
    serial = serialised(plan, case.model)
    assert {stream for _, stream in serial.queues} == {COMPUTE_STREAM}
    for group in plan.placement.by_name:
        before = [str(one) for (name, _), queue in plan.queues.items() if name == group for one in queue]
        after = [str(one) for (name, _), queue in serial.queues.items() if name == group for one in queue]
        assert sorted(before) == sorted(after)
        computes, kept = (
            [one for one in each.queues.get((group, COMPUTE_STREAM), ()) if one.kind not in TRANSFERS]
            for each in (plan, serial)
        )
        assert computes == kept
    program = lower(serial, case.model)
    check(program)
    assert not claims_overlap(program)


def test_what_is_serial_stays() -> None:
    case = make_case("ep", ep=2)
    plan = plan_of(case)
    assert serialised(plan, case.model) == plan


@pytest.mark.parametrize(("system", "layout"), SYSTEMS)
def test_it_takes_longer(system: str, layout: dict[str, Any]) -> None:
    case = make_case(system, "qwen3-30b", seq_len=4096, microbatches=8, **layout)
    plan = plan_of(case)
    costs = costs_of(case, plan.placement, get_assumptions())
    whole, serial = (
        simulate(lower(each, case.model), costs).step_time_s for each in (plan, serialised(plan, case.model))
    )
    assert serial > whole
