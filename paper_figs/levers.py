"""Time and memory of recomputation and offload, measured, with what was predicted."""

import textwrap
from typing import TYPE_CHECKING

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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_LEFT_IN, _RIGHT_IN, _GAP_IN, _BELOW_IN, _TOP_IN, _ROW_IN = 1.3, 0.3, 0.35, 0.78, 0.42, 0.26
_GIB = 2**30


def draw(frame: "DataFrame") -> "Figure":
    """A row a lever: its step on the left, the fullest moment of the GPU on the right; predictions are diamonds.

    Args:
        frame: as `experiments.levers.table` makes it.
    Raises BadInput where there are no rows.
    """
    if not len(frame):
        raise BadInput("levers", "no rows", "a run of a lever that ended well")
    body = _ROW_IN * len(frame)
    wide = (WIDTH_IN - _LEFT_IN - _RIGHT_IN - _GAP_IN) / 2
    first = frame.iloc[0]
    with style():
        figure = new_figure(WIDTH_IN, _BELOW_IN + body + _TOP_IN)
        times = add_axes(figure, (_LEFT_IN, _BELOW_IN, wide, body))
        _bars(times, frame, "step_time", "_s", 1e-3, "step (ms)")
        times.set_yticks(range(len(frame)), frame["lever"])
        room = add_axes(figure, (_LEFT_IN + wide + _GAP_IN, _BELOW_IN, wide, body))
        _bars(room, frame, "peak_memory", "_bytes", _GIB, "most memory of tensors (GiB)")
        room.set_yticks(range(len(frame)), [""] * len(frame))
        stamp(room, one_source("levers: source", frame["source"]))
        handles, names = times.get_legend_handles_labels()
        figure.legend(handles, names, loc="upper left", ncols=2, frameon=False, fontsize=BODY_PT)
        number = f"{first['gpus']} GPU" if first["gpus"] else "processes on CPUs"
        words = (
            f"{first['model']}, {first['cluster']} ({number}), {first['system']}, sequences of {first['seq_len']}"
            f" tokens, {first['global_batch_tokens']:,} tokens a step; medians over {first['steps']} steps of"
            f" {first['rounds']} rounds, lines from the fastest round to the slowest. Predictions:"
            f" {first['assumptions']}."
        )
        caption(figure, textwrap.wrap(words, int(20 * WIDTH_IN)))
    return figure


def _bars(ax: "Axes", frame: "DataFrame", name: str, unit: str, scale: float, label: str) -> None:
    """Measured bars with their values, predictions as diamonds. `scale` is one of the axis's units."""
    colour = system_colours(frame["system"])[frame["system"].iloc[0]]
    places = range(len(frame))
    measured = frame[name + unit].astype(float) / scale
    predicted = frame[f"predicted_{name}{unit}"].astype(float) / scale
    ax.barh(places, measured.fillna(0.0), 0.66, color=colour, edgecolor=INK, linewidth=0.4, label="measured")
    if f"{name}_low{unit}" in frame:
        ends = zip(frame[f"{name}_low{unit}"] / scale, frame[f"{name}_high{unit}"] / scale, strict=True)
        for place, end in enumerate(ends):
            ax.plot(end, (place, place), color=INK, linewidth=0.8)
    ax.plot(predicted, places, "D", markersize=4, markerfacecolor="white", markeredgecolor=INK, label="predicted")
    for place, value in enumerate(measured):
        if value > 0:
            ax.text(0, place, f" {value:,.0f}" if scale < 1 else f" {value:.1f}", va="center", fontsize=SMALL_PT)
    ax.set_xlim(0, 1.08 * max(measured.max() if measured.notna().any() else 0.0, predicted.max()))
    ax.invert_yaxis()
    ax.set_xlabel(label, labelpad=1.5)
    ax.grid(axis="x")
