"""Actions: text and packed forms are inverse, and bad text is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.action import END_OF_STEP, Action, Kind, Pass, at_microbatch, pack, unpack, view
from bench.errors import BadInput

ACTIONS = st.builds(
    Action,
    st.sampled_from([kind for kind in Kind if kind not in END_OF_STEP]),
    st.sampled_from(list(Pass)),
    st.integers(0, 2**14 - 1),
    st.integers(0, 2**20 - 1),
    st.integers(0, 2**10 - 1),
)


@given(ACTIONS)
def test_text_and_code_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert view(int(pack([action])[0])) == action


@given(ACTIONS, st.integers(0, 1000))
def test_shifting_a_code_moves_only_the_microbatch(action: Action, by: int) -> None:
    moved = view(int(at_microbatch(pack([action]), by)[0]))
    assert moved == action._replace(microbatch=action.microbatch + by)


def test_columns_keep_every_field_apart() -> None:
    columns = unpack(pack([Action(Kind.EXPERT, Pass.W, 3, 5, 7), Action(Kind.SYNC)]))
    assert [list(column) for column in columns] == [[2, 9], [2, 0], [3, 0], [5, 0], [7, 0]]


def test_the_text_form_is_the_documented_one() -> None:
    assert str(Action(Kind.ATTENTION, Pass.F, 3, 5)) == "attn:F3.5"
    assert str(Action(Kind.DISPATCH, Pass.B, 0, 12, 1)) == "dispatch:B0.12.1"
    assert str(Action(Kind.UPDATE)) == "update"


@pytest.mark.parametrize(
    "text", ["", "attn", "attn:F3", "attn:X3.5", "atn:F3.5", "sync:F0.0", "attn:F3.5.1.2", "attn:F-1.0"]
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="action") as refused:
        Action.parse(text)
    assert refused.value.value == text
