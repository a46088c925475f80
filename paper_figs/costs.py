"""Single operations as shares of a GPU's peaks with what is assumed, and a step's operations with what is simulated."""

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.assumptions import get_assumptions
from bench.errors import BadInput
from paper_figs.style import (
    BODY_PT,
    INK,
    SMALL_PT,
    WIDTH_IN,
    add_axes,
    caption,
    new_figure,
    one_source,
    stamp,
    style,
    system_colours,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_LEFT_IN, _RIGHT_IN, _GAP_IN, _BELOW_IN, _TOP_IN, _ROW_IN = 2.1, 0.25, 1.15, 0.78, 0.42, 0.17


def draw(frame: "DataFrame") -> "Figure":
    """A row an operation: its share of the peak on the left, with the assumed one; a step's operations on the right.

    Args:
        frame: as `experiments.costs` makes it.
    Raises BadInput where there are no rows.
    """
    single = frame[(frame["part"] == "single") & frame["share"].notna()]
    step = frame[(frame["part"] == "step") & (frame["operation"] != "step")]
    if not len(single) or not len(step):
        raise BadInput("costs", "no rows", "single operations and those of a step")
    first = frame.iloc[0]
    half_span = get_assumptions(first["assumptions"]).attention_half_span
    colour = system_colours(["ep"])["ep"]
    body, wide = _ROW_IN * len(single), (WIDTH_IN - _LEFT_IN - _RIGHT_IN - _GAP_IN) / 2
    with style():
        figure = new_figure(WIDTH_IN, _BELOW_IN + body + _TOP_IN)
        shares = add_axes(figure, (_LEFT_IN, _BELOW_IN, wide, body))
        shares.barh(range(len(single)), single["share"], 0.66, color=colour, edgecolor=INK, linewidth=0.4)
        taken = [_assumed(row, half_span) for row in single.to_dict("records")]
        places = [place for place, value in enumerate(taken) if value is not None]
        marks = {"markersize": 3.5, "markerfacecolor": "white", "markeredgecolor": INK}
        shares.plot([value for value in taken if value is not None], places, "D", **marks)  # type: ignore[arg-type]
        names = [_name(row) for row in single.to_dict("records")]
        shares.set_yticks(range(len(single)), names, fontsize=SMALL_PT)
        shares.set_xlim(0, 1)
        shares.set_xlabel("share of the peak", labelpad=1.5)
        times = add_axes(figure, (_LEFT_IN + wide + _GAP_IN, _BELOW_IN, wide, body))
        times.barh(
            range(len(step)),
            step["measured_s"] * 1e3,
            0.66,
            color=colour,
            edgecolor=INK,
            linewidth=0.4,
            label="measured",
        )
        times.plot(step["simulated_s"] * 1e3, range(len(step)), "D", label="assumed, simulated", **marks)  # type: ignore[arg-type]
        times.set_yticks(range(len(step)), step["operation"], fontsize=SMALL_PT)
        times.set_xlabel("ms in a step", labelpad=1.5)
        for axes, rows in ((shares, single), (times, step)):
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.grid(axis="x")
        stamp(times, one_source("costs: source", frame["source"]))
        handles, labels = times.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper left", ncols=2, frameon=False, fontsize=BODY_PT)
        words = (
            f"{first['gpu']}, torch {first['torch']}. Left: the trainer's kernels, one by one, in short runs; FLOPs and"
            f" bytes as the cost model counts them; diamonds: {first['assumptions']}. Right: a step of ep on one GPU,"
            " sums over what it computes."
        )
        caption(figure, textwrap.wrap(words, int(20 * WIDTH_IN)))
    return figure


def _assumed(row: Mapping[Any, Any], half_span: float) -> float | None:
    """The share that is assumed of an operation; of the attention core at its length."""
    if not row["field"]:
        return None
    share = float(row["assumed"])
    return share * row["x"] / (row["x"] + half_span) if row["field"].startswith("attention") else share


def _name(row: Mapping[Any, Any]) -> str:
    """With what it was timed for, where that is several."""
    name, x = str(row["operation"]), row["x"]
    if isinstance(x, float) and x == x:
        unit = "tokens" if name.startswith("attention") else "rows"
        return f"{name.split(' as ', maxsplit=1)[0]}, {x:,.0f} {unit}"
    return name
