"""Steady state: warm-ups of known length are found, spikes are tagged and kept, intervals cover."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.steady import median_interval, steady, warm_up_steps


def noisy(n: int, seed: int, scale: float = 0.01) -> np.ndarray:
    return 1.0 + scale * np.random.default_rng(seed).standard_normal(n)


@settings(max_examples=60)
@given(st.integers(0, 12), st.integers(30, 80), st.floats(1.3, 20.0), st.integers(0, 10**6))
def test_a_warm_up_of_known_length_is_found(length: int, n: int, factor: float, seed: int) -> None:
    times = noisy(n, seed)
    times[:length] *= np.linspace(factor, 1.2, length) if length > 1 else factor
    found = steady(times)
    assert found.settled
    assert length <= found.first <= length + 1
    assert abs(found.step_time_s.median - 1.0) < 0.02


@settings(max_examples=40)
@given(st.integers(30, 80), st.data())
def test_a_spike_is_tagged_and_stays_in_the_window(n: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(n // 2 + 1, n - 1))
    times = noisy(n, n)
    times[at] = 7.0
    found = steady(times)
    assert at in found.tags["outlier"]
    assert found.first <= at <= found.last == n - 1
    assert found.as_json()["tagged_steps"]["outlier"] >= 1


def test_a_spike_in_the_first_half_is_no_warm_up() -> None:
    times = noisy(60, 3)
    clean = warm_up_steps(times)
    times[20] = 50.0
    assert warm_up_steps(times) == clean
    assert 20 in steady(times).tags["outlier"]


def test_a_series_that_keeps_falling_is_not_settled() -> None:
    found = steady(np.linspace(2.0, 1.0, 40))
    assert not found.settled
    assert (found.first, found.last) == (20, 39)
    assert "drifts" in found.note
    assert "not settled" in steady([3.0] * 12 + [1.0] * 8).note


def test_short_series_leave_out_the_first_step_and_say_so() -> None:
    found = steady([9.0, 1.0, 1.2])
    assert (found.first, found.last, found.settled) == (1, 2, False)
    assert found.step_time_s.median == pytest.approx(1.1)
    assert steady([3.0]).step_time_s.low == steady([3.0]).step_time_s.high == 3.0


def test_disturbances_tag_the_steps_they_overlap() -> None:
    spans = [(float(i), i + 0.9) for i in range(10)]
    found = steady([0.9] * 10, spans, [("gc", 2.5, 2.6), ("throttled", 4.95, 6.1), ("checkpoint", 20.0, 21.0)])
    assert found.tags == {"gc": (2,), "throttled": (5, 6)}


@pytest.mark.parametrize("times", [[], [1.0, float("nan")], [1.0, 0.0], [-1.0]])
def test_what_is_no_series_of_times_is_refused(times: list[float]) -> None:
    with pytest.raises(BadInput, match="step_times_s"):
        steady(times)


def test_the_interval_covers_the_median_about_as_often_as_it_says() -> None:
    """Of AR(1) noise, whose neighbours are alike; a bootstrap of single steps would be far too sure."""
    hits = 0
    for seed in range(200):
        shocks = np.random.default_rng(seed).standard_normal(120)
        noise = np.zeros(120)
        for i in range(1, 120):
            noise[i] = 0.5 * noise[i - 1] + shocks[i]
        found = median_interval(10 + noise, draws=400, seed=seed)
        assert found.low <= found.median <= found.high
        hits += found.low <= 10.0 <= found.high
    assert 0.85 <= hits / 200 <= 1.0
