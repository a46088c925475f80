"""A study along one axis: throughput of every system, and below it the factors of one system over others."""

import textwrap
from collections.abc import Mapping, Sequence
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

NEEDED = ("panel", "x", "system", "status", "source", "cluster", "assumptions", "seq_len", "global_batch_tokens")
RATE = "tokens_per_s_per_gpu"
_LEFT_IN, _RIGHT_IN, _GAP_IN, _BELOW_IN, _MIN_IN = 0.6, 0.1, 0.42, 0.72, 4.4
_UPPER_IN, _LOWER_IN, _BETWEEN_IN = 1.35, 0.7, 0.12


def draw(
    frame: "DataFrame",
    label: str,
    *,
    log: bool = True,
    words: Mapping[float, str] | None = None,
    ours: str = "disagmoe",
    baseline: str = "ep",
    overlap: Sequence[str] = (),
) -> "Figure":
    """One column a panel: tokens/s/GPU (thousand) over x, and the factors of `ours`; hollow marks where nothing was
    found, in rows at the foot.

    Args:
        frame: one row a panel, x and system, columns NEEDED and RATE, which may be absent where no cell ran.
        label: of the axis. log: whether x doubles. words: what stands for a value of x.
        ours, baseline, overlap: the factors are over `baseline` and over the fastest of `overlap`, where both ran; with
            neither in the frame they are left out.
    Raises BadInput where a column is absent, a cell stands twice, or a panel would show simulated and measured numbers
    together.
    """
    cells = _cells(frame)
    panels = list(dict.fromkeys(cells["panel"]))
    systems = system_order(cells["system"])
    factors = {"over " + baseline: [baseline], "over best overlap": [name for name in overlap if name in systems]}
    factors = {name: over for name, over in factors.items() if set(over) & set(systems) and ours in systems}
    lower_in = _LOWER_IN + _BETWEEN_IN if factors else 0.0
    width = min(WIDTH_IN, max(_MIN_IN, _LEFT_IN + 2.6 * len(panels)))
    wide = (width - _LEFT_IN - _RIGHT_IN + _GAP_IN) / len(panels) - _GAP_IN
    height = _BELOW_IN + lower_in + _UPPER_IN + (0.66 if factors else 0.5)
    with style():
        figure = new_figure(width, height)
        for column, panel in enumerate(panels):
            left = _LEFT_IN + column * (wide + _GAP_IN)
            some = cells[cells["panel"] == panel]
            upper = add_axes(figure, (left, _BELOW_IN + lower_in, wide, _UPPER_IN))
            _rates(upper, some, systems)
            stamp(upper, one_source(f"study panel {panel}: source", some["source"]))
            upper.set_title(panel, loc="left", pad=4, fontsize=BODY_PT)
            axes = [upper]
            if factors:
                axes.append(add_axes(figure, (left, _BELOW_IN, wide, _LOWER_IN)))
                _factors(axes[1], some, ours, factors)
            for ax in axes:
                _place(ax, sorted(set(cells["x"])), log, words or {}, labels=ax is axes[-1])
            axes[-1].set_xlabel(label)
            if column == 0:
                upper.set_ylabel("tokens/s/GPU (thousand)")
                if factors:
                    axes[1].set_ylabel(f"{ours},\nfactor")
        for ax, top in zip(figure.axes[:2] if factors else figure.axes[:1], (1.0, 1 - 0.17 / height), strict=False):
            handles, names = ax.get_legend_handles_labels()
            figure.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, top), ncols=len(names))
        lines = textwrap.wrap(_caption(cells), int(22 * width))
        caption(figure, lines)
    return figure


def _cells(frame: "DataFrame") -> "DataFrame":
    absent = [name for name in NEEDED if name not in frame.columns]
    if absent:
        raise BadInput("study columns", absent, f"a table with {', '.join(NEEDED)}")
    if not len(frame):
        raise BadInput("study rows", 0, "at least one cell")
    cells = frame.reindex(columns=[*NEEDED, RATE]).astype({RATE: float, "x": float})
    if cells.duplicated(["panel", "x", "system"]).any():
        raise BadInput("study rows", "one that stands twice", "one row a panel, x and system")
    return cells


def _rates(ax: "Axes", cells: "DataFrame", systems: list[str]) -> None:
    colours = system_colours(systems)
    at_foot = ax.get_xaxis_transform()
    marked: dict[float, int] = {}
    for position, system in enumerate(systems):
        rows = cells[cells["system"] == system].sort_values("x")
        ran = rows["status"] == "ok"
        how: dict[str, Any] = {"color": colours[system], "marker": marker(system, position), "markersize": 4}
        # A line ends where nothing was found.
        rates = (rows[RATE] / 1e3).where(ran)
        ax.plot(rows["x"].tolist(), rates.tolist(), label=system, markeredgecolor=INK, markeredgewidth=0.3, **how)
        for x in rows.loc[~ran, "x"].tolist():
            how |= {"markerfacecolor": "white", "markeredgecolor": colours[system], "markeredgewidth": 0.8}
            ax.plot([x], [_foot(marked.setdefault(x, 0))], transform=at_foot, clip_on=False, **how)
            marked[x] += 1
    for x, num in marked.items():
        ax.text(x, _foot(num), "no layout", transform=at_foot, ha="center", va="center", size=SMALL_PT, color=MUTED)
    top = cells.loc[cells["status"] == "ok", RATE].max()
    ax.set_ylim(0, 1.1 * top / 1e3 if top > 0 else 1.0)
    ax.grid(axis="y")


def _foot(place: int) -> float:
    """Height in a panel of the marks of systems without a layout: they do not hide each other."""
    return 0.04 + 0.06 * place


def _factors(ax: "Axes", cells: "DataFrame", ours: str, factors: Mapping[str, Sequence[str]]) -> None:
    ran = cells[cells["status"] == "ok"]
    mine = ran[ran["system"] == ours].set_index("x")[RATE]
    ax.axhline(1.0, color=MUTED, linewidth=0.6)
    for (name, over), dashes in zip(factors.items(), ("solid", "dashed"), strict=False):
        best = ran[ran["system"].isin(over)].groupby("x")[RATE].max()
        ratio = (mine / best).reindex(sorted(set(cells["x"])))  # a line ends where a side is missing
        how: dict[str, Any] = {"color": INK, "linestyle": dashes, "marker": ".", "markersize": 3}
        ax.plot(ratio.index.tolist(), ratio.tolist(), label=f"{ours} {name}", **how)
    ax.grid(axis="y")
    ax.margins(y=0.2)


def _place(ax: "Axes", places: list[float], log: bool, words: Mapping[float, str], *, labels: bool) -> None:
    if log:
        ax.set_xscale("log", base=2)
        ax.set_xlim(places[0] / 1.25, places[-1] * 1.25)
    else:
        room = 0.06 * ((places[-1] - places[0]) or 1.0)
        ax.set_xlim(places[0] - room, places[-1] + room)
    ax.set_xticks(places, [words.get(x, f"{x:g}") for x in places])
    ax.minorticks_off()
    ax.tick_params(axis="x", labelbottom=labels)


def _caption(cells: "DataFrame") -> str:
    parts = [" and ".join(sorted(set(cells["source"])))]
    parts += [f"assumptions: {', '.join(sorted(set(cells['assumptions'].dropna().astype(str))))}"]
    held = {"cluster": "cluster", "seq_len": "tokens a sequence", "global_batch_tokens": "tokens a step"}
    for column, name in held.items():
        values = list(dict.fromkeys(cells[column]))
        if len(values) == 1:
            parts.append(f"{name}: {values[0]}" if column == "cluster" else f"{name}: {int(values[0]):,}")
    lacking = bool((cells["status"] != "ok").any())
    hollow = " A hollow mark: no layout that was tried fits in memory, or none is possible." if lacking else ""
    return "; ".join(parts) + "." + hollow
