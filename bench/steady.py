"""When a series of step times has settled, what its median is and how sure that is, and which steps to look at twice.

Nothing is dropped: the median is of every step of the window; steps that stand out or that something got into are
tagged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput

MIN_STEPS = 5
"""Shorter series say nothing of a warm-up: only their first step is left out of the window."""
OUTLIER_DEVIATIONS = 5.0
DRIFT = 0.01
MIN_SHARE = 0.01
"""Of a step that a disturbance takes, to be worth a tag: small garbage collections are in every step."""
MIN_TAIL = 8
LEVEL = 0.95
DRAWS = 2000
_MAD_TO_SIGMA = 1.4826  # of a normal distribution

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A median with its confidence interval."""

    median: float
    low: float
    high: float
    level: float = LEVEL


@dataclass(frozen=True)
class Steady:
    """What a series of step times says.

    Attributes:
        first, last: steps of the window, both in it.
        settled: whether a warm-up was found to end in the first half of the series. Where not, the window is the second
            half of it, or what a short series has after its first step, and `note` says which.
        step_time_s: median over the window.
        tags: kind -> steps, in and before the window, that stand out (``outlier``) or that something got into.
    """

    first: int
    last: int
    settled: bool
    note: str
    step_time_s: Interval
    tags: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For a trial: the window, how it was found, and how many steps of it have each tag."""
        inside = {kind: sum(self.first <= step <= self.last for step in steps) for kind, steps in self.tags.items()}
        return {
            "first_step": self.first,
            "last_step": self.last,
            "settled": self.settled,
            "note": self.note,
            "statistic": "median of all steps of the window",
            "step_time_s": self.step_time_s.median,
            "low_s": self.step_time_s.low,
            "high_s": self.step_time_s.high,
            "level": self.step_time_s.level,
            "tagged_steps": inside,
        }


def steady(
    step_times_s: Sequence[float],
    spans: Sequence[tuple[float, float]] = (),
    disturbances: Iterable[tuple[str, float, float]] = (),
) -> Steady:
    """The window, its median and the tags of a series of step times, raw and in order.

    Args:
        spans: start and end of every step, on the clock of `disturbances`; where they are given.
        disturbances: kind, start and end of what may have got into steps: ``gc``, ``checkpoint``, ``throttled``.
    Raises:
        BadInput: no steps, or a time that is not a positive number.
    """
    times = np.asarray(step_times_s, dtype=np.float64)
    if not len(times) or not np.all(np.isfinite(times)) or not np.all(times > 0):
        raise BadInput("step_times_s", list(step_times_s)[:5], "one or more positive numbers")
    first, settled, note = _window(times)
    tags: dict[str, set[int]] = {}
    outliers = _outliers(times, times[first:])
    if len(outliers):
        tags["outlier"] = set(outliers.tolist())
    overlap: dict[str, Floats] = {}
    begun, over = np.array(list(spans), dtype=np.float64).reshape(-1, 2).T
    for kind, start, end in disturbances:
        shared = np.maximum(0.0, np.minimum(over, end) - np.maximum(begun, start))
        overlap[kind] = overlap.get(kind, np.zeros(len(begun))) + shared
    for kind, seconds in overlap.items():
        hit = np.flatnonzero(seconds > MIN_SHARE * (over - begun))
        if len(hit):
            tags[kind] = set(hit.tolist())
    return Steady(
        first=first,
        last=len(times) - 1,
        settled=settled,
        note=note,
        step_time_s=median_interval(times[first:]),
        tags={kind: tuple(sorted(steps)) for kind, steps in sorted(tags.items())},
    )


def _window(times: Floats) -> tuple[int, bool, str]:
    n = len(times)
    if n < MIN_STEPS:
        return min(1, n - 1), False, f"fewer than {MIN_STEPS} steps: all but the first, no warm-up looked for"
    first = warm_up_steps(times)
    if first is None:
        return n // 2, False, "not settled in the first half: the second half"
    if _drifts(times[n // 2 :]):
        return n // 2, False, "the second half still drifts: the second half"
    return first, True, f"warm-up of {first} steps: from there on steps are like those of the second half"


def warm_up_steps(times: Floats) -> int | None:
    """How many steps at the beginning to leave out; None where that would be more than half of them.

    The fewest after which, for a tenth of the series, steps lie within `OUTLIER_DEVIATIONS` of the second half's
    median. Each step is seen as the median of itself and its neighbours, the first as it is: a single slow step between
    settled ones is an outlier and no warm-up.
    """
    n = len(times)
    centre, spread = _centre_and_spread(times[n // 2 :])
    alike = np.abs(_median_of_three(times) - centre) <= OUTLIER_DEVIATIONS * spread
    run = max(3, n // 10)
    return next((first for first in range(n // 2 + 1) if alike[first : first + run].all()), None)


def _drifts(tail: Floats) -> bool:
    """Whether the two halves of what should have settled differ by more than `DRIFT` and more than by noise.

    Noise is taken from differences of neighbours, in which a drift does not show; a median of m values has a standard
    error of 1.25 sigma / sqrt(m).
    """
    if len(tail) < MIN_TAIL:
        return False
    halves = np.array_split(tail, 2)
    moved = abs(float(np.median(halves[0]) - np.median(halves[1])))
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(np.diff(tail)))) / np.sqrt(2)
    error = 1.25 * sigma * np.sqrt(sum(1 / len(half) for half in halves))
    return moved > DRIFT * float(np.median(tail)) and moved > 3 * error


def _median_of_three(values: Floats) -> Floats:
    """Each value's median with its neighbours; the first and the last stay as they are."""
    inner = np.median(np.stack([values[:-2], values[1:-1], values[2:]]), axis=0)
    return np.concatenate([values[:1], inner, values[-1:]])


def _centre_and_spread(values: Floats) -> tuple[float, float]:
    """Median and scaled median deviation from it; of times that are nearly all equal, a thousandth of the median."""
    centre = float(np.median(values))
    return centre, max(_MAD_TO_SIGMA * float(np.median(np.abs(values - centre))), 1e-3 * centre)


def _outliers(times: Floats, window: Floats) -> NDArray[np.int64]:
    """Steps further from the window's median than `OUTLIER_DEVIATIONS` of its deviations (by the median of them)."""
    centre, spread = _centre_and_spread(window)
    return np.flatnonzero(np.abs(times - centre) > OUTLIER_DEVIATIONS * spread)


def median_interval(
    values: Sequence[float] | Floats, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Interval:
    """The median and a percentile interval of it from a circular block bootstrap.

    Neighbouring steps are alike, so blocks of the cube root of n steps are drawn and not single ones (Politis and
    Romano, 1992). With one value the interval is that value.
    """
    data = np.asarray(values, dtype=np.float64)
    n = len(data)
    length = max(1, round(n ** (1 / 3)))
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, n, size=(draws, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)) % n
    medians = np.median(data[places.reshape(draws, -1)[:, :n]], axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    median = float(np.median(data))
    return Interval(median, min(float(low), median), max(float(high), median), level)
