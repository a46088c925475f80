"""Figures: what is drawn is the data, what did not run says so, and the same data gives the same file."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import PLACEMENT, TWO_STAGES, hops, one_layer, repeated, timeline

from bench.action import Kind
from bench.errors import BadInput
from bench.placement import Group, Placement
from bench.program import Op
from paper_figs import fig7, train_demo
from paper_figs import timeline as drawing
from paper_figs.action_colours import ACTION_COLOURS, ON_ITS_WAY, palette
from paper_figs.occupancy import shares, stacked
from paper_figs.style import SYSTEM_COLOURS, save, system_colours, system_order

pytest.importorskip("matplotlib")
pd = pytest.importorskip("pandas")

MODELS = ("small-moe", "large-moe")
LENGTHS = (4096, 16384)


def cell(model: str, seq_len: int, system: str, rate: float | None, **other: Any) -> dict[str, Any]:
    number = float("nan") if rate is None else rate
    return {
        "model": model,
        "seq_len": seq_len,
        "system": system,
        "status": "ok" if rate is not None else "infeasible",
        "message": "" if rate is not None else "needs 13.2 GiB more",
        "tokens_per_s_per_gpu": number,
        "mfu": number / 1e4,
        "fraction_of_bound": number / 5e3,
        "layout": "ep=16 pp=2",
        "source": "simulated",
        "assumptions": "plain",
        "global_batch_tokens": 1 << 22,
        "cluster": "h800x16",
        "case_id": "0" * 16,
        "step_time_s": 0.1 + 0.2,
        "peak_memory_bytes": 1e9,
        "missing_gib": float("nan") if rate is not None else 13.2,
        **other,
    }


def frame(**changes: Any) -> Any:
    rates = itertools.count(1000, 300)
    rows = [cell(m, s, x, float(next(rates))) for m in MODELS for s in LENGTHS for x in ("ep", "disagmoe")]
    rows[3] = cell(MODELS[0], LENGTHS[1], "disagmoe", None)
    table = pd.DataFrame(rows)
    for name, value in changes.items():
        table[name] = value
    return table


def texts(figure: Any) -> list[str]:
    from matplotlib.text import Text

    return [found.get_text() for found in figure.findobj(Text) if found.get_text()]


def bars(ax: Any) -> dict[str, list[tuple[float, float]]]:
    """(middle, height) of the bars of every system."""
    return {
        group.get_label(): [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in group]
        for group in ax.containers
        if not group.get_label().startswith("_")
    }


def test_bars_are_as_high_as_the_data() -> None:
    table = frame()
    axes = fig7.draw(table).axes
    for column, model in enumerate(MODELS):
        for ax, name, scale in (
            (axes[2 * column], "tokens_per_s_per_gpu", 1e-3),
            (axes[2 * column + 1], "fraction_of_bound", 1),
        ):
            for system, drawn in bars(ax).items():
                ran = table[(table.model == model) & (table.system == system) & (table.status == "ok")]
                assert [height for _, height in drawn] == pytest.approx(list(ran[name] * scale))
                # A bar stands within half a step of its sequence length.
                assert [LENGTHS[round(middle)] for middle, _ in drawn] == list(ran.seq_len)
    assert axes[0].get_title(loc="left") == MODELS[0]


def test_bars_of_a_group_do_not_overlap() -> None:
    systems = list(SYSTEM_COLOURS)
    table = pd.DataFrame([cell("m", s, x, 1000.0) for s in LENGTHS for x in systems])
    ax = fig7.draw(table).axes[0]
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for group in ax.containers for bar in group)
    assert len(spans) == len(systems) * len(LENGTHS)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_mfu_stands_below_where_no_cell_has_a_bound() -> None:
    table = frame().drop(columns="fraction_of_bound")
    lower = fig7.draw(table).axes[1]
    assert lower.get_ylabel() == "MFU"
    assert bars(lower)["ep"][0][1] == pytest.approx(table.mfu[0])


def test_factors_stand_where_both_ran() -> None:
    factors = [text for text in texts(fig7.draw(frame())) if text.endswith("\N{MULTIPLICATION SIGN}")]
    assert factors == [
        f"{ours / base:.2f}\N{MULTIPLICATION SIGN}" for base, ours in ((1000, 1300), (2200, 2500), (2800, 3100))
    ]


@pytest.mark.parametrize(
    ("missing_gib", "status", "said"),
    [
        (13.2, "infeasible", "needs +13 GiB"),
        (0.25, "infeasible", "needs +0.25 GiB"),
        (float("nan"), "error", "error"),
        (float("nan"), "infeasible", "no layout possible"),
    ],
)
def test_a_cell_that_did_not_run_is_hatched_and_says_why(missing_gib: float, status: str, said: str) -> None:
    table = frame()
    table.loc[3, ["missing_gib", "status"]] = [missing_gib, status]
    figure = fig7.draw(table)
    hatched = [bar for group in figure.axes[0].containers for bar in group if bar.get_hatch()]
    assert len(hatched) == 1
    assert not [bar for group in figure.axes[2].containers for bar in group if bar.get_hatch()]
    assert said in texts(figure)
    assert (1.0, 1.3) not in [(round(m), h) for m, h in bars(figure.axes[0])["disagmoe"]]


def test_a_search_that_was_broken_off_is_not_said_to_prove_anything() -> None:
    table = frame()
    table["search_budget"] = [32.0 if row == 3 else float("nan") for row in range(len(table))]
    said = texts(fig7.draw(table))
    assert "no layout found in 32" in said
    assert not [text for text in said if text.startswith("needs")]
    assert any("others were not tried" in text for text in said)


def test_factors_over_the_baseline_and_over_the_fastest_overlap_system() -> None:
    rates = {"ep": 1000.0, "tutel": 1250.0, "comet": 1600.0, "disagmoe": 2000.0}
    table = pd.DataFrame([cell("m", 4096, system, rate) for system, rate in rates.items()])
    factors = [
        text
        for text in texts(fig7.draw(table, overlap=("tutel", "comet", "none")))
        if text.endswith("\N{MULTIPLICATION SIGN}")
    ]
    assert sorted(factors) == ["1.25\N{MULTIPLICATION SIGN}", "2.00\N{MULTIPLICATION SIGN}"]


def test_with_many_systems_a_model_has_a_row_of_its_own() -> None:
    table = pd.DataFrame([cell(m, s, x, 1000.0) for m in MODELS for s in LENGTHS for x in SYSTEM_COLOURS])
    axes = fig7.draw(table).axes
    assert len({round(ax.get_position().x0, 6) for ax in axes}) == 1
    tops = [(ax.get_position().y0, ax.get_position().y1) for ax in axes]
    assert all(lower[1] < upper[0] for upper, lower in itertools.pairwise(tops))


def test_nothing_ran() -> None:
    table = pd.DataFrame([cell("m", 4096, system, None) for system in ("ep", "disagmoe")])
    assert texts(fig7.draw(table)).count("needs +13 GiB") == 2


def test_every_panel_is_stamped_and_the_caption_says_what_was_run() -> None:
    figure = fig7.draw(frame())
    assert texts(figure).count("simulated") == len(MODELS)
    (caption,) = [text for text in texts(figure) if "assumptions" in text]
    for part in ("simulated", "assumptions: plain", "cluster: h800x16", "4,194,304 tokens"):
        assert part in " ".join(caption.split())


def test_a_panel_does_not_mix_sources() -> None:
    table = frame()
    table.loc[table.model == MODELS[1], "source"] = "measured"
    stamps = texts(fig7.draw(table))
    assert (stamps.count("simulated"), stamps.count("measured")) == (1, 1)
    table.loc[0, "source"] = "measured"
    with pytest.raises(BadInput, match="one source a panel"):
        fig7.draw(table)


def doubled(table: Any) -> Any:
    return pd.concat([table, table.iloc[:1]])


def with_value(row: int, column: str, value: object) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        table.loc[row, column] = value
        return table

    return change


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        (doubled, "one row a cell"),
        (with_value(0, "cluster", "h200x1"), "the same for all systems"),
        (with_value(0, "global_batch_tokens", 1024), "the same for all systems"),
        (with_value(0, "tokens_per_s_per_gpu", float("nan")), "a number where status is ok"),
        (lambda table: table.drop(columns="cluster"), "a table with"),
        (lambda table: table.iloc[:0], "at least one cell"),
    ],
)
def test_a_frame_that_would_mislead_is_refused(tmp_path: Path, change: Callable[[Any], Any], allowed: str) -> None:
    with pytest.raises(BadInput, match=allowed):
        fig7.write(change(frame()), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_are_the_same_bytes_and_the_csv_is_the_frame(tmp_path: Path) -> None:
    table = frame()
    first, second = fig7.write(table, tmp_path / "a"), fig7.write(table, tmp_path / "b")
    assert [path.name for path in first] == ["fig7.pdf", "fig7.png", "fig7.csv"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(path.name for path in first)
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert b"CreationDate" not in first[0].read_bytes()
    read = pd.read_csv(first[2], dtype={"case_id": str})
    pd.testing.assert_frame_equal(read.fillna({"message": ""}), table, check_dtype=False, rtol=1e-15)


@pytest.mark.parametrize(("num_models", "width_in"), [(1, 3.4), (3, 7.0), (5, 7.0)])
def test_size_on_paper(tmp_path: Path, num_models: int, width_in: float) -> None:
    from matplotlib.image import imread

    table = pd.DataFrame([cell(f"m{i}", 4096, "ep", 1000.0) for i in range(num_models)])
    _, png, _ = fig7.write(table, tmp_path)
    assert imread(png).shape[1] == 200 * width_in


def test_settings_of_the_user_do_not_show(tmp_path: Path) -> None:
    import matplotlib

    plain = fig7.write(frame(), tmp_path / "a")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "savefig.dpi": 40}):
        other = fig7.write(frame(), tmp_path / "b")
        assert matplotlib.rcParams["font.size"] == 30
    assert plain[1].read_bytes() == other[1].read_bytes()


def test_colours_go_by_name() -> None:
    assert system_colours(["disagmoe", "zig"])["disagmoe"] == system_colours(["ep", "disagmoe"])["disagmoe"]
    many = system_colours([*SYSTEM_COLOURS, "zig", "zag"])
    assert len(set(many.values())) == len(many)
    assert system_order(["disagmoe", "zig", "comet", "ep"]) == ["ep", "comet", "zig", "disagmoe"]


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


# Linear RGB as seen without one of the three cones: Machado, Oliveira and Fernandes 2009, severity 1.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def lab(colour: str, vision: str) -> Any:
    """CIE L*a*b* (D65) of a colour as seen with `vision`."""
    from matplotlib.colors import to_rgb

    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    xyz /= (0.9505, 1.0, 1.089)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart_by_every_kind_of_sight(vision: str) -> None:
    actions = {colour for kind, passes in ACTION_COLOURS.items() for colour in passes} | {"#efefef"}
    for colours in (actions, set(SYSTEM_COLOURS.values())):
        for one, other in itertools.combinations(sorted(colours), 2):
            # About two is the least that is seen side by side.
            assert np.linalg.norm(lab(one, vision) - lab(other, vision)) > 14, (one, other)


def test_passes_go_from_light_to_dark() -> None:
    for kind in (Kind.ATTENTION, Kind.EXPERT, Kind.HEAD):
        light, middle, dark = (lab(colour, "normal")[0] for colour in ACTION_COLOURS[kind])
        assert light - middle > 14
        assert middle - dark > 14


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


LOSSES = {
    "reference": [4.0, 3.0, 2.5],
    "ep": [4.0, 3.0 * (1 + 1e-6), 2.5],
    "disagmoe": [4.0, 3.0, 2.5 * (1 - 1e-5)],
}
STEPS = [
    ("disagmoe", one_layer("measured", scale=2e-3), PLACEMENT),
    ("disagmoe", one_layer(), PLACEMENT),
    ("ep", hops(), TWO_STAGES),
]


def test_the_demo_shows_losses_and_their_differences(tmp_path: Path) -> None:
    figure = train_demo.draw(LOSSES, STEPS)
    upper, lower = figure.axes[:2]
    assert {line.get_label(): list(line.get_ydata()) for line in upper.lines} == LOSSES
    ep, disagmoe = (list(line.get_ydata()) for line in lower.lines)
    floor = lower.get_yticks()[0]
    assert lower.get_yticklabels()[0].get_text() == "equal"
    assert ep == pytest.approx([floor, 1e-6, floor])
    assert disagmoe == pytest.approx([floor, floor, 1e-5])
    assert lower.get_yscale() == "log"
    assert lower.get_ylim()[0] < floor < 1e-6
    assert lower.get_ylim()[1] > 1e-5
    # Marks of different shape at different steps.
    assert upper.lines[1].get_marker() != upper.lines[2].get_marker()
    one, other = (save(train_demo.draw(LOSSES, STEPS), tmp_path / name, "demo")[1] for name in "ab")
    assert one.read_bytes() == other.read_bytes()


def test_the_demo_says_of_every_panel_what_it_is() -> None:
    figure = train_demo.draw(LOSSES, STEPS)
    shown = texts(figure)
    assert shown.count("simulated") == 2
    assert shown.count("measured") == 1  # the losses
    assert shown.count("measured, clocks within 5 µs") == 1
    # Every step is shown whole, over shares of its own length; how long it took stands in its title.
    panels = figure.axes[2:5]
    for ax, (_, step, _) in zip(panels, STEPS, strict=True):
        scale = ax.get_xlim()[1] / step.step_time_s
        assert ax.get_xlim() == pytest.approx((0, scale * step.step_time_s))
        assert list(ax.get_xticks()) == pytest.approx([ax.get_xlim()[1] * n / 4 for n in range(5)])
    assert [bool(ax.get_xlabel()) for ax in panels] == [False, False, True]
    assert "share of the step" in panels[-1].get_xlabel()
    assert sum(text.startswith("step ") for text in shown) == 3


def test_the_demo_without_a_reference_compares_to_the_first() -> None:
    lines = train_demo.draw({"a": [2.0], "b": [2.2]}, STEPS[:1]).axes[1].lines
    assert [line.get_ydata()[0] for line in lines] == pytest.approx([0.1])


@pytest.mark.parametrize("losses", [{}, {"a": [1.0], "b": [1.0, 2.0]}, {"a": []}])
def test_the_demo_refuses_runs_that_do_not_compare(losses: Any) -> None:
    with pytest.raises(BadInput):
        train_demo.draw(losses, STEPS)
