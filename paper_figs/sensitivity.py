"""Tornado: what each assumption does to the speed-ups, a column a model. A bar that crosses 1 changes the winner."""

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench.assumptions import Assumptions
from bench.errors import BadInput
from paper_figs.style import (
    BODY_PT,
    FAINT,
    INK,
    MUTED,
    WIDTH_IN,
    add_axes,
    caption,
    new_figure,
    one_source,
    stamp,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

NEEDED = ("model", "over", "field", "value", "default_ratio", "ratio", "fits", "source", "assumptions")
COLOURS = {"low": "#0072b2", "high": "#e69f00", "other": "#7f7f7f"}
MAX_ROWS = 12
_LEFT_IN, _RIGHT_IN, _GAP_IN, _ROW_IN, _ABOVE_IN = 1.88, 0.1, 0.2, 0.155, 0.5


def draw(
    frame: "DataFrame", *, ours: str = "disagmoe", baseline: str = "ep", overlap: Mapping[str, str] | None = None
) -> "Figure":
    """Rows of panels: over `baseline`, over the best overlap system; the fields that move most come first.

    Args:
        frame: one row a variation, columns NEEDED; over is ``baseline`` or ``overlap``; ratio None where there is none.
        overlap: name of the overlap system, by model.
    Raises BadInput where a column is absent, there is nothing to draw, or simulated and measured numbers are mixed.
    """
    cells = _bars(frame)
    models, blocks = list(dict.fromkeys(cells["model"])), list(dict.fromkeys(cells["over"]))
    orders = {over: _order(cells[cells["over"] == over]) for over in blocks}
    wide = (WIDTH_IN - _LEFT_IN - _RIGHT_IN + _GAP_IN) / len(models) - _GAP_IN
    highs = {over: _ROW_IN * len(order) for over, order in orders.items()}
    text = _caption(cells, ours, baseline)
    lines = textwrap.wrap(text, int(22 * WIDTH_IN))
    foot = 0.52 + 0.112 * len(lines)
    height = foot + sum(highs.values()) + len(blocks) * _ABOVE_IN + (len(blocks) - 1) * 0.15 + 0.2
    with style():
        figure = new_figure(WIDTH_IN, height)
        bottom = height - 0.2
        for over in blocks:
            bottom -= highs[over] + _ABOVE_IN
            for column, model in enumerate(models):
                some = cells[(cells["over"] == over) & (cells["model"] == model)]
                left = _LEFT_IN + column * (wide + _GAP_IN)
                ax = add_axes(figure, (left, bottom, wide, highs[over]))
                _panel(ax, some, orders[over])
                other = baseline if over == "baseline" else (overlap or {}).get(model, "best overlap")
                ax.set_title(f"{model}\nover {other}", loc="left", pad=3, fontsize=BODY_PT)
                if len(some):
                    source = one_source(f"sensitivity panel {model}: source", some["source"])
                    stamp(ax, source, y=1 + 10 / (72 * highs[over]))  # beside the title's first line
                if over == blocks[-1]:
                    ax.set_xlabel("speed-up")
                labels = [_label(cells, row) for row in orders[over]]
                ax.set_yticks(range(len(labels)), labels if column == 0 else [""] * len(labels))
            bottom -= 0.15
        _legend(figure, not cells["fits"].all())
        caption(figure, lines)
    return figure


def _bars(frame: "DataFrame") -> "DataFrame":
    """The variations with a ratio, each with its row and with the end that it is."""
    absent = [name for name in NEEDED if name not in frame.columns]
    if absent:
        raise BadInput("sensitivity columns", absent, f"a table with {', '.join(NEEDED)}")
    cells = frame.astype({"ratio": float, "default_ratio": float})
    pairs = list(zip(cells["field"], cells["value"], strict=True))
    numbers: dict[str, list[float]] = {}
    for field, value in pairs:
        if field in Assumptions.model_fields:
            numbers.setdefault(field, []).append(float(value))

    def end(field: str, value: object) -> str:
        if field not in numbers:
            return "other"
        return "low" if float(str(value)) == min(numbers[field]) else "high"

    # An end is told before what has no ratio goes: the other end of its field may be left alone.
    cells["end"] = [end(*pair) for pair in pairs]
    cells["row"] = [field if field in numbers else f"{field}: {_word(value)}" for field, value in pairs]
    cells = cells.dropna(subset=["ratio"])
    if not len(cells):
        raise BadInput("sensitivity rows", 0, "at least one variation with a ratio")
    return cells


def _order(cells: "DataFrame") -> list[str]:
    """Rows by the largest change of any model, that with most first; the least are left out."""
    change = (cells["ratio"] / cells["default_ratio"] - 1).abs()
    return list(change.groupby(cells["row"]).max().sort_values(ascending=False, kind="stable").index[:MAX_ROWS])


def _label(cells: "DataFrame", row: str) -> str:
    """A field with its ends; a setting has its value in its name."""
    ends = list(dict.fromkeys(cells.loc[cells["field"] == row, "value"]))
    return f"{row}  {' / '.join(f'{float(end):g}' for end in ends)}" if ends else row


def _word(value: object) -> str:
    word = str(value)
    return f"{int(word) >> 20}M" if word.isdigit() and int(word) >= 1 << 20 else word


def _panel(ax: "Axes", cells: "DataFrame", order: list[str]) -> None:
    base = float(cells["default_ratio"].iloc[0]) if len(cells) else 1.0
    for y, name in enumerate(order):
        rows = cells[cells["row"] == name]
        bars = list(zip(rows["ratio"], rows["fits"], rows["end"].map(COLOURS), strict=True))
        for ratio, fits, colour in sorted(bars, key=lambda bar: -abs(bar[0] - base)):
            hatch = None if fits else "//////"
            ax.barh(y, ratio - base, left=base, height=0.62, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.3)
    ax.axvline(base, color=INK, linewidth=0.8)
    ax.axvline(1.0, color=MUTED, linewidth=0.8, linestyle=(0, (3, 2)))
    ax.set_ylim(len(order) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    low, high = ax.get_xlim()
    ax.set_xlim(low - 0.02, high + 0.02)
    ax.grid(axis="x", color=FAINT)


def _legend(figure: "Figure", some_too_large: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=COLOURS["low"], edgecolor=INK, linewidth=0.3, label="low end"),
        Patch(facecolor=COLOURS["high"], edgecolor=INK, linewidth=0.3, label="high end"),
        Patch(facecolor=COLOURS["other"], edgecolor=INK, linewidth=0.3, label="another setting"),
        Patch(facecolor="white", edgecolor=INK, linewidth=0.3, hatch="//////", label="no longer fits"),
        Line2D([], [], color=INK, linewidth=0.8, label="default"),
        Line2D([], [], color=MUTED, linewidth=0.8, linestyle=(0, (3, 2)), label="equal"),
    ]
    if not some_too_large:
        handles = [handle for handle in handles if handle.get_label() != "no longer fits"]
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), borderaxespad=0.2)


def _caption(cells: "DataFrame", ours: str, baseline: str) -> str:
    sources, assumptions = sorted(set(cells["source"])), sorted(set(cells["assumptions"]))
    return (
        f"{' and '.join(sources)}; assumptions: {', '.join(assumptions)}, one changed at a time; layouts held at those "
        f"found under the default. The {MAX_ROWS} that move most are shown. "
        f"Throughput of {ours} over {baseline}, and over the overlap system that is fastest in the cell."
    )
