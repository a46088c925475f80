"""Cases, workloads and layouts: strict, hashable by content, text and object inverse."""

import pytest
from hypothesis import given, settings

from bench.case import Case, Layout, Workload, batch_of
from bench.errors import BadInput
from bench.system import get_system, plan_of
from tests.cases import cases, make_case


@settings(max_examples=20, deadline=None)
@given(cases())
def test_text_round_trip_keeps_the_id(case: Case) -> None:
    again = Case.parse(case.to_text())
    assert again == case and again.id == case.id
    assert Layout.from_pairs(str(case.layout).split()) == case.layout


def test_the_id_follows_the_content() -> None:
    case = make_case("ep", ep=2)
    assert case.id != case.model_copy(update={"layout": Layout(ep=4, replicas=1)}).id
    assert len(case.id) == 16


@settings(max_examples=20, deadline=None)
@given(cases())
def test_the_batch_makes_up_the_global_batch(case: Case) -> None:
    batch = batch_of(case, plan_of(case).placement)
    assert batch.num_sequences * case.workload.seq_len == case.workload.global_batch_tokens


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("mbs", "key=value"),
        ("mbs=two", "a whole number"),
        ("mbs=0", "mbs"),
        ("mbs=99999999", "mbs"),
        ("mb=2", "did you mean 'mbs'"),
        ("copies=pod", "copies"),
        ("shard_state=yes", "true or false"),
        ("recompute=some", "recompute"),
    ],
)
def test_bad_layout_words(pair: str, says: str) -> None:
    with pytest.raises(BadInput) as refused:
        Layout.from_pairs([pair])
    assert says in str(refused.value)


def test_a_field_the_system_does_not_use_is_refused() -> None:
    with pytest.raises(BadInput, match=r"layout\.groups: 2 .* not used by ep"):
        plan_of(make_case("ep", groups=2))


@pytest.mark.parametrize(
    ("system", "layout", "field"),
    [
        ("ep", {"ep": 3}, "layout.ep"),
        ("ep", {"pp": 8, "ep": 1}, "layout.pp"),
        ("ep", {"vpp": 2}, "layout.vpp"),
        ("ep", {"ep": 2, "pp": 4, "replicas": 2}, "layout"),
        ("disagmoe", {"expert_ranks": 3}, "layout.expert_ranks"),
        ("disagmoe", {"groups": 3, "layers_per_chunk": 2}, "layout.groups"),
        ("disagmoe", {"head_group": 1}, "layout.head_group"),
        ("disagmoe", {"shared_on": "expert"}, "layout.shared_on"),
        ("disagmoe", {"attention_ranks": 8}, "layout"),
    ],
)
def test_layouts_that_cannot_be(system: str, layout: dict[str, int], field: str) -> None:
    with pytest.raises(BadInput) as refused:
        plan_of(make_case(system, **layout))
    assert refused.value.field == field


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    case = make_case("ep", ep=2, microbatches=3)
    odd = case.model_copy(update={"workload": Workload(seq_len=16, global_batch_tokens=16 * 7)})
    with pytest.raises(BadInput, match="global_batch_tokens"):
        plan_of(odd)
    with pytest.raises(BadInput, match="multiple of 16"):
        Workload(seq_len=16, global_batch_tokens=17).num_sequences  # noqa: B018


def test_unknown_systems_list_the_known() -> None:
    with pytest.raises(BadInput, match="disagmoe"):
        get_system("disag")
