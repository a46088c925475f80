"""Systems side by side on the GPUs of one host: throughput, and how far the simulated step and memory are off."""

import re
import textwrap
from typing import TYPE_CHECKING, Any

from bench.errors import BadInput
from paper_figs.style import (
    BODY_PT,
    INK,
    MUTED,
    SMALL_PT,
    WIDTH_IN,
    add_axes,
    caption,
    new_figure,
    one_source,
    stamp,
    style,
    system_colours,
    system_order,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

NEEDED = ("model", "system", "transport", "serial", "layout", "source", "step_time_s", "tokens_per_s_per_gpu")
_LEFT_IN, _RIGHT_IN, _GAP_IN, _TOP_IN = 0.6, 0.1, 0.4, 0.4
_RATES_IN, _ERRORS_IN, _BETWEEN_IN, _NAMES_IN, _LINE_IN = 1.6, 0.9, 0.15, 0.75, 0.105
_BARS = 0.76  # width of a system's bars together


def draw(frame: "DataFrame", note: str = "") -> "Figure":
    """One column a model: tokens/s/GPU, with the range of the rounds; below it the errors of the prediction.

    A system has a place in every column, also where it cannot run at this scale. Runs without overlap are not drawn;
    the hidden share comes from them.

    Args:
        frame: one row a model, system and transport, measured, as `experiments.h200x2` makes it.
        note: what the caption adds.
    Raises BadInput where there are no rows, or a column is absent.
    """
    absent = [name for name in NEEDED if name not in frame.columns]
    if absent or not len(frame):
        raise BadInput("h200x2", absent or "no rows", f"rows with {', '.join(NEEDED)}")
    frame = frame[~frame["serial"].astype(bool)]
    models, systems = list(dict.fromkeys(frame["model"])), system_order(frame["system"])
    lines = textwrap.wrap(_caption(frame) + " " + note, 138)
    below = _NAMES_IN + _LINE_IN * len(lines) + 0.1
    height = below + _ERRORS_IN + _BETWEEN_IN + _RATES_IN + _TOP_IN
    wide = (WIDTH_IN - _LEFT_IN - _RIGHT_IN + _GAP_IN) / len(models) - _GAP_IN
    with style():
        figure = new_figure(WIDTH_IN, height)
        for column, model in enumerate(models):
            rows = frame[frame["model"] == model]
            left = _LEFT_IN + column * (wide + _GAP_IN)
            upper = add_axes(figure, (left, below + _ERRORS_IN + _BETWEEN_IN, wide, _RATES_IN))
            lower = add_axes(figure, (left, below, wide, _ERRORS_IN))
            _rates(upper, rows, systems)
            _errors(lower, rows, systems)
            title = re.sub(r"-(\d+)-layers$", r"\n\1 layers", model)
            upper.set_title(title, loc="left", pad=4, fontsize=BODY_PT)
            stamp(upper, one_source(f"h200x2 {model}: source", rows["source"]))
            for ax in (upper, lower):
                ax.set_xlim(-0.6, len(systems) - 0.4)
                ax.grid(axis="y")
            upper.set_xticks(range(len(systems)), [])
            lower.set_xticks(range(len(systems)), systems, rotation=35, ha="right", fontsize=SMALL_PT)
            if column == 0:
                upper.set_ylabel("tokens/s/GPU (thousand)")
                lower.set_ylabel("simulated over\nmeasured")
                lower.legend(loc="lower left", fontsize=SMALL_PT, ncols=2, handletextpad=0.2, borderaxespad=0.1)
                _name_transports(upper, rows)
        caption(figure, lines)
    return figure


def _place(row: "Mapping[Hashable, Any]", rows: "DataFrame", systems: list[str]) -> float:
    """Of a row's bar: the transports of a system stand side by side."""
    own = list(rows.loc[rows["system"] == row["system"], "transport"])
    return systems.index(row["system"]) + _width(rows) * (own.index(row["transport"]) - (len(own) - 1) / 2)


def _width(rows: "DataFrame") -> float:
    """Of a bar: as many stand side by side as the system with the most transports has."""
    return _BARS / max(2, int(rows.groupby("system").size().max()))


def _hatch(transport: str) -> str | None:
    """Plain for the first transport of a device; one with a number has fewer of its thread blocks."""
    return "....." if ":" in transport else "/////" if transport in ("copy", "host") else None


def _rates(ax: "Axes", rows: "DataFrame", systems: list[str]) -> None:
    colours = system_colours(systems)
    highest = float((rows["tokens_per_s_per_gpu"] / 1e3).max())
    for row in rows.to_dict("records"):
        place = _place(row, rows, systems)
        rate, tokens = row["tokens_per_s_per_gpu"] / 1e3, row["tokens_per_s_per_gpu"] * row["step_time_s"] / 1e3
        look: dict[str, Any] = {"color": colours[row["system"]], "edgecolor": INK, "linewidth": 0.4}
        ax.bar(place, rate, _width(rows), hatch=_hatch(row["transport"]), **look)
        fastest, slowest = (tokens / row[name] for name in ("step_time_low_s", "step_time_high_s"))
        ax.plot([place, place], [slowest, fastest], color=INK, linewidth=0.8)
        if row.get("hidden_share") == row.get("hidden_share") and row.get("hidden_share") is not None:
            words = f"{row['hidden_share']:.0%}"
            above = fastest + 0.02 * highest
            ax.text(place, above, words, ha="center", va="bottom", rotation=90, fontsize=SMALL_PT, color=INK)
    for place, system in enumerate(systems):
        if system not in set(rows["system"]):
            words, low = "not at this scale", 0.02 * highest
            ax.text(place, low, words, ha="center", va="bottom", rotation=90, fontsize=SMALL_PT, color=MUTED)
    ax.set_ylim(0, 1.25 * highest)


def _name_transports(ax: "Axes", rows: "DataFrame") -> None:
    from matplotlib.patches import Patch

    words = sorted(set(rows["transport"]), key=lambda name: (_hatch(name) or "", name))
    handles = [Patch(facecolor="white", edgecolor=INK, linewidth=0.4, hatch=_hatch(name), label=name) for name in words]
    ax.legend(handles=handles, loc="upper right", fontsize=SMALL_PT, ncols=len(words), borderaxespad=0.1)


def _errors(ax: "Axes", rows: "DataFrame", systems: list[str]) -> None:
    ax.axhline(1.0, color=MUTED, linewidth=0.6)
    places = [_place(row, rows, systems) for row in rows.to_dict("records")]
    for name, mark, label in (
        ("predicted_over_measured", "o", "step time"),
        ("predicted_over_measured_memory", "s", "peak memory"),
    ):
        values = rows[name].astype(float).tolist()
        ax.plot(places, values, mark, color=INK, markersize=3, label=label, markerfacecolor="white")
    ax.set_ylim(0, max(1.4, 1.1 * float(rows["predicted_over_measured"].astype(float).max())))


def _caption(frame: "DataFrame") -> str:
    layouts = "; ".join(
        f"{system} {layout}" for system, layout in dict(zip(frame["system"], frame["layout"], strict=True)).items()
    )
    first = frame.iloc[0]
    fewest, most = int(frame["rounds"].min()), int(frame["rounds"].max())
    rounds = f"{most}" if fewest == most else f"{fewest} to {most}"
    return (
        f"measured on {first['cluster']}; {int(first['seq_len']):,} tokens a sequence, "
        f"{int(first['global_batch_tokens']):,} a step; bars: median over the steps of {rounds} "
        f"interleaved rounds, line: range of the rounds' medians, number: share of the transfers that is hidden "
        f"((serial - measured) / transfer, serial: the same plan without overlap). Layouts: {layouts}."
    )
