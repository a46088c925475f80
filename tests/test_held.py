"""What is held on a rank, how gradients are summed and the state is updated, and what lives with the host."""

from math import log2
from typing import Any

import numpy as np
import pytest
from cases import make_case

from bench import predict
from bench.action import Action, Kind, Pass
from bench.assumptions import get_assumptions
from bench.clusters import Cluster, get_cluster
from bench.cost import Costs
from bench.errors import BadInput
from bench.flops import num_parameters
from bench.program import Held
from bench.system import get_system
from tests.costing import costs_of


@pytest.mark.parametrize("shard_state", [True, False])
@pytest.mark.parametrize(("system", "copies"), [("ep", 2), ("disagmoe", 1)])
def test_static_state_holds_every_parameter(system: str, copies: int, shard_state: bool) -> None:
    """Two replicas of two groups; `copies` attention ranks a group, two expert ranks."""
    layout = {"ep": {"ep": 2, "pp": 2}, "disagmoe": {"groups": 2, "expert_ranks": 2}}[system]
    case = make_case(system, "tiny-shared", cluster="h800x2", replicas=2, shard_state=shard_state, **layout)
    costs = costs_of(case)
    experts = 3 * 8 * 3 * 64 * 96  # three of the four layers
    rest = num_parameters(case.model).total - experts
    held = sum(costs.static_bytes(group.name) * group.size for group in costs.placement.groups)
    shards, expert_shards = (2 * copies, 2) if shard_state else (1, 1)
    assert held == pytest.approx(copies * rest * (6 + 12 / shards) + experts * (6 + 12 / expert_shards))


@pytest.mark.parametrize("shard_state", [True, False])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_two_directions_hold_every_parameter_twice(pp: int, shard_state: bool) -> None:
    """Optimizer state is divided over both copies: their ranks hold the same. One stage has one copy."""
    case = make_case("dualpipe", "tiny-shared", microbatches=8, ep=2, pp=pp, shard_state=shard_state)
    costs = costs_of(case)
    copies = 1 if pp == 1 else 2
    experts = 3 * 8 * 3 * 64 * 96
    rest = num_parameters(case.model).total - experts
    held = sum(costs.static_bytes(group.name) * group.size for group in costs.placement.groups)
    shards, expert_shards = (2 * copies, copies) if shard_state else (1, 1)
    expected = copies * (2 * rest * (6 + 12 / shards) + experts * (6 + 12 / expert_shards))
    assert held == pytest.approx(expected)
    mirrored = [costs.static_bytes(group.name) for group in reversed(costs.placement.groups)]
    assert [costs.static_bytes(group.name) for group in costs.placement.groups] == mirrored


def test_two_copies_sum_their_gradients_over_each_other() -> None:
    """A rank's ring is that of both copies: of experts two ranks, of all else the four of both groups."""
    costs = costs_of(make_case("dualpipe", microbatches=4, ep=2, pp=2, shard_state=False))
    experts = 4 * 8 * 3 * 64 * 96 // 2  # both stages' layers, half of the experts
    rest = num_parameters(costs.case.model).total - 2 * experts
    assert costs.sync_bytes("S0") == pytest.approx(2 * 4 * (experts / 2 + rest * 3 / 4))
    assert costs.sync_bytes("S1") == costs.sync_bytes("S0")


def test_state_is_divided_over_the_ranks_that_hold_the_same() -> None:
    one, two = (costs_of(make_case("disagmoe", expert_ranks=2, replicas=n, cluster="h800x2")) for n in (1, 2))
    experts = 4 * 8 * 3 * 64 * 96 / 2
    assert one.static_bytes("F0") == pytest.approx(18 * experts)
    assert two.static_bytes("F0") == pytest.approx((6 + 12 / 2) * experts)


def test_gradient_sums_are_rings() -> None:
    case = make_case("disagmoe", expert_ranks=8, attention_ranks=8, replicas=2, cluster="h800x4", shard_state=False)
    costs = costs_of(case)
    # An expert shard has two copies, a node apart: half of it is sent twice over one NIC.
    experts = 4 * 3 * 64 * 96
    assert costs.sync_bytes("F0") == pytest.approx(2 * 4 * experts / 2)
    assert costs.sync_s("F0") == pytest.approx(4 * experts / 50e9 + 2 * 10e-6)
    # Attention is on 16 ranks of two nodes: the eight NICs of a node outrun NVLink.
    assert costs.sync_s("A0") == pytest.approx(costs.sync_bytes("A0") / 160e9 + 2 * log2(16) * 10e-6)
    sharded = costs_of(case.model_copy(update={"layout": case.layout.model_copy(update={"shard_state": True})}))
    # fp32 gradients are reduced, bf16 weights are gathered.
    assert sharded.sync_bytes("F0") == pytest.approx((4 + 2) * experts / 2)
    assert costs_of(make_case("disagmoe", expert_ranks=2)).sync_s("F0") == 0


def test_the_update_moves_every_byte_of_the_state() -> None:
    costs = costs_of(make_case("disagmoe", expert_ranks=2))
    experts = 4 * 8 * 3 * 64 * 96 / 2
    # Gradient 4, main weight and two moments read and written 24, weight 2.
    assert costs.update_s("F0") == pytest.approx(38 * experts / 3.35e12)


def test_state_with_the_host_takes_no_memory_and_the_links_time() -> None:
    case, resident = (make_case("disagmoe", expert_ranks=2, offload=offload) for offload in ("state", "none"))
    host, gpus = costs_of(case), costs_of(resident)
    experts = 4 * 8 * 3 * 64 * 96 / 2
    assert gpus.static_bytes("F0") - host.static_bytes("F0") == 12 * experts
    # PCIe 5.0: main weight and moments one way while others go the other way.
    assert host.update_s("F0") == pytest.approx(12 * experts / 64e9)
    slow = costs_of(case, get_assumptions("datasheet", ["host_link=0.5"]))
    assert slow.update_s("F0") == pytest.approx(2 * host.update_s("F0"))
    older = case.model_copy(update={"cluster": get_cluster("a100x16")})
    assert costs_of(older).update_s("F0") == pytest.approx(12 * experts / 32e9)
    # A link faster than memory does not make the update faster.
    gpu = case.cluster.gpu.model_copy(update={"host_bytes_per_s": 1e15})
    endless = case.model_copy(update={"cluster": case.cluster.model_copy(update={"gpu": gpu})})
    assert costs_of(endless).update_s("F0") == gpus.update_s("F0")


@pytest.mark.parametrize(("system", "layout"), [("disagmoe", {"expert_ranks": 2}), ("ep", {"ep": 2})])
def test_offloaded_activations_are_held_for_an_action_and_take_the_links_time(
    system: str, layout: dict[str, Any]
) -> None:
    def costs_with(offload: str, *assumed: str) -> Costs:
        return costs_of(make_case(system, **layout, offload=offload), get_assumptions("datasheet", assumed))

    here, away, both = (costs_with(offload) for offload in ("none", "activations", "all"))
    slow, endless = costs_with("activations", "host_link=0.001"), costs_with("activations", "host_link=1.0", "hbm=1e-6")
    for kind in (Kind.ATTENTION, Kind.EXPERT):
        forward, backward = (Action(kind, each, 1, 0) for each in (Pass.F, Pass.B))
        kept = here.held_bytes(Held.FORWARD, forward)
        assert (kept > 0).all()
        assert not away.held_bytes(Held.FORWARD, forward).any()
        assert away.held_bytes(Held.BACKWARD, backward) == pytest.approx(here.held_bytes(Held.BACKWARD, backward))
        for action in (forward, backward):
            # Its own, and as much again of its neighbour.
            assert away.working_bytes(action) == pytest.approx(2 * kept)
            assert not here.working_bytes(action).any()
            # PCIe 5.0: no less than their way, and more where the action itself takes longer.
            assert slow.seconds(action) == pytest.approx(kept / 64e6)
            assert away.seconds(action) == pytest.approx(np.maximum(here.seconds(action), kept / 64e9))
            assert (endless.seconds(action) > kept / 64e9).all()
        weight = forward._replace(pass_=Pass.W)
        assert slow.seconds(weight) == pytest.approx(here.seconds(weight))
    head = Action(Kind.HEAD, Pass.F, 0, 0)
    assert away.held_bytes(Held.FORWARD, head) == pytest.approx(here.held_bytes(Held.FORWARD, head))
    group = away.placement.attention[0]
    assert away.static_bytes(group) == here.static_bytes(group) > both.static_bytes(group)


def test_offloaded_activations_make_room_for_micro_batches() -> None:
    """A pipeline with many micro-batches in flight is the less full, and as full at any number of them."""

    def peak(offload: str, microbatches: int) -> float:
        layout = {"pp": 4, "recompute": "none", "offload": offload}
        case = make_case("ep", "tiny", cluster="h800x2", seq_len=512, microbatches=microbatches, **layout)
        return predict.predict(case, get_assumptions("datasheet")).memory_parts["activations and messages"]

    assert peak("activations", 8) < 0.7 * peak("none", 8)


def test_what_is_computed_again_is_not_offloaded() -> None:
    case = make_case("ep", offload="activations", recompute="full")
    with pytest.raises(BadInput, match=r"layout.offload: 'activations'.*computed again is not kept"):
        costs_of(case)


def test_state_is_offloaded_in_spaces_where_it_crowds_the_gpus() -> None:
    def offloads(model: str) -> set[tuple[int, str]]:
        spec = make_case("ep", model, cluster="h800x16", microbatches=128)
        return {(each.mbs, each.offload) for each in get_system("ep").space(spec)}

    assert offloads("qwen3-235b") == {(1, "none"), (1, "state"), (2, "none")}  # 22 of 80 GB
    assert offloads("qwen3-30b") == {(1, "none"), (2, "none")}


def test_the_usual_link_to_the_host_is_left_out_of_a_text() -> None:
    usual, older = get_cluster("h800x1"), get_cluster("a100x16")
    assert "host_bytes_per_s" not in usual.to_text()
    assert '"host_bytes_per_s": 32000000000.0' in older.to_text()
    for cluster in (usual, older):
        assert Cluster.parse(cluster.to_text()) == cluster


def test_messages_are_held_whole_where_they_are_packed_and_received() -> None:
    costs = costs_of(make_case("ep", ep=4))
    dispatch = Action(Kind.DISPATCH)
    packed = costs.message(dispatch).num_bytes
    assert costs.held_bytes(Held.SENT, dispatch) == pytest.approx(packed.sum(axis=1))
    assert costs.held_bytes(Held.RECEIVED, dispatch) == pytest.approx(packed.sum(axis=0))


def test_recompute_holds_less_until_the_backward_and_as_much_after() -> None:
    none, full = (costs_of(make_case("ep", ep=2, recompute=recompute)) for recompute in ("none", "full"))
    for kind in (Kind.ATTENTION, Kind.EXPERT):
        forward, backward = Action(kind), Action(kind, Pass.B)
        assert (full.held_bytes(Held.FORWARD, forward) < none.held_bytes(Held.FORWARD, forward)).all()
        assert full.held_bytes(Held.BACKWARD, backward) == pytest.approx(none.held_bytes(Held.BACKWARD, backward))
        # While it runs, a backward that computes again has what the other one kept.
        again = full.held_bytes(Held.FORWARD, forward) + full.working_bytes(backward)
        assert again == pytest.approx(none.held_bytes(Held.FORWARD, forward))
        assert not none.working_bytes(backward).any()
        assert not full.working_bytes(forward).any()
