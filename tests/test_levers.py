"""Recomputation and offload measured one at a time: the cases, the whole path on CPUs, the published table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("torch")

from bench.errors import BadInput
from bench.results import read_trials
from experiments import Request, get_experiment, levers
from paper_figs import levers as drawing
from paper_figs.style import save


def test_cases_differ_by_their_lever_alone() -> None:
    assert get_experiment("levers") is levers
    chosen = levers.cases("cuda")
    plain = {"recompute": "none", "offload": "none"}
    assert len({case.id for case in chosen}) == len(levers.LEVERS)
    assert len({str(case.model_copy(update={"layout": case.layout.model_copy(update=plain)})) for case in chosen}) == 1


@pytest.mark.slow
def test_the_whole_path_on_cpus(tmp_path: Path) -> None:
    found = levers.run(Request(tmp_path, True, lambda *_: None, device="cpu"))
    assert found.failures == []
    assert list(found.data["lever"]) == list(levers.LEVERS)
    kept = [trial for _, trial in read_trials([tmp_path])]
    assert {levers.lever_of(trial) for trial in kept} == set(levers.LEVERS)
    assert all(path.stat().st_size > 0 for path in save(drawing.draw(**found.drawn), tmp_path / "out", "levers"))


def test_without_rows_nothing_is_drawn() -> None:
    with pytest.raises(BadInput, match="levers"):
        drawing.draw(levers.table([]))


def test_the_published_table_is_that_of_the_published_trials() -> None:
    trials = [trial for _, trial in read_trials([levers.FOLDER])]
    found = levers.evidence(trials)
    assert found.failures == []
    published = pd.read_csv(levers.FOLDER / "levers.csv")
    measured = [name for name in published if not name.startswith("predicted")]  # those follow the code
    pd.testing.assert_frame_equal(found.data[measured], published[measured])


def test_a_lost_run_is_a_failure() -> None:
    trials = [trial for _, trial in read_trials([levers.FOLDER])]
    lost = trials[0].model_copy(update={"status": "oom", "message": "no memory left"})
    assert levers.evidence([lost, *trials[1:]]).failures == [f"{levers.lever_of(lost)}: oom: no memory left"]
