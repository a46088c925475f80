"""Figures: what is drawn is the data, what did not run says so, and the same data gives the same file."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BadInput
from paper_figs import fig7
from paper_figs.style import SYSTEM_COLOURS, system_colours, system_order

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
