"""Regimes: maps of the speed-up of disaggregation over the best colocated system, with the line at 1."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.errors import BadInput
from paper_figs.style import INK, MUTED, SMALL_PT, WIDTH_IN, new_figure, one_source, stamp, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from pandas import DataFrame

COLUMNS = ("panel", "x", "y", "source", "speedup", "best_colocated")
LABELS = {
    "seq_len": "sequence length (tokens)",
    "nic_bytes_per_s": "NIC bandwidth per GPU (GB/s)",
    "top_k": "experts per token (top-k)",
    "num_experts": "experts",
    "num_nodes": "nodes of 8 GPUs",
}
_HEIGHT_IN = 2.8
_LEAST_SPAN = 1.25  # the colours reach at least from 1 / 1.25 to 1.25


def draw(
    frame: "DataFrame", marks: Sequence[Mapping[str, Any]] = (), assumptions: str = "", budget: int | None = None
) -> "Figure":
    """One panel a map: colour and number are the speed-up, the line is where it is 1.

    Args:
        frame: one row a cell: COLUMNS, and a column for every field that `x` and `y` name. A cell without a speed-up is
            hatched: one of the two does not fit.
        budget: most layouts that were simulated of a system in a cell; None for all.
        marks: named models, with `label` and values of the fields; drawn on a panel whose axes are both among them.
    Raises BadInput where a column is absent, a cell stands twice, or simulated and measured would mix.
    """
    absent = [name for name in COLUMNS if name not in frame.columns]
    if absent or not len(frame):
        raise BadInput("regimes columns", absent, f"rows with {', '.join(COLUMNS)}")
    from matplotlib.colors import TwoSlopeNorm

    panels = list(frame.groupby("panel", sort=False))
    known = frame["speedup"].dropna()
    span = max(_LEAST_SPAN, *(max(value, 1 / value) for value in known)) if len(known) else _LEAST_SPAN
    norm = TwoSlopeNorm(0.0, -float(np.log2(span)), float(np.log2(span)))
    with style():
        figure = new_figure(WIDTH_IN, _HEIGHT_IN)
        grids = [_grid(rows) for _, rows in panels]
        widths = [max(2.2, grid.shape[1]) * (1.2 if n else 1.0) for n, (_, _, grid, _) in enumerate(grids)]
        axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
        figure.subplots_adjust(left=0.075, right=0.9, top=0.87, bottom=0.29, wspace=0.42)
        for ax, (name, rows), grid in zip(axes, panels, grids, strict=True):
            _draw_map(ax, rows, grid, norm)
            _draw_marks(ax, rows, grid, marks)
            ax.set_title(str(name), loc="left", pad=4)
            stamp(ax, one_source(f"regimes {name}: source", rows["source"]))
        _draw_scale(figure, norm)
        figure.text(0.005, 0.015, _caption(assumptions, budget), fontsize=SMALL_PT, color=MUTED, linespacing=1.35)
    return figure


Grid = tuple[list[float], list[float], np.ndarray, np.ndarray]


def _grid(rows: "DataFrame") -> Grid:
    """Values of x and of y, log2 of the speed-up [y, x] (nan where there is none), colocated systems [y, x]."""
    x, y = rows["x"].iloc[0], rows["y"].iloc[0]
    xs, ys = sorted(set(rows[x])), sorted(set(rows[y]))
    values = np.full((len(ys), len(xs)), np.nan)
    names = np.full(values.shape, "", dtype=object)
    seen = set()
    for _, row in rows.iterrows():
        place = ys.index(row[y]), xs.index(row[x])
        if place in seen:
            raise BadInput("regimes rows", f"{row['panel']} {x}={row[x]} {y}={row[y]}", "one row a cell")
        seen.add(place)
        speedup = row["speedup"]
        values[place] = np.log2(float(speedup)) if speedup is not None and speedup > 0 else np.nan
        names[place] = row["best_colocated"] or ""
    return xs, ys, values, names


def _draw_map(ax: "Axes", rows: "DataFrame", grid: Grid, norm: "Normalize") -> None:
    xs, ys, values, _ = grid
    ax.set_facecolor("white")
    ax.pcolormesh(values, cmap="PuOr_r", norm=norm, edgecolors="white", linewidth=0.6)
    for (j, i), value in np.ndenumerate(values):
        if np.isnan(value):
            corners = [i, i + 1, i + 1, i], [j, j, j + 1, j + 1]
            ax.fill(*corners, fill=False, hatch="//////", edgecolor=MUTED, linewidth=0)
            continue
        dark = abs(value) > 0.62 * norm.vmax  # type: ignore[operator]  # the norm of `draw` has limits
        colour = "white" if dark else INK
        ax.text(i + 0.5, j + 0.5, f"{2**value:.2f}", ha="center", va="center", fontsize=SMALL_PT, color=colour)
    _draw_line(ax, values)
    ax.set_xticks(np.arange(len(xs)) + 0.5, [_shown(rows["x"].iloc[0], value) for value in xs])
    ax.set_yticks(np.arange(len(ys)) + 0.5, [_shown(rows["y"].iloc[0], value) for value in ys])
    ax.tick_params(length=0)
    ax.set_xlabel(LABELS.get(rows["x"].iloc[0], rows["x"].iloc[0]))
    ax.set_ylabel(LABELS.get(rows["y"].iloc[0], rows["y"].iloc[0]))


def _draw_line(ax: "Axes", values: np.ndarray) -> None:
    """The edges between cells of which one has a speed-up above 1 and the other one has not."""
    for (j, i), value in np.ndenumerate(values):
        for j2, i2 in ((j + 1, i), (j, i + 1)):
            if j2 < values.shape[0] and i2 < values.shape[1]:
                other = values[j2, i2]
                if not np.isnan(value + other) and (value > 0) != (other > 0):
                    ax.plot([i2, i + 1], [j2, j + 1], color=INK, linewidth=1.6, solid_capstyle="projecting")


def _draw_marks(ax: "Axes", rows: "DataFrame", grid: Grid, marks: Sequence[Mapping[str, Any]]) -> None:
    """Named models in the cells that they lie in; those outside the map are left out."""
    x, y = rows["x"].iloc[0], rows["y"].iloc[0]
    xs, ys = grid[:2]
    taken: dict[tuple[int, int], int] = {}
    for mark in marks:
        if x in mark and y in mark and mark[x] in xs and mark[y] in ys:
            place = xs.index(mark[x]), ys.index(mark[y])
            row = taken[place] = taken.get(place, -1) + 1
            where = (place[0] + 0.5, place[1] + 0.12 + 0.14 * row)
            ax.text(*where, str(mark["label"]), ha="center", va="center", fontsize=SMALL_PT - 1.2, color=INK)


def _shown(field: str, value: float) -> str:
    if field == "nic_bytes_per_s":
        return f"{value / 1e9:g}"
    if field == "seq_len":
        return f"{int(value) // 1024}K" if value % 1024 == 0 else f"{value:g}"
    return f"{value:g}"


def _draw_scale(figure: "Figure", norm: "Normalize") -> None:
    from matplotlib.cm import ScalarMappable

    ax = figure.add_axes((0.925, 0.29, 0.014, 0.58))
    scale = figure.colorbar(ScalarMappable(norm, "PuOr_r"), cax=ax)
    steps = (0.25, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 4.0)
    shown = [factor for factor in steps if norm.vmin <= np.log2(factor) <= norm.vmax]
    scale.set_ticks([float(np.log2(factor)) for factor in shown], labels=[f"{factor:g}" for factor in shown])
    scale.ax.tick_params(length=2)
    scale.outline.set_visible(False)
    ax.set_ylabel("speed-up", fontsize=SMALL_PT)
    ax.axhline(0.0, color=INK, linewidth=1.4)


def _caption(assumptions: str, budget: int | None) -> str:
    tuned = "each the best of all its layouts" if budget is None else f"each the best of at most {budget} layouts"
    text = (
        f"simulated; assumptions: {assumptions or 'not named'}. Throughput of disagmoe over that of the best colocated "
        f"system of the cell, {tuned}; black line: 1. Off its axes a panel has Qwen3-30B's "
        "shape, 8K tokens, 50 GB/s and 4 nodes of 8 H800; a model's name marks its top-k and experts, not its size. "
        "Hatched: one side does not fit."
    )
    return "\n".join(textwrap.wrap(text, 150))
