"""The compute-communication roofline: attention, experts and both together, moving with the sequence length."""

from typing import TYPE_CHECKING

from bench.errors import BadInput
from paper_figs.style import BODY_PT, FAINT, MUTED, SMALL_PT, WIDTH_IN, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

NAMES_OF_ROW = ("model", "cluster", "assumptions", "seq_len", "side", "top_k", "copies")
COLUMNS = (*NAMES_OF_ROW, "intensity", "attainable_flops_per_s", "compute_flops_per_s", "link_bytes_per_s")
COLOURS = {"attention": "#0072b2", "expert": "#d55e00", "colocated": "#5f5f5f"}
MARKERS = {"attention": "o", "expert": "^", "colocated": "s"}
NAMES = {"attention": "attention GPUs", "expert": "expert GPUs", "colocated": "colocated: both on one GPU"}
_HEIGHT_IN = 2.75
_COPIES = {"expert": "a copy per expert", "rank": "a copy per rank", "node": "a copy per node"}


def draw(frame: "DataFrame") -> "Figure":
    """One panel a model: attainable TFLOP/s of a GPU over FLOPs a byte sent, with the roofs of the sides.

    Args:
        frame: one row a point, with COLUMNS; points of one side are joined in the order of their length.
    Raises BadInput where a column or every row is absent, or more than one top-k or way of copying is given a model.
    """
    absent = [name for name in COLUMNS if name not in frame.columns]
    if absent or not len(frame):
        raise BadInput("roofline columns", absent, f"rows with {', '.join(COLUMNS)}")
    models = list(dict.fromkeys(frame["model"]))
    for model in models:
        kinds = frame[frame["model"] == model][["top_k", "copies"]].drop_duplicates()
        if len(kinds) > 1:
            raise BadInput("roofline rows", kinds.to_numpy().tolist(), f"one top-k and one way of copying for {model}")
    with style():
        figure = new_figure(WIDTH_IN if len(models) > 1 else WIDTH_IN * 0.6, _HEIGHT_IN)
        axes = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
        left = 0.075 if len(models) > 1 else 0.12
        figure.subplots_adjust(left=left, right=0.97, top=0.83, bottom=0.255, wspace=0.08)
        low, high = frame["intensity"].min() / 1.8, frame["intensity"].max() * 1.9
        bottom = frame["attainable_flops_per_s"].min() / 1e12
        top = frame["compute_flops_per_s"].max() / 1e12
        for ax, model in zip(axes, models, strict=True):
            rows = frame[frame["model"] == model]
            ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom / 1.7, top * 1.6))
            _draw_model(ax, rows)
            ax.set_title(f"{model} (top-{rows['top_k'].iloc[0]})", loc="left", pad=4)
            ax.set_xlabel("FLOPs per byte sent")
        axes[0].set_ylabel("attainable TFLOP/s per GPU")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 1.01), ncols=3, fontsize=BODY_PT)
        figure.text(0.005, 0.015, _caption(frame, len(models) == 1), fontsize=SMALL_PT, color=MUTED, linespacing=1.35)
    return figure


def _draw_model(ax: "Axes", rows: "DataFrame") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.grid(which="major", color=FAINT)
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e3:g}K" if value >= 1e3 else f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    low, high = ax.get_xlim()
    for side, points in rows.groupby("side", sort=False):
        colour = COLOURS[str(side)]
        points = points.sort_values("seq_len")
        roof, link = points["compute_flops_per_s"].max(), points["link_bytes_per_s"].max()
        ridge = roof / link
        behind = 0 if side == "colocated" else 1
        heights = [low * link / 1e12, roof / 1e12, roof / 1e12]
        ax.plot([low, ridge, high], heights, color=colour, alpha=0.55, zorder=behind)
        x, y = points["intensity"], points["attainable_flops_per_s"] / 1e12
        ax.plot(
            x,
            y,
            color=colour,
            marker=MARKERS[str(side)],
            markersize=4,
            linewidth=0.8,
            linestyle=":",
            markeredgecolor="white",
            markeredgewidth=0.4,
            label=NAMES[str(side)],
            zorder=3 + behind,
        )
        _label_lengths(ax, points, str(side))


def _label_lengths(ax: "Axes", points: "DataFrame", side: str) -> None:
    """The first and the last length where the points lie apart, else all of them at one place."""
    first, last = points.iloc[0], points.iloc[-1]
    if last["intensity"] < 1.05 * first["intensity"]:
        ends = [(first, "all lengths" if len(points) > 1 else _length(first["seq_len"]))]
    else:
        ends = [(first, _length(first["seq_len"])), (last, _length(last["seq_len"]))]
    for point, text in ends:
        on_roof = point["attainable_flops_per_s"] >= point["compute_flops_per_s"]
        offset, align = (0.0, -8.5), "center"
        if side == "attention":
            offset, align = ((2.5, -15.0), "left") if on_roof else ((-4.0, 1.5), "right")
        elif side == "expert":
            offset, align = ((0.0, 4.5), "center") if on_roof else ((5.0, -7.0), "left")
        where = (point["intensity"], point["attainable_flops_per_s"] / 1e12)
        ax.annotate(text, where, offset, textcoords="offset points", ha=align, fontsize=SMALL_PT, color=COLOURS[side])


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _caption(frame: "DataFrame", narrow: bool) -> str:
    import textwrap

    cluster, assumptions = ", ".join(dict.fromkeys(frame["cluster"])), ", ".join(dict.fromkeys(frame["assumptions"]))
    copies = ", ".join(_COPIES.get(way, way) for way in dict.fromkeys(frame["copies"]))
    text = (
        f"simulated; assumptions: {assumptions}; cluster: {cluster}; dispatch: {copies} of a token. Slopes: a GPU's "
        "own links; colocated, what stays in the node does not count. Plateaus: what the side's kernels reach at best."
    )
    return "\n".join(textwrap.wrap(text, 92 if narrow else 165))
