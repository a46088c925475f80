"""`ep` beside megatron-core itself: the same work, the whole path on CPUs, the published table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bench.errors import BadInput
from bench.execute.job import Job
from bench.results import read_trials
from experiments import Request, get_experiment, megatron_ratio
from paper_figs import megatron_ratio as drawing
from paper_figs.style import save


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 8])
def test_both_have_the_same_to_do_on_every_number_of_gpus(num_gpus: int) -> None:
    assert get_experiment("megatron-ratio") is megatron_ratio
    ours, theirs = megatron_ratio.cases("cuda", num_gpus)
    assert ours.model_copy(update={"system": "megatron"}) == theirs
    ranks = {1: 1, 2: 2, 3: 2, 8: 8}[num_gpus]
    for case, trainer in ((ours, "plan"), (theirs, "native")):
        job = Job.of(case, "synthetic", "device", None, trainer)
        assert job.world_size == case.cluster.num_gpus == ranks
        assert job.batch.num_microbatches == megatron_ratio.SEQUENCES // 2


@pytest.mark.slow
def test_the_whole_path_on_cpus(tmp_path: Path) -> None:
    found = megatron_ratio.run(Request(tmp_path, True, lambda *_: None, device="cpu"))
    assert found.failures == []
    frame = found.data.set_index("system")
    assert dict(frame["trainer"]) == {"ep": "plan", "megatron": "native"}
    ratio = frame.loc["ep", "step_time_s"] / frame.loc["megatron", "step_time_s"]
    assert frame.loc["ep", "over_megatron"] == pytest.approx(ratio)
    kept = [trial for _, trial in read_trials([tmp_path])]
    assert {trial.provenance["execution"]["trainer"] for trial in kept} == {"plan", "native"}
    assert all(path.stat().st_size > 0 for path in save(drawing.draw(**found.drawn), tmp_path / "out", "ratio"))


def test_without_rows_nothing_is_drawn() -> None:
    with pytest.raises(BadInput, match="megatron-ratio"):
        drawing.draw(megatron_ratio.table([]))


def test_the_published_table_is_that_of_the_published_trials() -> None:
    trials = [trial for _, trial in read_trials([megatron_ratio.FOLDER])]
    found = megatron_ratio.evidence(trials)
    assert found.failures == []
    assert found.data.loc[0, "over_megatron"] <= megatron_ratio.MOST
    pd.testing.assert_frame_equal(found.data, pd.read_csv(megatron_ratio.FOLDER / "megatron-ratio.csv"))


def test_a_slow_ep_and_a_lost_run_are_failures() -> None:
    trials = [trial for _, trial in read_trials([megatron_ratio.FOLDER])]
    slow = [
        trial.model_copy(update={"samples": {**trial.samples, "step_time_s": [9.0] * 20}})
        if trial.case.system == "ep"
        else trial
        for trial in trials
    ]
    (failure,) = megatron_ratio.evidence(slow).failures
    assert "of megatron-core's step" in failure
    lost = [trials[0].model_copy(update={"status": "oom", "message": "no memory left"}), *trials[1:]]
    assert any("oom" in failure for failure in megatron_ratio.evidence(lost).failures)
