"""Colours of actions: the hue says what is done, the lightness in which pass; and the legend that explains them."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bench.action import Kind, Pass
from bench.errors import BadInput
from paper_figs.style import INK, MUTED, SMALL_PT, width_pt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUMBER_PT = 4.6  # letters inside boxes

# F, B, W from light to dark. The hues are told apart by colour-blind readers.
_ATTENTION = ("#99bdfb", "#3492f0", "#1a4675")
_EXPERT = ("#dcb490", "#bd7a2d", "#714511")
_ENDS = ("#c8f7c5", "#4b724a", "#08300c")
_DISPATCH = ("#fad0ff", "#9f64a8", "#9f64a8")
_COMBINE = ("#c4c872", "#919358", "#919358")
_RESIDUAL = ("#6cccba", "#068676", "#068676")
_STEP_END = ("#4d4d4d",) * 3
ACTION_COLOURS: dict[Kind, tuple[str, str, str]] = {
    Kind.EMBED: _ENDS,
    Kind.ATTENTION: _ATTENTION,
    Kind.EXPERT: _EXPERT,
    Kind.JOIN: _ENDS,
    Kind.HEAD: _ENDS,
    Kind.DISPATCH: _DISPATCH,
    Kind.COMBINE: _COMBINE,
    Kind.RESIDUAL: _RESIDUAL,
    Kind.HOP: _RESIDUAL,
    Kind.SYNC: _STEP_END,
    Kind.UPDATE: _STEP_END,
}
# Transfers between their start and their arrival: a tint of their own, paler than what moves.
_TINT = 0.5
_LEGEND = (
    (("attention", _ATTENTION), ("experts", _EXPERT), ("embedding, join, head", _ENDS)),
    (
        ("dispatch", _DISPATCH[:2]),
        ("combine", _COMBINE[:2]),
        ("residual, hop", _RESIDUAL[:2]),
        ("sync, update", _STEP_END[:1]),
    ),
)


ON_ITS_WAY = 3 * len(Kind)


def palette() -> NDArray[np.float64]:
    """Colour of kind k in pass p at 3 k + p, of a transfer on its way at ON_ITS_WAY + k: red, green, blue, alpha."""
    from matplotlib.colors import to_rgba_array

    busy = np.concatenate([to_rgba_array(ACTION_COLOURS[kind]) for kind in Kind])
    return np.concatenate([busy, 1 - _TINT * (1 - busy[int(Pass.B) :: 3])])


def draw_legend(ax: "Axes") -> None:
    """Two lines of swatches, compute and transfers, and how to read a row; `ax` is given over to it."""
    from matplotlib.patches import Rectangle

    figure = ax.get_figure(root=True)
    if figure is None:
        raise BadInput("ax", None, "axes of a figure")
    box = ax.get_position()
    wide, high = figure.get_size_inches() * 72 * (box.width, box.height)
    ax.set(xlim=(0, wide), ylim=(0, high))
    ax.axis("off")
    for line, entries in enumerate(_LEGEND):
        x, y = 0.0, high - 10.0 - 11.0 * line
        for name, colours in entries:
            for letter, colour in zip("FBW", colours, strict=False):
                ax.add_patch(Rectangle((x, y), 8, 7.5, facecolor=colour, edgecolor="white", linewidth=0.35))
                shade = INK if letter == "F" and len(colours) > 1 else "white"
                if len(colours) > 1:
                    ax.text(x + 4, y + 3.6, letter, fontsize=NUMBER_PT, color=shade, ha="center", va="center_baseline")
                x += 8
            ax.text(x + 3, y + 3.6, name, fontsize=SMALL_PT, va="center_baseline")
            x += 12 + width_pt(name, SMALL_PT)
    tints = [palette()[ON_ITS_WAY + int(kind)] for kind in (Kind.DISPATCH, Kind.COMBINE, Kind.RESIDUAL)]
    for n, tint in enumerate(tints):
        ax.add_patch(Rectangle((x + 8 * n, y), 8, 7.5, facecolor=tint, edgecolor="white", linewidth=0.35))
    ax.text(x + 8 * len(tints) + 3, y + 3.6, "on its way (latency, waiting)", fontsize=SMALL_PT, va="center_baseline")
    note = (
        "F forward, B input gradient, W weight gradient; numbers: micro-batches; thin lanes: sent, received; "
        "grey: idle; stacks: shares of time"
    )
    ax.text(0, high - 29.0, note, fontsize=SMALL_PT, color=MUTED, va="center_baseline")
