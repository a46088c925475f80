"""Timelines as pictures: what is drawn is the timeline, and narrow operations become shares of time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import PLACEMENT, one_layer, repeated, timeline

from bench.action import Kind
from bench.errors import BadInput
from bench.placement import Group, Placement
from bench.program import Op
from paper_figs import timeline as drawing
from paper_figs.action_colours import ACTION_COLOURS, ON_ITS_WAY, palette
from paper_figs.occupancy import shares, stacked
from paper_figs.style import save

pytest.importorskip("matplotlib")
pd = pytest.importorskip("pandas")


def texts(figure: Any) -> list[str]:
    from matplotlib.text import Text

    return [found.get_text() for found in figure.findobj(Text) if found.get_text()]


def boxes(ax: Any) -> list[tuple[float, float, float, float, tuple[float, ...]]]:
    """left, right, top, bottom and colour of every operation that a panel shows."""
    (found,) = (c for c in ax.collections if c.get_label() == "operations")
    colours = [tuple(colour) for colour in found.get_facecolors()]
    corners = [path.vertices for path in found.get_paths()]
    return [
        (c[:, 0].min(), c[:, 0].max(), c[:, 1].min(), c[:, 1].max(), colour)
        for c, colour in zip(corners, colours, strict=True)
    ]


def rgba(kind: Kind, pass_: int = 0) -> tuple[float, ...]:
    from matplotlib.colors import to_rgba

    return to_rgba(ACTION_COLOURS[kind][pass_])


def test_a_timeline_shows_every_group_at_its_times() -> None:
    ax = drawing.draw([("one layer", one_layer(), PLACEMENT)]).axes[0]
    # Of A0, rank 1 is busier.
    assert [label.get_text() for label in ax.get_yticklabels()] == ["A0.1", "F0"]
    drawn = boxes(ax)
    # Two of each of: attention, its dispatch, the combine it receives; three on the experts' side; two updates.
    assert len(drawn) == 14
    attention = sorted(box[:3] for box in drawn if box[4] == rgba(Kind.ATTENTION))
    assert attention == [pytest.approx((0, 1, 0)), pytest.approx((1, 2, 0))]
    experts = sorted(box[:3] for box in drawn if box[4] == rgba(Kind.EXPERT))
    assert experts == [pytest.approx((1.25, 2, 1)), pytest.approx((2.25, 3, 1))]
    # Sent and received stand in lanes below the computation, apart from each other.
    dispatches = sorted((box for box in drawn if box[4] == rgba(Kind.DISPATCH)), key=lambda box: box[2])
    sent, received = dispatches[:2], dispatches[2:]
    assert all(0.5 < box[2] < box[3] < 0.72 for box in sent)
    assert all(1.7 < box[2] < box[3] < 2 for box in received)
    assert "(ms)" in ax.get_xlabel()


def tint(kind: Kind) -> tuple[float, ...]:
    return tuple(palette()[ON_ITS_WAY + int(kind)].tolist())


def test_an_exchange_bound_by_latency_is_drawn_from_its_sender_on() -> None:
    """Bytes take microseconds, latency milliseconds: on its way from the first sender's start until it takes a port."""
    rows = [
        (0, "A0", "compute", Op.COMPUTE, "attn:F0.0", 0.0, 1e-3),
        (0, "A0", "send", Op.SEND, "dispatch:F0.0", 1e-3, 1.001e-3),
        (1, "A0", "send", Op.SEND, "dispatch:F0.0", 2e-3, 2.001e-3),
        (2, "F0", "recv/dispatch:F/A0", Op.RECV, "dispatch:F0.0", 5e-3, 5.001e-3),
        (2, "F0", "compute", Op.COMPUTE, "expert:F0.0", 5.001e-3, 6e-3),
    ]
    drawn = boxes(drawing.draw([("late", timeline(rows), PLACEMENT)]).axes[0])
    (way,) = (box for box in drawn if box[4] == pytest.approx(tint(Kind.DISPATCH)))
    assert way[:2] == pytest.approx((1, 5))
    assert 1.7 < way[2] < way[3] < 2


def test_a_serial_exchange_is_drawn_where_it_blocks_the_computation() -> None:
    rows = [
        (0, "S0", "compute", Op.COMPUTE, "attn:F0.0", 0.0, 1e-3),
        (0, "S0", "compute", Op.SEND, "dispatch:F0.0", 1e-3, 1.5e-3),
        (0, "S0", "compute", Op.RECV, "dispatch:F0.0", 3e-3, 3.5e-3),
        (0, "S0", "compute", Op.COMPUTE, "expert:F0.0", 3.5e-3, 4e-3),
    ]
    one = Placement((Group("S0", 0, 1),), "S0", "S0", ("S0",), ("S0",), ("S0",))
    drawn = boxes(drawing.draw([("serial", timeline(rows), one)]).axes[0])
    (way,) = (box for box in drawn if box[4] == pytest.approx(tint(Kind.DISPATCH)))
    assert way[:2] == pytest.approx((1.5, 3)) and way[3] == pytest.approx(0.5)
    lane = sorted(box[:2] for box in drawn if box[3] == pytest.approx(0.5))
    assert [end for _, end in lane[:-1]] == pytest.approx([begin for begin, _ in lane[1:]])  # no gap is left


def test_what_follows_a_title_in_its_second_line_stands_behind_the_step() -> None:
    figure = drawing.draw([("disagmoe\n" + "groups=2 " * 60, one_layer(), PLACEMENT)])
    shown = texts(figure)
    assert "disagmoe" in shown and "step 4.5 ms" in shown
    (details,) = (text for text in shown if text.startswith("groups=2"))
    assert details.endswith("…")


def test_every_rank_on_request_and_numbers_in_boxes() -> None:
    figure = drawing.draw([("one layer", one_layer(), PLACEMENT)], rows="ranks")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["A0.0", "A0.1", "F0"]
    assert len(boxes(figure.axes[0])) == len(one_layer())
    assert (
        sorted(text.get_text() for text in figure.axes[0].texts if text.get_text().isdigit()) == ["0"] * 3 + ["1"] * 3
    )


def test_a_window_cuts() -> None:
    ax = drawing.draw([("one layer", one_layer(), PLACEMENT)], window_s=(0.5e-3, 1.1e-3)).axes[0]
    assert ax.get_xlim() == pytest.approx((500, 1100))
    drawn = boxes(ax)
    assert sorted(box[:2] for box in drawn if box[4] == rgba(Kind.ATTENTION)) == [
        pytest.approx((500, 1000)),
        pytest.approx((1000, 1100)),
    ]
    assert not [box for box in drawn if box[4] == rgba(Kind.EXPERT)]


def test_panels_share_a_scale_and_each_says_its_source() -> None:
    panels = [("same", one_layer(), PLACEMENT), ("same", one_layer("measured", scale=3e-3), PLACEMENT)]
    figure = drawing.draw(panels)
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() == pytest.approx((0, 13.5))
    assert "simulated" in texts(figure)
    assert "measured, clocks within 5 µs" in texts(figure)
    assert "step 4.5 ms" in texts(figure)


def test_a_million_operations_can_be_drawn(tmp_path: Path) -> None:
    figure = drawing.draw([("long", repeated(1_000_000), PLACEMENT)], window_s=(0.1, 0.1000395))
    assert len(boxes(figure.axes[0])) == 40
    pdf, png = save(drawing.draw([("long", repeated(200_000), PLACEMENT)]), tmp_path, "long")
    assert pdf.stat().st_size < 1 << 20
    assert png.stat().st_size < 1 << 20


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 4), st.integers(0, 2)), max_size=12))
def test_shares_of_time_are_those_of_the_intervals(spans: list[tuple[float, float, int]]) -> None:
    start = np.array([begin for begin, _, _ in spans])
    end = np.array([begin + length for begin, length, _ in spans])
    edges = np.linspace(0.5, 12.5, 7)
    ticks = 0.5 + np.arange(12 * 500) / 500 + 1e-3
    covered = np.array([np.any((start <= tick) & (tick < end)) for tick in ticks]).reshape(6, -1).mean(axis=1)
    assert shares(start, end, edges) == pytest.approx(covered, abs=0.002 * (len(spans) + 1))
    if spans:
        column, low, high, what = stacked(start, end, np.array([kind for _, _, kind in spans]), edges)
        assert set(what) <= {kind for _, _, kind in spans}
        assert np.all((low >= 0) & (low < high) & (high <= 1 + 1e-9))
        # A stack has no gaps: it reaches as high as its parts are long.
        heights = np.bincount(column, high - low, minlength=6)
        assert [max(high[column == b], default=0.0) for b in range(6)] == pytest.approx(heights.tolist(), abs=1e-9)


def test_narrow_operations_are_drawn_as_shares_of_time() -> None:
    ax = drawing.draw([("long", repeated(20_000), PLACEMENT)]).axes[0]
    (found,) = (c for c in ax.collections if c.get_label() == "shares")
    corners = np.array([path.vertices for path in found.get_paths()])
    heights = np.ptp(corners[:, :, 1], axis=1)
    # Four fifths of the time are spent in attention.
    assert heights.mean() == pytest.approx(0.8 * 0.5, rel=0.01)
    assert corners[:, :, 0].min() == pytest.approx(ax.get_xlim()[0])


def test_a_rank_that_stands_for_its_group_is_named_after_it() -> None:
    ax = drawing.draw([("folded", replace(one_layer(), stands_for=2), PLACEMENT)]).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["A0", "F0"]


def test_a_long_title_leaves_room_for_the_source() -> None:
    figure = drawing.draw([("layout " * 60, one_layer(), PLACEMENT)])
    figure.canvas.draw()
    shown = {text.get_text(): text.get_window_extent() for text in figure.axes[0].texts}
    (title,) = (text for text in shown if text.startswith("layout"))
    assert title.endswith("…")
    assert shown["step 4.5 ms"].x1 < shown["simulated"].x0


@pytest.mark.parametrize(
    ("panels", "options", "allowed"),
    [
        ([], {}, "at least one timeline"),
        ([("empty", timeline([]), PLACEMENT)], {}, "a timeline with operations"),
        ([("t", one_layer(), PLACEMENT)], {"window_s": (2.0, 1.0)}, "the first before the second"),
        ([("t", one_layer(), PLACEMENT)], {"rows": "all"}, "groups, ranks"),
    ],
)
def test_timelines_that_cannot_be_drawn(panels: Any, options: Any, allowed: str) -> None:
    with pytest.raises(BadInput, match=allowed):
        drawing.draw(panels, **options)
