"""The command line: what verbs print, their exit codes, and one line for every kind of bad input."""

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench.case import batch_of
from bench.cli import app
from bench.cli.application import OneLineErrors
from bench.cli.executed import run_case
from bench.cli.pairs import spread_pairs
from bench.clusters import get_cluster
from bench.lower import lower
from bench.models import get_model
from bench.plan import Plan
from bench.results import read_trials
from bench.system import plan_of
from bench.trial import command_for
from bench.tune import DEFAULT_BUDGET

ROOT = Path(__file__).parents[1]
SMALL = ["--model", "tiny", "--cluster", "h800x1", "--seq-len", "64", "--global-batch-tokens", "1024"]
RUN = ["--model", "tiny", "--seq-len", "16"]

SIMULATE_KEYS = {
    "kind", "system", "layout", "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu",
    "bound_s", "fraction_of_bound", "bubble_fraction", "exposed_comm_s", "peak_memory_bytes", "assumptions", "case_id",
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def call(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result


def call_json(*words: str, code: int = 0) -> dict[str, Any]:
    """Runs with --json; stdout has to be one JSON object and nothing else."""
    return json.loads(call(*words, "--json", code=code).stdout)


def in_process(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "bench.cli", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


# What is printed


def test_every_help_text_has_an_example(here: Path) -> None:
    verbs = call_help("--help")
    for verb in ("list", "plan", "simulate", "run", "verify", "figure", "trace", "trace step", "trace analyze"):
        assert verb.split()[0] in verbs
        example = f"Example: moebench {verb.removesuffix(' step')}"
        assert example in " ".join(call_help(*verb.split(), "--help").split())


def call_help(*words: str) -> str:
    return str(call(*words).stdout)


@pytest.mark.parametrize("what", ["systems", "models", "clusters", "experiments", "assumptions"])
def test_list(here: Path, what: str) -> None:
    rows = call_json("list", what)[what]
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names)) >= 2
    shown = call("list", what).stdout
    assert all(name in shown for name in names)


def test_plan_describes_what_it_prints(here: Path) -> None:
    words = ["plan", "disagmoe", *SMALL, "--layout", "attention_ranks=2", "expert_ranks=2", "groups=2"]
    facts = call_json(*words)
    text = call(*words, "--print-schedule").stdout
    parsed = Plan.parse(text)
    assert str(parsed) == text
    assert parsed.num_actions == facts["num_actions"] == sum(facts["actions"].values())
    assert facts["check"] == "ok"
    assert facts["groups"] == {
        group.name: [group.first, group.first + group.size - 1] for group in parsed.placement.groups
    }
    assert facts["num_microbatches"] == parsed.num_microbatches == 1024 // 64 // 2
    shown = call(*words).stdout
    assert facts["case_id"] in shown
    assert "attention 0 2" in shown


def test_layout_pairs_may_follow_one_option_or_stand_quoted(here: Path) -> None:
    together = call_json("plan", "ep", *SMALL, "--layout", "ep=2", "pp=2")
    assert together["layout"]["ep"] == together["layout"]["pp"] == 2
    for words in (["--layout", "ep=2", "--layout", "pp=2"], ["--layout", "ep=2 pp=2"]):
        assert call_json("plan", "ep", *SMALL, *words) == together
    assert spread_pairs(["--layout", "a=1", "b=2", "--json", "c=3"]) == [
        "--layout",
        "a=1",
        "--layout",
        "b=2",
        "--json",
        "c=3",
    ]
    assert spread_pairs(["--set=a=1", "x", "--layout", "b=2"]) == ["--set=a=1", "x", "--layout", "b=2"]


def test_simulate_has_the_promised_keys(here: Path) -> None:
    words = ["simulate", "ep", *SMALL, "--layout", "ep=8"]
    facts = call_json(*words)
    assert facts.keys() >= SIMULATE_KEYS
    assert facts["kind"] == "simulated"
    assert facts["tokens_per_s"] == pytest.approx(1024 / facts["step_time_s"])
    assert facts["tokens_per_s_per_gpu"] == pytest.approx(facts["tokens_per_s"] / 8)
    assert 0 < facts["fraction_of_bound"] <= 1
    assert facts["layout"]["ep"] == 8
    assert "simulated" in call(*words).stdout
    assert not list(here.iterdir())


def test_simulate_says_what_stands_for_what(here: Path) -> None:
    for routing, timed, replicas, words in (
        ("balanced", 4, 2, "each timed rank stands for 4 equal ones of its group; one replica for all 2"),
        ("zipf:1", 1, 2, "every rank timed; one replica for all 2"),
        ("zipf:1", 1, 1, "every rank timed; one replica (4 of 4 GPUs timed)"),
    ):
        given = ["simulate", "ep", *SMALL, "--routing", routing, "--layout", "ep=4", f"replicas={replicas}"]
        facts = call_json(*given)
        assert (facts["gpus_per_timed_rank"], facts["replicas_per_timed_replica"]) == (timed, replicas)
        assert words in " ".join(call(*given).stdout.split())


def test_a_plan_that_is_a_pairs_order_only_says_so_wherever_it_is_shown(here: Path) -> None:
    for layout, trait in ((["ep=2"], "pair-order"), (["ep=2", "pp=2"], "two-copies")):
        for verb in ("plan", "simulate"):
            words = [verb, "dualpipe", *SMALL, "--layout", *layout]
            assert call_json(*words)["traits"] == [trait]
            assert trait in call(*words).stdout
    assert call_json("simulate", "ep", *SMALL, "--layout", "ep=2")["traits"] == []
    # Both copies of a layer are shown where they are.
    held = call_json("plan", "dualpipe", *SMALL, "--layout", "ep=2", "pp=2")["layers"]
    layers = [f"{part} {layer}" for layer in range(4) for part in ("attention", "experts")]
    assert held["S0"] == held["S1"] == ["embedding", *layers, "head"]


def test_every_simulation_option_takes_effect(here: Path) -> None:
    words = ["simulate", "ep", *SMALL, "--layout", "ep=8"]
    plain = call_json(*words)
    for option in (
        ["--set", "kernel_s=0.001"],
        ["--assumptions", "datasheet"],
        ["--routing", "zipf:1.2"],
        ["--dtype", "fp32"],
    ):
        other = call_json(*words, *option)
        assert other["step_time_s"] != plain["step_time_s"], option
    assert call_json(*words, "--set", "kernel_s=0.001")["assumptions"] == "h200-measured kernel_s=0.001"
    skewed = [call_json(*words, "--routing", "zipf:1.2", "--seed", seed)["case_id"] for seed in ("1", "2")]
    assert skewed[0] != skewed[1]


def test_tune_shows_memory_against_step_time(here: Path) -> None:
    """Of all layouts simulated, those that none beats in both; rounds of AF-Pipe trade the one for the other."""
    shape = ["attention_ranks=2", "expert_ranks=2", "groups=2", "replicas=1", "recompute=none", "mbs=1"]
    found = call_json("tune", "disagmoe", *SMALL, "--layout", *shape)
    timed = [(each["step_time_s"], each["peak_memory_bytes"]) for each in found["candidates"] if each["step_time_s"]]
    shown = [(each["step_time_s"], each["peak_memory_bytes"]) for each in found["memory_against_time"]]
    assert len(shown) > 1
    assert shown == sorted(shown)
    assert set(shown) == {
        one for one in timed if not any(other[0] <= one[0] and other[1] <= one[1] and other != one for other in timed)
    }
    text = call("tune", "disagmoe", *SMALL, "--layout", *shape).stdout
    assert "memory against step time" in text.replace("\n", " ")
    assert f"Default: {DEFAULT_BUDGET}." in call_help("tune", "--help")


def test_without_a_layout_the_best_is_taken_and_comes_again_when_given(here: Path) -> None:
    tuned = call_json("simulate", "ep", *SMALL)
    assert tuned["search"]["candidates"]["ok"] >= 1
    assert tuned["search"]["runner_up"]["step_time_s"] >= tuned["step_time_s"]
    given = call_json(
        "simulate", "ep", *SMALL, "--layout", *(f"{key}={word(value)}" for key, value in tuned["layout"].items())
    )
    assert given["case_id"] == tuned["case_id"]
    assert given["step_time_s"] == tuned["step_time_s"]
    for layout in ("ep=1", "ep=8"):
        assert tuned["step_time_s"] <= call_json("simulate", "ep", *SMALL, "--layout", layout)["step_time_s"]


def word(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def test_a_simulated_trace_is_written_and_drawn(here: Path) -> None:
    facts = call_json("trace", "ep", *SMALL, "--layout", "ep=8", "--out", "out/step.json")
    assert facts["kind"] == "simulated"
    assert sorted(path.name for path in (here / "out").iterdir()) == ["step.json", "step.pdf", "step.png"]
    events = json.loads((here / "out" / "step.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == facts["num_operations"]


# Bad input: one line, exit code 2, nothing written

SIMULATE = ["simulate", "ep", *SMALL]
BAD = [
    (["nothing"], "command", "'nothing'", "simulate"),
    (["results", "nope"], "command", "'nope'", "list, show, export"),
    (["site", "nope"], "command", "'nope'", "init"),
    (["tune", "ep", *SMALL, "--budget", "x"], "--budget", "'x'", "a whole number"),
    (["tune", "ep", *SMALL, "--budget", "0"], "--budget", "0", "at least 1"),
    (["verify", "comet", *RUN], "system", "'comet'", "executed; its plans are modelled-only"),
    (["list", "things"], "what", "'things'", "systems, models"),
    (["plan"], "system", "None", "a value"),
    (["plan", "ep", "--model", "tiny", "--cluster", "h800x1"], "--seq-len", "None", "a number of tokens"),
    (["plan", "ep", "--model", "tiny", "--seq-len", "64"], "--cluster", "None", "a value"),
    (["plan", "disagmoe", *SMALL, "--refine", "guess"], "--refine", "'guess'", "simulate, run, none"),
    (["plan", "disagmoe", *SMALL, "--budget", "0"], "--budget", "0", "at least 1"),
    (["plan", "ep", *RUN, "--refine", "run"], "--refine", "'run'", "a planner of its own: disagmoe"),
    (
        ["plan", "disagmoe", *RUN, "--refine", "run", "--layout", "groups=2"],
        "--refine",
        "'run'",
        "nothing beside --layout",
    ),
    (["plan", "disagmoe", *RUN, "--refine", "run", "--ranks", "0"], "--ranks", "0", "1 to 64"),
    (["simulate", "epp", *SMALL], "system", "'epp'", "did you mean 'ep'"),
    (["simulate", "ep", *SMALL, "--model", "tinny"], "--model", "'tinny'", "did you mean 'tiny'"),
    (["simulate", "ep", *SMALL, "--model", "no/such.json"], "--model", "no/such.json", "a readable file"),
    (["simulate", "ep", *SMALL, "--cluster", "h900x1"], "--cluster", "'h900x1'", "h800x<nodes>"),
    (["simulate", "ep", *SMALL, "--cluster", "h800x0"], "--cluster", "'h800x0'", "1 to 16384 nodes"),
    ([*SIMULATE, "--seq-len", "0"], "--seq-len", "0", "greater than or equal to 2"),
    ([*SIMULATE, "--seq-len", "many"], "--seq-len", "'many'", "a whole number"),
    ([*SIMULATE, "--seq-len", "60"], "--global-batch-tokens", "1024", "a multiple of 60"),
    ([*SIMULATE, "--global-batch-tokens", "-4"], "--global-batch-tokens", "-4", "greater than"),
    (
        [*SIMULATE, "--global-batch-tokens", "64", "--layout", "ep=8"],
        "--global-batch-tokens",
        "64",
        "multiple of",
    ),
    ([*SIMULATE, "--dtype", "fp64"], "--dtype", "'fp64'", "'bf16' or 'fp32'"),
    ([*SIMULATE, "--routing", "zipf"], "--routing", "'zipf'", "zipf:"),
    ([*SIMULATE, "--seed", "-1"], "--seed", "-1", "greater than"),
    ([*SIMULATE, "--assumptions", "hopeful"], "--assumptions", "'hopeful'", "h200-measured"),
    ([*SIMULATE, "--set", "gem=0.5"], "--set", "'gem'", "did you mean 'gemm'"),
    ([*SIMULATE, "--set", "gemm=2"], "--set", "'gemm=2.0'", "less than or equal to 1"),
    ([*SIMULATE, "--set", "gemm"], "--set", "'gemm'", "key=value"),
    ([*SIMULATE, "--layout", "ep"], "--layout", "'ep'", "key=value"),
    ([*SIMULATE, "--layout", "epp=2"], "--layout", "'epp'", "mbs, replicas, ep,"),
    ([*SIMULATE, "--layout", "ep=two"], "layout.ep", "'two'", "a whole number"),
    ([*SIMULATE, "--layout", "ep=0"], "layout.ep", "0", "greater than or equal to 1"),
    ([*SIMULATE, "--layout", "ep=3"], "layout.ep", "3", "a divisor of experts"),
    ([*SIMULATE, "--layout", "ep=8", "pp=2"], "--layout", "ep=8 pp=2", "8 GPUs of h800x1"),
    ([*SIMULATE, "--layout", "groups=2"], "layout.groups", "2", "not used by ep"),
    ([*SIMULATE, "--layout", "copies=pair"], "layout.copies", "'pair'", "'expert'"),
    ([*SIMULATE, "--layout", "shard_state=maybe"], "layout.shard_state", "'maybe'", "true or false"),
    ([*SIMULATE, "--speed", "high"], "option", "'--speed'", "--seq-len"),
    (["trace", "ep", *SMALL, "--out", "step.txt"], "--out", "step.txt", "ends in .json"),
    (["trace", "ep", "--model", "tiny", "--out", "step.json"], "--cluster", "None", "--executed"),
    (["figure", "fig8"], "experiment", "'fig8'", "did you mean 'fig7'"),
    (["figure", "fig7", "--out", "../file"], "--out", "../file", "a directory"),
    (["figure", "fig7", "--results", "../file/deep"], "--results", "../file/deep", "a directory"),
    (["run", "ep", *RUN, "--ranks", "0"], "--ranks", "0", "1 to 64"),
    (["run", "ep", *RUN, "--ranks", "x"], "--ranks", "'x'", "a whole number"),
    (["run", "ep", *RUN, "--device", "tpu"], "--device", "'tpu'", "cpu or cuda"),
    (["run", "ep", *RUN, "--steps", "0"], "--steps", "0", "1"),
    (["run", "ep", *RUN, "--data", "web"], "--data", "'web'", "text"),
    (["run", "ep", *RUN, "--layout", "ep=8"], "--layout", "ep=8", "4 GPUs"),
    (["run", "ep", *RUN, "--model", "deepseek-v3"], "model.router_bias", "", ""),
    (["run", "disagmoe", *RUN, "--ranks", "1"], "--ranks", "1", "2 or more"),
    (["run", "ep", *RUN, "--cluster", "h800x1"], "--ranks", "4", "the 8 GPUs of h800x1"),
    (["verify", "ep", *RUN, "--tolerance", "2"], "--tolerance", "'2'", "below 1"),
    (["verify", "epp", *RUN], "system", "'epp'", "did you mean 'ep'"),
    (["verify", "ep", *RUN, "--layout", "ep=3"], "layout.ep", "3", "a divisor of experts"),
]


@pytest.mark.parametrize(("words", "field", "value", "allowed"), BAD, ids=[" ".join(case[0][-2:]) for case in BAD])
def test_bad_input_is_one_line(here: Path, words: list[str], field: str, value: str, allowed: str) -> None:
    (here.parent / "file").write_text("")
    result = call(*words, code=2)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith(f"moebench: {field}: ")
    assert value in lines[0]
    assert "allowed: " in lines[0]
    assert allowed in lines[0].partition("allowed: ")[2]
    assert not list(here.iterdir())


def test_a_plan_that_cannot_run_shows_its_queues(here: Path) -> None:
    text = call("plan", "ep", *SMALL, "--layout", "ep=2", "--print-schedule").stdout
    hand_made = typer.Typer(cls=OneLineErrors)

    @hand_made.command()
    def run_it() -> None:
        lower(Plan.parse(text.replace("expert:F1.1 ", "")), get_model("tiny"))

    @hand_made.command()
    def read_it() -> None:
        assert list(read_trials([here])) == []

    result = CliRunner().invoke(hand_made, ["run-it"])
    line, *grid = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert line.startswith("moebench: ")
    assert "expert:F1.1" in line
    assert any("S0" in shown for shown in grid)
    (here / "foreign.json").write_text("{}")
    result = CliRunner().invoke(hand_made, ["read-it"])
    assert result.exit_code == 0
    assert result.stderr.startswith("moebench: warning: not trials, left out: ")
    assert len(result.stderr.splitlines()) == 1


def test_malformed_files_are_one_line(here: Path) -> None:
    (here / "broken.json").write_text('{"name": "x", ')
    fields = {**get_model("tiny").model_dump(mode="json"), "heads": 3}
    (here / "extra.json").write_text(json.dumps(fields))
    for name, said in (("./broken.json", "JSON text"), ("./extra.json", "model.heads")):
        result = call("plan", "ep", *SMALL, "--model", name, "--layout", "ep=2", code=2)
        assert len(result.stderr.splitlines()) == 1
        assert said in result.stderr


def test_a_model_file_is_a_model(here: Path) -> None:
    (here / "mine.json").write_text(
        json.dumps({**get_model("tiny").model_dump(mode="json"), "name": "mine", "num_layers": 2})
    )
    facts = call_json("plan", "ep", *SMALL, "--model", "./mine.json", "--layout", "ep=2")
    assert facts["actions"]["attn:F"] == 2 * facts["num_microbatches"]


@pytest.mark.parametrize("layout", [["--layout", "ep=8"], []])
def test_what_does_not_fit_names_the_missing_gib(here: Path, layout: list[str]) -> None:
    words = ["--model", "deepseek-v3", "--cluster", "h800x1", "--seq-len", "4096", "--global-batch-tokens", "65536"]
    line, *grid = call("simulate", "ep", *words, *layout, code=2).stderr.splitlines()
    assert "GiB missing" in line
    assert "79.6 GiB per GPU" in line
    assert grid[0].startswith("fullest: rank ") and any("optimizer state" in shown for shown in grid)
    assert not list(here.iterdir())


# On real ranks


def test_run_keeps_the_trial_it_prints(here: Path) -> None:
    facts = call_json("run", "ep", *RUN, "--ranks", "2", "--steps", "3", "--results", "kept")
    assert facts["kind"] == "measured"
    assert len(facts["losses"]) == len(facts["grad_norms"]) == 3
    assert facts["losses"][-1] < facts["losses"][0]
    ((path, trial),) = read_trials([here / "kept"])
    assert path.stem == trial.name == facts["trial"]
    assert trial.samples["loss"] == facts["losses"]
    assert (trial.case_id, trial.status, trial.source) == (facts["case_id"], "ok", "measured")
    assert trial.metrics["tokens_per_s"] == facts["tokens_per_s"] > 0
    assert trial.metrics["load_imbalance"] == facts["load_imbalance"] >= 1
    assert "torch" in trial.provenance
    # The command that a trial names gives the same losses, and says a line a step.
    again = call(*shlex.split(trial.command)[1:])
    shown = [line for line in again.stdout.splitlines() if line.startswith("step ")]
    assert [f"loss {loss:.4f}" in line for loss, line in zip(facts["losses"], shown, strict=True)] == [True] * 3
    assert len(list((here / "results" / "local").glob("*.json"))) == 1


def test_a_plan_is_refined_by_running_its_neighbours(here: Path) -> None:
    words = ["plan", "disagmoe", *RUN, "--refine", "run", "--ranks", "4", "--steps", "3", "--budget", "3"]
    done = call(*words, "--results", "kept", "--json")
    facts = json.loads(done.stdout)
    found = facts["refinement"]
    assert found["source"] == "measured"
    told = done.stderr.splitlines()
    assert told[0] == "planning disagmoe on 4 ranks of this machine: starting them"
    assert any(line.startswith("planning disagmoe on 4 ranks of this machine: 0 of 3: seed") for line in told)
    assert any(re.search(r": 3 of 3: .*: [0-9.e-]+ s a step$", line) for line in told)
    ran = {each["trial"]: each for each in found["tried"] if each["step_time_s"] is not None}
    assert len(ran) == 3
    kept = {trial.name: trial for _, trial in read_trials([here / "kept"])}
    assert kept.keys() == ran.keys()
    for name, trial in kept.items():
        assert (trial.source, trial.status) == ("measured", "ok")
        assert trial.metrics["step_time_s"] == ran[name]["step_time_s"]
    assert found["path"][0]["change"].startswith("seed")
    times = [each["step_time_s"] for each in found["path"]]
    assert times == sorted(times, reverse=True) and times[-1] <= min(times)
    assert facts["layout"] == found["path"][-1]["layout"]
    assert any(sentence.startswith("Refinement: measured") for sentence in facts["sentences"])


def test_a_run_of_a_pairs_order_is_labelled(here: Path) -> None:
    shown = call("run", "dualpipe", *RUN, "--ranks", "2", "--steps", "1", "--results", "kept").stdout
    assert shown.startswith("dualpipe (plan, pair-order) for tiny")
    ((_, trial),) = read_trials([here / "kept"])
    assert (trial.status, trial.traits) == ("ok", ("pair-order",))


def test_verify_tells_a_miss_by_its_exit_code(here: Path) -> None:
    words = ["verify", "disagmoe", *RUN, "--ranks", "2"]
    facts = call_json(*words)
    assert facts["ok"]
    assert 0 < facts["worst_gradient_error"] <= 1e-5
    assert facts["loss_error"] <= 1e-6
    missed = call(*words, "--tolerance", "1e-12", code=1)
    assert "largest gradient errors" in missed.stdout
    assert "FAILED" in missed.stdout
    assert not list(here.iterdir())


def test_an_executed_trace_is_written_and_drawn(here: Path) -> None:
    facts = call_json("trace", "disagmoe", *RUN, "--ranks", "2", "--executed", "--out", "step.json.gz")
    assert facts["kind"] == "measured"
    assert sorted(path.name for path in here.iterdir()) == ["step.json.gz", "step.pdf", "step.png"]
    about = json.loads(gzip.decompress((here / "step.json.gz").read_bytes()))["otherData"]
    assert about["source"] == "measured"


@pytest.mark.slow
def test_the_training_demo_holds(here: Path) -> None:
    facts = call_json("figure", "train-demo", "--quick", "--out", "drawn")
    assert facts["failures"] == []
    assert sorted(path.name for path in (here / "drawn").iterdir()) == [
        f"train-demo-quick.{end}" for end in ("csv", "pdf", "png")
    ]
    assert len(list((here / "results" / "local").glob("*.json"))) == 3


def test_a_run_on_gpus_that_are_named_is_of_their_cluster() -> None:
    case = run_case("ep", "tiny", 2, "cpu", 16, None, "fp32", "learned", 0, None, "h200x2gpu")
    assert case.cluster == get_cluster("h200x2gpu")
    assert "--cluster h200x2gpu" in command_for("run", case)
    plain = run_case("ep", "tiny", 2, "cpu", 16, None, "fp32", "learned", 0, None)
    assert (plain.cluster.gpu.name, plain.cluster.num_gpus) == ("cpu", 2)
    assert "--cluster" not in command_for("run", plain)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_default_layouts_use_what_divides(ranks: int) -> None:
    for system in ("ep", "disagmoe"):
        case = run_case(system, "tiny", ranks, "cpu", 16, None, "fp32", "learned", 0, None)
        dealt = batch_of(case, plan_of(case).placement)
        assert dealt.num_microbatches == 4
        assert dealt.num_replicas * plan_of(case).placement.size <= ranks


# As a process


def test_process_exit_codes_and_streams(here: Path) -> None:
    good = in_process("simulate", "ep", *SMALL, "--layout", "ep=8", "--json", cwd=here)
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout).keys() >= SIMULATE_KEYS
    bad = in_process("plan", "ep", *SMALL, "--layout", "ep=3", "--json", cwd=here)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("moebench: layout.ep: 3 is not valid; allowed: ")
    assert not list(here.iterdir())


SLOW = """import time
from systems.baselines.ep import ExpertParallel

class Slow(ExpertParallel):
    name = "slow"

    def plan(self, case):
        time.sleep(1.5)
        return super().plan(case)
"""


@pytest.mark.parametrize("verb", ["simulate", "compare"])
def test_a_slow_schedule_shows_on_a_terminal_that_it_goes_on(here: Path, verb: str) -> None:
    (here / "slow.py").write_text(SLOW)
    words = [verb, "slow.py", *SMALL, "--layout", "ep=8", *(["--against", "ep", "--budget", "1"] * (verb == "compare"))]
    terminal, stderr = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.cli", *words],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    os.close(stderr)
    told = b""
    with suppress(OSError):  # the terminal is gone with the process
        while part := os.read(terminal, 4096):
            told += part
    os.close(terminal)
    out = process.communicate()[0]
    assert process.returncode == 0, told
    assert b"slow" in out
    assert {"simulate": b"simulating slow.py", "compare": b"tuning: slow"}[verb] in told
    assert re.search(rb"0:00:0[1-9]", told)  # the time that has passed


def test_without_torch_run_says_how_to_install_it(here: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; from bench.cli import main; main()"
    for verb in ("run", "verify"):
        done = subprocess.run(
            [sys.executable, "-c", program, verb, "ep", *RUN],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert "pip install 'disagmoe-bench[train]'" in done.stderr
        assert "make setup-train" in done.stderr
    assert not list(here.iterdir())


def test_ctrl_c_while_it_still_imports_is_said_in_a_line(here: Path) -> None:
    # A shell that runs the tests in its background has its children ignore Ctrl-C.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heed}\nfrom bench.cli import main; main()"
    words = [sys.executable, "-X", "importtime", "-c", program, "list", "systems"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not process.stderr.readline().rstrip().endswith(" typer"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    told = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, out, told) == (130, "", ["moebench: stopped"])
