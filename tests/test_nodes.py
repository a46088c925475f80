"""Ranks over nodes, packed and strided: where a rank lies, and the bytes, rings and likenesses that follow from it."""

import random
from dataclasses import replace
from math import log2
from typing import Any

import numpy as np
import pytest
from cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.action import COMPUTE, Action, Kind, Pass
from bench.assumptions import get_assumptions
from bench.bound import bound_s
from bench.case import Case, Layout
from bench.cost import Costs
from bench.errors import BadInput
from bench.nodes import Nodes
from bench.placement import Group
from bench.predict import costs_of, predict
from bench.system import get_system, plan_of
from bench.tally import lie
from experiments import fig7

DATASHEET = get_assumptions("datasheet")


def costs(case: Case) -> Costs:
    return costs_of(case, plan_of(case).placement, DATASHEET)


def m2n(attention: int, experts: int, **layout: Any) -> Costs:
    shape = {"model": "qwen3-235b", "seq_len": 128, "attention_ranks": attention, "expert_ranks": experts}
    return costs(make_case("disagmoe", cluster=f"h800x{(attention + experts) // 8}", **shape, **layout))


@st.composite
def nodes(draw: st.DrawFn) -> Nodes:
    per_node = draw(st.sampled_from([1, 2, 4, 6, 8]))
    block = draw(st.sampled_from([n for n in (1, 2, 3, 4) if per_node % n == 0]))
    return Nodes(per_node, per_node * draw(st.integers(1, 5)), block, draw(st.booleans()))


@given(nodes(), st.integers(1, 3))
def test_every_gpu_has_one_rank_and_every_replica_its_own_nodes(nodes: Nodes, replicas: int) -> None:
    size = nodes.replica_size
    slot = nodes.slot(np.arange(replicas * size))
    taken = slot.node * nodes.gpus_per_node + slot.local
    assert sorted(taken) == list(range(replicas * size))
    assert (taken // size).tolist() == (np.arange(replicas * size) // size).tolist()
    assert all(len(set(together)) == 1 for together in slot.node.reshape(-1, nodes.block))


def test_neighbours_lie_on_the_replicas_nodes_in_turn() -> None:
    strided = Nodes(4, 8, strided=True)
    assert strided.slot(range(16)).node.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3]
    assert strided.slot(range(8)).local.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    pairs = Nodes(4, 8, block=2, strided=True)
    assert pairs.node(range(8)).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert pairs.slot(range(8)).local.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert Nodes(4, 6).node(range(12)).tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_packed_is_what_a_layout_has_and_its_text_leaves_it_out() -> None:
    plain, said = make_case("ep", ep=8), make_case("ep", ep=8, ranks_over_nodes="packed")
    assert plain.id == said.id
    assert "ranks_over_nodes" not in plain.to_text()
    strided = make_case("ep", ep=8, ranks_over_nodes="strided")
    assert strided.id != plain.id
    assert Case.parse(strided.to_text()) == strided
    assert Layout.from_pairs(str(strided.layout).split()) == strided.layout
    for system in ("ep", "disagmoe"):
        layouts = get_system(system).space(fig7.spec_of("gpt-oss-120b", 8192, system))
        assert {layout.ranks_over_nodes for layout in layouts} == {"packed"}


@pytest.mark.parametrize("how", ["packed", "strided"])
def test_half_of_an_all_to_all_over_two_nodes_crosses_the_nic(how: str) -> None:
    case = make_case("ep", "qwen3-235b", cluster="h800x2", seq_len=128, ep=16, ranks_over_nodes=how)
    message = costs(case).message(Action(Kind.DISPATCH))
    total = message.num_bytes.sum()
    # Of 16 ranks, 8 are on the other node, 7 are neighbours, one is the source itself.
    assert message.nic_bytes.sum() == pytest.approx(total * 8 / 16)
    assert message.nvlink_bytes.sum() == pytest.approx(total * 7 / 16)
    assert message.nic_bytes[0].nonzero()[0].tolist() == (list(range(8, 16)) if how == "packed" else [*range(1, 16, 2)])


@pytest.mark.parametrize(
    ("attention", "experts", "packed", "strided"),
    [
        (8, 8, 0, 1 / 2),  # every expert rank away; of two nodes, each source's own has half of the expert ranks
        (8, 16, 0, (3 * 5 + 3 * 5 + 2 * 6) / (8 * 16)),  # three nodes: 3, 3, 2 sources and 5, 5, 6 expert ranks
        (12, 4, 4 / 12, 1 / 2),  # a third of the sources on the experts' node; then 6 and 2 on each
        (16, 16, 0, 1 / 4),
    ],
)
def test_nvlinks_share_of_m2n_is_that_of_the_experts_on_the_sources_node(
    attention: int, experts: int, packed: float, strided: float
) -> None:
    for how, share in (("packed", packed), ("strided", strided)):
        for action in (Action(Kind.DISPATCH), Action(Kind.COMBINE), Action(Kind.DISPATCH, Pass.B)):
            message = m2n(attention, experts, ranks_over_nodes=how).message(action)
            assert message.nvlink_bytes.sum() == pytest.approx(message.num_bytes.sum() * share)
            assert message.nic_bytes.sum() == pytest.approx(message.num_bytes.sum() * (1 - share))


def test_a_row_a_node_crosses_to_the_other_node_alone() -> None:
    strided = m2n(8, 8, copies="node", ranks_over_nodes="strided")
    dispatch = strided.message(Action(Kind.DISPATCH))
    reached = strided.routes.reached(0, np.array([0, 1] * 4))
    rows = 128 * reached[0] * (2 * 4096)
    assignments = 128 * 8 / 2 * 8  # half of a token's eight pairs go to the other node, 8 B each
    assert dispatch.nic_bytes.sum(axis=1) == pytest.approx([rows + assignments] * 8)
    assert not dispatch.nic_bytes[0, ::2].any()
    assert dispatch.relayed_bytes == pytest.approx(dispatch.relayed_bytes[:1].repeat(8))


def test_residuals_between_groups_of_whole_turns_stay_on_their_node() -> None:
    shape = {"attention_ranks": 4, "expert_ranks": 4, "groups": 2, "cluster": "h800x2"}
    message = costs(make_case("disagmoe", **shape, ranks_over_nodes="strided")).message(Action(Kind.RESIDUAL))
    assert message.nvlink_bytes.sum() == pytest.approx(message.num_bytes.sum())


def test_rings_go_over_the_nodes_of_their_ranks() -> None:
    shape = {"attention_ranks": 8, "expert_ranks": 8, "cluster": "h800x2", "shard_state": False}
    packed = costs(make_case("disagmoe", **shape))
    strided = costs(make_case("disagmoe", **shape, ranks_over_nodes="strided"))
    assert strided.sync_bytes("A0") == packed.sync_bytes("A0")
    inside = packed.sync_bytes("A0") / 160e9
    assert packed.sync_s("A0") == pytest.approx(inside + 2 * log2(8) * 5e-6)
    # Four NICs a node, 200 GB/s, outrun NVLink; the latency is the NIC's.
    assert strided.sync_s("A0") == pytest.approx(inside + 2 * log2(8) * 10e-6)


@given(st.data(), st.booleans())
@settings(max_examples=200)
def test_pairs_of_groups_are_alike_where_their_ranks_share_nodes_alike(data: st.DataObject, strided: bool) -> None:
    nodes = Nodes(4, 12, data.draw(st.sampled_from([1, 2])), strided)

    def pair() -> tuple[Group, Group]:
        cuts = sorted(data.draw(st.lists(st.integers(0, 12), min_size=4, max_size=4, unique=True)))
        ends = [Group("A", cuts[0], cuts[1] - cuts[0]), Group("B", cuts[2], cuts[3] - cuts[2])]
        return (ends[0], ends[1]) if data.draw(st.booleans()) else (ends[1], ends[0])

    def shared(source: Group, target: Group) -> tuple[Any, ...]:
        slot = nodes.slot([*source.ranks, *target.ranks])
        return source.size, (slot.node[:, None] == slot.node[None, :]).tolist(), slot.local.tolist()

    one, other = pair(), pair()
    assert (lie(*one, nodes) == lie(*other, nodes)) == (shared(*one) == shared(*other))


@pytest.mark.parametrize("system", ["ep", "disagmoe"])
def test_costs_known_from_one_strided_placement_hold_for_all(system: str) -> None:
    spec = fig7.spec_of("gpt-oss-120b", 16384, system)
    layouts = [layout.model_copy(update={"ranks_over_nodes": "strided"}) for layout in get_system(system).space(spec)]
    chosen = 0
    for layout in random.Random(0).sample(layouts, 40):
        case = spec.with_layout(layout)
        placement = get_system(system).placement(case)
        if placement.size % 8 or chosen == 8:
            continue
        chosen += 1
        shared = costs_of(case, placement, get_assumptions("h200-measured"))
        alone = replace(shared)
        alone.__dict__["_cache"] = {}
        for action in (a for likeness in shared.tally.likenesses for a in shared.actions_of(likeness)):
            if action.kind not in COMPUTE:
                for one, other in zip(shared.ports(action), alone.ports(action), strict=True):
                    np.testing.assert_array_equal(one, other)
    assert chosen >= 4


def test_a_mixed_node_makes_a_step_of_communication_shorter_and_no_shorter_than_its_bound() -> None:
    """Half of M2N leaves the NIC, which bounds a model of few FLOPs."""
    shape = {"attention_ranks": 8, "expert_ranks": 8, "cluster": "h800x2", "seq_len": 4096, "groups": 1}
    packed, strided = (
        predict(make_case("disagmoe", **shape, ranks_over_nodes=how), DATASHEET) for how in ("packed", "strided")
    )
    assert strided.timeline.step_time_s < packed.timeline.step_time_s
    assert bound_s(strided.program, strided.costs) <= strided.timeline.step_time_s


@pytest.mark.parametrize(("system", "layout"), [("ep", {"ep": 4}), ("disagmoe", {"attention_ranks": 6})])
def test_a_replica_of_part_of_a_node_cannot_be_strided(system: str, layout: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=r"layout.ranks_over_nodes: 'strided' is not valid; allowed: packed: a replica"):
        plan_of(make_case(system, cluster="h800x2", **layout, ranks_over_nodes="strided"))
