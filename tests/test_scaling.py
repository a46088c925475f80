"""The scaling study: its cells, and its figure from a few trials."""

from __future__ import annotations

import pytest

from bench.errors import BadInput
from bench.trial import Trial
from experiments import get_experiment, scaling
from paper_figs.scaling import draw


def trials() -> list[Trial]:
    """Made-up numbers for the quick cells; disagmoe on the smaller cluster does not fit."""
    found = []
    for number, spec in enumerate(scaling.specs(quick=True)):
        fits = not (spec.system == "disagmoe" and spec.cluster.num_nodes == 4)
        found.append(
            Trial.make(
                case=spec,
                source="simulated",
                status="ok" if fits else "infeasible",
                message="" if fits else "1 GiB missing",
                metrics={"tokens_per_s_per_gpu": 1000.0 + number} if fits else {"missing_gib": 1.0},
                assumptions="none",
                code_digest="0",
                command="moebench",
                provenance={},
            )
        )
    return found


def test_every_cell_is_there_once() -> None:
    specs = scaling.specs()
    assert get_experiment("scaling") is scaling
    assert len(set(specs)) == len(specs)
    # At 16 nodes weak and strong have the same batch.
    assert len(specs) == len(scaling.MODELS) * len(scaling.SYSTEMS) * (2 * len(scaling.NODES) - 1)
    assert set(scaling.specs(quick=True)) < set(specs)
    assert all(spec.workload.num_sequences % spec.cluster.num_gpus == 0 for spec in specs)


def test_cells_of_both_modes_stand_in_both() -> None:
    evidence = scaling.evidence(trials())
    rows = evidence.data
    assert len(rows) == 8
    assert sorted(rows[rows["num_gpus"] == 128]["mode"]) == ["strong", "strong", "weak", "weak"]
    weak, strong = evidence.tables
    assert [row[:2] for row in weak.rows] == [row[:2] for row in strong.rows] == [["qwen3-30b", 4], ["qwen3-30b", 16]]
    assert weak.rows[0][3] == "does not fit" and weak.rows[1][4] is not None
    assert evidence.failures == []


def test_the_figure_has_a_panel_for_each_model_and_mode() -> None:
    frame = scaling.evidence(trials()).data
    figure = draw(frame)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["qwen3-30b\nweak", "qwen3-30b\nstrong"]
    for ax in figure.axes:
        lines = {line.get_label(): list(line.get_xdata()) for line in ax.get_lines()}
        assert lines["ep"] == [32, 128] and lines["disagmoe"] == [128]
        assert ax.get_ylim()[1] > max(float(y) for line in ax.get_lines() for y in line.get_ydata())
    # Marks of cells without a rate stand at the bottom, each as what it is.
    assert [list(line.get_xdata()) for line in figure.axes[0].get_lines() if line.get_marker() == "x"][-1] == [32]
    assert "A cross: no layout fits" in figure.texts[-1].get_text() and "ring" not in figure.texts[-1].get_text()
    broken_off = draw(frame.assign(search_complete=frame["status"] == "ok"))
    rings = [list(line.get_xdata()) for line in broken_off.axes[0].get_lines() if line.get_linestyle() == "None"]
    assert rings.count([32]) == 1
    said = broken_off.texts[-1].get_text()
    assert "A ring: the search ended" in said and "cross" not in said
    with pytest.raises(BadInput, match="one source a panel"):
        draw(frame.assign(source=["measured"] + ["simulated"] * 7))
    with pytest.raises(BadInput, match="scaling columns"):
        draw(frame.drop(columns="mode"))
