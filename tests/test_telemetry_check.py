"""The check of telemetry: refused without a GPU; its parts that need none; what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import make_case
from test_telemetry import CUDA

from bench.errors import BadInput
from bench.execute.pool import RankPool
from bench.measured import measure
from bench.steady import Interval
from experiments import Request, get_experiment, telemetry_check
from experiments.telemetry_check import Load, _cost_failures, _energy_failures, load_frame
from paper_figs.style import save
from paper_figs.telemetry_check import draw


def load_of(counter: float | None, instant: float | None) -> Load:
    columns = {
        "time_s": [5.0 + i / 10 for i in range(101)],
        "power_w": [300.0] * 101,
        "power_instant_w": [300.0 + i % 7 for i in range(101)],
        "energy_j": [30.0 * i for i in range(101)],
    }
    joules = {"energy_j": counter, "power_instant_w": instant, "power_w": 3000.0}
    return Load(columns, {"energy_j": "Not Supported"}, {}, 5.0, 15.0, joules, 0.1, None)


def test_energies_that_disagree_and_a_sampler_that_costs_are_failures() -> None:
    assert _energy_failures(load_of(3000.0, 3100.0)) == []
    assert "1.067" in _energy_failures(load_of(3000.0, 3200.0))[0]
    assert "Not Supported" in _energy_failures(load_of(None, 3000.0))[0]
    assert _energy_failures(load_of(3000.0, None)) == []
    assert _cost_failures(Interval(1.008, 1.0, 1.009)) == []
    assert "1.0120" in _cost_failures(Interval(1.012, 1.011, 1.02))[0]
    assert _cost_failures(Interval(0.999, 0.99, 1.011))[0].startswith("too few")


@pytest.mark.skipif(CUDA, reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused_in_one_line(tmp_path: Path) -> None:
    assert get_experiment("telemetry-check") is telemetry_check
    with pytest.raises(BadInput, match="a GPU that NVML reads"):
        telemetry_check.run(Request(tmp_path, True, lambda *_: None))


def test_steps_with_and_without_the_sampler_are_timed_in_pairs(pool: RankPool) -> None:
    case = make_case("ep", cluster="cpu", ep=1, microbatches=1)
    case = case.model_copy(update={"workload": case.workload.model_copy(update={"dtype": "fp32"})})
    (ratios,) = pool.run(telemetry_check.step_ratios, case, 50.0, 0.0, 0.01, world_size=1)
    assert len(ratios.cost) == len(ratios.noise) == telemetry_check.MIN_QUADS
    assert all(ratio > 0 for ratio in ratios.cost + ratios.noise)
    assert ratios.steps >= 3


def test_the_figure_is_drawn_from_a_load_and_a_trial(pool: RankPool, tmp_path: Path) -> None:
    trial = measure(make_case("ep", cluster="cpu", ep=1, microbatches=1), steps=3, pool=pool, telemetry_hz=50).trial
    samples = {"time_s": [0.0, 0.1, 0.2], "power_w": [100.0, None, 120.0]}
    trial = trial.model_copy(
        update={"telemetry_samples": samples, "samples": {**trial.samples, "step_power_w": [100.0, 110.0, 120.0]}}
    )
    load = load_of(3000.0, 3020.0)
    figure = draw(load_frame(load), load.joules, trial)
    legend = figure.axes[0].get_legend()
    assert legend is not None and legend.get_title().get_text() == "energy counter: 3,000 J"
    texts = [text.get_text() for text in legend.get_texts()]
    assert any("3,020 J (+0.7%)" in text for text in texts)
    assert all(path.stat().st_size for path in save(figure, tmp_path, "telemetry-check"))
    with pytest.raises(BadInput, match="power_instant_w"):
        draw(load_frame(load)[["time_s", "energy_j"]], load.joules, trial)
