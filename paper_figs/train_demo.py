"""The training demo: losses of every system on one curve, and steps as executed beside steps as simulated."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench.errors import BadInput
from paper_figs.action_colours import draw_legend
from paper_figs.style import (
    WIDTH_IN,
    add_axes,
    marker,
    new_figure,
    stamp,
    style,
    system_colours,
)
from paper_figs.timeline import (
    AXIS_IN,
    LEGEND_IN,
    RIGHT_IN,
    ROW_IN,
    TITLE_IN,
    Panel,
    Rows,
    draw_panel,
    shown_ranks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOSS_LEFT_IN, _LOSS_WIDE_IN, _STEPS_LEFT_IN = 0.52, 2.15, 3.2
_GAP_IN, _MIN_HEIGHT_IN = 0.1, 3.0


def draw(losses: Mapping[str, Sequence[float]], timelines: Sequence[Panel], *, rows: Rows = "groups") -> "Figure":
    """Left: loss by step of every system, and below it how far each is from the reference. Right: one step each.

    Args:
        losses: mean loss in nats a token, one value a step, by system; compared to ``reference``, or else to the first.
        timelines: (title, timeline, placement); give a system's executed step and its simulated one after the other.
            Every panel shows its step whole.
        rows: see `paper_figs.timeline.draw`.
    Raises BadInput where there are no losses or timelines, or the runs had different numbers of steps.
    """
    _check(losses, timelines)
    shown = [shown_ranks(timeline, placement, rows) for _, timeline, placement in timelines]
    heights = [TITLE_IN + ROW_IN * len(ranks) + _GAP_IN for ranks in shown]
    body = max(sum(heights) + AXIS_IN - _GAP_IN, _MIN_HEIGHT_IN)
    height = body + LEGEND_IN
    with style():
        figure = new_figure(WIDTH_IN, height)
        _draw_losses(figure, losses, body, height)
        top = height
        wide = WIDTH_IN - _STEPS_LEFT_IN - RIGHT_IN
        for number, ((title, timeline, placement), ranks) in enumerate(zip(timelines, shown, strict=True), 1):
            bottom = top - TITLE_IN - ROW_IN * len(ranks)
            ax = add_axes(figure, (_STEPS_LEFT_IN, bottom, wide, ROW_IN * len(ranks)))
            draw_panel(ax, timeline, placement, title=title, ranks=ranks)
            _share_axis(ax, last=number == len(timelines))
            top = bottom - _GAP_IN
        draw_legend(add_axes(figure, (_LOSS_LEFT_IN, 0, WIDTH_IN - _LOSS_LEFT_IN - RIGHT_IN, LEGEND_IN)))
    return figure


def _share_axis(ax: "Axes", last: bool) -> None:
    """Every step over its own whole length, so that orders can be compared; its seconds are in the title."""
    left, right = ax.get_xlim()
    shares = (0, 25, 50, 75, 100)
    ax.set_xticks([left + (right - left) * share / 100 for share in shares], [f"{share} %" for share in shares])
    ax.get_xticklabels()[-1].set_horizontalalignment("right")
    ax.tick_params(labelbottom=last)
    ax.set_xlabel("share of the step; every panel shows its own step whole" if last else "", labelpad=1.5)


def _check(losses: Mapping[str, Sequence[float]], timelines: Sequence[Panel]) -> None:
    if not losses or not timelines:
        raise BadInput("train demo", [*losses, *(title for title, _, _ in timelines)], "losses and timelines")
    steps = {name: len(values) for name, values in losses.items()}
    if len(set(steps.values())) > 1 or not next(iter(steps.values())):
        raise BadInput("losses", steps, "the same number of steps for every system, at least one")


def _draw_losses(figure: "Figure", losses: Mapping[str, Sequence[float]], body_in: float, height_in: float) -> None:
    reference = "reference" if "reference" in losses else next(iter(losses))
    wide, top = _LOSS_WIDE_IN, height_in - TITLE_IN
    below_in = 0.3 * (body_in - TITLE_IN - AXIS_IN)
    above_in = body_in - TITLE_IN - AXIS_IN - below_in - 0.12
    upper = add_axes(figure, (_LOSS_LEFT_IN, top - above_in, wide, above_in))
    lower = add_axes(figure, (_LOSS_LEFT_IN, top - above_in - 0.12 - below_in, wide, below_in))
    colours = system_colours(losses)
    steps = range(1, len(losses[reference]) + 1)
    every = max(len(steps) // 10, 1)
    for i, (name, values) in enumerate(losses.items()):
        (line,) = upper.plot(steps, values, color=colours[name], linewidth=0.8, markersize=3, label=name)
        # Curves that overlie: the reference is a broad pale line, the others carry their marks at different steps.
        if name == reference:
            line.set(linewidth=3.5, alpha=0.25)
        else:
            line.set(marker=marker(name, i), markerfacecolor="white", markevery=(i * every // len(losses), every))
    upper.set_title("loss", loc="left", pad=4)
    stamp(upper, "measured")
    upper.set_ylabel("loss (nats/token)")
    upper.tick_params(labelbottom=False)
    upper.legend(loc="upper right")
    _draw_differences(lower, losses, reference, colours)
    for ax in (upper, lower):
        ax.grid(axis="y")
        ax.set_xlim(0.5, len(steps) + 0.5)
        ax.yaxis.set_label_coords(-0.36 / wide, 0.5)


def _draw_differences(
    ax: "Axes", losses: Mapping[str, Sequence[float]], reference: str, colours: Mapping[str, str]
) -> None:
    """|loss - reference| / |reference| on a log scale; equal losses lie on the line "equal"."""
    relative = {
        name: [
            abs(a - b) / abs(b) if b else math.inf * abs(a - b) for a, b in zip(values, losses[reference], strict=True)
        ]
        for name, values in losses.items()
        if name != reference
    }
    finite = [value for values in relative.values() for value in values if 0 < value < math.inf]
    lowest = math.floor(math.log10(min(finite, default=1e-15))) - 1
    highest = math.ceil(math.log10(max(finite, default=1e-13)))
    floor = 10.0**lowest
    ax.set_yscale("log")
    ax.set_ylim(floor / 2, 2 * 10.0 ** max(highest, lowest + 2))
    for i, (name, values) in enumerate(relative.items()):
        shown = [value or floor for value in values]
        ax.plot(
            range(1, len(values) + 1),
            shown,
            color=colours[name],
            linewidth=0.6,
            marker=marker(name, i + 1),
            markersize=2,
        )
    decades = range(lowest + 1, max(highest, lowest + 2) + 1, max((highest - lowest) // 3, 1))
    ax.set_yticks([floor, *(10.0**d for d in decades)], ["equal", *(f"$10^{{{d}}}$" for d in decades)])
    ax.minorticks_off()
    ax.set_ylabel("relative difference")
    ax.set_xlabel("optimizer step", labelpad=1.5)
