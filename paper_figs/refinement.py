"""The planner against a whole search: step times of its split and of the refined plan over those of the best layout."""

from typing import TYPE_CHECKING

from bench.errors import BadInput
from paper_figs.style import INK, MUTED, SMALL_PT, WIDTH_IN, add_axes, new_figure, one_source, stamp, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

NEEDED = ("model", "seq_len", "source", "programme_over_whole", "refined_over_whole", "num_searched", "num_simulated")
_PROGRAMME, _REFINED = "#56b4e9", "#d55e00"
_HEIGHT_IN = 2.5


def draw(frame: "DataFrame", within: float = 0.02) -> "Figure":
    """One column a cell: the programme's split and the refined plan, as step time over that of the best layout.

    Args:
        frame: one row a cell, columns NEEDED. A cell without a ratio is one where nothing fits.
        within: the share by which a refined plan may be slower; a dashed line.
    Raises BadInput where a column is absent, or for measured numbers.
    """
    absent = [name for name in NEEDED if name not in frame.columns]
    if absent or not len(frame):
        raise BadInput("refinement columns", absent, f"rows with {', '.join(NEEDED)}")
    with style():
        figure = new_figure(WIDTH_IN, _HEIGHT_IN)
        ax = add_axes(figure, (0.6, 0.9, WIDTH_IN - 0.75, _HEIGHT_IN - 1.22))
        places, below = list(range(len(frame))), ax.get_xaxis_transform()
        ax.axhline(1.0, color=INK, linewidth=0.8)
        ax.axhline(1 + within, color=MUTED, linewidth=0.8, linestyle=(0, (3, 2)))
        ax.text(-0.55, 1 + within, f"+{100 * within:g} %", fontsize=SMALL_PT, color=MUTED, va="bottom")
        split = frame["programme_over_whole"].astype(float)
        refined = frame["refined_over_whole"].astype(float)
        ax.vlines(places, refined, split, color=_PROGRAMME, linewidth=0.8)
        ax.plot(places, split, "D", color=_PROGRAMME, markersize=4, label="the programme's split")
        ax.plot(places, refined, "^", color=_REFINED, markersize=5, label="refined plan")
        for place, row in zip(places, frame.to_dict("records"), strict=True):
            if row["refined_over_whole"] != row["refined_over_whole"] or row["refined_over_whole"] is None:
                ax.text(place, 0.5, "nothing\nfits", fontsize=SMALL_PT, color=MUTED, ha="center", transform=below)
                continue
            counts = f"{row['num_simulated']:.0f} of\n{row['num_searched']:.0f}"
            ax.text(place, -0.18, counts, fontsize=SMALL_PT, color=MUTED, ha="center", va="top", transform=below)
        ax.set_xticks(places, [f"{length // 1024}K" for length in frame["seq_len"]])
        ax.set_xlim(-0.6, len(frame) - 0.4)
        ax.margins(y=0.15)
        ax.tick_params(axis="x", length=0)
        ax.grid(axis="y")
        ax.set_ylabel("step time / best of all layouts")
        for model, rows in frame.reset_index(drop=True).groupby("model", sort=False):
            middle = (rows.index[0] + rows.index[-1]) / 2
            ax.text(middle, -0.42, str(model), ha="center", va="top", weight="bold", transform=below)
        ax.legend(loc="upper right", ncols=2, bbox_to_anchor=(0.9, 1.19), borderaxespad=0)
        stamp(ax, one_source("refinement: source", frame["source"]))
        note = "below the lengths: layouts that the refinement simulated, of those that the whole search looked at"
        if (split.isna() & refined.notna()).any():
            note = "below: layouts that the refinement simulated, of the whole search; no diamond: does not fit"
        figure.text(0.6 / WIDTH_IN, 0.02, note, fontsize=SMALL_PT, color=MUTED)
    return figure
