"""Where the time of each GPU went in a profiler's trace: its streams over time, and its classes of work by length.

A column of a stream is filled by class to the height of the time that it was busy. The row of all streams says how much
of each column computes alone, computes and communicates, or communicates alone (exposed); what is left was idle.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput
from bench.kineto import Analysis
from bench.kineto.times import GpuTime, RankTime
from paper_figs.style import BODY_PT, INK, MUTED, SMALL_PT, WIDTH_IN, new_figure, stamp, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

USE_COLOURS = {"compute": "#8fb4d9", "overlapped": "#3f4fa1", "exposed": "#d7301f"}
_USE_LABELS = {"compute": "compute alone", "overlapped": "overlapped", "exposed": "exposed communication"}
# Work in blues, greens and greys; communication in the warm half.
CLASS_COLOURS = {
    "gemm": "#2b6cb0",
    "grouped_gemm": "#0b2f5c",
    "attention": "#63b3ed",
    "convolution": "#4a7fb5",
    "permute": "#2c9c8a",
    "elementwise": "#a9cfc4",
    "copy": "#b8b8b8",
    "memset": "#d6d6d6",
    "host_copy": "#8a8a8a",
    "unknown": "#1a1a1a",
    "dispatch": "#9b3fb5",
    "combine": "#d16ba5",
    "notify": "#e9b8d8",
    "all_to_all": "#7d1d3f",
    "all_reduce": "#d55e00",
    "all_gather": "#f0a202",
    "reduce_scatter": "#f6d36b",
    "send_recv": "#b8860b",
    "broadcast": "#a0522d",
    "peer_copy": "#e57373",
    "other_communication": "#8c564b",
    "fused": "#5b2a86",
}
_SPARE = ("#556b2f", "#708090", "#bc8f8f", "#483d8b")
MAX_DETAILED, MAX_GPUS, MAX_STREAMS, MAX_CLASSES = 4, 64, 8, 9
_ROW_IN, _TITLE_IN, _AXIS_IN, _LEGEND_LINE_IN = 0.2, 0.26, 0.34, 0.13
_LEFT_IN, _BARS_IN, _BETWEEN_IN, _RIGHT_IN = 0.72, 1.05, 1.0, 0.42
_LEGEND_COLUMNS = 6
Columns = NDArray[np.float64]


def draw(analysis: Analysis) -> "Figure":
    """A panel a GPU with its streams, and beside it the longest classes; with many GPUs a row each.

    Raises BadInput where there is nothing to draw.
    """
    gpus = [(rank, gpu) for rank in analysis.ranks for gpu in rank.gpus]
    if not gpus:
        raise BadInput("analysis", "no GPUs", "an analysis with at least one GPU")
    detailed = len(gpus) <= MAX_DETAILED
    panels = [[pair] for pair in gpus] if detailed else [gpus[:MAX_GPUS]]
    rows = [_rows(pairs, detailed) for pairs in panels]
    classes = _classes(gpu for pairs in panels for _, gpu in pairs) if detailed else []
    legend = _legend_entries(classes)
    legend_in = _LEGEND_LINE_IN * (-(-len(legend) // _LEGEND_COLUMNS)) + 0.12
    heights = [_ROW_IN * max(len(some), 4) for some in rows]
    height = sum(heights) + len(panels) * (_TITLE_IN + _AXIS_IN) + legend_in
    with style():
        figure = new_figure(WIDTH_IN, height)
        top = height
        for pairs, some, body in zip(panels, rows, heights, strict=True):
            bottom = top - _TITLE_IN - body
            wide = WIDTH_IN - _LEFT_IN - _BETWEEN_IN - _BARS_IN - _RIGHT_IN
            _draw_rows(_axes(figure, (_LEFT_IN, bottom, wide, body)), pairs, some)
            bars = _axes(figure, (_LEFT_IN + wide + _BETWEEN_IN, bottom, _BARS_IN, body))
            if detailed:
                _draw_classes(bars, pairs[0][1])
            else:
                _draw_exposed(bars, pairs)
            top = bottom - _AXIS_IN
        _draw_legend(_axes(figure, (0.1, 0.0, WIDTH_IN - 0.2, legend_in)), legend)
    return figure


def _axes(figure: "Figure", box_in: tuple[float, float, float, float]) -> "Axes":
    width, height = figure.get_size_inches()
    left, bottom, wide, high = box_in
    return figure.add_axes((left / width, bottom / height, wide / width, high / height))


Row = tuple[str, Mapping[str, Columns], float]  # label, share by class or use, span in seconds
_ALL = "all streams"


def _rows(pairs: list[tuple[RankTime, GpuTime]], detailed: bool) -> list[Row]:
    if not detailed:
        several = any(len(rank.gpus) > 1 for rank, _ in pairs)
        labels = [f"rank {rank.rank}" + (f" GPU {gpu.device}" if several else "") for rank, gpu in pairs]
        return [(label, gpu.by_use, gpu.time.span_s) for label, (_, gpu) in zip(labels, pairs, strict=True)]
    ((_, gpu),) = pairs
    rows: list[Row] = [(_ALL, gpu.by_use, gpu.time.span_s)]
    busiest = sorted(gpu.streams, key=lambda stream: -stream.time.busy_s)[:MAX_STREAMS]
    for stream in sorted(busiest, key=lambda stream: stream.stream):
        shares = {name: column for (number, name), column in gpu.by_class.items() if number == stream.stream}
        rows.append((f"stream {stream.stream}", shares, gpu.time.span_s))
    return rows


def _draw_rows(ax: "Axes", pairs: list[tuple[RankTime, GpuTime]], rows: list[Row]) -> None:
    from matplotlib.collections import PolyCollection

    span = max(span for _, _, span in rows)
    unit, scale = _unit(span)
    corners, colours = [], []
    for number, (_, shares, length) in enumerate(rows):
        for colour, left, right, low, high in _stack(shares, length * scale):
            top, bottom = number + 0.88 - 0.8 * high, number + 0.88 - 0.8 * low
            corners.append(np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2))
            colours += [colour] * len(left)
    end = span * scale
    background = [[(0, i + 0.08), (end, i + 0.08), (end, i + 0.88), (0, i + 0.88)] for i in range(len(rows))]
    ax.add_collection(PolyCollection(background, facecolors="#f0f0f0", linewidths=0, label="idle"), autolim=False)
    if corners:
        ax.add_collection(
            PolyCollection(
                np.concatenate(corners),  # type: ignore[arg-type]  # one array of corners is taken as it is
                facecolors=colours,
                linewidths=0,
                antialiaseds=False,
                rasterized=True,
                label="work",
            ),
            autolim=False,
        )
    ax.set_xlim(0, span * scale)
    ax.set_ylim(len(rows), 0)
    ax.set_yticks([i + 0.48 for i in range(len(rows))], [label for label, _, _ in rows])
    ax.tick_params(axis="y", length=0, labelsize=SMALL_PT)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"time since the GPU's first work ({unit})", labelpad=1.5)
    _title(ax, pairs)


def _stack(shares: Mapping[str, Columns], length: float) -> Iterable[tuple[str, Columns, Columns, Columns, Columns]]:
    """(colour, left, right, low, high) of the filled columns of each class; what runs at once is scaled to 1."""
    if not shares:
        return
    names = sorted(shares, key=_order)
    layers = np.array([np.clip(shares[name], 0, 1) for name in names])
    layers = layers / np.maximum(layers.sum(axis=0), 1.0)
    tops = np.cumsum(layers, axis=0)
    edges = np.linspace(0, length, layers.shape[1] + 1)
    for name, layer, high in zip(names, layers, tops, strict=True):
        some = np.flatnonzero(layer > 1e-6)
        yield _colour(name), edges[some], edges[some + 1], (high - layer)[some], high[some]


def _title(ax: "Axes", pairs: list[tuple[RankTime, GpuTime]]) -> None:
    if len(pairs) > 1:
        title, numbers = f"{len(pairs)} GPUs", "compute alone, overlapped and exposed over time"
    else:
        ((rank, gpu),) = pairs
        of = f" of {rank.world_size}" if rank.world_size else ""
        title = f"rank {rank.rank}{of}, GPU {gpu.device}"
        numbers = "  ".join(
            f"{word} {value / gpu.time.span_s:.1%}" if gpu.time.span_s else word
            for word, value in (
                ("compute", gpu.time.compute_s),
                ("communication", gpu.time.communication_s),
                ("exposed", gpu.time.exposed_s),
                ("idle", gpu.time.idle_s),
            )
        )
    size = BODY_PT + 1
    text = ax.annotate(
        title, (0, 1), (0, 3), "axes fraction", "offset points", weight="bold", va="bottom", fontsize=size
    )
    ax.annotate(numbers, (1, 0), (6, 0), text, "offset points", color=MUTED, va="bottom", fontsize=SMALL_PT)


def _draw_classes(ax: "Axes", gpu: GpuTime) -> None:
    """Bars of the longest classes; a hatched part is exposed."""
    longest = gpu.classes[:MAX_CLASSES]
    unit, scale = _unit(max(time.busy_s for time in longest))
    for i, time in enumerate(longest):
        ax.barh(i, time.busy_s * scale, height=0.72, color=_colour(time.name), linewidth=0)
        if time.exposed_s:
            ax.barh(i, time.exposed_s * scale, height=0.72, color=USE_COLOURS["exposed"], linewidth=0)
        ax.annotate(
            f"{time.busy_s * scale:.3g} {unit}",
            (time.busy_s * scale, i),
            (3, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=SMALL_PT,
            color=INK,
        )
    ax.set_yticks(range(len(longest)), [_label(time.name) for time in longest])
    ax.set_ylim(max(len(longest), 4) - 0.5, -0.5)
    _bare(ax, "time by class, red: exposed")


def _draw_exposed(ax: "Axes", pairs: list[tuple[RankTime, GpuTime]]) -> None:
    """A bar a GPU: how long its communication was exposed."""
    unit, scale = _unit(max(gpu.time.exposed_s for _, gpu in pairs))
    for i, (_, gpu) in enumerate(pairs):
        ax.barh(i + 0.48, gpu.time.exposed_s * scale, height=0.72, color=USE_COLOURS["exposed"], linewidth=0)
        ax.annotate(
            f"{gpu.time.exposed_s * scale:.3g} {unit}",
            (gpu.time.exposed_s * scale, i + 0.48),
            (3, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=SMALL_PT,
        )
    ax.set_yticks([])
    ax.set_ylim(max(len(pairs), 4), 0)
    _bare(ax, "exposed")


def _bare(ax: "Axes", title: str) -> None:
    ax.set_xlim(left=0)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0, labelsize=SMALL_PT)
    ax.spines["bottom"].set_visible(False)
    ax.annotate(title, (0, 1), (0, 3), "axes fraction", "offset points", color=MUTED, va="bottom", fontsize=SMALL_PT)


def _classes(gpus: Iterable[GpuTime]) -> list[str]:
    return sorted({name for gpu in gpus for _, name in gpu.by_class}, key=_order)


def _legend_entries(classes: list[str]) -> list[tuple[str, str]]:
    uses = [(label, USE_COLOURS[use]) for use, label in _USE_LABELS.items()]
    return [*uses, *((_label(name), _colour(name)) for name in classes)]


def _draw_legend(ax: "Axes", entries: list[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    ax.set_axis_off()
    stamp(ax, "measured", y=0.0)
    ax.legend(
        handles=[Patch(facecolor=colour, linewidth=0, label=label) for label, colour in entries],
        loc="center",
        ncols=_LEGEND_COLUMNS,
        labelspacing=0.25,
        fontsize=SMALL_PT,
        handlelength=1.0,
        handleheight=0.8,
        columnspacing=1.0,
        borderaxespad=0,
    )


def _order(name: str) -> tuple[int, str]:
    known = [*USE_COLOURS, *CLASS_COLOURS]
    return (known.index(name) if name in known else len(known), name)


def _colour(name: str) -> str:
    return USE_COLOURS.get(name) or CLASS_COLOURS.get(name) or _SPARE[sum(name.encode()) % len(_SPARE)]


def _label(name: str) -> str:
    return name.replace("_", " ")


def _unit(span_s: float) -> tuple[str, float]:
    """A unit in which a span reads well, and its number in a second."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if span_s * scale >= 1:
            return unit, scale
    return "µs", 1e6
