"""What goes wrong on disks and clocks: nothing that was kept is lost, and nothing is half-read."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cases import make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_trial import measured, simulated

from bench.errors import BadInput
from bench.migrations import MIGRATIONS, SCHEMA_VERSION
from bench.results import ResultsWarning, Store, load, read_trial, read_trials
from bench.results.schema import PUBLISHED_SCHEMA, schema_text
from bench.trial import Trial

V1 = Path(__file__).parent / "data" / "trial-v1.json"
SERIES = {"samples": {"loss": [2.0, 1.0, float("nan")], "tag_gc": [0.0, 1.0, 0.0]}}
TELEMETRY = {"rank": [0.0, 0.0, 1.0], "power_w": [300.5, None, 1e-300], "energy_j": [1.0, 2.0]}


def full(**fields: Any) -> Trial:
    return measured(make_case("ep"), **{**SERIES, "telemetry_samples": TELEMETRY, **fields})


def same(a: Trial, b: Trial) -> bool:
    return a.to_text() == b.to_text()


def test_series_lie_beside_the_record_and_come_back_as_they_were(tmp_path: Path) -> None:
    trial = full()
    path = Store(tmp_path).write(trial)
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".parquet", ".parquet"]
    record = json.loads(path.read_text())
    assert record["samples"] == record["telemetry_samples"] == {}
    assert set(record["series"]) == {"samples", "telemetry_samples"}
    assert same(read_trial(path), trial)
    assert read_trial(path).name == trial.name == path.stem


def test_a_trial_whose_series_were_left_behind_is_not_kept_without_them(tmp_path: Path) -> None:
    record = Store(tmp_path / "a").write(full()).read_bytes()
    with pytest.raises(BadInput, match="series read in"):
        Store(tmp_path / "b").write(Trial.parse(record))


def test_a_record_with_all_there_can_be_has_at_most_20_kb(tmp_path: Path) -> None:
    """A stack of many ranks, the most findings that telemetry keeps, a reason for every field, many metrics."""
    from bench.provenance import collect
    from bench.telemetry.nvml import GPU_FIELDS
    from bench.telemetry.summary import MAX_FINDINGS

    finding = {"rank": 1000, "what": "throttled", "share": 0.123456789, "details": "hardware thermal slowdown, " * 3}
    trial = full(
        status="error",
        message="a line of a stack\n" * 10_000,
        last_actions=["rank 1: in step 7: compute in expert:F3.12 for 300.1 s; comm after send dispatch:F3.12"] * 64,
        telemetry={
            "absent": dict.fromkeys(GPU_FIELDS, "NVML: Driver Not Loaded, as long as such reasons get"),
            "findings": [finding] * MAX_FINDINGS,
            **{f"number_{i}": {"min": 1 / 3, "mean": 1 / 3, "max": 1 / 3} for i in range(12)},
        },
        metrics={f"some_metric_{i}_s": 1 / 3 for i in range(30)},
        samples={"loss": [1.0] * 50_000},
    ).model_copy(update={"provenance": collect()})
    size = Store(tmp_path).write(trial).stat().st_size
    assert 8_000 < size <= 20_000


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trial]:
    folder = tmp_path_factory.mktemp("kept")
    trial = full()
    return Store(folder).write(trial), trial


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_trial_cut_at_any_byte_is_read_whole_or_named(kept: tuple[Path, Trial], data: st.DataObject) -> None:
    path, trial = kept
    victim = data.draw(st.sampled_from(sorted(path.parent.iterdir())))
    content = victim.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    victim.write_bytes(content[:at])
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read = [found for _, found in read_trials([path.parent])]
        if read:  # only the newline at its end was missing
            assert victim == path and at == len(content) - 1
            assert same(read[0], trial)
        else:
            assert len(caught) == 1
            assert path.name in str(caught[0].message)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert len(load([path.parent])) == (victim != path or at == len(content) - 1)
    finally:
        victim.write_bytes(content)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_damaged_series_is_never_taken_for_the_one_that_was_written(
    kept: tuple[Path, Trial], at: int, flip: int
) -> None:
    path, trial = kept
    victim = next(path.parent.glob("*telemetry_samples*"))
    content = bytearray(victim.read_bytes())
    content[at % len(content)] ^= flip
    whole = victim.read_bytes()
    victim.write_bytes(bytes(content))
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            for _, found in read_trials([path.parent]):
                assert same(found, trial)
    finally:
        victim.write_bytes(whole)


def test_foreign_newer_and_older_files(tmp_path: Path) -> None:
    good = Store(tmp_path).write(simulated(make_case("ep")))
    record = json.loads(good.read_text())
    (tmp_path / "newer.json").write_text(json.dumps({**record, "schema_version": SCHEMA_VERSION + 1}))
    (tmp_path / "foreign.json").write_text('{"schema_version": 2}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "bytes.json").write_bytes(bytes(range(256)))
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nothing")
    (tmp_path / "a" / "old.json").parent.mkdir()
    (tmp_path / "a" / "old.json").write_bytes(V1.read_bytes())
    for read in (lambda: len(load([tmp_path])), lambda: len(list(read_trials([tmp_path])))):
        with pytest.warns(ResultsWarning) as caught:
            assert read() == 2
        assert len(caught) == 1
        for name in ("newer.json (newer", "foreign.json", "list.json", "bytes.json", "dangling.json"):
            assert name in str(caught[0].message)


def test_a_record_of_the_first_version_is_read_with_its_samples() -> None:
    trial = Trial.parse(V1.read_bytes())
    assert trial.schema_version == SCHEMA_VERSION
    assert trial.samples["loss"] == [3.5, 3.25]
    assert load([V1])["tokens_per_s"].tolist() == [1000.0]
    assert Trial.model_fields["schema_version"].default == SCHEMA_VERSION
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_the_published_schema_is_that_of_the_code() -> None:
    assert PUBLISHED_SCHEMA.read_text() == schema_text(), "run python -m bench.results.schema"


def _write_many(folder: str, texts: list[str]) -> None:
    store = Store(Path(folder))
    for text in texts:
        store.write(Trial.parse(text))


def test_writers_of_the_same_names_leave_every_trial_once(tmp_path: Path) -> None:
    """Processes that keep the same trials at the same time, in different orders, with a reader among them."""
    trials = [full(metrics={"x": float(i)}) for i in range(12)]
    texts = [trial.to_text() for trial in trials]
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_write_many, args=(str(tmp_path), texts[i * 3 :] + texts[: i * 3])) for i in range(3)
    ]
    for writer in writers:
        writer.start()
    names = {trial.name for trial in trials}
    while any(writer.is_alive() for writer in writers):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is under way is not seen
            assert {path.stem for path, _ in read_trials([tmp_path])} <= names
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    read = {path.stem: trial for path, trial in read_trials([tmp_path])}
    assert set(read) == names
    assert all(same(read[trial.name], trial) for trial in trials)
    assert not list(tmp_path.glob(".*"))


FILL = """
import resource, signal, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from test_results_faults import full
from bench.errors import BadInput
from bench.results import Store
trial = full(samples={{"loss": [float(i * 7919 % 104729) for i in range(4000)]}})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
store = Store(Path({folder!r}))
try:
    store.write(trial)
except BadInput as error:
    print("refused", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(store.write(trial).name)
"""


@pytest.mark.parametrize("limit", [0, 700, 3000, 9000])
def test_a_write_that_the_system_cuts_leaves_nothing_behind_and_can_be_made_again(tmp_path: Path, limit: int) -> None:
    """RLIMIT_FSIZE: writes beyond it fail, as on a full disk."""
    here = Path(__file__).parent
    earlier = full()
    Store(tmp_path).write(earlier)
    program = FILL.format(root=str(here.parent), tests=str(here), folder=str(tmp_path), limit=limit)
    out = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    assert out[0].startswith("refused results") and "File too large" in out[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {path.name for path, _ in read_trials([tmp_path])} == {out[1], f"{earlier.name}.json"}
    assert not list(tmp_path.glob(".*"))


def _mount(folder: Path, size: str) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def test_a_full_disk_costs_only_the_trial_that_does_not_fit(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not _mount(disk, "64k"):
        pytest.skip("needs the right to mount a tmpfs; the limit on file sizes is tested without")
    try:
        store = Store(disk)
        names: list[str] = []

        def fill() -> None:
            for i in range(100):
                names.append(store.write(full(samples={"loss": [float(i), *map(float, range(500))]})).name)

        with pytest.raises(BadInput, match="No space left"):
            fill()
        assert names
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert sorted(path.name for path, _ in read_trials([disk])) == sorted(names)
        assert not list(disk.glob(".*"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jumps=st.lists(st.timedeltas(timedelta(days=-4000), timedelta(days=4000)), min_size=1, max_size=6))
def test_a_wall_clock_that_jumps_loses_no_trial(
    tmp_path_factory: pytest.TempPathFactory, jumps: list[timedelta]
) -> None:
    """Whatever times of day measurements bear, also one and the same, none hides another."""
    store = Store(tmp_path_factory.mktemp("jumps"))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for number, jump in enumerate(jumps):
        store.write(full(metrics={"number": float(number)}).model_copy(update={"created": now + jump}))
    read = Store(store.directory).trials()
    assert sorted(trial.metrics["number"] for trial in read) == list(map(float, range(len(jumps))))
    assert [trial.created for trial in read] == sorted(trial.created for trial in read)
    found = store.find(read[0].case, lambda trial: trial.status == "ok")
    assert found is not None and found.created == read[-1].created


def test_killed_at_any_time_a_writer_leaves_whole_trials_only(tmp_path: Path) -> None:
    trials = [full(metrics={"x": float(i)}) for i in range(200)]
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_write_many, args=(str(tmp_path), [trial.to_text() for trial in trials]))
    writer.start()
    while len(list(tmp_path.glob("*.json"))) < 5 and writer.is_alive():
        pass
    writer.kill()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL or writer.exitcode == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = dict(read_trials([tmp_path]))
    assert len(read) >= 5
    by_name = {trial.name: trial for trial in trials}
    assert all(same(trial, by_name[path.stem]) for path, trial in read.items())
