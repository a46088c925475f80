"""What actions and transfers take: closed forms, counts, and what does not depend on what."""

from itertools import product
from math import comb

import numpy as np
import pytest
from cases import cases, make_case
from hypothesis import given, settings

from bench.action import COMPUTE, Action, Kind, Pass
from bench.assumptions import get_assumptions
from bench.case import Case, batch_of
from bench.errors import BadInput
from bench.flops import attention_pairs, step_flops
from bench.models import get_model
from bench.program import Held
from bench.roofline import attention_core
from bench.system import plan_of
from tests.costing import DATASHEET, actions_of, costs_of, m2n, sliced, with_routing


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


def test_costs_do_not_depend_on_the_micro_batch() -> None:
    costs = m2n()
    for kind in (Kind.ATTENTION, Kind.DISPATCH):
        first, later = Action(kind, Pass.F, 1, 0), Action(kind, Pass.F, 1, 3)
        cost = costs.seconds if kind is Kind.ATTENTION else costs.transfer_s
        assert np.array_equal(cost(first), cost(later))


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
