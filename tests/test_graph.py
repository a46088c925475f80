"""The columns of a graph say what its edges say."""

from hypothesis import given, settings

from bench.action import TRANSFERS, Action, view
from bench.case import Case
from bench.edges import Edge, edges, ends
from bench.graph import NONE, ends_of, graph_of
from bench.system import plan_of
from tests.cases import cases


@settings(max_examples=60, deadline=None)
@given(cases())
def test_columns_have_every_edge_once(case: Case) -> None:
    plan = plan_of(case)
    at = (case.model, plan.placement, plan.recompute, plan.chunks)
    graph = graph_of(*at)
    found = [
        Edge(view(int(s)), view(int(d)), None if v == NONE else view(int(v)), graph.volumes[n])
        for s, d, v, n in zip(graph.src, graph.dst, graph.via, graph.volume, strict=True)
    ]
    assert len(found) == len(set(found))
    assert set(found) == set(edges(*at))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_ends_are_those_of_every_action(case: Case) -> None:
    plan = plan_of(case)
    graph = graph_of(case.model, plan.placement, plan.recompute, plan.chunks)
    names = [group.name for group in plan.placement.groups]
    sources, targets = ends_of(plan.placement, graph.actions)
    for code, source, target in zip(graph.actions, sources, targets, strict=True):
        action: Action = view(int(code))
        if action.kind in TRANSFERS:
            assert (names[source], names[target]) == ends(plan.placement, action)
        else:
            assert (names[source], int(target)) == (
                plan.placement.home(action.kind, action.layer, action.microbatch),
                NONE,
            )
