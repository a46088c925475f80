"""The store of trials: whole files, no overwriting, reading around what is no trial."""

import threading
import warnings
from pathlib import Path

import pytest
from cases import make_case
from test_trial import measured, simulated

from bench.errors import BadInput
from bench.results import PUBLISHED, ResultsWarning, Store, load, read_trials, write_once
from bench.trial import Trial


def test_what_was_written_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    trial = simulated(make_case("ep"))
    path = store.write(trial)
    assert path.name == f"{trial.name}.json"
    assert [read for _, read in read_trials([tmp_path])] == [trial]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = simulated(make_case("ep"), metrics={"step_time_s": 1.0})
    second = simulated(make_case("ep"), metrics={"step_time_s": 2.0})
    assert store.write(first) == store.write(second)
    assert load([tmp_path])["step_time_s"].tolist() == [1.0]
    store.write(measured(make_case("ep")))
    store.write(measured(make_case("ep")))
    assert load([tmp_path])["source"].value_counts().to_dict() == {"measured": 2, "simulated": 1}


def test_many_writers_of_one_name_leave_one_whole_file(tmp_path: Path) -> None:
    texts = [str(i) * 100_000 for i in range(8)]
    threads = [threading.Thread(target=write_once, args=(tmp_path / "one", text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [file.name for file in tmp_path.iterdir()] == ["one"]
    assert (tmp_path / "one").read_text() in texts


def test_foreign_and_truncated_files_are_named_once_and_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    good = store.write(simulated(make_case("ep")))
    (tmp_path / "cut.json").write_text(good.read_text()[:200])
    (tmp_path / "other.json").write_text('{"some": "thing"}')
    (tmp_path / "notes.txt").write_text("not looked at")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "state.json").write_text("{}")
    with pytest.warns(ResultsWarning) as caught:
        frame = load([tmp_path])
    assert len(frame) == 1
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "cut.json" in text
    assert "other.json" in text
    assert "notes" not in text
    assert "state.json" not in text


def test_find_gives_a_finished_trial_that_matches(tmp_path: Path) -> None:
    case = make_case("ep", ep=2)
    store = Store(tmp_path)
    trial = simulated(case)
    store.write(trial)
    failed = simulated(make_case("ep", ep=4, microbatches=2), status="error", message="stopped", code_digest="2" * 16)
    store.write(failed)

    def anything(_: Trial) -> bool:
        return True

    assert store.find(trial.spec, lambda found: found.code_digest == trial.code_digest) == trial
    assert store.find(case, anything) == trial
    assert store.find(make_case("ep", ep=1), anything) is None
    assert store.find(trial.spec, lambda found: found.code_digest == "1" * 16) is None
    assert store.find(failed.case, anything) is None
    assert Store(tmp_path / "empty", also=[tmp_path]).find(case, anything) == trial


def test_a_table_has_a_row_a_trial(tmp_path: Path) -> None:
    Store(tmp_path).write(
        simulated(make_case("ep", ep=2), status="infeasible", message="needs 2 GiB, allowed 1 GiB: 1 GiB missing")
    )
    row = load([tmp_path]).iloc[0]
    assert (row.system, row.model, row.seq_len, row.layout, row.status) == (
        "ep",
        "tiny",
        16,
        "replicas=1 ep=2",
        "infeasible",
    )
    assert load([tmp_path / "nothing"]).empty


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="results"):
        Store(tmp_path / "file").write(simulated(make_case("ep")))


def test_published_trials_are_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path, trial in read_trials([PUBLISHED]):
            assert path.stem == trial.name
