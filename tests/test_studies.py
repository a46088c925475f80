"""Studies, sensitivity and the comparison with what is published: what they ask for, and what they show of it."""

import math
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from typer.testing import CliRunner

from bench.assumptions import ASSUMPTIONS, DEPARTURES, Assumptions
from bench.case import Case, CaseSpec, Layout, Workload
from bench.cli import app
from bench.cli.figures import draw
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.evaluate import CostModel
from bench.models import get_model
from bench.results import Store
from bench.system import systems
from experiments import batch, ep_size, nodes, sensitivity, split, top_k, virtual_stages
from experiments._published import differences, published_table
from experiments._study import Axis, Cell, evidence
from experiments._sweep import Job, sweep_jobs
from paper_figs import sensitivity as tornado
from paper_figs import study as study_figure

STUDIES = (batch, ep_size, nodes, split, top_k, virtual_stages)


@pytest.mark.parametrize("study", STUDIES)
def test_cells_of_a_study_are_each_there_once_and_few(study: object) -> None:
    cells = study.cells()  # type: ignore[attr-defined]
    keys = [(cell.panel, cell.x, cell.spec.system) for cell in cells]
    assert len(set(keys)) == len(keys) <= 40
    assert len(study.cells(quick=True)) < len(cells)  # type: ignore[attr-defined]


@pytest.mark.parametrize("study", STUDIES)
def test_every_cell_has_a_layout_in_its_systems_space(study: object) -> None:
    for cell in study.cells(quick=True):  # type: ignore[attr-defined]
        system = systems()[cell.spec.system]
        for layout in islice(system.space(cell.spec), 1):  # none where the batch is too small for the system
            Layout.from_pairs(cell.fixed, layout).require_only(system.name, system.fields)


@pytest.mark.parametrize("study", [batch, top_k, nodes])
def test_systems_of_a_place_have_the_same_work(study: object) -> None:
    places: dict[tuple[str, float], set[CaseSpec]] = {}
    for cell in study.cells():  # type: ignore[attr-defined]
        places.setdefault((cell.panel, cell.x), set()).add(cell.spec.model_copy(update={"system": ""}))
    assert all(len(specs) == 1 for specs in places.values())


def test_virtual_stages_are_as_many_as_asked_for() -> None:
    for stages in virtual_stages.STAGES:
        pairs = virtual_stages.fixed("disagmoe", "qwen3-235b", stages)
        layout = Layout.from_pairs(pairs)
        parts = math.ceil(get_model("qwen3-235b").num_layers / layout.layers_per_chunk)
        assert parts / layout.groups == pytest.approx(stages, rel=0.1)


def spec(system: str, tokens: int = 2048) -> CaseSpec:
    work = Workload(seq_len=64, global_batch_tokens=tokens)
    return CaseSpec(model=get_model("tiny"), cluster=get_cluster("h800x1"), workload=work, system=system)


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Cell], list[Job]]:
    folder = tmp_path_factory.mktemp("trials")
    cells = [
        Cell("tiny", tokens, spec(system, tokens), fixed)
        for tokens in (1024, 2048)
        for system, fixed in (("megatron", ("ep=2",)), ("disagmoe", ("expert_ranks=2",)))
    ]
    jobs = [Job(cell.spec, CostModel.named(), cell.fixed) for cell in cells]
    sweep_jobs(jobs, Store(folder), lambda *_: None, budget=2, num_workers=1)
    return folder, cells, jobs


def test_a_study_is_reused_with_what_was_fixed(studied: tuple[Path, list[Cell], list[Job]]) -> None:
    folder, _, jobs = studied
    reports: list[tuple[int, int, str]] = []
    trials = sweep_jobs(jobs, Store(folder), lambda *r: reports.append(r), budget=2)
    assert reports == [(4, 4, "found")]
    assert all("ep=2" in str(t.layout) or "expert_ranks=2" in str(t.layout) for t in trials)
    other = [jobs[0]._replace(fixed=("ep=4",))]
    sweep_jobs(other, Store(folder), lambda *r: reports.append(r), budget=2, num_workers=1)
    assert reports[1:] == [(0, 1, "found"), (1, 1, "megatron tiny 64")]


def test_a_case_is_simulated_as_it_is_and_reused(tmp_path: Path) -> None:
    job = Job(spec("ep").with_layout(Layout(ep=2)), CostModel.named())
    (first,) = sweep_jobs([job], Store(tmp_path), lambda *_: None, num_workers=1)
    assert isinstance(first.case, Case) and first.case == job.spec
    assert sweep_jobs([job], Store(tmp_path), lambda *_: None) == [first]


def test_a_study_is_drawn(studied: tuple[Path, list[Cell], list[Job]], tmp_path: Path) -> None:
    folder, cells, jobs = studied
    trials = sweep_jobs(jobs, Store(folder), lambda *_: None, budget=2)
    found = evidence(cells, trials, Axis("tokens", words={1024.0: "1K"}))
    assert found.failures == []
    assert [row[:2] for row in found.tables[0].rows] == [["tiny", "1K"], ["tiny", "2,048"]]
    files = draw("batch", found, tmp_path)
    assert [path.name for path in files] == ["batch.pdf", "batch.png", "batch.csv"]
    upper, lower = study_figure.draw(**found.drawn).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in (*upper.lines, *lower.lines)}
    rates = [t.metrics["tokens_per_s_per_gpu"] for t in trials]
    assert lines["megatron"] == pytest.approx([rates[0] / 1e3, rates[2] / 1e3])
    assert lines["disagmoe over megatron"] == pytest.approx([rates[1] / rates[0], rates[3] / rates[2]])


def test_a_place_without_a_layout_ends_the_line_and_has_a_hollow_mark(
    studied: tuple[Path, list[Cell], list[Job]],
) -> None:
    folder, cells, jobs = studied
    table = evidence(cells, sweep_jobs(jobs, Store(folder), lambda *_: None, budget=2), Axis("tokens")).data
    whole = study_figure.draw(table, "tokens", baseline="megatron")
    table.loc[table["system"].eq("megatron") & table["x"].eq(2048), "status"] = "infeasible"
    lacking = study_figure.draw(table, "tokens", baseline="megatron")

    def marks(figure: Figure) -> list[list[float]]:
        return [list(line.get_xdata()) for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]

    assert (marks(whole), marks(lacking)) == ([], [[2048.0]])
    for ax, label in zip(lacking.axes, ("megatron", "disagmoe over megatron"), strict=True):
        (line,) = (line for line in ax.lines if line.get_label() == label)
        assert [math.isnan(value) for value in line.get_ydata()] == [False, True]
    said = ["hollow" in text.get_text() for figure in (whole, lacking) for text in figure.texts]
    assert said == [False, True]


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        (lambda t: t.drop(columns="panel"), "a table with"),
        (lambda t: t.iloc[:0], "at least one cell"),
        (lambda t: pd.concat([t, t]), "one row a panel"),
        (lambda t: t.assign(source=["measured", *t.source[1:]]), "one source a panel"),
    ],
)
def test_a_study_that_would_mislead_is_refused(
    studied: tuple[Path, list[Cell], list[Job]], change: object, allowed: str
) -> None:
    folder, cells, jobs = studied
    trials = sweep_jobs(jobs, Store(folder), lambda *_: None, budget=2)
    table = evidence(cells, trials, Axis("tokens")).data
    with pytest.raises(BadInput, match=allowed):
        study_figure.draw(change(table), "tokens")  # type: ignore[operator]


def test_every_assumption_is_varied_around_its_value_and_says_why() -> None:
    assert set(sensitivity.RANGES) == set(Assumptions.model_fields)
    for field, (low, high, why) in sensitivity.RANGES.items():
        assert low <= getattr(ASSUMPTIONS["h200-measured"], field) <= high
        assert low < high and why
    for field, value, _ in DEPARTURES.values():
        assert sensitivity.RANGES[field].low <= value <= sensitivity.RANGES[field].high
    for variation in sensitivity.variations(CostModel.named()):
        case = spec("disagmoe").with_layout(Layout(attention_ranks=2, expert_ranks=2))
        job = sensitivity.job_of(case, CostModel.named(), variation)
        layout = case.layout
        changed = variation.value in (layout.copies, layout.recompute, layout.ranks_over_nodes)
        assert (job is None) == changed
        assert job is None or (job.spec, job.model) != (case, CostModel.named())


def test_a_factor_changes_as_its_assumption_does(tmp_path: Path) -> None:
    """Slower many-to-many slows `disagmoe` down and leaves `ep` as it is."""
    layouts = {"ep": "ep=16", "disagmoe": "attention_ranks=8 expert_ranks=8", "comet": "ep=16 chunks=8 comm_sms=20"}
    model, store = CostModel.named(), Store(tmp_path)
    work = Workload(seq_len=4096, global_batch_tokens=1 << 18)
    base = CaseSpec(model=get_model("qwen3-30b"), cluster=get_cluster("h800x2"), workload=work, system="ep")
    cases = {
        s: base.model_copy(update={"system": s}).with_layout(Layout.from_pairs(w.split())) for s, w in layouts.items()
    }
    tuned = sweep_jobs([Job(case, model) for case in cases.values()], store, lambda *_: None, num_workers=1)
    slower = sensitivity.Variation("nic_many_to_many", "0.5")
    roles = {"ours": "disagmoe", "baseline": "ep", "overlap": "comet"}
    jobs = {("qwen3-30b", role, slower): sensitivity.job_of(cases[s], model, slower) for role, s in roles.items()}
    trials = sweep_jobs([job for job in jobs.values() if job], store, lambda *_: None, num_workers=1)
    assert all(t.status in ("ok", "infeasible") for t in (*tuned, *trials))
    rates = [t.metrics["tokens_per_s_per_gpu"] for t in (*tuned, *trials)]
    assert rates[0] == rates[3 + 1] and rates[1] > rates[3]


def tornado_frame() -> pd.DataFrame:
    rows = [("nvlink", "0.6", 1.1), ("nvlink", "1.0", 1.3), ("copies", "rank", 0.9), ("hbm", "0.7", None)]
    columns = ["field", "value", "ratio"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(
        model="m",
        over="baseline",
        default_ratio=1.2,
        fits=[True, True, False, True],
        source="simulated",
        assumptions="x",
    )


def test_a_tornado_has_what_moves_most_on_top_and_hatches_what_does_not_fit() -> None:
    (ax,) = tornado.draw(tornado_frame()).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["copies: rank", "nvlink  0.6 / 1"]
    spans = sorted((round(bar.get_x(), 6), round(bar.get_x() + bar.get_width(), 6)) for bar in ax.patches)
    assert sorted(tuple(sorted(span)) for span in spans) == [(0.9, 1.2), (1.1, 1.2), (1.2, 1.3)]
    assert [bool(bar.get_hatch()) for bar in ax.patches].count(True) == 1


def test_an_end_without_a_ratio_does_not_change_the_colour_of_the_other() -> None:
    table = tornado_frame()
    table.loc[0, "ratio"] = None  # the low end of nvlink
    (ax,) = tornado.draw(table).axes
    colours = {to_hex(bar.get_facecolor()) for bar in ax.patches}
    assert colours == {tornado.COLOURS["high"], tornado.COLOURS["other"]}


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        (lambda t: t.drop(columns="over"), "a table with"),
        (lambda t: t.assign(ratio=None), "at least one"),
        (lambda t: t.assign(source=["measured", *t.source[1:]]), "one source"),
    ],
)
def test_a_tornado_that_would_mislead_is_refused(change: object, allowed: str) -> None:
    with pytest.raises(BadInput, match=allowed):
        tornado.draw(change(tornado_frame()))  # type: ignore[operator]


def published(rate: float = 1000.0, status: str = "ok") -> pd.DataFrame:
    cell = {"assumptions": "a", "model": "m", "cluster": "c", "seq_len": 4096, "global_batch_tokens": 1 << 22}
    rows = [cell | {"system": s, "status": "ok", "tokens_per_s_per_gpu": 500.0} for s in ("ep", "tutel")]
    return pd.DataFrame([*rows, cell | {"system": "disagmoe", "status": status, "tokens_per_s_per_gpu": rate}])


def test_a_fresh_table_is_compared_cell_by_cell(tmp_path: Path) -> None:
    assert differences(published(), published()) == []
    assert differences(published(1000.5), published()) == []
    assert differences(published().iloc[1:], published()) == []
    (line,) = differences(published(1002.0), published())
    assert "disagmoe: 1002 tokens/s/GPU, published 1000, allowed 1e-03" in line
    (line,) = differences(published(float("nan"), "infeasible"), published())
    assert line.endswith("infeasible, published ok")
    (line,) = differences(published().assign(model=["m", "n", "m"]), published())
    assert line.endswith("tutel: not published")


def test_a_published_table_that_is_missing_or_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none is yet"):
        published_table("fig7", tmp_path)
    (tmp_path / "fig7").mkdir()
    published().to_csv(tmp_path / "fig7" / "fig7.csv", index=False)
    assert differences(published_table("fig7", tmp_path), published()) == []
    with pytest.raises(BadInput, match="fig7"):
        published_table("fig8", tmp_path)
    published().drop(columns="status").to_csv(tmp_path / "fig7" / "fig7.csv", index=False)
    with pytest.raises(BadInput, match="status"):
        published_table("fig7", tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["figure", "batch", "--assumptions", "datashet"], "did you mean 'datasheet'"),
        (["figure", "train-demo", "--assumptions", "datasheet"], "is measured"),
        (["figure", "split", "--check"], "one that is published"),
        (["figure", "regimes", "--check"], "one whose published table has the columns"),
        (["claims", "--assumptions", "h200-measured,none"], "allowed: datasheet, h200-measured"),
        (["claims", "--published", "--into", "absent.md"], "can be read and written"),
        (["claims", "--published", "--results", "x", "--into", "marks.md"], "a file with the marks"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "marks.md").write_text("no marks here\n")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert said in result.output and len(result.output.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["marks.md"]


def test_claims_by_published_trials_go_into_a_file(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    file.write_text("# Title\n<!-- claims: begin --><!-- claims: end -->\n")
    result = CliRunner().invoke(app, ["claims", "--published", "--markdown", "--into", str(file)])
    assert result.exit_code == 0, result.output
    assert file.read_text() == f"# Title\n<!-- claims: begin -->\n{result.output}<!-- claims: end -->\n"
