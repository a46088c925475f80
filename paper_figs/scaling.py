"""Scaling: throughput per GPU over the number of nodes, a column a model, weak above strong."""

import textwrap
from typing import TYPE_CHECKING

from bench.errors import BadInput
from paper_figs.style import (
    BODY_PT,
    WIDTH_IN,
    add_axes,
    caption,
    marker,
    new_figure,
    one_source,
    stamp,
    style,
    system_colours,
    system_order,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

NEEDED = ("mode", "model", "system", "status", "source", "num_gpus", "global_batch_tokens")
RATE = "tokens_per_s_per_gpu"
WHOLE = "search_complete"
MAX_LABELS = 5  # of an axis
_LEFT_IN, _RIGHT_IN, _GAP_IN, _HIGH_IN, _ABOVE_IN, _BELOW_IN = 0.5, 0.12, 0.36, 1.25, 0.52, 0.66


def draw(frame: "DataFrame") -> "Figure":
    """One panel a model and mode: tokens/s/GPU (thousand) over GPUs; at the bottom a cross where nothing fits, a ring
    where the search ended before it had found anything.

    Args:
        frame: one row a cell and mode, columns NEEDED and RATE, which may be absent where no cell ran; WHOLE says
            whether a cell's search saw every layout.
    Raises BadInput where a column is absent or a panel would show simulated and measured numbers together.
    """
    absent = [name for name in NEEDED if name not in frame.columns]
    if absent:
        raise BadInput("scaling columns", absent, f"a table with {', '.join(NEEDED)}")
    if not len(frame):
        raise BadInput("scaling rows", 0, "at least one cell")
    cells = frame.reindex(columns=[*NEEDED, RATE])
    cells[WHOLE] = frame[WHOLE].astype(bool) if WHOLE in frame.columns else True
    sizes = sorted(set(cells["num_gpus"].astype(int)))
    models, modes = list(dict.fromkeys(cells["model"])), list(dict.fromkeys(cells["mode"]))
    width = min(WIDTH_IN, _LEFT_IN + 2.2 * len(models))
    wide = (width - _LEFT_IN - _RIGHT_IN + _GAP_IN) / len(models) - _GAP_IN
    height = _BELOW_IN + len(modes) * (_HIGH_IN + _ABOVE_IN) + 0.15
    with style():
        figure = new_figure(width, height)
        for row, mode in enumerate(modes):
            bottom = _BELOW_IN + (len(modes) - 1 - row) * (_HIGH_IN + _ABOVE_IN)
            for column, model in enumerate(models):
                ax = add_axes(figure, (_LEFT_IN + column * (wide + _GAP_IN), bottom, wide, _HIGH_IN))
                some = cells[(cells["model"] == model) & (cells["mode"] == mode)]
                if len(some):
                    _panel(ax, some, sizes)
                    stamp(ax, one_source(f"scaling panel {model} {mode}: source", some["source"]))
                ax.set_title(f"{model}\n{mode}", loc="left", pad=4, fontsize=BODY_PT)
                if column == 0:
                    ax.set_ylabel("tokens/s/GPU (thousand)")
                if row == len(modes) - 1:
                    ax.set_xlabel("GPUs")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(labels))
        lines = textwrap.wrap(_caption(cells), int(22 * width))
        caption(figure, lines)
    return figure


def _panel(ax: "Axes", cells: "DataFrame", sizes: list[int]) -> None:
    """sizes: numbers of GPUs of all panels, which have one axis."""
    from matplotlib.ticker import MaxNLocator

    systems = system_order(cells["system"])
    colours = system_colours(systems)
    for position, system in enumerate(systems):
        rows = cells[cells["system"] == system].sort_values("num_gpus")
        ran = rows[rows["status"] == "ok"]
        mark = marker(system, position)
        rates = (ran[RATE].astype(float) / 1e3).tolist()
        ax.plot(ran["num_gpus"].tolist(), rates, color=colours[system], marker=mark, markersize=3, label=system)
        height = 0.04 + 0.07 * position  # of the panel: marks of several systems do not hide each other
        for whole, shape in ((True, "x"), (False, "o")):
            without = rows.loc[(rows["status"] != "ok") & (rows[WHOLE] == whole), "num_gpus"].tolist()
            ax.plot(
                without, [height] * len(without), shape, color=colours[system], markersize=3.5, markerfacecolor="none",
                transform=ax.get_xaxis_transform(), clip_on=False,
            )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    every = -(-len(sizes) // MAX_LABELS)
    ax.set_xticks(sizes, ["" if number % every else str(size) for number, size in enumerate(sizes)])
    ax.minorticks_off()
    top = float(cells.loc[cells["status"] == "ok", RATE].max()) / 1e3 if (cells["status"] == "ok").any() else 1.0
    ax.set_ylim(0, 1.1 * top)
    ax.yaxis.set_major_locator(MaxNLocator(MAX_LABELS - 1, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.grid(axis="y")


def _caption(cells: "DataFrame") -> str:
    weak = cells[cells["mode"] == "weak"]
    strong = cells[cells["mode"] == "strong"]
    words = []
    if len(weak):
        each = int(weak["global_batch_tokens"].iloc[0] // weak["num_gpus"].iloc[0])
        words.append(f"Weak: {each:,} tokens a GPU and step.")
    if len(strong):
        words.append(f"Strong: {int(strong['global_batch_tokens'].iloc[0]):,} tokens a step.")
    failed = cells[cells["status"] != "ok"]
    if failed[WHOLE].any():
        words.append("A cross: no layout fits in memory.")
    if not failed[WHOLE].all():
        words.append("A ring: the search ended before it found a layout that fits.")
    return " ".join(words)
