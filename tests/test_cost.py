from itertools import product
from math import comb, log2
from typing import Any

import numpy as np
import pytest
from cases import cases, make_case
from hypothesis import given, settings

from bench import predict
from bench.action import COMPUTE, Action, Kind, Pass
from bench.assumptions import (
    ASSUMPTIONS,
    DEFAULT_ASSUMPTIONS,
    DEPARTURES,
    REASONS,
    Assumptions,
    get_assumptions,
)
from bench.case import Case, batch_of
from bench.clusters import Cluster, get_cluster
from bench.cost import Costs
from bench.edges import edges
from bench.errors import BadInput
from bench.flops import attention_pairs, num_parameters, step_flops
from bench.limits import least_bytes
from bench.models import get_model
from bench.placement import Placement
from bench.program import Held
from bench.roofline import attention_core
from bench.system import get_system, plan_of

DATASHEET = get_assumptions("datasheet")


def placement_of(case: Case) -> Placement:
    return plan_of(case).placement


def costs_of(case: Case, assumed: Assumptions = DATASHEET) -> Costs:
    return predict.costs_of(case, placement_of(case), assumed)


def with_routing(case: Case, name: str) -> Case:
    return case.model_copy(update={"workload": case.workload.model_copy(update={"routing": name})})


def actions_of(costs: Costs) -> set[Action]:
    graph = edges(costs.case.model, costs.placement, costs.recompute, costs.chunks)
    return {end for edge in graph for end in (edge.src, edge.dst, edge.via) if end is not None}


@given(cases())
@settings(max_examples=25, deadline=None)
def test_every_model_flop_is_done_once(case: Case) -> None:
    """Summed over actions, ranks and micro-batches, as counted for the whole step; for uneven routing too."""
    for routing in ("balanced", "zipf:1"):
        costs = costs_of(with_routing(case, routing))
        done = sum(float(costs.flops(action).sum()) for action in actions_of(costs) if action.kind in COMPUTE)
        each_way = batch_of(case, costs.placement).num_microbatches / costs.placement.directions
        expected = step_flops(case.model, case.workload.seq_len, case.workload.global_batch_tokens)
        assert done * each_way == pytest.approx(expected)


def test_a_head_takes_its_gemm_and_its_loss_at_the_data_sheets_rates() -> None:
    costs = costs_of(make_case("ep", "qwen3-30b", ep=2, seq_len=4096))
    gemm = 2 * 4096 * 2048 * 151936 / 989e12
    # The norm reads and writes bf16 rows; the loss reads bf16 logits and writes fp32 probabilities.
    elementwise = 4096 * (2 * 2048 * 2 + 151936 * (2 + 4)) / 3.35e12
    # It forms the last x from the residual and from one row of each rank that has one of 8 of 128 experts.
    copies = 2 * (1 - comb(64, 8) / comb(128, 8))
    joined = 4096 * (copies + 2) * 2048 * 2 / 3.35e12
    assert costs.seconds(Action(Kind.HEAD)) == pytest.approx([gemm + elementwise + joined] * 2)
    assert costs.flops(Action(Kind.HEAD)) == pytest.approx([2 * 4096 * 2048 * 151936] * 2)


def test_an_attention_core_costs_its_pairs_and_two_and_a_half_times_them_backward() -> None:
    def core(pass_: Pass, seq_len: int) -> float:
        """Seconds that the core alone takes: what is left of two efficiencies."""
        case = make_case("ep", "mixtral-8x7b", ep=2, seq_len=seq_len)
        half = get_assumptions("datasheet", ["attention_forward=0.5", "attention_backward=0.5"])
        action = Action(Kind.ATTENTION, pass_)
        return float((costs_of(case, half).seconds(action) - costs_of(case).seconds(action))[0])

    forward = 4 * attention_pairs(32768) * 32 * 128 / 989e12
    assert core(Pass.F, 32768) == pytest.approx(forward)
    assert core(Pass.B, 32768) == pytest.approx(2.5 * forward)
    assert core(Pass.W, 32768) == 0


@pytest.mark.parametrize(("layer", "window"), [(0, 128), (1, 0)])
def test_short_spans_reach_less(layer: int, window: int) -> None:
    assumed = get_assumptions("datasheet", ["attention_half_span=1000", "attention_forward=0.8"])
    core = attention_core(get_model("gpt-oss-120b"), layer, Pass.F, 16384, 8192, 2, assumed)
    pairs = attention_pairs(8192, window)
    span = 2 * pairs / 8192  # a window of 128 is a span of 254 or so, a whole sequence one of 8193
    assert core.flops == pytest.approx(2 * pairs * 4 * 64 * 64)
    assert core.reached == pytest.approx(0.8 * span / (span + 1000))


def test_few_rows_are_bound_by_the_experts_weights() -> None:
    costs = costs_of(make_case("ep", "mixtral-8x7b", ep=2, seq_len=2))
    weights = 4 * 3 * 4096 * 14336 * 2  # bytes of four local experts
    assert costs.seconds(Action(Kind.EXPERT))[0] == pytest.approx(weights / 3.35e12, rel=0.01)
    # The fp32 gradient is read and written.
    assert costs.seconds(Action(Kind.EXPERT, Pass.W))[0] == pytest.approx(4 * weights / 3.35e12, rel=0.01)


def test_a_rank_without_tokens_takes_no_time() -> None:
    costs = costs_of(with_routing(make_case("ep", ep=4), "hot-rank"), get_assumptions("h200-measured"))
    seconds = costs.seconds(Action(Kind.EXPERT))
    assert seconds[0] > 0
    assert seconds[1:].tolist() == [0, 0, 0]


@given(cases().filter(lambda case: case.system != "megatron"))  # which recomputes whole layers only
@settings(max_examples=15, deadline=None)
def test_full_recompute_adds_the_forward_to_the_backward(case: Case) -> None:
    again = costs_of(case.model_copy(update={"layout": case.layout.model_copy(update={"recompute": "full"})}))
    kept = costs_of(case.model_copy(update={"layout": case.layout.model_copy(update={"recompute": "none"})}))
    for action in actions_of(kept):
        if action.kind in COMPUTE and action.pass_ is Pass.B:
            forward = kept.seconds(action._replace(pass_=Pass.F))
            extra = again.seconds(action) - kept.seconds(action)
            # What is computed again is not sent again: packing and adding up rows is left out.
            assert (extra <= forward * (1 + 1e-9)).all()
            if kept.flops(action).any():
                assert (extra > 0.3 * forward).all()
            assert again.flops(action) == pytest.approx(kept.flops(action))


def test_redispatch_moves_the_recomputation_into_an_action_of_its_own() -> None:
    layout = {"attention_ranks": 2, "expert_ranks": 4, "groups": 2}
    again = costs_of(make_case("disagmoe", "tiny-shared", cluster="h800x2", recompute="redispatch", **layout))
    kept = costs_of(make_case("disagmoe", "tiny-shared", cluster="h800x2", **layout))
    backward = Action(Kind.ATTENTION, Pass.B, 2)
    assert again.seconds(backward) == pytest.approx(kept.seconds(backward))
    assert (again.seconds(backward._replace(pass_=Pass.R)) > 0).all()
    assert not again.flops(backward._replace(pass_=Pass.R)).any()
    # Layer 0 is dense: nothing to send again, so its backward computes its forward again itself.
    dense = Action(Kind.ATTENTION, Pass.B, 0)
    assert (again.seconds(dense) > kept.seconds(dense)).all()
    # Experts keep pairs (8 bytes each) instead of rows, and get the rows once more.
    forward = Action(Kind.EXPERT, Pass.F, 2)
    assert again.held_bytes(Held.FORWARD, forward) == pytest.approx(2 * 16 * 2 / 4 * 12)
    rows = again.message(Action(Kind.DISPATCH, Pass.R, 2)).num_bytes
    assert rows == pytest.approx(kept.message(Action(Kind.COMBINE, Pass.B, 2)).num_bytes)
    # x and the chosen experts stay with the attention, the rest is there from R to B.
    attention = Action(Kind.ATTENTION, Pass.F, 2)
    whole = kept.held_bytes(Held.FORWARD, attention)
    x_and_choices = 16 * 64 * 2 + 16 * 2 * 12
    assert again.held_bytes(Held.FORWARD, attention) == pytest.approx(x_and_choices)
    assert again.held_bytes(Held.AGAIN, attention._replace(pass_=Pass.R)) == pytest.approx(whole - x_and_choices)


def m2n(copies: str = "expert") -> Costs:
    """Two groups of 2 attention and 4 expert ranks, tiny model (H 64, 8 experts, top 2), 16 tokens a rank."""
    layout = {"groups": 2, "attention_ranks": 2, "expert_ranks": 4, "copies": copies}
    return costs_of(make_case("disagmoe", cluster="h800x2", **layout))


HIT = 1 - (6 * 5) / (8 * 7)  # a token has one of its 2 experts on a rank of 2 of 8


@pytest.mark.parametrize(("copies", "per_rank"), [("expert", 2 / 4), ("rank", HIT)])
def test_m2n_messages_have_closed_forms(copies: str, per_rank: float) -> None:
    costs = m2n(copies)
    rows, pairs = 16 * per_rank, 16 * 2 / 4
    row = 64 * 2
    expected = {
        Action(Kind.DISPATCH, Pass.F, 0): ((2, 4), rows * row + pairs * 8),
        Action(Kind.COMBINE, Pass.F, 0): ((4, 2), rows * row),
        Action(Kind.COMBINE, Pass.B, 0): ((2, 4), rows * row),
        Action(Kind.DISPATCH, Pass.B, 0): ((4, 2), rows * row + pairs * 4),
    }
    for action, (shape, num_bytes) in expected.items():
        message = costs.message(action)
        assert message.crossing.shape == shape
        assert message.crossing == pytest.approx(np.full(shape, num_bytes))


def test_residuals_go_from_rank_to_rank_with_the_row_map() -> None:
    costs = m2n()
    assert costs.message(Action(Kind.RESIDUAL, Pass.F, 0)).crossing == pytest.approx(np.eye(2) * 16 * (64 * 2 + 2 * 4))
    assert costs.message(Action(Kind.RESIDUAL, Pass.B, 0)).crossing == pytest.approx(np.eye(2) * 16 * 64 * 2)


def test_what_stays_on_its_rank_is_no_traffic() -> None:
    message = costs_of(make_case("ep", ep=4)).message(Action(Kind.DISPATCH))
    assert (np.diag(message.num_bytes) > 0).all()
    assert np.diag(message.crossing).tolist() == [0, 0, 0, 0]
    alone = costs_of(make_case("ep", ep=1))
    assert alone.transfer_s(Action(Kind.DISPATCH)) == 0


@pytest.mark.parametrize(
    ("copies", "all_to_all", "many_to_many"), [("expert", 4.0, 8.0), ("rank", 3.3, 6.6), ("node", 1.0, 2.0)]
)
def test_copies_over_the_nic_for_128_experts_on_two_nodes(copies: str, all_to_all: float, many_to_many: float) -> None:
    """Qwen3, top 8 of 128 on 16 ranks: an all-to-all over two nodes crosses with half, a many-to-many with all."""
    shape = {"model": "qwen3-235b", "cluster": "h800x4", "seq_len": 128, "copies": copies}
    colocated = costs_of(make_case("ep", ep=16, **shape)).message(Action(Kind.COMBINE))
    apart = costs_of(make_case("disagmoe", attention_ranks=16, expert_ranks=16, **shape)).message(Action(Kind.COMBINE))
    for message, expected in ((colocated, all_to_all), (apart, many_to_many)):
        assert message.nic_bytes.sum() / 16 / (128 * 4096 * 2) == pytest.approx(expected, abs=0.05)


def test_a_node_row_is_relayed_to_the_ranks_that_need_it() -> None:
    """What an expert rank gets over NIC and NVLink together is what it needs, whatever crosses the NIC."""
    shape = {"model": "qwen3-235b", "cluster": "h800x4", "seq_len": 128, "attention_ranks": 16, "expert_ranks": 16}
    once = costs_of(make_case("disagmoe", copies="node", **shape)).message(Action(Kind.COMBINE, Pass.B))
    per_rank = costs_of(make_case("disagmoe", copies="rank", **shape)).message(Action(Kind.COMBINE, Pass.B))
    assert once.num_bytes == pytest.approx(per_rank.num_bytes)
    assert once.relayed_bytes == pytest.approx(per_rank.num_bytes.sum(axis=0) * 7 / 8)
    assert not per_rank.relayed_bytes.any()


def test_links_follow_the_nodes_of_both_ends() -> None:
    # Nodes of 8: the first holds A0 = 0..5 and half of F0 = 6..9.
    costs = costs_of(make_case("disagmoe", cluster="h800x2", attention_ranks=6, expert_ranks=4))
    message = costs.message(Action(Kind.DISPATCH))
    assert (message.nvlink_bytes > 0).tolist() == [[True, True, False, False]] * 6
    assert (message.nic_bytes > 0).tolist() == [[False, False, True, True]] * 6
    ports = costs.ports(Action(Kind.DISPATCH))
    sent = message.num_bytes
    assert ports.nic_send_s == pytest.approx(sent[:, 2:].sum(axis=1) / 50e9)
    assert ports.nvlink_send_s == pytest.approx(sent[:, :2].sum(axis=1) / 160e9)
    assert ports.nic_receive_s == pytest.approx([0, 0, *(sent[:, 2:].sum(axis=0) / 50e9)])
    assert ports.latency_s == pytest.approx([5e-6, 5e-6, 10e-6, 10e-6])
    assert not costs.uniform


def test_a_transfer_alone_takes_its_busiest_port_and_the_latency() -> None:
    costs = m2n()
    received = 2 * (8 * 64 * 2 + 8 * 8)  # by one of four expert ranks, from two
    sent = 2 * received
    assert costs.transfer_s(Action(Kind.DISPATCH)) == pytest.approx(sent / 160e9 + 5e-6)


def test_uniform_where_ranks_are_alike() -> None:
    assert m2n().uniform
    assert costs_of(make_case("ep", cluster="h800x2", ep=4, pp=2)).uniform
    assert not costs_of(with_routing(make_case("ep", ep=4), "zipf:1")).uniform


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
    assert costs.update_s("F0") == pytest.approx(30 * experts / 3.35e12)


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


def test_costs_do_not_depend_on_the_micro_batch() -> None:
    costs = m2n()
    for kind in (Kind.ATTENTION, Kind.DISPATCH):
        first, later = Action(kind, Pass.F, 1, 0), Action(kind, Pass.F, 1, 3)
        cost = costs.seconds if kind is Kind.ATTENTION else costs.transfer_s
        assert np.array_equal(cost(first), cost(later))


def sliced(system: str, chunks: int, model: str = "mixtral-8x7b", ep: int = 8, **layout: int) -> Costs:
    case = make_case(system, model, cluster="h800x2", ep=ep, seq_len=4096, chunks=chunks, **layout)
    return costs_of(case, get_assumptions("h200-measured"))


def test_a_chunk_is_its_share_of_rows_with_costs_of_its_own() -> None:
    whole, chunk = sliced("tutel", 1), sliced("tutel", 4)
    for pass_ in (Pass.F, Pass.B, Pass.W):
        expert = Action(Kind.EXPERT, pass_, 1)
        assert chunk.flops(expert) * 4 == pytest.approx(whole.flops(expert))
        assert (chunk.seconds(expert) * 4 > whole.seconds(expert)).all()
    for kind, pass_ in product((Kind.DISPATCH, Kind.COMBINE), (Pass.F, Pass.B)):
        sent = Action(kind, pass_, 1)
        assert chunk.message(sent).num_bytes * 4 == pytest.approx(whole.message(sent).num_bytes)
        assert chunk.ports(sent).latency_s == pytest.approx(whole.ports(sent).latency_s)
    for held in (Held.FORWARD, Held.BACKWARD):
        expert = Action(Kind.EXPERT, Pass.F if held is Held.FORWARD else Pass.B, 1)
        assert chunk.held_bytes(held, expert) * 4 == pytest.approx(whole.held_bytes(held, expert))
    # Attention is not cut; it packs every chunk with a kernel of its own.
    attention = Action(Kind.ATTENTION, Pass.F, 1)
    assert chunk.flops(attention) == pytest.approx(whole.flops(attention))
    assert chunk.seconds(attention) - whole.seconds(attention) == pytest.approx(3 * whole.assumed.kernel_s)


def test_few_rows_a_chunk_read_the_experts_weights_once_a_chunk() -> None:
    expert = Action(Kind.EXPERT, Pass.F, 1)
    whole, chunk = (costs_of(make_case("tutel", "mixtral-8x7b", ep=2, seq_len=64, chunks=chunks)) for chunks in (1, 8))
    assert chunk.seconds(expert) == pytest.approx(whole.seconds(expert), rel=0.02)


@pytest.mark.parametrize("comm_sms", [4, 20, 32])
def test_a_fused_exchange_takes_sms_from_the_experts_and_nothing_a_chunk(comm_sms: int) -> None:
    plain, fused = sliced("ep", 1), sliced("comet", 8, comm_sms=comm_sms)
    for pass_, factor in ((Pass.F, 132 / (132 - comm_sms)), (Pass.B, 132 / (132 - comm_sms)), (Pass.W, 1.0)):
        expert = Action(Kind.EXPERT, pass_, 1)
        assert fused.seconds(expert) * 8 == pytest.approx(plain.seconds(expert) * factor)
    attention = Action(Kind.ATTENTION, Pass.F, 1)
    assert fused.seconds(attention) == pytest.approx(plain.seconds(attention))
    share = min(1.0, comm_sms / 20)
    for kind in (Kind.DISPATCH, Kind.COMBINE):
        slow, fast = fused.ports(Action(kind, Pass.F, 1)), plain.ports(Action(kind, Pass.F, 1))
        assert slow.nvlink_send_s * 8 * share == pytest.approx(fast.nvlink_send_s)
        assert slow.latency_s == pytest.approx(fast.latency_s)
    assert not any(column.any() for column in fused.with_free_communication().ports(Action(Kind.DISPATCH)))


def test_sms_are_not_taken_twice() -> None:
    case = make_case("comet", "mixtral-8x7b", ep=8, seq_len=4096, chunks=8, comm_sms=16)
    expert = Action(Kind.EXPERT, Pass.F)
    usual = costs_of(case, DATASHEET).seconds(expert)
    for everywhere, taken in ((8, 16), (32, 32)):
        also = costs_of(case, DATASHEET.with_overrides([f"communication_sms={everywhere}"])).seconds(expert)
        assert also == pytest.approx(usual * (132 - 16) / (132 - taken))


def test_a_fused_kernel_needs_sms_for_both() -> None:
    with pytest.raises(BadInput, match=r"layout\.comm_sms: 0"):
        plan_of(make_case("comet", ep=2, comm_sms=0))
    with pytest.raises(BadInput, match=r"layout\.comm_sms: 132 .* less than 132 SMs"):
        costs_of(make_case("comet", ep=2, comm_sms=132)).seconds(Action(Kind.EXPERT))


def test_free_communication_is_free() -> None:
    costs = costs_of(make_case("ep", ep=4, pp=2, cluster="h800x2")).with_free_communication()
    assert all(costs.transfer_s(action) == 0 for action in actions_of(costs) if action.kind not in COMPUTE)
    assert costs.sync_s("S0") == 0


def test_load_imbalance_is_that_of_the_worst_layer() -> None:
    assert m2n().load_imbalance == pytest.approx(1)
    assert costs_of(with_routing(make_case("ep", ep=4), "hot-rank")).load_imbalance == pytest.approx(4)


def test_a_transfer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInput, match=r"transfer: 'residual:F0.0' is not valid"):
        costs_of(make_case("ep", ep=2)).message(Action(Kind.RESIDUAL))


# Of a value that differs from both sets' own, and the total that it moves.
OVERRIDES = {
    "gemm": "0.3",
    "grouped_gemm": "0.3",
    "grouped_gemm_backward": "0.3",
    "attention_forward": "0.3",
    "attention_backward": "0.3",
    "attention_half_span": "9000",
    "attention_backward_factor": "4",
    "hbm": "0.3",
    "optimizer": "0.3",
    "nvlink": "0.3",
    "nic_all_to_all": "0.3",
    "nic_many_to_many": "0.3",
    "nic_collective": "0.3",
    "cross_rail": "0.3",
    "incast": "0.5",
    "transfer_s": "0.5",
    "kernel_s": "0.5",
    "communication_sms": "64",
    "saturating_sms": "40",
    "tensor_exposed": "0.5",
    "ring_exposed": "0.5",
    "host_link": "0.001",
}
MEMORY_OVERRIDES = {"context_bytes": "9000000000", "communicator_bytes": "9000000000", "fragmentation": "0.5"}


def all_seconds(assumed: Assumptions) -> float:
    """Everything that takes time, in layouts that use every link."""
    total = 0.0
    for system, layout in (
        ("ep", {"ep": 16}),
        ("ep", {"ep": 16, "tp": 2, "cp": 4, "offload": "state"}),
        ("comet", {"ep": 16, "chunks": 8, "comm_sms": 16}),
        ("disagmoe", {"attention_ranks": 8, "expert_ranks": 4, "groups": 2}),
    ):
        case = make_case(system, "qwen3-30b", cluster="h800x6", seq_len=8192, replicas=2, **layout)
        costs = costs_of(case, assumed)
        for action in actions_of(costs):
            is_compute = action.kind in COMPUTE
            total += float(costs.seconds(action).sum()) if is_compute else costs.transfer_s(action)
        total += sum(costs.sync_s(group.name) + costs.update_s(group.name) for group in costs.placement.groups)
    return total


@pytest.mark.parametrize("name", sorted(OVERRIDES))
def test_every_assumption_takes_effect(name: str) -> None:
    assumed = get_assumptions("h200-measured")
    changed = assumed.with_overrides([f"{name}={OVERRIDES[name]}"])
    ratio = all_seconds(changed) / all_seconds(assumed)
    assert ratio < 1 - 1e-6 if OVERRIDES[name] == "0.5" and name.endswith("exposed") else ratio > 1 + 1e-6


@pytest.mark.parametrize("name", sorted(MEMORY_OVERRIDES))
def test_every_assumption_on_memory_takes_effect(name: str) -> None:
    assumed = get_assumptions("h200-measured")
    case = make_case("ep", ep=2)
    more = costs_of(case, assumed.with_overrides([f"{name}={MEMORY_OVERRIDES[name]}"]))
    assert more.static_bytes("S0") > costs_of(case, assumed).static_bytes("S0") + 2**30


def test_every_assumption_has_a_reason_and_a_test() -> None:
    assert set(Assumptions.model_fields) == set(REASONS) == {*OVERRIDES, *MEMORY_OVERRIDES}


def test_a_set_that_departs_from_the_default_does_so_in_one_field_for_a_reason() -> None:
    default = ASSUMPTIONS[DEFAULT_ASSUMPTIONS].model_dump()
    assert set(ASSUMPTIONS) == {"datasheet", DEFAULT_ASSUMPTIONS, *DEPARTURES}
    for name, (field, value, why) in DEPARTURES.items():
        assert ASSUMPTIONS[name].model_dump() == default | {field: value}
        assert value != default[field] and why
        assert get_assumptions(DEFAULT_ASSUMPTIONS, [f"{field}={value}"]) == ASSUMPTIONS[name]


def test_a_ranks_reserve_counts_its_communicators() -> None:
    """Two replicas of two expert ranks: exchanges, sums of replicated parameters, sums of expert shards."""
    assumed = get_assumptions("datasheet", ["context_bytes=1000", "communicator_bytes=10", "fragmentation=0.5"])
    half = 81559 * 2**20 / 2
    both = costs_of(make_case("ep", ep=2, replicas=2, cluster="h800x2"), assumed)
    assert both.static_parts("S0")["reserve"] == 1000 + 3 * 10 + half
    once = costs_of(make_case("ep", ep=2, cluster="h800x2"), assumed)
    assert once.static_parts("S0")["reserve"] == 1000 + 2 * 10 + half
    alone = costs_of(make_case("ep", ep=1, cluster="h800x2"), assumed)
    assert alone.static_parts("S0")["reserve"] == 1000 + half
    assert sum(both.static_parts("S0").values()) == both.static_bytes("S0")


def test_a_layout_that_fits_but_for_the_reserve_does_not_fit() -> None:
    """Bound and simulation agree on it, and say what the memory is for."""
    case = make_case("ep", "qwen3-30b", cluster="h800x2", ep=16, seq_len=4096, recompute="full")
    found = predict.predict(case, DATASHEET)
    assert not found.missing_bytes
    assert sum(found.memory_parts.values()) == pytest.approx(found.peak_memory_bytes)
    assert found.memory_parts["reserve"] == 0
    share = 1.01 - found.peak_memory_bytes / case.cluster.gpu.memory_bytes
    fragmented = DATASHEET.with_overrides([f"fragmentation={share}"])
    again = predict.predict(case, fragmented)
    assert again.missing_bytes
    reserve = share * case.cluster.gpu.memory_bytes
    assert again.memory_parts["reserve"] == pytest.approx(reserve)
    assert again.peak_memory_bytes == pytest.approx(found.peak_memory_bytes + reserve)
    placement = placement_of(case)
    least = least_bytes(case, placement, costs_of(case, fragmented))
    assert least == pytest.approx(least_bytes(case, placement, costs_of(case)) + reserve)
    assert least <= again.peak_memory_bytes


@pytest.mark.parametrize("name", sorted(ASSUMPTIONS))
def test_a_sets_text_gives_it_again(name: str) -> None:
    assumed = ASSUMPTIONS[name]
    assert get_assumptions("datasheet", str(assumed).split()) == assumed


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("gem=1", "did you mean 'gemm'"),
        ("gemm", "key=value"),
        ("gemm=fast", "a number"),
        ("gemm=2", "less than or equal to 1"),
        ("gemm=nan", "finite"),
        ("communication_sms=1.5", "a whole number"),
    ],
)
def test_bad_overrides_say_what_is_allowed(pair: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        DATASHEET.with_overrides([pair])


def test_bad_names_and_too_many_sms() -> None:
    with pytest.raises(BadInput, match="datasheet, h200-measured"):
        get_assumptions("data-sheet")
    greedy = DATASHEET.with_overrides(["communication_sms=132"])
    with pytest.raises(BadInput, match="less than 132 SMs"):
        costs_of(make_case("ep", ep=2), greedy).seconds(Action(Kind.HEAD))


def test_an_unknown_dtype_of_the_gpu_is_named() -> None:
    cluster = get_cluster("h800x1")
    gpu = cluster.gpu.model_copy(update={"peak_tflops": {"fp8": 1.0}})
    case = make_case("ep", get_model("tiny"), ep=2)
    lacking = case.model_copy(update={"cluster": cluster.model_copy(update={"gpu": gpu})})
    with pytest.raises(BadInput, match="fp8"):
        costs_of(lacking).seconds(Action(Kind.HEAD))
