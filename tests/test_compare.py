"""Schedules in files: that they load, are compared and run, and that each kind of fault is said with its line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.case import Case, CaseSpec, Layout, Workload
from bench.check import PlanError
from bench.cli import app
from bench.clusters import get_cluster
from bench.compare import compare, labels, resolve, trying_layout
from bench.errors import BadInput
from bench.evaluate import CostModel
from bench.loading import ExecutesFile, WrittenPlan, load
from bench.models import get_model
from bench.results import read_trials
from bench.system import get_system, plan_of
from bench.trial import Trial
from tests.cases import make_case

EXAMPLE = (Path(__file__).parents[1] / "docs" / "examples" / "pingpong.py").read_text()
SMALL = ["--model", "tiny", "--cluster", "h800x1", "--seq-len", "64", "--global-batch-tokens", "2048", "--budget", "2"]

pytestmark = pytest.mark.filterwarnings("ignore::bench.loading.ExecutesFile")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec(system: str, tokens: int = 2048, cluster: str = "h800x1", model: str = "tiny") -> CaseSpec:
    work = Workload(seq_len=64, global_batch_tokens=tokens)
    return CaseSpec(model=get_model(model), cluster=get_cluster(cluster), workload=work, system=system)


def case_of(path: Path, text: str, **layout: Any) -> Case:
    path.write_text(text)
    return make_case("ep", ep=2, pp=2, **layout).model_copy(update={"system": str(path)})


def written(path: Path, old: str = "", new: str = "") -> Case:
    """A case of the plan of `ep` as text, with a change made by hand."""
    text = str(plan_of(make_case("ep", ep=2, pp=2)))
    assert old in text
    return case_of(path, text.replace(old, new, 1)).model_copy(update={"layout": Layout(replicas=1)})


def line_of(case: Case, word: str) -> int:
    lines = Path(case.system).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if word in line)


# Loading


def test_a_python_file_says_that_it_is_executed_before_it_is(here: Path) -> None:
    (here / "loud.py").write_text("import pathlib; pathlib.Path('ran').touch()\n" + EXAMPLE)
    with pytest.warns(ExecutesFile, match=r"loud\.py is Python"):
        system = load("loud.py")
    assert (here / "ran").exists()
    assert (system.name, get_system("loud.py")) == ("pingpong", system)


def test_a_file_is_read_again_once_it_has_changed(here: Path) -> None:
    path = here / "mine.py"
    path.write_text(EXAMPLE)
    assert load("mine.py").name == "pingpong"
    path.write_text(EXAMPLE.replace('"pingpong"', '"pong"'))
    assert load("mine.py").name == "pong"


def test_a_plan_as_text_gives_the_same_plan(here: Path) -> None:
    case = written(here / "mine.txt")
    assert str(plan_of(case)) == str(plan_of(make_case("ep", ep=2, pp=2)))
    assert isinstance(load(case.system), WrittenPlan)


def test_a_text_offers_layouts_that_make_its_micro_batches(here: Path) -> None:
    case = written(here / "mine.txt")
    offered = list(get_system(case.system).space(spec(case.system, tokens=64 * 4 * 2 * 2)))
    assert [(layout.replicas, layout.mbs) for layout in offered] == [(2, 1), (1, 2)]
    with pytest.raises(BadInput, match="4 micro-batches x 2 data ranks"):
        list(get_system(case.system).space(spec(case.system, tokens=64 * 3)))


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("class Broken(:\n    pass\n", 1, "invalid syntax"),
        ("x = 1\nraise KeyError('k')\n", 2, "KeyError"),
        (EXAMPLE.replace("warmup = min(", "warmup = max(nothing, "), 19, "NameError"),
        ("x = 1\n", None, "exactly one class"),
        ("class One:\n    def plan(self, case): ...\n", None, "name, summary, fields, space, placement, plan"),
        (EXAMPLE.replace('fields = Colocated.fields - {"vpp"}', 'fields = frozenset({"epp"})'), None, "epp"),
    ],
)
def test_a_python_file_that_is_none_is_refused_in_a_line(here: Path, text: str, line: int | None, said: str) -> None:
    case = case_of(here / "mine.py", text)
    with pytest.raises(BadInput) as caught:
        plan_of(case)
    assert said in str(caught.value)
    assert caught.value.field.endswith(f"mine.py, line {line}") or line is None


@pytest.mark.parametrize("name", ["gone.py", "gone.txt"])
def test_a_file_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load(name)


# Faults: each kind with its line, and the queue around it


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("embed:F0.1", "embed:F0.1 embed:F0.1", "once"),
        ("attn:F2.0", "attn:F1.0", "on group S0"),
        ("attn:F0.1", "attn:F0.9", "micro-batches 0 to 3"),
        ("attn:F0.0", "attn:F9.0", "an action of this model"),
    ],
)
def test_a_fault_of_a_text_names_its_line_and_marks_it(here: Path, old: str, new: str, said: str) -> None:
    case = written(here / "mine.txt", old, new)
    with pytest.raises(PlanError) as caught:
        plan_of(case)
    error = caught.value
    word = new.rpartition(" ")[2]
    assert re.search(rf"mine\.txt, lines? .*\b{line_of(case, word)}\b", error.field)
    assert said in error.allowed
    shown, marker = error.grid.splitlines()
    assert shown[marker.index("^") :].startswith(word)


def test_a_deadlock_of_a_text_names_the_lines_where_it_stands(here: Path) -> None:
    case = written(here / "mine.txt", "attn:F0.0 dispatch:F0.0", "dispatch:F0.0 attn:F0.0")
    with pytest.raises(PlanError, match="deadlock") as caught:
        plan_of(case)
    assert re.search(rf"mine\.txt, lines .*\b{line_of(case, 'dispatch:F0.0')}\b", caught.value.field)
    assert "waits for S0 attn:F0.0, which stands 1 further on in this same queue" in caught.value.grid


def test_a_missing_action_is_named_with_its_group(here: Path) -> None:
    case = written(here / "mine.txt", "expert:W3.1 ", "")
    with pytest.raises(PlanError, match=r"expert:W3\.1 is missing.*on group S1") as caught:
        plan_of(case)
    assert "S1 compute" in caught.value.grid


def test_a_line_of_text_that_is_no_action_is_named(here: Path) -> None:
    case = written(here / "mine.txt", "attn:F0.1", "attention:F0.1")
    with pytest.raises(BadInput) as caught:
        plan_of(case)
    assert f"mine.txt, line {line_of(case, 'attention:F0.1')}: queue S0 compute [11]" in caught.value.field


def test_a_fault_of_a_python_file_names_the_line_that_made_the_action(here: Path) -> None:
    text = EXAMPLE.replace(
        "[attention, dispatch, experts, combine]", "[attention, attention, dispatch, experts, combine]"
    )
    case = case_of(here / "mine.py", text)
    with pytest.raises(PlanError, match="allowed: once") as caught:
        plan_of(case)
    assert f"mine.py, line {line_of(case, '+= [Action(kind, of')}" in caught.value.field
    assert "^" in caught.value.grid


def test_a_deadlock_of_a_python_file_is_raised_by_a_comparison(here: Path) -> None:
    text = EXAMPLE.replace("[attention, dispatch, experts, combine]", "[experts, attention, dispatch, combine]")
    (here / "mine.py").write_text(text)
    with pytest.raises(PlanError, match="deadlock") as caught:
        compare([spec("mine.py")], CostModel.named(), budget=1)
    assert caught.value.field.startswith("mine.py, line")


# Comparing


def test_a_name_may_be_given_by_its_beginning() -> None:
    assert resolve("tut") == "tutel"
    assert resolve("megatron") == "megatron"
    assert resolve("ep") == "ep"
    with pytest.raises(BadInput, match="did you mean 'disagmoe'"):
        resolve("disagmoo")


def test_systems_of_one_name_are_told_apart_by_their_files(here: Path) -> None:
    for name in ("one.py", "two.py"):
        (here / name).write_text(EXAMPLE)
    assert labels(["one.py", "two.py", "ep"]) == ["one.py", "two.py", "ep"]
    assert labels(["one.py", "ep"]) == ["pingpong", "ep"]


def test_all_are_tuned_with_the_same_budget_and_hiding_communication_pays(here: Path) -> None:
    (here / "mine.py").write_text(EXAMPLE)
    mine, ep = compare([spec("mine.py"), spec("ep")], CostModel.named(), budget=3)
    assert mine.trial.search["budget"] == ep.trial.search["budget"] == 3
    assert mine.best is not None and ep.best is not None
    assert mine.best.metrics.step_time_s < ep.best.metrics.step_time_s
    assert mine.trial.code_digest != ep.trial.code_digest


def test_what_fits_nowhere_is_a_row_that_says_so(here: Path) -> None:
    work = Workload(seq_len=4096, global_batch_tokens=65536)
    big = CaseSpec(model=get_model("deepseek-v3"), cluster=get_cluster("h800x1"), workload=work, system="ep")
    (entry,) = compare([big], CostModel.named(), budget=1)
    assert entry.best is None
    assert "GiB missing" in str(entry.row(entry)[-1])


@pytest.mark.parametrize(
    ("system", "layout"), [("ep", "replicas=1 ep=2 pp=2 vpp=2"), ("dualpipe-v", "replicas=1 ep=2 pp=2 vpp=2")]
)
def test_a_run_takes_the_layout_that_moves_most_between_groups(system: str, layout: str) -> None:
    assert str(trying_layout(spec(system, cluster="h800x4gpu"))) == layout


def test_the_command_compares_verifies_runs_and_draws(here: Path) -> None:
    pytest.importorskip("torch")
    (here / "mine.py").write_text(EXAMPLE)
    words = ["compare", "mine.py", "--against", "disagmoe,megatron", *SMALL, "--run", "--ranks", "4", "--steps", "1"]
    words += ["--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "is not in compare-measured" not in result.stderr  # megatron-core as itself has a timeline, too
    found = json.loads(result.stdout)
    assert [one["label"] for one in found["simulated"]] == ["pingpong", "disagmoe", "megatron"]
    assert all(one["ok"] and one["num_ranks"] == 4 for one in found["verified"])
    assert [one["status"] for one in found["measured"]] == ["ok"] * 3
    for name in ("compare.png", "compare-measured.png"):
        assert (here / "out" / name).stat().st_size > 10_000
    trials: list[Trial] = [trial for _, trial in read_trials([here / "results"])]
    assert sorted((t.source, t.case.system) for t in trials) == [
        (source, system) for source in ("measured", "simulated") for system in ("disagmoe", "megatron", "mine.py")
    ]


def test_a_layout_is_that_of_the_first_and_the_others_are_tuned(here: Path) -> None:
    (here / "mine.py").write_text(EXAMPLE)
    words = ["compare", "mine.py", "--against", "ep", *SMALL, "--layout", "ep=2", "pp=2", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    mine, ep = json.loads(result.stdout)["simulated"]
    assert mine["layout"] == "ep=2 pp=2"
    trials = {trial.case.system: trial for _, trial in read_trials([here / "results"])}
    assert trials["mine.py"].search == {} and trials["ep"].search["budget"] == 2
    assert ep["layout"] == trials["ep"].layout


def test_the_command_refuses_a_fault_with_exit_code_2_and_the_grid(here: Path) -> None:
    case = written(here / "mine.txt", "embed:F0.1", "embed:F0.1 embed:F0.1")
    words = ["compare", "mine.txt", "--against", "ep", *SMALL[:-4], "--global-batch-tokens", "512"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    line, *grid = result.stderr.splitlines()
    assert line.startswith(f"moebench: mine.txt, line {line_of(case, 'embed:F0.1')}: ")
    assert "^" in grid[-1]


def test_a_system_that_does_not_verify_exits_with_1(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import bench.execute.report as report

    strict = {name: report.Tolerance(0.0, 0.0, 0.0, 0.0, 0.0) for name in report.TOLERANCES}
    monkeypatch.setattr("bench.execute.verify.TOLERANCES", strict)
    words = ["compare", "ep", "--against", "ep", *SMALL, "--run", "--ranks", "2", "--steps", "1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert "allowed 0e+00" in result.stderr
