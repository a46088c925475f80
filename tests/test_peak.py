"""The fullest moment of a step: that it is the simulated peak, what fills it, and how a fault shows it."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from bench.assumptions import get_assumptions
from bench.case import Case, CaseSpec, Layout, Workload
from bench.check import PlanError
from bench.cli import app
from bench.clusters import get_cluster
from bench.models import get_model
from bench.predict import predict
from bench.simulate.memory import peak_bytes
from bench.simulate.peak import find_peak
from tests.cases import cases, make_case

ASSUMED = get_assumptions()
EXAMPLE = (Path(__file__).parents[1] / "docs" / "examples" / "pingpong.py").read_text()
BIG = ["--model", "qwen3-30b", "--cluster", "h800x4", "--seq-len", "8192", "--global-batch-tokens", "1048576"]

pytestmark = pytest.mark.filterwarnings("ignore::bench.loading.ExecutesFile")


def too_big(microbatches: int = 4) -> Case:
    work = Workload(seq_len=16384, global_batch_tokens=16384 * 8 * microbatches)
    spec = CaseSpec(model=get_model("qwen3-30b"), cluster=get_cluster("h800x4"), workload=work, system="ep")
    return spec.with_layout(Layout(ep=8, pp=4, replicas=1))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_what_fills_the_memory_sums_to_the_peak(case: Case) -> None:
    found = predict(case, ASSUMED)
    full = find_peak(found.program, found.costs, found.timeline)
    assert full.num_bytes == pytest.approx(found.peak_memory_bytes, rel=1e-9)
    assert full.num_bytes == pytest.approx(max(full.by_group.values()), rel=1e-9)
    assert full.by_group[full.group] == max(full.by_group.values())
    assert full.group == next(g.name for g in found.program.plan.placement.groups if full.rank in g.ranks)
    assert all(each.num_bytes >= 0 for each in full.fillings)
    state = found.costs.static_parts(full.group)
    assert [each.num_bytes for each in full.fillings[: len(state)]] == list(state.values())


def test_activations_are_told_by_part_and_reason() -> None:
    found = predict(make_case("disagmoe", attention_ranks=2, expert_ranks=2, recompute="full", round_length=4), ASSUMED)
    full = find_peak(found.program, found.costs, found.timeline)
    words = " ".join(each.what for each in full.fillings)
    assert "until their backward" in words
    peaks = peak_bytes(found.program, found.costs, found.timeline)
    assert full.num_bytes == pytest.approx(float(np.max(peaks)))


@pytest.mark.parametrize("system", ["dualpipe", "dualpipe-v", "megatron"])
def test_the_peak_of_other_systems_is_told_as_well(system: str) -> None:
    layout = {"dualpipe-v": {"vpp": 2}, "megatron": {"copies": "expert"}}.get(system, {})
    found = predict(make_case(system, ep=2, pp=2, microbatches=8, **layout), ASSUMED)
    full = find_peak(found.program, found.costs, found.timeline)
    assert full.num_bytes == pytest.approx(found.peak_memory_bytes, rel=1e-9)


def test_a_layout_that_does_not_fit_shows_where_what_and_how_much_would_fit() -> None:
    case = too_big()
    found = predict(case, ASSUMED)
    with pytest.raises(PlanError, match="GiB missing") as caught:
        found.require_fits()
    lines = caught.value.grid.splitlines()
    assert re.match(r"fullest: rank \d+, of group S0, at [\d.]+ ms of a step of", lines[0])
    compute = next(n for n, line in enumerate(lines) if "S0 compute" in line)
    marker = lines[compute + 1]
    assert lines[compute][marker.index("^") :].startswith(str(caught.value.actions[-1]))
    listed = dict(re.findall(r"^  (.+?)\s+([\d.]+) GiB", caught.value.grid, re.MULTILINE))
    whole = float(listed.pop("all of it"))
    allowed = float(listed.pop("expected: at most"))
    assert whole > allowed == pytest.approx(case.cluster.gpu.memory_bytes / 2**30, abs=0.01)
    assert sum(map(float, listed.values())) == pytest.approx(whole, abs=0.01 * len(listed))
    waiting, fit = re.search(r"(\d+) micro-batches wait.*, (\d+) would fit", lines[-1]).groups()  # type: ignore[union-attr]
    assert 0 < int(fit) < int(waiting) == 4


def test_as_many_in_flight_as_are_said_to_fit_do() -> None:
    found = predict(too_big(microbatches=4), ASSUMED)
    said = re.search(r", (\d+) would fit", found.memory_fault().grid)
    assert said is not None
    fewer = predict(too_big(microbatches=int(said[1])), ASSUMED)
    assert fewer.missing_bytes == 0


@pytest.mark.parametrize("verb", ["simulate", "explain", "compare", "trace"])
def test_verbs_show_it_for_a_schedule_of_ones_own(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(EXAMPLE)
    extra = {"compare": ["--against", "ep", "--budget", "1"], "trace": ["--out", "t.json"]}.get(verb, [])
    result = CliRunner().invoke(app, [verb, "mine.py", *BIG, *extra, "--layout", "ep=8", "pp=4"])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = next(line for line in result.stderr.splitlines() if "GiB missing" in line)
    number = int(re.match(r"moebench: mine\.py, lines? (\d+)", line)[1])  # type: ignore[index]
    assert "Action(kind, of" in EXAMPLE.splitlines()[number - 1]
    assert "^^^" in result.stderr and "optimizer state" in result.stderr and "would fit" in result.stderr


def test_a_search_that_finds_nothing_shows_the_closest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(EXAMPLE)
    words = ["--model", "deepseek-v3", "--cluster", "h800x1", "--seq-len", "4096", "--global-batch-tokens", "65536"]
    result = CliRunner().invoke(app, ["compare", "mine.py", "--against", "ep", *words, "--budget", "1"])
    assert result.exit_code == 1, result.output
    assert "pingpong" in result.stdout and "GiB missing" in result.stdout
    assert "moebench: pingpong:" in result.stderr and "fullest: rank" in result.stderr
    result = CliRunner().invoke(app, ["tune", "ep", *words, "--budget", "1"])
    assert result.exit_code == 2
    assert "fullest: rank" in result.stderr and "weights" in result.stderr
