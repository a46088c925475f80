"""Timelines side by side: what each group computes and sends, on one time scale.

A row is one rank: its compute queue above, and below it two thin lanes, what it sends and what it receives. A transfer
is drawn dark while it takes a port, and pale from when its first sender begins until then: latency, and waiting.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from bench.action import Kind, Pass, unpack
from bench.errors import BadInput
from bench.placement import Placement
from bench.plan import COMPUTE_STREAM
from bench.program import Op
from bench.timeline import Timeline
from paper_figs.action_colours import NUMBER_PT, ON_ITS_WAY, draw_legend, palette
from paper_figs.occupancy import stacked
from paper_figs.style import (
    BODY_PT,
    INK,
    MUTED,
    SMALL_PT,
    WIDTH_IN,
    add_axes,
    axes_width_pt,
    new_figure,
    stamp,
    style,
    width_pt,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = tuple[str, Timeline, Placement]
Rows = Literal["groups", "ranks"]
Floats = NDArray[np.float64]

# Lanes of a row, in row heights from its top: compute, sent, received.
_LANES = ((0.0, 0.5), (0.55, 0.71), (0.75, 0.91))
ROW_IN = 0.34
TITLE_IN, AXIS_IN, LEGEND_IN, LEFT_IN, RIGHT_IN = 0.26, 0.36, 0.50, 0.46, 0.14
_MAX_VECTOR_BOXES = 6000
_NARROW_PT = 0.72  # two pixels of the PNG; where half of the boxes are narrower, shares of time are drawn
_MAX_NUMBERS = 3000


def draw(panels: Sequence[Panel], *, window_s: tuple[float, float] | None = None, rows: Rows = "groups") -> "Figure":
    """One panel a timeline, one above the other, all on the same time scale.

    Args:
        panels: (title, timeline, placement of one replica).
        window_s: show only these seconds of the step; None shows the longest step whole.
        rows: "groups" shows of every group of the first replica the rank that computes longest, "ranks" every rank.
    Raises BadInput where there is nothing to draw.
    """
    if not panels:
        raise BadInput("panels", list(panels), "at least one timeline")
    window = window_s or (0.0, max(timeline.step_time_s for _, timeline, _ in panels))
    shown = [shown_ranks(timeline, placement, rows) for _, timeline, placement in panels]
    heights = [TITLE_IN + ROW_IN * len(ranks) for ranks in shown]
    height = sum(heights) + 0.1 * (len(panels) - 1) + AXIS_IN + LEGEND_IN
    with style():
        figure = new_figure(WIDTH_IN, height)
        top = height
        for (title, timeline, placement), ranks, panel_height in zip(panels, shown, heights, strict=True):
            bottom = top - panel_height
            box = (LEFT_IN, bottom, WIDTH_IN - LEFT_IN - RIGHT_IN, ROW_IN * len(ranks))
            ax = add_axes(figure, box)
            draw_panel(ax, timeline, placement, title=title, window_s=window, ranks=ranks)
            top = bottom - 0.1
            if len(figure.axes) < len(panels):
                ax.set_xlabel("")
                ax.tick_params(labelbottom=False)
        draw_legend(add_axes(figure, (LEFT_IN, 0.0, WIDTH_IN - LEFT_IN - RIGHT_IN, LEGEND_IN)))
    return figure


def shown_ranks(timeline: Timeline, placement: Placement, rows: Rows = "groups") -> list[int]:
    """Ranks of the first replica that a panel shows, in the placement's order."""
    if not len(timeline):
        raise BadInput("timeline", "no operations", "a timeline with operations")
    if rows not in ("groups", "ranks"):
        raise BadInput("rows", rows, "groups, ranks")
    computes = timeline.op == Op.COMPUTE
    busy = np.bincount(
        timeline.rank[computes], (timeline.end_s - timeline.start_s)[computes], minlength=int(timeline.rank.max()) + 1
    )
    present = set(np.unique(timeline.rank).tolist())
    ranks: list[int] = []
    for group in placement.groups:
        timed = [rank for rank in group.ranks if rank in present]
        if timed:
            ranks += timed if rows == "ranks" else [max(timed, key=lambda rank: (busy[rank], -rank))]
    if not ranks:
        raise BadInput("timeline.rank", sorted(present)[:8], f"ranks of the first replica, 0 to {placement.size - 1}")
    return ranks


@dataclass(frozen=True)
class _Boxes:
    """What a panel shows, one entry a box; times in seconds, `row` counts from the top."""

    row: NDArray[np.int64]
    lane: NDArray[np.int64]
    start_s: Floats
    end_s: Floats
    kind: NDArray[np.int64]
    pass_: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    on_its_way: NDArray[np.bool_]

    @property
    def colour(self) -> NDArray[np.int64]:
        """Place in the palette."""
        return np.where(self.on_its_way, ON_ITS_WAY + self.kind, 3 * self.kind + self.pass_)


def _boxes(timeline: Timeline, ranks: Sequence[int], window_s: tuple[float, float], num_ranks: int) -> _Boxes:
    """What `ranks` do in the window, cut to it, behind it what is on its way to them; nothing without duration.

    num_ranks: of a replica.
    """
    begin, end = window_s
    mine = np.flatnonzero(np.isin(timeline.rank, ranks))
    sent_s = _sent_s(timeline, mine, num_ranks)
    number = np.zeros(int(timeline.rank.max()) + 1, dtype=np.int64)
    number[list(ranks)] = np.arange(len(ranks))
    lanes = np.array([0 if s == COMPUTE_STREAM else 2 if s.startswith("recv/") else 1 for _, s in timeline.queues])
    of = np.concatenate([mine, mine])
    start_s = np.concatenate([sent_s, timeline.start_s[mine]])
    end_s = np.concatenate([timeline.start_s[mine], timeline.end_s[mine]])
    on_its_way = np.arange(len(of)) < len(mine)
    seen = (start_s < end) & (end_s > begin) & (end_s > start_s)
    columns = unpack(timeline.code[of[seen]])
    return _Boxes(
        row=number[timeline.rank[of[seen]]],
        lane=lanes.astype(np.int64)[timeline.queue[of[seen]]],
        start_s=np.maximum(start_s[seen], begin),
        end_s=np.minimum(end_s[seen], end),
        kind=columns.kind,
        pass_=columns.pass_,
        microbatch=columns.microbatch,
        on_its_way=on_its_way[seen],
    )


def _sent_s(timeline: Timeline, rows: NDArray[np.int64], num_ranks: int) -> Floats:
    """When what each row receives was first sent; its own start where it receives nothing.

    A receive in the queue that sent is the second half of an exchange, whose first half is drawn up to its end.
    """
    sent_s = timeline.start_s[rows].copy()
    sends = np.flatnonzero(timeline.op == Op.SEND)
    receives = timeline.op[rows] == Op.RECV
    if not len(sends) or not receives.any():
        return sent_s
    codes, code = np.unique(timeline.code, return_inverse=True)
    replica = timeline.rank // num_ranks
    key = code.astype(np.int64) * (int(replica.max()) + 1) + replica
    first_s = np.full(len(codes) * (int(replica.max()) + 1), np.inf)
    np.minimum.at(first_s, key[sends], timeline.start_s[sends])
    began_s = first_s[key[rows]]
    # Of one rank's queue.
    own = (code.astype(np.int64) * (int(timeline.rank.max()) + 1) + timeline.rank) * len(timeline.queues)
    own += timeline.queue
    order = sends[np.argsort(own[sends], kind="stable")]
    place = np.minimum(np.searchsorted(own[order], own[rows]), len(order) - 1)
    halves = own[order[place]] == own[rows]
    began_s[halves] = timeline.end_s[order[place[halves]]]
    return np.where(receives, np.minimum(began_s, sent_s), sent_s)


def draw_panel(
    ax: "Axes",
    timeline: Timeline,
    placement: Placement,
    *,
    title: str,
    window_s: tuple[float, float] | None = None,
    ranks: Sequence[int] | None = None,
) -> None:
    """Draws one timeline into `ax`; titles it, and says whether it was simulated or measured."""
    begin, end = window_s or (0.0, timeline.step_time_s)
    if not begin < end:
        raise BadInput("window_s", (begin, end), "two times in seconds, the first before the second")
    ranks = shown_ranks(timeline, placement) if ranks is None else list(ranks)
    unit, scale = time_unit(end - begin)
    ax.set_xlim(begin * scale, end * scale)
    ax.set_ylim(len(ranks), 0)
    _fill(ax, _boxes(timeline, ranks, (begin, end), placement.size), len(ranks), scale)
    ax.set_yticks(
        [row + sum(_LANES[0]) / 2 for row in range(len(ranks))],
        [_name(rank, placement, timeline.stands_for) for rank in ranks],
    )
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"time since the start of the step ({unit})", labelpad=1.5)
    if begin < timeline.step_time_s < end:
        ax.axvline(timeline.step_time_s * scale, color=INK, linewidth=0.6, linestyle=(0, (2, 2)))
    _head(ax, timeline, title)


def _head(ax: "Axes", timeline: Timeline, title: str) -> None:
    """The line above a panel: name, step time and the title's second line on the left, source on the right."""
    unit, scale = time_unit(timeline.step_time_s)
    step = f"step {timeline.step_time_s * scale:.4g} {unit}"
    error = f", clocks within {timeline.clock_error_s * 1e6:.3g} µs" if timeline.clock_error_s else ""
    room = axes_width_pt(ax) - width_pt(step, BODY_PT) - width_pt(timeline.source + error, SMALL_PT) - 20
    name, _, details = title.partition("\n")
    size = BODY_PT + 1 if width_pt(name, BODY_PT + 1, "bold") <= room else SMALL_PT
    name = _fitting(name, room, size, "bold")
    where = ("axes fraction", "offset points")
    text = ax.annotate(name, (0, 1), (0, 3), *where, fontsize=size, weight="bold", va="bottom")
    text = ax.annotate(step, (1, 0), (5, 0), text, "offset points", color=MUTED, va="bottom")
    room -= width_pt(name, size, "bold") + 8
    if details:
        shown = _fitting(details, room, SMALL_PT)
        ax.annotate(shown, (1, 0), (6, 0), text, "offset points", fontsize=SMALL_PT, color=MUTED, va="bottom")
    stamp(ax, timeline.source + error)


def _fitting(text: str, room_pt: float, size_pt: float, weight: str = "normal") -> str:
    """The text, or its beginning that fits."""
    if width_pt(text, size_pt, weight) <= room_pt:
        return text
    fits = bisect_right(range(len(text)), room_pt, key=lambda n: width_pt(text[:n] + "…", size_pt, weight))
    return text[: max(fits - 1, 0)].rstrip() + "…"


def _fill(ax: "Axes", boxes: _Boxes, num_rows: int, scale: float) -> None:
    """Idle background and what was done: box by box, or where boxes are too narrow as shares of time."""
    from matplotlib.collections import PolyCollection

    begin, end = ax.get_xlim()
    idle = [(begin, end, row + top, row + bottom) for row in range(num_rows) for top, bottom in _LANES]
    background = [[(a, t), (b, t), (b, u), (a, u)] for a, b, t, u in idle]
    ax.add_collection(PolyCollection(background, facecolors="#efefef", linewidths=0, label="idle"), autolim=False)
    left, right = boxes.start_s * scale, boxes.end_s * scale
    points = (right - left) / (end - begin) * axes_width_pt(ax)
    if not len(points):
        return
    if np.median(points) < _NARROW_PT:
        _fill_shares(ax, boxes, left, right)
        return
    top, bottom = (boxes.row[:, None] + np.array(_LANES)[boxes.lane]).T
    collection = PolyCollection(
        _corners(left, right, top, bottom),  # type: ignore[arg-type]  # one array of corners is taken as it is
        facecolors=palette()[boxes.colour],
        # A white edge parts neighbours, but would hide boxes that are narrow.
        edgecolors="white",
        linewidths=np.where(points > 2.5, 0.35, 0.0),
        rasterized=len(points) > _MAX_VECTOR_BOXES,
        label="operations",
    )
    ax.add_collection(collection, autolim=False)
    _number(ax, boxes, (left + right) / 2, points)


def _fill_shares(ax: "Axes", boxes: _Boxes, left: Floats, right: Floats) -> None:
    """Every lane as a row of thin columns, each a stack of what the lane did in it; what is left over was idle."""
    from matplotlib.collections import PolyCollection

    edges = np.linspace(*ax.get_xlim(), int(axes_width_pt(ax) / _NARROW_PT) + 1)
    corners, colours = [], []
    for row, lane in np.unique(np.stack([boxes.row, boxes.lane], axis=1), axis=0).tolist():
        here = (boxes.row == row) & (boxes.lane == lane)
        column, low, high, colour = stacked(left[here], right[here], boxes.colour[here], edges)
        top, bottom = _LANES[lane]
        at = row + bottom - np.stack([high, low]) * (bottom - top)
        corners.append(_corners(edges[column], edges[column + 1], *at))
        colours.append(palette()[colour])
    collection = PolyCollection(
        np.concatenate(corners),  # type: ignore[arg-type]
        facecolors=np.concatenate(colours),
        linewidths=0,
        antialiaseds=False,
        rasterized=True,
        label="shares",
    )
    ax.add_collection(collection, autolim=False)


def _corners(left: Floats, right: Floats, top: Floats, bottom: Floats) -> Floats:
    """Rectangles as an array (boxes, 4 corners, x and y)."""
    return np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)


def _number(ax: "Axes", boxes: _Boxes, middle: Floats, points: Floats) -> None:
    digits = np.char.str_len(boxes.microbatch.astype(str))
    named = boxes.kind <= int(Kind.HEAD)
    room = (boxes.lane == 0) & named & (points > digits * NUMBER_PT * 0.64 + 0.7)
    chosen = np.flatnonzero(room)
    if len(chosen) > _MAX_NUMBERS:
        return
    centre = (_LANES[0][0] + _LANES[0][1]) / 2
    for i in chosen.tolist():
        ax.text(
            middle[i],
            boxes.row[i] + centre,
            str(boxes.microbatch[i]),
            fontsize=NUMBER_PT,
            color=INK if boxes.pass_[i] == Pass.F else "white",
            ha="center",
            va="center_baseline",
            clip_on=True,
        )


def _name(rank: int, placement: Placement, stands_for: int) -> str:
    group = next(group for group in placement.groups if rank in group.ranks)
    return group.name if group.size in (1, stands_for) else f"{group.name}.{rank - group.first}"


def time_unit(span_s: float) -> tuple[str, float]:
    """A unit in which a span reads well, and its number in a second."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if span_s * scale >= 1:
            return unit, scale
    return "µs", 1e6
