"""The shift of the attention groups' turn: windowed layers are spread over the groups, and nothing else changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.assumptions import get_assumptions
from bench.case import Layout
from bench.errors import BadInput
from bench.flops import part_flops
from bench.models import Model, get_model
from bench.predict import predict
from bench.system import systems
from bench.tune import with_fixed
from experiments.fig7 import spec_of
from systems.disagmoe.placement import place
from systems.disagmoe.planner.allocation import allocate
from systems.disagmoe.planner.neighbours import neighbours
from systems.disagmoe.planner.problem import Choices, problem
from systems.disagmoe.shift import best_shift, shift_of, turns
from tests.cases import make_case

GPT = get_model("gpt-oss-120b")


def work_of_groups(model: Model, layout: Layout, seq_len: int) -> np.ndarray:
    """[groups]: FLOPs of attention, router and head of a token, forward."""
    placement, sums = place(model, layout), dict.fromkeys((f"A{g}" for g in range(layout.groups)), 0.0)
    for layer, home in enumerate(placement.attention):
        for part in ("attention", "router"):
            sums[home] += part_flops(model, part, layer, "F", tokens=1.0, seq_len=seq_len)
    sums[placement.head] += part_flops(model, "head", 0, "F", tokens=1.0, seq_len=seq_len)
    return np.array(list(sums.values()))


@pytest.mark.parametrize("seq_len", [32768, 131072])
@pytest.mark.parametrize("groups", [2, 4])
def test_no_group_of_a_windowed_model_has_far_more_to_do_than_the_mean(groups: int, seq_len: int) -> None:
    shift_at = shift_of(GPT, seq_len, groups)
    plain, shifted = (
        work_of_groups(GPT, Layout.make(groups=groups, shift_at=each), seq_len) for each in (None, shift_at)
    )
    assert plain.max() / plain.mean() > 1.4
    assert shifted.max() / shifted.mean() < (1.1 if groups == 2 else 1.25)


def test_layers_behind_a_shift_are_one_group_further_and_their_experts_are_not() -> None:
    placement = place(get_model("tiny-window"), Layout.make(groups=2, shift_at=2))
    placement.validate()
    assert placement.attention == ("A0", "A1", "A1", "A0")
    assert placement.expert == ("F0", "F1", "F0", "F1")
    assert placement.head == "A1"


@given(st.lists(st.integers(1, 50), min_size=2, max_size=12), st.integers(0, 100), st.integers(1, 4), st.integers(1, 3))
def test_the_best_shift_is_the_one_that_exhaustive_search_finds(
    work: list[int], head: int, groups: int, chunk: int
) -> None:
    def busiest(shift_at: int | None) -> float:
        sums = [0.0] * groups
        for group, one in zip(turns(len(work), groups, chunk, shift_at), [*work, head], strict=True):
            sums[group] += one
        return max(sums)

    found = best_shift([*work, head], groups, chunk)
    least = min((busiest(each) for each in range(chunk, len(work), chunk)), default=busiest(None))
    if found is None:
        assert least >= 0.98 * busiest(None)
    else:
        assert found % chunk == 0 and busiest(found) == least < 0.98 * busiest(None)


@pytest.mark.parametrize("model", ["qwen3-235b", "deepseek-moe-16b"])
def test_layers_of_a_model_without_windows_stay_in_turn(model: str) -> None:
    assert shift_of(get_model(model), 32768, 4) is None
    space = systems()["disagmoe"].space(spec_of(model, 32768, "disagmoe"))
    assert all(layout.shift_at is None for layout in space)


def test_the_space_and_the_planner_shift_a_windowed_model() -> None:
    spec = spec_of("gpt-oss-120b", 32768, "disagmoe")
    of_groups: dict[int, set[int | None]] = {}
    for layout in systems()["disagmoe"].space(spec):
        of_groups.setdefault(layout.groups, set()).add(layout.shift_at)
    assert of_groups[1] == {None}
    assert of_groups[2] == {shift_of(GPT, 32768, 2)} and None not in of_groups[2]
    choices = Choices(groups=(2,), recompute=("redispatch",), copies=("node",))
    layout = allocate(problem(spec, get_assumptions(), choices)).layout
    assert layout.shift_at is not None
    assert place(GPT, layout).head == f"A{layout.head_group}"


@pytest.mark.parametrize("chunk", [1, 2, 3, 9])
def test_a_shift_follows_from_groups_and_chunks_that_are_fixed(chunk: int) -> None:
    spec = spec_of("gpt-oss-120b", 8192, "disagmoe")
    fields = {"attention_ranks": 16, "expert_ranks": 16, "groups": 2, "shift_at": 1, "head_group": 1}
    pairs = ["groups=4", f"layers_per_chunk={chunk}"]
    layout = with_fixed(spec, pairs, Layout.make(**fields))
    assert layout.shift_at == (shift_of(GPT, 8192, 4) if chunk == 1 else None)
    place(GPT, layout)
    assert with_fixed(spec, [*pairs, f"shift_at={3 * chunk}"], layout).shift_at == 3 * chunk
    assert with_fixed(spec, ["mbs=2"], Layout.make(**fields)).shift_at == 1


def test_a_neighbour_is_dealt_in_turn_or_shifted() -> None:
    spec = spec_of("gpt-oss-120b", 32768, "disagmoe")
    fields = {"attention_ranks": 16, "expert_ranks": 16, "groups": 2, "replicas": 2, "copies": "node"}
    plain, shifted = (Layout.make(shift_at=each, **fields) for each in (None, shift_of(GPT, 32768, 2)))
    assert shifted in {near for near, _ in neighbours(spec, plain)}
    assert plain in {near for near, _ in neighbours(spec, shifted)}
    four = {near.shift_at for near, _ in neighbours(spec, shifted) if near.groups == 4}
    assert four == {shift_of(GPT, 32768, 4)}


def test_a_shift_shortens_the_step_of_a_windowed_model() -> None:
    """Two pairs of groups on 32K tokens, where attention takes the longest."""
    fields = {"attention_ranks": 8, "expert_ranks": 16, "groups": 2, "replicas": 2, "cp": 8, "copies": "node"}
    case = make_case("disagmoe", GPT, "h800x16", microbatches=16, seq_len=32768, round_length=2, deferred_w=4, **fields)
    shifted = case.model_copy(update={"layout": case.layout.model_copy(update={"shift_at": shift_of(GPT, 32768, 2)})})
    plain_s, shifted_s = (predict(each, get_assumptions(), rough=True).step_time_s for each in (case, shifted))
    assert shifted_s < 0.95 * plain_s


@pytest.mark.parametrize("fields", [{"shift_at": 4}, {"shift_at": 3, "layers_per_chunk": 2}])
def test_a_shift_at_no_chunk_of_the_model_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=r"layout\.shift_at"):
        place(get_model("tiny-window"), Layout.make(groups=2, **fields))
