"""Tensor and context parallelism of attention: FLOPs conserved, bytes by hand, memory, refusals, the spaces."""

from typing import Any

import pytest
from cases import make_case

from bench import predict
from bench.action import COMPUTE, Action, Kind, Pass
from bench.assumptions import Assumptions, get_assumptions
from bench.case import Case, CaseSpec, Layout, Workload, batch_of
from bench.clusters import get_cluster
from bench.cost import Costs
from bench.edges import edges
from bench.errors import BadInput
from bench.flops import num_parameters, parameters, step_flops
from bench.models import get_model
from bench.program import Held
from bench.sequence import CUT, Exchange, ring_rows
from bench.system import get_system

DATASHEET = get_assumptions("datasheet")
COLOCATED = {"ep": 8, "cluster": "h800x2"}
APART = {"attention_ranks": 8, "expert_ranks": 4, "groups": 2, "cluster": "h800x3"}
SHARES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]


def costs_of(case: Case, assumed: Assumptions = DATASHEET) -> Costs:
    return predict.costs_of(case, get_system(case.system).placement(case), assumed)


def shared(tp: int, cp: int, model: str = "tiny", system: str = "ep", seq_len: int = 64, **more: Any) -> Case:
    where = APART if system == "disagmoe" else COLOCATED
    return make_case(system, model, seq_len=seq_len, tp=tp, cp=cp, **{**where, **more})


@pytest.mark.parametrize(("tp", "cp"), SHARES)
@pytest.mark.parametrize("system", ["ep", "disagmoe"])
def test_every_model_flop_is_done_once_however_sequences_are_shared(system: str, tp: int, cp: int) -> None:
    case = shared(tp, cp, "tiny-shared", system)
    costs = costs_of(case)
    graph = edges(case.model, costs.placement)
    actions = {end for edge in graph for end in (edge.src, edge.dst) if end.kind in COMPUTE}
    done = sum(float(costs.flops(action).sum()) for action in actions)
    batch = batch_of(case, costs.placement)
    assert batch.num_microbatches == 4
    assert batch.num_sequences * case.workload.seq_len == case.workload.global_batch_tokens
    expected = step_flops(case.model, case.workload.seq_len, case.workload.global_batch_tokens)
    assert done * batch.num_microbatches == pytest.approx(expected)


def test_nothing_is_exchanged_and_no_id_changes_where_nothing_is_shared() -> None:
    case = shared(1, 1)
    attention = Action(Kind.ATTENTION)
    assert costs_of(case).sequence_exchanges(attention) == (Exchange(0, 0), Exchange(0, 0))
    assert not {"tp", "cp"} & case.layout.model_dump().keys()
    assert case.layout == Layout.from_pairs(str(case.layout).split())
    split = shared(2, 2)
    assert Case.parse(split.to_text()) == split
    assert split.id != case.id


def test_exchanged_bytes_by_hand() -> None:
    """A sequence of 64 tokens on 2 x 2 ranks, 16 each: rows of 64 elements; two key-value heads of 16; bf16."""
    costs = costs_of(shared(2, 2))
    gathered, keys_and_values = 16 * 64 * 2, 16 * 2 * (2 * 16) * 2
    expected = {
        Pass.F: (Exchange(2 * gathered, 2), Exchange(keys_and_values, 1)),
        Pass.R: (Exchange(2 * gathered, 2), Exchange(keys_and_values, 1)),
        Pass.B: (Exchange(2 * gathered, 2), Exchange(2 * keys_and_values, 1)),
        Pass.W: (Exchange(gathered, 1), Exchange(0, 0)),
    }
    for pass_, exchanges in expected.items():
        assert costs.sequence_exchanges(Action(Kind.ATTENTION, pass_)) == exchanges
    four = costs_of(shared(1, 4)).sequence_exchanges(Action(Kind.ATTENTION))
    assert four == (Exchange(0, 0), Exchange(3 * keys_and_values, 3))


def test_latents_are_gathered_in_place_of_rows() -> None:
    """DeepSeek-V2-Lite: no query latent, so rows of 2048; a latent of 512 and 64 of the keys' positions beside them."""
    tensor, _ = costs_of(shared(4, 1, "deepseek-v2-lite")).sequence_exchanges(Action(Kind.ATTENTION))
    assert tensor == Exchange(3 * 16 * (2048 + 2048 + 512 + 64) * 2, 2)


def test_a_window_needs_only_the_rows_before_each_piece() -> None:
    model, layout = get_model("gpt-oss-120b"), Layout(cp=4)
    assert ring_rows(model, layout, 1, 2048, 8192) == 3 * 2048  # all
    assert ring_rows(model, layout, 0, 2048, 8192) == 2 * 127  # a window of 128, one sequence of two pieces
    assert ring_rows(model, layout, 0, 32, 128) == 3 * 32  # shorter than the window


def test_exchanges_lengthen_attention_by_what_is_not_hidden() -> None:
    case = shared(2, 1)
    costs = costs_of(case)
    attention = Action(Kind.ATTENTION)
    alone = costs.with_free_communication().seconds(attention)
    # Both over NVLink, at 160 GB/s with 5 us each.
    assert costs.seconds(attention) - alone == pytest.approx(2 * (32 * 64 * 2 / 160e9 + 5e-6))
    half = costs_of(case, get_assumptions("datasheet", ["tensor_exposed=0.5"]))
    assert half.seconds(attention) - alone == pytest.approx(32 * 64 * 2 / 160e9 + 5e-6)


def test_a_ring_hides_behind_the_core_as_long_as_this_takes() -> None:
    attention = Action(Kind.ATTENTION)

    def added(seq_len: int, *overrides: str) -> float:
        costs = costs_of(shared(1, 2, "qwen3-30b", seq_len=seq_len), get_assumptions("datasheet", overrides))
        return float((costs.seconds(attention) - costs.with_free_communication().seconds(attention))[0])

    # 4 key-value heads of 128, keys and values; the core: 4 x 32 x 128 FLOPs a pair.
    ring = 16384 * 2 * 4 * 128 * 2 / 160e9 + 5e-6
    assert added(32768) == 0
    assert added(32768, "ring_exposed=0.25") == pytest.approx(0.25 * ring)
    short = 32 * 2 * 4 * 128 * 2 / 160e9 + 5e-6
    core = 32 * (2 * 32 + 2 * 2 * 4) * 128 * 2 / 3.35e12  # bound by memory: queries, outputs, keys and values of both
    assert added(64) == pytest.approx(short - core)


def test_attention_weights_are_cut_over_tensor_parallel_ranks_only() -> None:
    """And so are their gradients' sums; norms, router, embedding and head stay whole."""
    case = shared(2, 2, replicas=2, shard_state=False)
    costs = costs_of(case)
    model = case.model
    total, experts = num_parameters(model).total, 4 * 8 * 3 * 64 * 96
    cut = 4 * sum(size for name, size in parameters(model, "attention", 0).items() if name in CUT)
    assert cut == 4 * (64 * (64 + 2 * 32) + 64 * 64)
    held = total - experts - cut + cut / 2 + experts / 8
    assert costs.static_bytes("S0") == 18 * held
    sharded = costs_of(shared(2, 2, replicas=2))
    # Of 16 ranks every other one has the same heads.
    whole = total - experts - cut
    expected = 6 * held + 12 * (whole / 16 + cut / 2 / 8 + experts / 8 / 2)
    assert sharded.static_bytes("S0") == pytest.approx(expected, abs=12)
    assert sharded.sync_bytes("S0") == pytest.approx(
        (4 + 2) * (whole * 15 / 16 + cut / 2 * 7 / 8 + experts / 8 / 2), abs=12
    )


def test_the_reserve_counts_a_communicator_for_each_way_of_sharing() -> None:
    counted = get_assumptions("datasheet", ["communicator_bytes=10"])
    reserves = [costs_of(shared(*share), counted).static_parts("S0")["reserve"] for share in ((1, 1), (1, 2), (2, 2))]
    assert reserves == [20, 30, 50]  # exchanges and sums; of weights that are cut as well


def test_ranks_that_share_a_sequence_hold_their_part_of_it() -> None:
    forward, backward = Action(Kind.ATTENTION), Action(Kind.ATTENTION, Pass.B)
    whole, parts = costs_of(shared(1, 1)), costs_of(shared(2, 2))
    assert parts.held_bytes(Held.FORWARD, forward) == pytest.approx(whole.held_bytes(Held.FORWARD, forward) / 4)
    # The gathered gradient of the output: the rows of one other rank.
    kept = whole.held_bytes(Held.BACKWARD, backward) / 4 + 16 * 64 * 2
    assert parts.held_bytes(Held.BACKWARD, backward) == pytest.approx(kept)
    # Gathered rows, and two buffers of keys and values (backward: and their gradients).
    assert parts.working_bytes(forward) == pytest.approx([(32 * 64 + 2 * 16 * 64) * 2] * 8)
    assert parts.working_bytes(backward) == pytest.approx([(32 * 64 + 4 * 16 * 64) * 2] * 8)
    assert not whole.working_bytes(forward).any()


@pytest.mark.parametrize("system", ["ep", "disagmoe"])
def test_sharing_sequences_needs_less_memory_for_activations(system: str) -> None:
    def activations(cp: int) -> float:
        found = predict.predict(shared(1, cp, system=system, seq_len=4096), DATASHEET)
        assert found.bound_s <= found.metrics.step_time_s
        return found.memory_parts["activations and messages"]

    assert activations(4) < 0.3 * activations(1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, r"layout\.tp: 3 .* divides the 8 ranks"),
        ({"cp": 8, "ep": 16, "tp": 2, "model": "qwen3-30b"}, r"layout\.cp: 8 .* divides the 8 GPUs of a node"),
        ({"tp": 4}, r"layout\.tp: 4 .* 4 heads and 2 key-value heads"),
        ({"cp": 8, "seq_len": 24}, r"layout\.cp: 8 .* pieces \(16\)"),
        ({"chunks": 8, "cp": 8, "seq_len": 32, "system": "tutel"}, r"layout\.chunks: 8 .* 4 tokens"),
    ],
)
def test_what_cannot_be_shared_is_refused(layout: dict[str, Any], message: str) -> None:
    fields = {"system": "ep", "seq_len": 32} | COLOCATED | layout
    system = str(fields.pop("system"))
    with pytest.raises(BadInput, match=message):
        costs_of(make_case(system, **fields))


@pytest.mark.parametrize(("field", "value"), [("tp", 2), ("cp", 2), ("ranks_over_nodes", "strided")])
def test_execution_refuses_it_before_anything_runs(field: str, value: Any) -> None:
    from bench.execute.job import Job

    with pytest.raises(BadInput, match=rf"layout\.{field}: '?{value}'? .* simulated only"):
        Job.of(shared(**{"tp": 1, "cp": 1, field: value}))


@pytest.mark.parametrize("system", ["ep", "tutel", "dualpipe", "dualpipe-v", "disagmoe"])
def test_spaces_share_sequences_of_any_length_and_number(system: str) -> None:
    def space(sequences: int, seq_len: int) -> list[Layout]:
        work = Workload(seq_len=seq_len, global_batch_tokens=sequences * seq_len)
        cluster = get_cluster("h800x2")
        spec = CaseSpec(model=get_model("tiny"), cluster=cluster, workload=work, system=system)
        known = get_system(system)
        found = list(known.space(spec))
        for layout in found:
            case = spec.with_layout(layout)
            batch_of(case, known.placement(case))  # refuses what does not divide
        return found

    for found in (space(1024, 64), space(16, 64), space(1024, 32768)):
        assert {layout.cp for layout in found} == {1, 2, 4, 8}
        assert {layout.tp for layout in found} == {1, 2}
