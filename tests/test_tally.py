"""Looking at one layer of every likeness, and at one group of every kind, gives the same sums as looking at all."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from bench.action import COMPUTE, Action
from bench.assumptions import get_assumptions
from bench.bound import SMS, busy
from bench.case import Case
from bench.edges import edges, ends
from bench.nodes import Nodes
from bench.predict import costs_of
from bench.system import get_system, plan_of
from bench.tally import actions_of, tally
from experiments import fig7
from tests.cases import cases


def every_action(case: Case) -> set[Action]:
    plan = plan_of(case)
    graph = edges(case.model, plan.placement, plan.recompute, plan.chunks)
    return {end for edge in graph for end in edge[:3] if isinstance(end, Action)}


@settings(max_examples=40, deadline=None)
@given(cases())
def test_layers_that_are_not_alike_have_every_action_once(case: Case) -> None:
    plan = plan_of(case)
    counted = tally(case.model, plan.placement, Nodes.of(case, plan.placement), False)
    found = [a for each in counted.likenesses for a in actions_of(case.model, plan.placement, each, plan.recompute)]
    assert len(found) == len(set(found))
    assert set(found) == {action for action in every_action(case) if action.chunk == 0}


@pytest.mark.parametrize("routing", ["balanced", "zipf:1", "rotating-hot-rank"])
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_sums_are_those_over_every_action(routing: str, case: Case) -> None:
    workload = case.workload.model_copy(update={"routing": routing})
    case = case.model_copy(update={"workload": workload})
    plan = plan_of(case)
    costs = costs_of(case, plan.placement, get_assumptions("h200-measured"))
    sums = costs.tally.sums(lambda likeness: busy(costs, likeness), np.zeros((5, 1)))
    expected = {group.name: np.zeros((5, group.size)) for group in plan.placement.groups}
    for action in every_action(case):
        if action.kind in COMPUTE:
            home = plan.placement.home(action.kind, action.layer, action.microbatch)
            expected[home][SMS] += costs.seconds(action)
        else:
            source, target = ends(plan.placement, action)
            ports = costs.ports(action)
            expected[source][1:3] += ports[:2]
            expected[target][3:5] += ports[2:4]
    for group in plan.placement.groups:
        found = np.broadcast_to(sums[costs.tally.like[group.name]], expected[group.name].shape)
        np.testing.assert_allclose(found, expected[group.name], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("system", ["ep", "tutel", "dualpipe", "disagmoe"])
def test_costs_known_from_one_placement_hold_for_all(system: str) -> None:
    spec = fig7.spec_of("gpt-oss-120b", 16384, system)
    layouts = list(get_system(system).space(spec))
    for layout in random.Random(0).sample(layouts, 12):
        case = spec.with_layout(layout)
        placement = get_system(system).placement(case)
        shared = costs_of(case, placement, get_assumptions("h200-measured"))
        alone = replace(shared)
        alone.__dict__["_cache"] = {}
        for likeness in shared.tally.likenesses:
            for action in shared.actions_of(likeness):
                if action.kind in COMPUTE:
                    np.testing.assert_array_equal(shared.seconds(action), alone.seconds(action))
                else:
                    for one, other in zip(shared.ports(action), alone.ports(action), strict=True):
                        np.testing.assert_array_equal(one, other)
