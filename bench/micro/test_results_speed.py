"""How fast records are written and read: 100,000 into a table, and whole trials with their series."""

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.models import get_model
from bench.provenance import collect
from bench.results import Store, load, read_trials
from bench.trial import Trial

NUM_STEPS = 100
FILES_A_FOLDER = 1000


def trial_of(number: int) -> Trial:
    """A measured trial of ordinary size."""
    workload = Workload(seq_len=4096, global_batch_tokens=1 << 20, seed=number)
    spec = CaseSpec(model=get_model("qwen3-235b"), cluster=get_cluster("h800x16"), workload=workload, system="ep")
    case: Case = spec.with_layout(Layout(ep=16, pp=8))
    return Trial.make(
        case=case,
        source="measured",
        metrics={f"metric_{i}_s": i / 7 for i in range(20)},
        samples={"loss": [i / 3 for i in range(NUM_STEPS)], "step_time_s": [i / 11 for i in range(NUM_STEPS)]},
        command="moebench run ep",
        provenance=collect(),
    )


@pytest.mark.parametrize("count", [100_000])
def test_records_into_a_table(benchmark: BenchmarkFixture, tmp_path: Path, count: int) -> None:
    if not benchmark.enabled:
        count = 200
    text = Store(tmp_path / "one").write(trial_of(0)).read_text()
    for i in range(count):
        folder = tmp_path / "many" / str(i // FILES_A_FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.json").write_text(text)
    table = benchmark.pedantic(load, args=([tmp_path / "many"],), rounds=1)
    assert len(table) == count
    if benchmark.stats is not None:
        benchmark.extra_info["records_per_s"] = count / benchmark.stats.stats.min
        benchmark.extra_info["bytes_a_record"] = len(text)


def test_writing_and_reading_whole_trials(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    store = Store(tmp_path)
    count = 200 if benchmark.enabled else 5
    trials = [trial_of(i) for i in range(count)]

    def there_and_back() -> int:
        for trial in trials:
            store.write(trial)
        return sum(1 for _ in read_trials([tmp_path]))

    assert benchmark.pedantic(there_and_back, rounds=1) == count
    if benchmark.stats is not None:
        benchmark.extra_info["trials_per_s"] = count / benchmark.stats.stats.min
