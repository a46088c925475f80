"""The comparison on two GPUs: its shapes fit, and the whole path on two processes of this machine."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from bench.errors import BadInput
from bench.execute.support import require_supported
from bench.fits import require_fits_here
from bench.predict import predict
from bench.results import PUBLISHED, read_trials
from bench.system import get_system
from bench.transports import NCCL_BLOCKS, Carrier
from bench.trial import Trial
from experiments import Request, get_experiment, h200x2
from experiments.h200x2 import case_of, setting
from paper_figs import h200x2 as drawing
from paper_figs.style import save

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def on_gpus() -> h200x2.Setting:
    return setting("cuda", quick=False)


def test_real_shapes_fit_with_as_many_layers_as_there_is_room_for(on_gpus: h200x2.Setting) -> None:
    assert get_experiment("h200x2") is h200x2
    layers = {model.name: model.num_layers for model in on_gpus.models}
    assert len(layers) == 3
    assert all(1 < number <= h200x2.MOST_LAYERS for number in layers.values()), layers
    for model in on_gpus.models:
        require_supported(model)
        for entry in on_gpus.entries:
            case = case_of(model, on_gpus.cluster, on_gpus.workload, entry)
            try:
                get_system(entry.system).plan(case)
            except BadInput:
                assert entry.system == "dualpipe-v"
                assert model.num_layers < 4
                continue
            require_fits_here(case, with_reference=False)


def test_one_more_layer_would_not_fit(on_gpus: h200x2.Setting) -> None:
    gpt = next(model for model in on_gpus.models if model.name.startswith("gpt"))
    assert gpt.num_layers < h200x2.MOST_LAYERS
    entry = next(entry for entry in on_gpus.entries if entry.system == "disagmoe")
    more = gpt.model_copy(update={"num_layers": 2 * gpt.num_layers})
    found = predict(case_of(more, on_gpus.cluster, on_gpus.workload, entry), h200x2.get_assumptions())
    assert found.missing_bytes > 0


@pytest.mark.slow
def test_the_whole_path_on_two_processes(tmp_path: Path) -> None:
    told: list[str] = []
    evidence = h200x2.run(Request(tmp_path, True, lambda *words: told.append(words[2]), device="cpu"))
    assert evidence.failures == []
    frame = evidence.data
    assert set(frame["system"]) == {"ep", "megatron-overlap", "tutel", "dualpipe-v", "disagmoe"}
    assert set(frame["transport"]) == {"gloo", "host"}
    assert (frame["source"] == "measured").all()
    measured = frame.loc[frame["hidden_share"].notna(), ["system", "serial"]].drop_duplicates().values.tolist()
    assert measured == [["disagmoe", False]]
    assert (frame["step_time_low_s"] <= frame["step_time_s"]).all()
    assert (frame["step_time_s"] <= frame["step_time_high_s"]).all()
    assert len(told) == len(frame)
    kept = [trial for _, trial in read_trials([tmp_path])]
    assert len(kept) == len(frame)
    # Drawn again from the trials alone, the table is the same.
    assert (
        h200x2.table(kept)
        .sort_values(["system", "transport", "serial"])
        .reset_index(drop=True)
        .equals(frame.sort_values(["system", "transport", "serial"]).reset_index(drop=True))
    )
    assert all(path.stat().st_size > 0 for path in save(drawing.draw(**evidence.drawn), tmp_path / "out", "h200x2"))


def test_the_network_is_dialled(on_gpus: h200x2.Setting) -> None:
    dialled = {system: [] for system, _ in h200x2.SYSTEMS}
    for entry in on_gpus.entries:
        dialled[entry.system] += [entry.transport] if not entry.serial else []
    assert dialled["ep"] == dialled["megatron-overlap"] == dialled["disagmoe"] == ["nccl", "nccl:2", "copy"]
    assert dialled["tutel"] == dialled["dualpipe-v"] == ["nccl"]
    serial = [entry.transport for entry in on_gpus.entries if entry.serial]
    assert serial == dialled["disagmoe"]
    for word, blocks in (("nccl", NCCL_BLOCKS), ("nccl:2", 2)):
        assert Carrier.of(word, "cuda", 2, 2).blocks == blocks


def test_capped_nccl_has_rows_and_bars_of_its_own(tmp_path: Path) -> None:
    trials = [trial for _, trial in read_trials([PUBLISHED / "h200x2"]) if trial.case.model.name.startswith("qwen3")]

    def capped(trial: Trial) -> Trial:
        how = {**trial.provenance["execution"], "nccl_blocks": 2}
        slower = {**trial.samples, "step_time_s": [2 * step_s for step_s in trial.samples["step_time_s"]]}
        changes = {"provenance": {**trial.provenance, "execution": how}, "samples": slower}
        return trial.model_copy(update=changes)

    usual = [trial for trial in trials if trial.provenance["execution"]["transport"] == "nccl"]
    found = h200x2.evidence([*trials, *map(capped, usual)], "")
    step_s = found.data.set_index(["system", "transport", "serial"])["step_time_s"]
    assert len(step_s) == len(h200x2.table(trials)) + len(h200x2.table(usual))
    assert step_s["disagmoe", "nccl:2", True] == 2 * step_s["disagmoe", "nccl", True]
    assert list(found.data.loc[found.data["system"] == "ep", "transport"]) == ["nccl", "nccl:2", "copy"]
    assert all(path.stat().st_size > 0 for path in save(drawing.draw(**found.drawn), tmp_path, "h200x2"))


def test_without_rows_nothing_is_drawn(on_gpus: h200x2.Setting) -> None:
    with pytest.raises(BadInput, match="h200x2"):
        drawing.draw(h200x2.table([]))


def test_the_published_table_is_that_of_the_published_trials() -> None:
    """What was measured; predictions beside it are those of the day."""
    trials = [trial for _, trial in read_trials([PUBLISHED / "h200x2"])]
    found = h200x2.evidence(trials, "")
    table = pd.read_csv(PUBLISHED / "h200x2" / "h200x2.csv")
    assert len({(row.model, row.system) for row in table.itertuples()}) >= 12
    assert set(table["cluster"]) == {"h200x2gpu"}
    assert found.failures == []
    lost = [trial for trial in trials if trial.status != "ok"]
    assert all(f"{trial.case.model.name} ({trial.status})" in found.drawn["note"] for trial in lost)
    of_runs = [name for name in table if not name.startswith("predicted")]
    pd.testing.assert_frame_equal(found.data[of_runs], table[of_runs])


def test_a_cell_in_which_no_run_ended_well_is_a_failure() -> None:
    trials = [trial for _, trial in read_trials([PUBLISHED / "h200x2"])]
    (lost,) = (trial for trial in trials if trial.status != "ok")
    cell = (lost.case.model.name, lost.case.system, lost.provenance["execution"])
    left = [
        trial
        for trial in trials
        if (trial.case.model.name, trial.case.system, trial.provenance["execution"]) != cell or trial == lost
    ]
    assert len(left) < len(trials)
    found = h200x2.evidence(left, "")
    (failure,) = found.failures
    assert "gpt-oss-120b-2-layers" in failure
    assert "out of memory" in failure
