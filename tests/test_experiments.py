"""Experiments: what they ask for, that a sweep takes up where it stopped, and what a figure shows of its cells."""

from pathlib import Path

import pytest

from bench.case import CaseSpec, Workload
from bench.cli.figures import draw
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.evaluate import CostModel
from bench.models import get_model
from bench.results import Store
from bench.system import systems
from bench.trial import Trial
from experiments import fig7, get_experiment, names, train_demo
from experiments._sweep import reusable, sweep
from tests.timelines import one_layer


def spec(system: str, model: str = "tiny", seq_len: int = 64, tokens: int = 2048) -> CaseSpec:
    work = Workload(seq_len=seq_len, global_batch_tokens=tokens)
    return CaseSpec(model=get_model(model), cluster=get_cluster("h800x1"), workload=work, system=system)


def test_an_experiment_is_found_by_its_file() -> None:
    assert {"fig7", "train-demo"} <= set(names())
    assert get_experiment("fig7") is fig7
    with pytest.raises(BadInput, match="did you mean 'fig7'"):
        get_experiment("fig77")


def test_figure_7_gives_every_system_the_same_work() -> None:
    specs = fig7.specs()
    assert len(specs) == len(set(specs)) == len(fig7.SYSTEMS) * 3 * 4
    assert set(fig7.SYSTEMS) == set(systems()) - {"reference"}
    by_cell: dict[tuple[str, int], set[CaseSpec]] = {}
    for one in specs:
        by_cell.setdefault((one.model.name, one.workload.seq_len), set()).add(one.model_copy(update={"system": ""}))
        assert one.cluster.num_gpus == 128
        assert one.workload.global_batch_tokens == 1 << 22
        assert one.workload.num_sequences * one.workload.seq_len == 1 << 22
    assert all(len(cells) == 1 for cells in by_cell.values())
    assert set(fig7.specs(quick=True)) < set(specs)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trial]]:
    """Small cells, one of which cannot fit, simulated by two processes."""
    folder = tmp_path_factory.mktemp("trials")
    specs = [
        spec("megatron"),
        spec("disagmoe"),
        spec("megatron", "deepseek-v3", 4096, 65536),
        spec("disagmoe", "deepseek-v3", 4096, 65536),
    ]
    return folder, sweep(specs, CostModel.named(), Store(folder), lambda *_: None, budget=2, num_workers=2)


def test_a_sweep_gives_a_trial_a_spec_and_keeps_it(swept: tuple[Path, list[Trial]]) -> None:
    folder, trials = swept
    assert [trial.status for trial in trials] == ["ok", "ok", "infeasible", "infeasible"]
    assert sorted(path.stem for path in folder.iterdir()) == sorted(trial.name for trial in trials)
    for trial in trials[2:]:
        assert trial.metrics["missing_gib"] > 0
        assert "GiB missing" in trial.message


def test_a_sweep_repeats_only_what_is_missing(swept: tuple[Path, list[Trial]], tmp_path: Path) -> None:
    folder, trials = swept
    reports: list[tuple[int, int, str]] = []
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = sweep([t.spec for t in trials], CostModel.named(), Store(folder), lambda *r: reports.append(r), budget=2)
    assert again == trials
    assert reports == [(4, 4, "found")]
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_other_code_assumptions_or_search_is_no_reuse(swept: tuple[Path, list[Trial]], tmp_path: Path) -> None:
    folder, (trial, *_) = swept
    store = Store(folder)
    assert reusable(store, trial.spec, CostModel.named(), 2) == trial
    assert reusable(store, trial.spec, CostModel.named(), 3) is None
    assert reusable(store, trial.spec, CostModel.named(None, ["gemm=0.5"]), 2) is None
    other = Store(tmp_path)
    other.write(Trial.parse(trial.to_text().replace(str(trial.code_digest), "0" * 16)))
    assert reusable(other, trial.spec, CostModel.named(), 2) is None


def test_figure_7_shows_cells_that_do_not_fit(swept: tuple[Path, list[Trial]], tmp_path: Path) -> None:
    evidence = fig7.evidence(swept[1])
    assert evidence.failures == []
    throughput = evidence.tables[0]
    assert [row[:2] for row in throughput.rows] == [["tiny", 64], ["deepseek-v3", 4096]]
    assert throughput.columns[2:] == ["megatron", "disagmoe"]
    assert throughput.rows[0][2].replace(",", "").isdigit()
    assert evidence.tables[1].rows[0][2].endswith("x")
    assert evidence.tables[1].rows[1][2] == "-"
    for trial, word in zip(swept[1][2:], throughput.rows[1][2:], strict=True):
        # The search of a cell that was broken off proves nothing; that of one that was not does.
        assert word == ("does not fit" if trial.search["complete"] else "no layout found in 2")
    files = draw("fig7", evidence, tmp_path)
    assert [path.name for path in files] == ["fig7.pdf", "fig7.png", "fig7.csv"]
    assert len(files[2].read_text().splitlines()) == 1 + 4


def test_an_error_in_a_cell_is_a_failure_of_the_figure(swept: tuple[Path, list[Trial]]) -> None:
    ok = swept[1][1]
    broken = Trial.make(
        case=spec("ep"),
        source="simulated",
        status="error",
        message="ValueError: no",
        assumptions=ok.assumptions,
        code_digest=ok.code_digest,
        command=ok.command,
        provenance={},
    )
    assert fig7.evidence([broken, ok]).failures == ["ep tiny 64: ValueError: no"]


def test_the_demo_gives_all_systems_the_same_batch() -> None:
    cases = train_demo.cases()
    assert set(cases) == {"reference", "ep", "disagmoe"}
    assert len({(case.model.name, case.workload, case.cluster) for case in cases.values()}) == 1


def test_curves_that_part_or_rise_are_named() -> None:
    falling = [3.0, 2.0, 1.0]
    assert train_demo.apart({"reference": falling, "ep": [3.0, 2.0001, 1.0001]}) == []
    found = train_demo.apart({"reference": falling, "ep": [3.0, 2.1, 1.0], "disagmoe": [3.0, 2.0, 3.5]})
    assert [line.split(":")[0] for line in found] == ["ep", "disagmoe", "disagmoe"]


def test_the_step_that_is_drawn_is_the_median_one() -> None:
    steps = [one_layer("measured", scale=scale * 1e-3) for scale in (5.0, 1.0, 3.0)]
    assert train_demo.median_step(steps) is steps[2]
    assert train_demo.median_step(steps[:2]) is steps[1]
