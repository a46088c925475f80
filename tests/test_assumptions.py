"""Assumptions: each takes effect, has a reason, and is refused where it cannot be."""

import pytest
from cases import make_case

from bench import predict
from bench.action import COMPUTE, Action, Kind
from bench.assumptions import ASSUMPTIONS, DEFAULT_ASSUMPTIONS, DEPARTURES, REASONS, Assumptions, get_assumptions
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.limits import least_bytes
from bench.models import get_model
from tests.costing import DATASHEET, actions_of, costs_of, placement_of

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
