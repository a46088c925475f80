"""Counting layers alike gives the same sums as looking at every one."""

from hypothesis import given, settings

from bench.action import COMPUTE, IN_CHUNKS, Action
from bench.assumptions import get_assumptions
from bench.case import Case
from bench.census import census
from bench.edges import edges
from bench.predict import costs_of
from bench.system import plan_of
from tests.cases import cases


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_census_counts_every_action_once(case: Case) -> None:
    plan = plan_of(case)
    at = (case.model, plan.placement, plan.recompute, plan.chunks)
    every = {e for edge in edges(*at) for e in edge[:3] if isinstance(e, Action)}
    apart = census(*at, layers_alike=False)
    assert apart == {e: plan.chunks if e.kind in IN_CHUNKS else 1 for e in every if e.chunk == 0}
    together = census(*at, layers_alike=True)
    assert sum(together.values()) == len(every)
    assert together.keys() <= every


@settings(max_examples=20, deadline=None)
@given(cases())
def test_actions_counted_together_cost_the_same(case: Case) -> None:
    plan = plan_of(case)
    costs = costs_of(case, plan.placement, get_assumptions("h200-measured"))
    for alike in (True, False):
        total = {group.name: 0.0 for group in plan.placement.groups}
        counted = census(case.model, plan.placement, plan.recompute, plan.chunks, layers_alike=alike)
        for action, times in counted.items():
            if action.kind in COMPUTE:
                home = plan.placement.home(action.kind, action.layer, action.microbatch)
                total[home] += times * float(costs.seconds(action).sum())
        if alike:
            together = total
    assert all(abs(together[name] - total[name]) <= 1e-9 * total[name] for name in total)
