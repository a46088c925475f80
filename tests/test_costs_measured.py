"""The cost model's assumptions measured on a GPU: the whole path on CPUs, what is published, values taken from it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench.assumptions import REASONS, get_assumptions
from bench.errors import BadInput
from bench.predict import predict
from experiments import Request, costs, get_experiment
from experiments._operations import fitted
from paper_figs import costs as drawing
from paper_figs.style import save


@pytest.mark.slow
def test_the_whole_path_on_cpus(tmp_path: Path) -> None:
    assert get_experiment("costs") is costs
    found = costs.run(Request(tmp_path, True, lambda *_: None, device="cpu"))
    single = found.data[found.data["part"] == "single"]
    assert (single["measured_s"] > 0).all()
    measured = {"gemm", "grouped_gemm", "grouped_gemm_backward", "attention_forward", "attention_backward"}
    assert set(single["field"]) - {""} == measured | {"hbm", "optimizer", "kernel_s"}
    step = found.data[found.data["part"] == "step"].set_index("operation")["measured_s"]
    assert {"attention F", "expert B", "head W", "update", costs.STEP} <= set(step.index)
    assert step.drop(costs.STEP).sum() <= step[costs.STEP]  # rank 0 does one thing at a time
    assert all(path.stat().st_size > 0 for path in save(drawing.draw(**found.drawn), tmp_path / "out", "costs"))


def test_values_of_the_default_set_are_those_published() -> None:
    rows = costs.published().data
    found, assumed = costs.measured_values(rows), get_assumptions("h200-measured")
    assert set(found) == {field for field, why in REASONS.items() if why.startswith("measured")} - LINKS | CURVE
    for field, value in found.items():
        assert getattr(assumed, field) == pytest.approx(value, rel=0.01), field


LINKS = {"nvlink", "transfer_s", "ring_exposed", "context_bytes"}
CURVE = {"attention_half_span"}


def test_a_step_is_set_beside_its_simulation() -> None:
    rows = costs.published().data
    step = rows[rows["part"] == "step"].set_index("operation")
    found = predict(costs.cases("cuda")[0], get_assumptions())
    assert step["simulated_s"][costs.STEP] == found.step_time_s
    simulated = costs.by_operation(found.timeline)
    assert {name: step["simulated_s"][name] for name in simulated} == {n: s for n, (_, s) in simulated.items()}
    # A simulated step of one rank is the sum of what it does.
    assert sum(seconds for _, seconds in simulated.values()) == pytest.approx(found.step_time_s)


def test_a_curve_is_fitted_back() -> None:
    def curve(most: float) -> list[tuple[float, float]]:
        return [(span, most * span / (span + 900.0)) for span in (4096.0, 8192.0, 32768.0)]

    assert fitted(curve(0.7), curve(0.5)) == pytest.approx((0.7, 0.5, 900.0), rel=1e-4)


def test_without_anything_published_a_gpu_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="device"):
        costs.published(tmp_path)


def test_without_rows_nothing_is_drawn() -> None:
    with pytest.raises(BadInput, match="costs"):
        drawing.draw(costs.published().data.head(0))
