"""`moebench results`: what is listed, shown and compared is what was kept; what is moved arrives whole."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from cases import make_case
from test_results_faults import full
from test_trial import simulated
from typer.testing import CliRunner

from bench.cli.results_cmd import register
from bench.errors import BadInput
from bench.results import ResultsWarning, Store, read_trials
from bench.results.difference import differences
from bench.trial import Trial

app = typer.Typer()
register(app)
app.callback()(lambda: None)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("bench.results.PUBLISHED", tmp_path / "published")  # what is published is not of these tests
    kept = Store(tmp_path / "kept")
    kept.write(full(metrics={"tokens_per_s": 100.0}, telemetry={"verdict": "clean"}))
    kept.write(simulated(make_case("disagmoe", cluster="h800x2", attention_ranks=2)))
    return kept


def call(store: Store, *words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["results", *words, "--results", str(store.directory)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def call_json(store: Store, *words: str, code: int = 0) -> dict[str, Any]:
    return json.loads(call(store, *words, "--json", code=code))


def names(store: Store) -> dict[str, str]:
    return {trial.case.system: trial.name for trial in store.trials()}


def test_list_and_where(store: Store) -> None:
    rows = call_json(store, "list")["trials"]
    assert {row["trial"] for row in rows} >= set(names(store).values())
    rows = call_json(store, "list", "--where", "system=ep", "--where", "source=measured")["trials"]
    assert [(row["trial"], row["tokens_per_s"], row["verdict"]) for row in rows] == [
        (names(store)["ep"], 100.0, "clean")
    ]
    rows = call_json(store, "list", "--where", "case_id=0")["trials"]
    assert rows == []
    assert "disagmoe" in call(store, "list")
    with pytest.raises(BadInput, match="systen"):
        call(store, "list", "--where", "systen=ep")


def test_show_one_by_the_beginning_of_its_name(store: Store) -> None:
    name = names(store)["ep"]
    facts = call_json(store, "show", name[:10])
    assert facts["trial"] == name
    assert "samples" not in facts
    assert call_json(store, "show", name, "--samples")["samples"]["tag_gc"] == [0.0, 1.0, 0.0]
    assert "300.5" in call(store, "show", str(store.directory / f"{name}.json"), "--samples")
    with pytest.raises(BadInput, match="a trial"):
        call(store, "show", "zzz")


def test_diff_names_what_differs(store: Store) -> None:
    ep, other = names(store)["ep"], names(store)["disagmoe"]
    found = call_json(store, "diff", ep, other, code=1)["differences"]
    assert {"case.system", "source"} <= {one["field"] for one in found}
    assert call_json(store, "diff", ep, ep)["differences"] == []
    a, b = full(metrics={"x": 2.0, "y": 1.0}), full(metrics={"x": 3.0, "y": 1.0})
    assert [tuple(one) for one in differences(a, b)] == [("metrics.x", 2.0, 3.0, 1.5)]


def test_an_archive_brings_every_trial_with_its_series(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out" / "all.tar.gz"
    assert call_json(store, "archive", str(out))["trials"] == len(call_json(store, "list")["trials"])
    other = Store(tmp_path / "other")
    assert call_json(other, "import", str(out))["new"] >= 2
    assert call_json(other, "import", str(out))["new"] == 0
    kept = {trial.name: trial.to_text() for trial in store.trials()}
    assert kept.items() <= {trial.name: trial.to_text() for _, trial in read_trials([other.directory])}.items()
    with pytest.raises(BadInput, match="does not exist yet"):
        call(store, "archive", str(out))


def test_a_cut_archive_and_members_with_paths_are_refused(store: Store, tmp_path: Path) -> None:
    out, other = tmp_path / "all.tar.gz", Store(tmp_path / "other")
    call(store, "archive", str(out))
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(out.read_bytes()[: out.stat().st_size // 2])
    with pytest.raises(BadInput, match="whole archive"):
        call(other, "import", str(cut))
    assert not other.directory.exists()
    bad = tmp_path / "bad.tar.gz"
    with tarfile.open(bad, "w:gz") as tar:
        tar.add(next(store.directory.glob("*simulated*.json")), arcname="../escaped.json")
    with pytest.warns(ResultsWarning, match="escaped"):
        assert call_json(other, "import", str(bad))["new"] == 0
    assert not (tmp_path / "escaped.json").exists()


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_export(store: Store, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"trials{suffix}"
    count = call_json(store, "export", str(out))["trials"]
    if suffix == ".jsonl":
        read = [Trial.parse(line) for line in out.read_text().splitlines()]
        assert {trial.name: trial.to_text() for trial in store.trials()}.items() <= {
            t.name: t.to_text() for t in read
        }.items()
    else:
        table = pd.read_csv(out) if suffix == ".csv" else pd.read_parquet(out)
        assert len(table) == count
        assert 100.0 in table["tokens_per_s"].tolist()
    with pytest.raises(BadInput, match=r"\.jsonl"):
        call(store, "export", str(tmp_path / "trials.xls"))
    assert not list(tmp_path.glob(".*"))
