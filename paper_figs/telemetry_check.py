"""Telemetry of one GPU: power and energy under a known load, and power beside the steps of a training run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bench.errors import BadInput
from paper_figs.style import MUTED, SMALL_PT, WIDTH_IN, add_axes, new_figure, stamp, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from bench.trial import Trial

_HEIGHT_IN, _LEFT_IN, _GAP_IN, _BOTTOM_IN, _TOP_IN = 2.7, 0.55, 0.85, 0.45, 0.3
_POWER, _AVERAGE, _STEPS = "#0072b2", "#e69f00", "#d9d9d9"
FIELDS = {"power_instant_w": ("instantaneous", _POWER), "power_w": ("NVML's one-second average", _AVERAGE)}


def draw(load: "DataFrame", joules: Mapping[str, float | None], trial: "Trial") -> "Figure":
    """Left: power under a load that comes and goes, with the energies. Right: power in a run, with its steps.

    Args:
        load: samples with time_s and the power fields that were read.
        joules: energy by the counter (``energy_j``) and by each power field; None where there is none.
        trial: a measured one with telemetry samples.
    Raises BadInput where no power was read.
    """
    if not any(field in load and load[field].notna().any() for field in FIELDS):
        raise BadInput("load", list(load.columns), f"samples of {' or '.join(FIELDS)}")
    with style():
        figure = new_figure(WIDTH_IN, _HEIGHT_IN)
        wide = (WIDTH_IN - _LEFT_IN - _GAP_IN - 0.1) / 2
        high = _HEIGHT_IN - _BOTTOM_IN - _TOP_IN
        left = add_axes(figure, (_LEFT_IN, _BOTTOM_IN, wide, high))
        right = add_axes(figure, (_LEFT_IN + wide + _GAP_IN, _BOTTOM_IN, wide, high))
        _draw_load(left, load, joules)
        _draw_run(right, trial)
        for ax in (left, right):
            ax.set_ylabel("power (W)")
            ax.set_ylim(0, ax.dataLim.y1 * 1.35)  # above the curves is room for words
            stamp(ax, "measured")
    return figure


def _draw_load(ax: "Axes", load: "DataFrame", joules: Mapping[str, float | None]) -> None:
    counter = joules.get("energy_j")
    for field, (label, colour) in FIELDS.items():
        if field in load:
            rows = load.dropna(subset=[field])
            value = joules.get(field)
            if value is not None and counter:
                label = f"{label}: {value:,.0f} J ({value / counter - 1:+.1%})"
            ax.plot(rows["time_s"], rows[field], color=colour, linewidth=0.8, label=label)
    ax.set_title("a load that comes and goes", loc="left", pad=4)
    ax.set_xlabel("time (s)")
    ax.set_xlim(left=0)
    title = f"energy counter: {counter:,.0f} J" if counter else None
    ax.legend(loc="upper left", fontsize=SMALL_PT, title=title, title_fontsize=SMALL_PT, alignment="left")


def _draw_run(ax: "Axes", trial: "Trial") -> None:
    samples = trial.telemetry_samples
    times = np.array([np.nan if t is None else t for t in samples.get("time_s", [])], dtype=float)
    for field, (_, colour) in FIELDS.items():
        if field in samples:
            values = np.array([np.nan if value is None else value for value in samples[field]], dtype=float)
            read = np.isfinite(values)
            ax.plot(times[read], values[read], color=colour, linewidth=0.8)
    step_s = np.array(trial.samples.get("step_time_s", []), dtype=float)
    if "step_power_w" in trial.samples and len(step_s):
        ax.bar(
            trial.samples["step_start_s"], trial.samples["step_power_w"], step_s, align="edge", color=_STEPS, zorder=0
        )
    ax.set_title(f"{len(step_s)} training steps", loc="left", pad=4)
    ax.set_xlabel("time since the first step (s)")
    joules = trial.metrics.get("joules_per_token")
    verdict = trial.telemetry.get("verdict") or "no verdict"
    words = verdict if joules is None else f"{verdict}; {joules * 1e3:.3g} mJ/token"
    ax.text(0.02, 0.97, words, transform=ax.transAxes, fontsize=SMALL_PT, color=MUTED, va="top")
