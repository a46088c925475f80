"""Figure 7: throughput of every system, by model and sequence length; what does not fit is drawn as such."""

import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BadInput
from paper_figs.style import (
    BODY_PT,
    INK,
    MUTED,
    SMALL_PT,
    WIDTH_IN,
    add_axes,
    axes_width_pt,
    new_figure,
    one_source,
    save,
    stamp,
    style,
    system_colours,
    system_order,
    width_pt,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patheffects import AbstractPathEffect
    from pandas import DataFrame, Series

NEEDED = ("model", "seq_len", "system", "status", "source", "cluster", "global_batch_tokens", "assumptions")
RATE = "tokens_per_s_per_gpu"
NUMBERS = (RATE, "fraction_of_bound", "mfu", "missing_gib")
NO_LAYOUT = "no layout possible"
BELOW = {"fraction_of_bound": "fraction of\nbound", "mfu": "MFU"}
MAX_BESIDE = 3
"""Most systems for which panels of three models stand beside each other; with more, a model has a row of its own."""

_GROUP_WIDTH = 0.84  # of the distance between two sequence lengths
_LEFT_IN, _GAP_IN, _UPPER_IN, _LOWER_IN, _MIN_WIDTH_IN = 0.56, 0.31, 1.56, 0.54, 3.4
_ROW_UPPER_IN, _ROW_LOWER_IN, _ROW_GAP_IN, _BETWEEN_IN = 1.22, 0.34, 0.5, 0.1


def draw(frame: "DataFrame", *, ours: str = "disagmoe", baseline: str = "ep", overlap: Sequence[str] = ()) -> "Figure":
    """Two panels a model: bars of tokens/s/GPU (thousand), below them the fraction of the bound (or MFU).

    Args:
        frame: one row a cell (model, sequence length, system), columns NEEDED, NUMBERS and ``search_budget``; those of
            the last two may be absent. Cells whose status is not ``ok`` are drawn hatched, with the memory that is
            missing; with `search_budget` instead, where the search ended there: that is no proof that nothing fits.
        ours, baseline, overlap: above the bars of `ours` stand its factors over `baseline`, in bold, and over the
            fastest of `overlap`, where both ran.
    Raises BadInput where a column is absent, a cell stands twice, a cell without number is ``ok``, systems of a cell
    had different work, or a panel would show simulated and measured numbers together.
    """
    cells = _cells(frame)
    models = list(dict.fromkeys(cells["model"]))
    systems = system_order(cells["system"])
    others = [system for system in overlap if system in systems]
    below = "fraction_of_bound" if cells["fraction_of_bound"].notna().any() else "mfu"
    failures = _failures(cells)
    lines = [caption(cells), *_note(systems, ours, baseline, others), *_ended(cells)]
    layout = _Panels(len(models), len(systems), len(_lengths(cells)), len(failures), lines)
    with style():
        figure = new_figure(layout.width, layout.height)
        for i, model in enumerate(models):
            some = cells[cells["model"] == model]
            upper, lower = (add_axes(figure, box) for box in layout.boxes(i))
            _draw_throughput(upper, some, systems)
            _print_factors(upper, some, systems, ours, ([baseline], others))
            _draw_fraction(lower, some, systems, below)
            upper.set_title(model, loc="left", pad=4)
            stamp(upper, one_source(f"fig7 panel {model}: source", some["source"]))
            if i == 0 or layout.in_rows:
                upper.set_ylabel("tokens/s/GPU\n(thousand)" if layout.in_rows else "tokens/s/GPU (thousand)")
                lower.set_ylabel(BELOW[below])
                for ax in (upper, lower):
                    ax.yaxis.set_label_coords(-0.3 / layout.panel_in, 0.5)
            if layout.in_rows and i < len(models) - 1:
                lower.set_xlabel("")
        _draw_legend(figure, systems, failures, layout.num_columns)
        where = (0.035 / layout.width, 0.04 / layout.height)
        figure.text(*where, "\n".join(layout.lines), fontsize=SMALL_PT, color=MUTED, va="bottom")
    return figure


class _Panels:
    """Where the panels stand, in inches from the lower left corner."""

    def __init__(self, num_models: int, num_systems: int, num_lengths: int, num_failures: int, text: list[str]) -> None:
        self.num_models = num_models
        self.in_rows = num_models > 1 and num_systems > MAX_BESIDE
        bars_in = 0.09 * num_systems * num_lengths
        columns = 1 if self.in_rows else num_models
        self.width = min(WIDTH_IN, max(_MIN_WIDTH_IN, _LEFT_IN + columns * (max(1.95, bars_in) + _GAP_IN)))
        if self.in_rows:
            self.width = WIDTH_IN
        self.panel_in = (self.width - _LEFT_IN + _GAP_IN - 0.04) / columns - _GAP_IN
        entries = num_systems + num_failures
        self.num_columns = min(entries, int(self.width / 0.95))
        self.legend_in = 0.3 + 0.14 * (math.ceil(entries / self.num_columns) - 1)
        self.lines = [line for part in text for line in textwrap.wrap(part, int(22 * self.width))]
        self.bottom = 0.43 + 0.112 * len(self.lines)
        self.upper_in, self.lower_in = (_ROW_UPPER_IN, _ROW_LOWER_IN) if self.in_rows else (_UPPER_IN, _LOWER_IN)
        self.row_in = self.lower_in + _BETWEEN_IN + self.upper_in
        rows = num_models if self.in_rows else 1
        self.height = self.bottom + rows * self.row_in + (rows - 1) * _ROW_GAP_IN + 0.23 + self.legend_in

    def boxes(self, i: int) -> list[tuple[float, float, float, float]]:
        """(left, bottom, width, height) of the upper and the lower panel of model `i`."""
        left, bottom = _LEFT_IN + i * (self.panel_in + _GAP_IN), self.bottom
        if self.in_rows:
            left, bottom = _LEFT_IN, self.bottom + (self.num_models - 1 - i) * (self.row_in + _ROW_GAP_IN)
        upper = (left, bottom + self.lower_in + _BETWEEN_IN, self.panel_in, self.upper_in)
        return [upper, (left, bottom, self.panel_in, self.lower_in)]


def write(frame: "DataFrame", out_dir: Path | str, stem: str = "fig7") -> tuple[Path, Path, Path]:
    """Draws `frame` and writes ``stem.pdf``, ``stem.png`` and, with every column of the frame, ``stem.csv``."""
    figure = draw(frame)
    pdf, png = save(figure, out_dir, stem)
    csv = Path(out_dir) / f"{stem}.csv"
    part = csv.with_name(csv.name + ".part")
    try:
        frame.to_csv(part, index=False, lineterminator="\n")
        os.replace(part, csv)
    finally:
        part.unlink(missing_ok=True)
    return pdf, png, csv


def _note(systems: list[str], ours: str, baseline: str, others: list[str]) -> list[str]:
    """What the factors are over."""
    if not {ours, baseline} <= set(systems):
        return []
    also = f"; below it, over the fastest of {', '.join(others)}" if others else ""
    return [f"Factors above {ours}: its throughput over {baseline}{also}."]


def _ended(cells: "DataFrame") -> list[str]:
    """What the words of cells without a bar mean, of those that are there."""
    reasons = {_reason(cell) for _, cell in cells[cells["status"] != "ok"].iterrows()}
    found = []
    if any(reason.startswith("no layout found") for reason in reasons):
        found.append("No layout found in N: none of the N that were simulated fits, and others were not tried.")
    if NO_LAYOUT in reasons:
        found.append("No layout possible: the system has none for so few sequences.")
    return found


def _failures(cells: "DataFrame") -> list[str]:
    """What the legend says of cells without a bar."""
    without = set(cells["status"]) - {"ok"}
    if not without:
        return []
    return ["no layout fits" if without <= {"infeasible", "oom"} else "no result"]


def caption(frame: "DataFrame") -> str:
    """Where the numbers come from, in one line: source, assumptions, cluster, global batch."""
    parts = [" and ".join(sorted(set(frame["source"])))]
    assumptions = sorted(set(frame["assumptions"].dropna().astype(str)))
    if assumptions:
        parts.append(f"assumptions: {', '.join(assumptions)}")
    parts.append(f"cluster: {', '.join(dict.fromkeys(frame['cluster']))}")
    batches = [f"{size:,}" for size in sorted(set(frame["global_batch_tokens"].astype(int)))]
    parts.append(f"global batch: {' / '.join(batches)} tokens a step")
    return "; ".join(parts) + "; per allocated GPU."


def _cells(frame: "DataFrame") -> "DataFrame":
    """The columns that are drawn, checked."""
    absent = [name for name in NEEDED if name not in frame.columns]
    if absent:
        raise BadInput("fig7 columns", absent, f"a table with {', '.join(NEEDED)}")
    if not len(frame):
        raise BadInput("fig7 rows", 0, "at least one cell")
    numbers = dict.fromkeys((*NUMBERS, "search_budget"), float)
    cells = frame.reindex(columns=[*NEEDED, *NUMBERS, "search_budget"]).astype(numbers).reset_index(drop=True)
    twice = cells[cells.duplicated(["model", "seq_len", "system"])]
    if len(twice):
        cell = twice.iloc[0]
        raise BadInput("fig7 rows", f"{cell['model']} {cell['seq_len']} {cell['system']}", "one row a cell")
    without = cells[(cells["status"] == "ok") & cells["tokens_per_s_per_gpu"].isna()]
    if len(without):
        cell = without.iloc[0]
        raise BadInput(
            "fig7 tokens_per_s_per_gpu", None, f"a number where status is ok ({cell['model']} {cell['system']})"
        )
    for what in ("cluster", "global_batch_tokens"):
        for (model, seq_len), some in cells.groupby(["model", "seq_len"]):
            if some[what].nunique() > 1:
                raise BadInput(
                    f"fig7 {what}", sorted(set(some[what])), f"the same for all systems of {model} at {seq_len}"
                )
    return cells


def _lengths(cells: "DataFrame") -> list[int]:
    return sorted(set(cells["seq_len"].astype(int)))


def _positions(cells: "DataFrame", systems: list[str], system: str) -> tuple["DataFrame", list[float], float]:
    """A system's rows, the middles of their bars, and the width of a bar."""
    lengths = _lengths(cells)
    width = _GROUP_WIDTH / len(systems)
    offset = (systems.index(system) - (len(systems) - 1) / 2) * width
    rows = cells[cells["system"] == system].sort_values("seq_len")
    return rows, [lengths.index(int(length)) + offset for length in rows["seq_len"]], width


def _draw_throughput(ax: "Axes", cells: "DataFrame", systems: list[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    colours = system_colours(systems)
    ran = cells["status"] == "ok"
    top = float(cells.loc[ran, "tokens_per_s_per_gpu"].max()) / 1e3 if ran.any() else 1.0
    top = top or 1.0
    _label_lengths(ax, cells, labels=False)
    ax.set_ylim(0, 1.24 * top)
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.grid(axis="y")
    for system in systems:
        rows, middles, width = _positions(cells, systems, system)
        ok = [i for i, status in enumerate(rows["status"]) if status == "ok"]
        heights = (rows["tokens_per_s_per_gpu"] / 1e3).tolist()
        ax.bar(
            [middles[i] for i in ok],
            [heights[i] for i in ok],
            width * 0.92,
            color=colours[system],
            edgecolor=INK,
            linewidth=0.4,
            label=system,
        )
        for i in sorted(set(range(len(rows))) - set(ok)):
            bar = ax.bar([middles[i]], [0.09 * top], width * 0.92, facecolor="white", edgecolor=colours[system])
            bar[0].set(hatch="//////", linewidth=0.5)
            why = _reason(rows.iloc[i])
            text = ax.text(middles[i], 0.12 * top, why, rotation=90, fontsize=SMALL_PT - 0.5, ha="center", va="bottom")
            text.set(color=MUTED, path_effects=_halo())


def _reason(cell: "Series[Any]") -> str:
    """Why a cell has no bar: how a broken-off search ended, or the memory that is missing, or its status."""
    if not math.isnan(cell["search_budget"]):
        return f"no layout found in {cell['search_budget']:.0f}"
    if math.isnan(cell["missing_gib"]):
        return NO_LAYOUT if cell["status"] == "infeasible" else str(cell["status"])
    return f"needs +{cell['missing_gib']:.{0 if cell['missing_gib'] >= 1 else 2}f} GiB"


def _halo() -> "list[AbstractPathEffect]":
    """A white rim, so that text stays legible where it crosses a bar."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=1.6, foreground="white")]


def _print_factors(
    ax: "Axes", cells: "DataFrame", systems: list[str], ours: str, over: tuple[list[str], list[str]]
) -> None:
    """The factor over the fastest of each list above the bars of `ours`, the first in bold and on top."""
    if ours not in systems:
        return
    ran = cells[cells["status"] == "ok"]
    rows, middles, width = _positions(cells, systems, ours)
    # Neighbours that the text would cross push it up.
    bar_pt = width / len(_lengths(cells)) * axes_width_pt(ax)
    reach = max(math.ceil((width_pt("0.00x", SMALL_PT, "bold") / bar_pt - 1) / 2), 0)
    beside = systems[max(systems.index(ours) - reach, 0) : systems.index(ours) + reach + 1]
    for (_, row), x in zip(rows.iterrows(), middles, strict=True):
        here = ran[ran["seq_len"] == row["seq_len"]].set_index("system")[RATE]
        above = here[here.index.isin(beside)].max() / 1e3
        height_pt = 1.5
        for others, weight, colour in zip(reversed(over), ("normal", "bold"), (MUTED, INK), strict=True):
            best = here[here.index.isin(others)].max()
            if row["status"] != "ok" or not best > 0:
                continue
            text = ax.annotate(
                f"{row[RATE] / best:.2f}\N{MULTIPLICATION SIGN}",
                (x, above),
                (0, height_pt),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=SMALL_PT,
                weight=weight,
                color=colour,
            )
            text.set_path_effects(_halo())
            height_pt += SMALL_PT + 0.5


def _draw_fraction(ax: "Axes", cells: "DataFrame", systems: list[str], column: str) -> None:
    colours = system_colours(systems)
    _label_lengths(ax, cells, labels=True)
    ax.grid(axis="y")
    ran = cells["status"] == "ok"
    top = cells.loc[ran, column].max() if ran.any() else 1.0
    whole = column == "fraction_of_bound" or not top <= 0.6
    ax.set_ylim(0, 1.0 if whole else 0.6)
    ax.set_yticks((0, 0.5, 1.0) if whole else (0, 0.3, 0.6))
    for system in systems:
        rows, middles, width = _positions(cells, systems, system)
        drawn = [i for i, status in enumerate(rows["status"]) if status == "ok"]
        values = [float(rows[column].iloc[i]) for i in drawn]
        ax.bar(
            [middles[i] for i in drawn],
            values,
            width * 0.92,
            color=colours[system],
            edgecolor=INK,
            linewidth=0.4,
            label=system,
        )
        for i in set(range(len(rows))) - set(drawn):
            ax.plot(
                middles[i], 0.05 * ax.get_ylim()[1], "x", markersize=2.5, markeredgewidth=0.6, color=colours[system]
            )


def _label_lengths(ax: "Axes", cells: "DataFrame", *, labels: bool) -> None:
    lengths = _lengths(cells)
    ax.set_xlim(-0.5, len(lengths) - 0.5)
    ax.set_xticks(range(len(lengths)), [_length(length) for length in lengths])
    ax.tick_params(axis="x", length=0, labelbottom=labels)
    if labels:
        ax.set_xlabel("sequence length (tokens)", labelpad=1.5)


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _draw_legend(figure: "Figure", systems: list[str], failures: list[str], num_columns: int) -> None:
    from matplotlib.patches import Patch

    colours = system_colours(systems)
    handles = [Patch(facecolor=colours[name], edgecolor=INK, linewidth=0.4, label=name) for name in systems]
    for said in failures:
        handles.append(Patch(facecolor="white", edgecolor=MUTED, hatch="//////", linewidth=0.5, label=said))
    figure.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 1.0),
        borderaxespad=0.3,
        ncols=num_columns,
        fontsize=BODY_PT,
        handlelength=1.4,
        columnspacing=1.3,
    )
