"""The data dependencies of a layer, by hand for one of each placement, and as properties for random ones."""

import pytest
from hypothesis import given, settings

from bench.action import IN_CHUNKS, Action, Kind, Pass
from bench.case import Case
from bench.edges import Edge, Rows, Term, Volume, edges, ends
from bench.errors import BadInput
from bench.models import get_model
from bench.system import plan_of
from tests.cases import cases, make_case


def test_a_layer_of_disagmoe_with_two_groups() -> None:
    """Experts' output goes on to the next group; input gradients go back to the group that sent."""
    case = make_case("disagmoe", groups=2, attention_ranks=2, expert_ranks=1)
    at = plan_of(case).placement
    found = [
        f"{e.src} -> {e.dst} by {e.via} [{e.volume}] {'->'.join(ends(at, e.via))}"
        for e in edges(case.model, at)
        if e.via and e.via.layer == 1
    ]
    assert found == [
        "attn:F1.0 -> expert:F1.0 by dispatch:F1.0 [copies*h + assignments*8B] A1->F1",
        "attn:F1.0 -> attn:F2.0 by residual:F1.0 [tokens*(h + 8B)] A1->A0",
        "expert:F1.0 -> attn:F2.0 by combine:F1.0 [copies*h] F1->A0",
        "attn:B2.0 -> expert:B1.0 by combine:B1.0 [copies*h] A0->F1",
        "attn:B2.0 -> attn:B1.0 by residual:B1.0 [tokens*h] A0->A1",
        "expert:B1.0 -> attn:B1.0 by dispatch:B1.0 [copies*h + assignments*4B] F1->A1",
    ]


def test_with_one_group_nothing_but_experts_is_sent() -> None:
    case = make_case("disagmoe", groups=1)
    kinds = {e.via.kind for e in edges(case.model, plan_of(case).placement) if e.via}
    assert kinds == {Kind.DISPATCH, Kind.COMBINE}


def test_a_colocated_stage_returns_to_its_sender_and_joins_before_the_hop() -> None:
    case = make_case("ep", ep=2, pp=2)
    placement = plan_of(case).placement
    graph = list(edges(case.model, placement))
    last_of_stage = 1
    hop = next(e for e in graph if e.via and e.via.kind is Kind.HOP and e.via.pass_ == 0)
    assert (str(hop.src), str(hop.dst), str(hop.via)) == ("join:F1.0", "attn:F2.0", "hop:F2.0")
    assert ends(placement, Action(Kind.COMBINE, layer=last_of_stage)) == ("S0", "S0")
    assert not any(e.via and e.via.kind is Kind.RESIDUAL for e in graph)


def test_a_dense_layer_has_no_experts_and_hops() -> None:
    case = make_case("disagmoe", "tiny-shared", groups=2)
    graph = list(edges(case.model, plan_of(case).placement))
    assert not any(e.dst.kind is Kind.EXPERT and e.dst.layer == 0 for e in graph)
    assert any(e.via and str(e.via) == "hop:F1.0" for e in graph)


def test_chunks_pass_the_experts_by_themselves_and_all_else_is_whole() -> None:
    case = make_case("disagmoe", groups=2)
    at = plan_of(case).placement
    whole = list(edges(case.model, at, "redispatch"))
    cut = list(edges(case.model, at, "redispatch", 3))

    def joined(edge: Edge) -> Edge:
        ends = (None if a is None else a._replace(chunk=0) for a in edge[:3])
        return Edge(*ends, edge.volume)

    assert {joined(edge) for edge in cut} == set(whole)
    for edge in whole:
        pieces = [piece for piece in cut if joined(piece) == edge]
        of_experts = IN_CHUNKS & {a.kind for a in edge[:3] if a}
        assert len(pieces) == (3 if of_experts else 1)
        for c, piece in enumerate(pieces):
            assert all(a.chunk == (c if a.kind in IN_CHUNKS else 0) for a in piece[:3] if a)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_forward_and_backward_mirror_each_other(case: Case) -> None:
    """Every forward transfer has its backward the other way, and the graph has no cycle."""
    plan = plan_of(case)
    graph = list(edges(case.model, plan.placement, chunks=plan.chunks))
    forward = {e.via: e for e in graph if e.via and e.via.pass_ == 0}
    backward = {e.via: e for e in graph if e.via and e.via.pass_ == 1}
    assert {(a.kind, a.layer) for a in forward} == {(a.kind, a.layer) for a in backward}
    for action in forward:
        there, back = ends(plan.placement, action), ends(plan.placement, action._replace(pass_=Pass.B))
        assert there == back[::-1]
    inputs: dict[Action, set[Action]] = {}
    for e in graph:
        inputs.setdefault(e.src, set())
        inputs.setdefault(e.dst, set()).add(e.src)
    while inputs:
        free = {action for action, waits in inputs.items() if not waits & inputs.keys()}
        assert free, "a cycle"
        inputs = {action: waits for action, waits in inputs.items() if action not in free}


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_residual_hop_stands_exactly_where_the_attention_group_changes(case: Case) -> None:
    plan = plan_of(case)
    at = plan.placement
    hops = {e.via.layer for e in edges(case.model, at) if e.via and e.via.kind is Kind.RESIDUAL}
    expected = {
        layer for layer in range(case.model.num_layers) if at.expert[layer] and at.attention[layer] != at.join[layer]
    }
    assert hops == expected


@settings(max_examples=20, deadline=None)
@given(cases())
def test_edges_print_and_parse(case: Case) -> None:
    plan = plan_of(case)
    for edge in edges(case.model, plan.placement, plan.recompute):
        assert Edge.parse(str(edge)) == edge


@pytest.mark.parametrize("text", ["attn:F1.0", "attn:F1.0 -> ", "attn:F1.0 -> x:F1.0", "a:F1.0 -> b:B1.0 by hop:F1.0"])
def test_bad_edges_are_refused(text: str) -> None:
    with pytest.raises(BadInput):
        Edge.parse(text)


def test_volumes_print_and_parse() -> None:
    for volume in {e.volume for e in edges(get_model("tiny"), plan_of(make_case("disagmoe", groups=2)).placement)}:
        assert Volume.parse(str(volume)) == volume
    mixed = Volume((Term(Rows.TOKENS, 2, 8), Term(Rows.COPIES, 1), Term(Rows.ASSIGNMENTS, 0, 4)))
    assert str(mixed) == "tokens*(2h + 8B) + copies*h + assignments*4B"
    assert Volume.parse(str(mixed)) == mixed
