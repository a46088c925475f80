"""Energy and averages from samples: interpolated counters, integrated power, means over spans of time."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Columns = Mapping[str, Sequence[float | None]]

WRAP_32 = 2.0**32


def points(columns: Columns, name: str) -> tuple[Floats, Floats]:
    """(times, values) of a field where it was read and time went on; empty where it never was.

    Samples whose time stamp is not after all before it say nothing of when they were taken, and are left out here.
    """
    if name not in columns:
        return np.empty(0), np.empty(0)
    times = np.array(columns["time_s"], dtype=np.float64)
    values = np.array([np.nan if value is None else value for value in columns[name]], dtype=np.float64)
    read = np.isfinite(values) & np.isfinite(times)
    times, values = times[read], values[read]
    if not len(times):
        return times, values
    before = np.concatenate([[-np.inf], np.maximum.accumulate(times)[:-1]])
    return times[times > before], values[times > before]


def counted(columns: Columns, name: str, start_s: float, end_s: float) -> float | None:
    """By how much a counter rose between two times, interpolated; None where they are not between samples of it.

    A counter that falls has wrapped at 32 bits, or was reset: of a reset what came before it is lost.
    """
    times, values = points(columns, name)
    if len(times) < 2 or start_s < times[0] or end_s > times[-1]:
        return None
    rises = np.diff(values)
    wrapped = (rises < 0) & (values[:-1] < WRAP_32) & (values[:-1] > WRAP_32 / 2)
    rises = np.where(wrapped, rises + WRAP_32, np.maximum(rises, 0.0))
    total = np.concatenate([[0.0], np.cumsum(rises)])
    low, high = np.interp([start_s, end_s], times, total)
    return float(high - low)


def integrated(columns: Columns, name: str, start_s: float, end_s: float) -> float | None:
    """The integral of a field over time by the trapezoidal rule; None where the times are not between samples of it."""
    times, values = points(columns, name)
    if len(times) < 2 or not end_s > start_s or start_s < times[0] or end_s > times[-1]:
        return None
    inside = (times > start_s) & (times < end_s)
    edges = np.interp([start_s, end_s], times, values)
    x = np.concatenate([[start_s], times[inside], [end_s]])
    y = np.concatenate([edges[:1], values[inside], edges[1:]])
    return float(np.sum(np.diff(x) * (y[:-1] + y[1:]) / 2))


def within(columns: Columns, name: str, start_s: float, end_s: float) -> Floats:
    """The field's values that were read between two times."""
    times, values = points(columns, name)
    return values[(times >= start_s) & (times <= end_s)]


def resolution_s(columns: Columns, name: str) -> float | None:
    """Median time between changes of a counter: what is shorter cannot be told apart. None below two changes."""
    times, values = points(columns, name)
    changed = times[1:][np.diff(values) != 0]
    return float(np.median(np.diff(changed))) if len(changed) > 1 else None
