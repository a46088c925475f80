"""Plans: text and object are inverse, golden schedules, and text errors that name their line."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings

from bench.case import Case
from bench.errors import BadInput
from bench.plan import Plan
from bench.system import plan_of
from tests.cases import cases, make_case

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_CASES = {
    "ep-one-stage": make_case("ep", microbatches=2, ep=2),
    "ep-1f1b": make_case("ep", microbatches=4, ep=2, pp=2),
    "ep-interleaved": make_case("ep", microbatches=4, ep=1, pp=2, vpp=2),
    "megatron": make_case("megatron", microbatches=4, ep=1, pp=2, vpp=2, copies="expert"),
    "dualpipe": make_case("dualpipe", microbatches=8, ep=1, pp=4),
    "dualpipe-one-stage": make_case("dualpipe", microbatches=3, ep=2),
    "tutel": make_case("tutel", microbatches=2, ep=2, pp=2, chunks=2),
    "tutel-redispatch": make_case("tutel", "tiny-shared", microbatches=1, ep=2, chunks=4, recompute="redispatch"),
    "comet": make_case("comet", microbatches=1, ep=2, chunks=2, comm_sms=20),
    "disagmoe-one-group": make_case("disagmoe", microbatches=3, attention_ranks=1, expert_ranks=1),
    "disagmoe-two-groups": make_case(
        "disagmoe", microbatches=4, groups=2, attention_ranks=2, expert_ranks=1, round_length=2
    ),
    "disagmoe-shifted": make_case("disagmoe", "tiny-window", microbatches=3, groups=2, round_length=2, shift_at=2),
    "disagmoe-dense-layer": make_case("disagmoe", "tiny-shared", microbatches=2, groups=2, shared_on="expert"),
}


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden_schedules(name: str) -> None:
    """A change of order shows as a diff of a text file; UPDATE_GOLDEN=1 writes them anew."""
    text = str(plan_of(GOLDEN_CASES[name]))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@settings(max_examples=30, deadline=None)
@given(cases())
def test_text_round_trip(case: Case) -> None:
    plan = plan_of(case)
    assert Plan.parse(str(plan)) == plan


def test_comments_and_line_breaks_do_not_matter() -> None:
    text = str(plan_of(GOLDEN_CASES["ep-1f1b"]))
    loose = text.replace("sync update", "sync  # gradients\n\n  update")
    assert Plan.parse(loose) == Plan.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("attn:F0.0", "attn:Q0.0", "attn:Q0.0"),
        ("group S0 = 0..1", "group S0 0..1", "S0 0..1"),
        ("microbatches=4", "microbatches=four", "microbatches=N"),
        ("copies=rank", "copies=pod", "'pod'"),
        ("copies=rank", "copies=rank chunks=two", "chunks=N"),
        ("copies=rank", "copies=rank chunks=2000", "1 to 1024"),
        ("home head S1", "home head S9", "S9"),
        ("home join S0 S0 S1 S1\n", "", "join"),
        ("queue S1 hops", "queue S7 hops", "S7"),
    ],
)
def test_a_bad_text_names_what_is_wrong(old: str, new: str, says: str) -> None:
    text = str(plan_of(GOLDEN_CASES["ep-1f1b"]))
    assert old in text
    with pytest.raises(BadInput) as refused:
        Plan.parse(text.replace(old, new, 1))
    assert says in str(refused.value)


def test_a_bad_action_names_its_line() -> None:
    lines = str(plan_of(GOLDEN_CASES["ep-1f1b"])).splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "head:F0.0" in line)
    lines[number - 1] = lines[number - 1].replace("head:F0.0", "heap:F0.0")
    with pytest.raises(BadInput, match=f"line {number}"):
        Plan.parse("\n".join(lines))
