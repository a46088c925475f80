"""Timelines: columns of one length; text and object are inverse."""

import numpy as np
import pytest
from hypothesis import given, settings

from bench.assumptions import get_assumptions
from bench.case import Case
from bench.errors import BadInput
from bench.predict import predict
from bench.timeline import COLUMNS, Timeline
from tests.cases import cases


@settings(max_examples=10, deadline=None)
@given(cases())
def test_text_round_trip(case: Case) -> None:
    timeline = predict(case, get_assumptions("datasheet")).timeline
    again = Timeline.parse(timeline.to_text())
    assert (again.source, again.queues, again.stands_for) == (timeline.source, timeline.queues, timeline.stands_for)
    for name, kind in COLUMNS.items():
        assert np.array_equal(getattr(again, name), getattr(timeline, name))
        assert getattr(again, name).dtype == kind


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"source": "simulated"}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="timeline"):
        Timeline.parse(text)


def test_columns_have_one_length() -> None:
    columns = {name: np.zeros(2, dtype=kind) for name, kind in COLUMNS.items()}
    columns["end_s"] = np.zeros(3)
    with pytest.raises(BadInput, match="one length"):
        Timeline("simulated", (("A0", "compute"),), **columns)
