"""The maps of where disaggregation pays, and the drawings of these and of the roofline."""

from pathlib import Path

import pandas as pd
import pytest

from bench.assumptions import get_assumptions
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.models import get_model
from bench.results import PUBLISHED, read_trials
from experiments import regimes
from paper_figs import regimes as map_figure
from paper_figs import roofline as roofline_figure
from paper_figs.style import save
from systems.disagmoe.planner.roofline import roofline


def cells(speedups: list[float | None]) -> pd.DataFrame:
    panel = regimes.Map("network", "seq_len", (4096, 8192), "nic_bytes_per_s", (25e9, 50e9))
    rows = [
        {**point._asdict(), "panel": "network", "x": panel.x, "y": panel.y, "source": "simulated"}
        | {"speedup": value, "best_colocated": None if value is None else "ep"}
        for point, value in zip(panel.points(), speedups, strict=True)
    ]
    return pd.DataFrame(rows)


def test_every_cell_has_every_system_with_the_same_work() -> None:
    wanted = regimes.specs()
    assert len(set(wanted)) == len(wanted)
    points = {point for panel in regimes.MAPS for point in panel.points()}
    assert len(wanted) == len(points) * (1 + len(regimes.COLOCATED))
    for point in points:
        same = [regimes.spec_at(point, system) for system in (regimes.OURS, *regimes.COLOCATED)]
        assert len({(s.model, s.cluster, s.workload) for s in same}) == 1
        assert same[0].model.top_k == point.top_k and same[0].cluster.num_nodes == point.num_nodes


def test_no_other_colocated_system_is_the_fastest_in_a_cell_of_figure_7() -> None:
    known = (regimes.OURS, *regimes.COLOCATED, "ep", "megatron")
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for _, trial in read_trials([PUBLISHED / "fig7"]):
        cell = rates.setdefault((trial.case.model.name, trial.case.workload.seq_len), {})
        cell[trial.case.system] = trial.metrics.get("tokens_per_s_per_gpu") or 0.0
    assert len(rates) == 12
    for cell in rates.values():
        assert set(cell) <= set(known)
        colocated = {system: rate for system, rate in cell.items() if system != regimes.OURS}
        assert max(colocated, key=lambda system: colocated[system]) in regimes.COLOCATED


def test_the_map_says_how_many_layouts_were_looked_at() -> None:
    caption = map_figure.draw(cells([0.8, 1.3, None, 1.0]), budget=64).texts[-1].get_text()
    assert "at most 64 layouts" in " ".join(caption.split())
    assert "all its layouts" in " ".join(map_figure.draw(cells([0.8, 1.3, None, 1.0])).texts[-1].get_text().split())


def test_quick_cells_are_fewer() -> None:
    assert len(regimes.specs(quick=True)) < len(regimes.specs()) / 4


def test_a_map_is_drawn_the_same_twice_with_what_does_not_fit_hatched(tmp_path: Path) -> None:
    frame = cells([0.8, 1.3, None, 1.0])
    marks = [{"label": "here", "seq_len": 4096, "nic_bytes_per_s": 25e9}]
    for folder in ("one", "two"):
        save(map_figure.draw(frame, marks), tmp_path / folder, "x")
    assert (tmp_path / "one/x.png").read_bytes() == (tmp_path / "two/x.png").read_bytes()
    figure = map_figure.draw(frame, marks)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {"0.80", "1.30", "1.00", "here"} <= set(texts)
    assert [patch.get_hatch() for patch in figure.axes[0].patches] == ["//////"]
    assert figure.axes[0].lines  # the line at 1


def test_a_map_without_a_change_of_side_has_no_line() -> None:
    assert not map_figure.draw(cells([1.1, 1.2, 1.3, 1.4])).axes[0].lines


def test_maps_that_cannot_be_are_refused() -> None:
    frame = cells([0.8, 1.3, None, 1.0])
    with pytest.raises(BadInput, match="columns"):
        map_figure.draw(frame.drop(columns="speedup"))
    with pytest.raises(BadInput, match="one row a cell"):
        map_figure.draw(pd.concat([frame, frame.iloc[:1]]))
    with pytest.raises(BadInput, match="one source"):
        map_figure.draw(frame.assign(source=["simulated", "measured"] * 2))


def points(copies: tuple[str, ...] = ("rank",)) -> pd.DataFrame:
    found = roofline(
        get_model("qwen3-30b"), get_cluster("h800x16"), (4096, 8192), get_assumptions("datasheet"), copies=copies
    )
    same = {"cluster": "h800x16", "assumptions": "datasheet"}
    rows = [
        {**vars(p), "intensity": p.intensity, "attainable_flops_per_s": p.attainable_flops_per_s, **same} for p in found
    ]
    return pd.DataFrame(rows)


def test_a_roofline_is_drawn_with_every_side() -> None:
    figure = roofline_figure.draw(points())
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == list(roofline_figure.NAMES.values())
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "all lengths" in texts and "4K" in texts and "8K" in texts


def test_a_roofline_of_two_ways_of_copying_in_one_panel_is_refused() -> None:
    with pytest.raises(BadInput, match="one way of copying"):
        roofline_figure.draw(points(("rank", "node")))
