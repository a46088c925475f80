"""Steps of `ep` from our plan beside those of megatron-core itself."""

import textwrap
from typing import TYPE_CHECKING

from bench.errors import BadInput
from paper_figs.style import (
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

_LEFT_IN, _RIGHT_IN, _BELOW_IN, _TOP_IN, _ROW_IN = 1.3, 0.8, 0.62, 0.3, 0.32


def draw(frame: "DataFrame") -> "Figure":
    """A bar a system: its step, the range of the rounds, and its step over megatron-core's.

    Args:
        frame: as `experiments.megatron_ratio.table` makes it.
    Raises BadInput where there are no rows.
    """
    if not len(frame):
        raise BadInput("megatron-ratio", "no rows", "a run of each system that ended well")
    colours, rows = system_colours(frame["system"]), frame.to_dict("records")
    body = _ROW_IN * len(rows)
    with style():
        figure = new_figure(WIDTH_IN, _BELOW_IN + body + _TOP_IN)
        ax = add_axes(figure, (_LEFT_IN, _BELOW_IN, WIDTH_IN - _LEFT_IN - _RIGHT_IN, body))
        for place, row in enumerate(rows):
            low, step, high = (row[f"step_time{name}_s"] * 1e3 for name in ("_low", "", "_high"))
            ax.barh(place, step, 0.66, color=colours[row["system"]], edgecolor=INK, linewidth=0.4)
            ax.plot([low, high], [place, place], color=INK, linewidth=0.8)
            over = row["over_megatron"]
            value = f"{step:.0f} ms" + ("" if over is None or over != over else f", {over:.2f}")
            ax.text(high, place, f" {value}", va="center", fontsize=SMALL_PT, color=INK)
        ax.set_yticks(range(len(rows)), [f"{row['system']}, {row['trainer']}" for row in rows])
        ax.invert_yaxis()
        ax.set_xlim(0, 1.05 * max(row["step_time_high_s"] for row in rows) * 1e3)
        ax.set_xlabel("step (ms); behind it, over megatron-core's", labelpad=1.5)
        ax.grid(axis="x")
        first = rows[0]
        stamp(ax, one_source("megatron-ratio: source", frame["source"]))
        number = f"{first['gpus']} GPU" if first["gpus"] else "processes on CPUs"
        words = (
            f"{first['model']}, {first['cluster']} ({number}), {first['layout']}, sequences of {first['seq_len']}"
            f" tokens, {first['global_batch_tokens']:,} tokens a step; {first['rounds']} rounds,"
            f" {first['steps']} steps."
        )
        caption(figure, textwrap.wrap(words, int(22 * WIDTH_IN)))
    return figure
