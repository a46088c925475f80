"""`moebench plan` of a system with a planner of its own: its limits, schedules of lengths, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.plan import Plan

ON = ["--model", "tiny", "--cluster", "h800x1", "--global-batch-tokens", "1024"]
SCHEDULE = [*ON, "--seq-len-schedule", "64:100,128:10"]
ONE = [*ON, "--seq-len", "64"]


def call(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", "disagmoe", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_schedule_shows_both_sides() -> None:
    found = json.loads(call(*SCHEDULE, "--budget", "2", "--json"))
    assert [(each["seq_len"], each["num_steps"]) for each in found["phases"]] == [(64, 100), (128, 10)]
    second = found["phases"][1]
    assert second["own_step_s"] <= second["kept_step_s"]
    assert (second["own_move"] is None) == (second["verdict"] == "same")
    shown = call(*SCHEDULE, "--budget", "2")
    assert all(word in shown for word in ("kept, step s", "own, step s", "pays after steps", "Together: "))


def test_the_budget_is_of_every_search_of_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    from systems.disagmoe.planner import phases

    budgets = []
    real = phases.search
    monkeypatch.setattr(phases, "search", lambda *a, **k: (budgets.append(k["budget"]), real(*a, **k))[1])
    call(*SCHEDULE, "--budget", "2")
    assert budgets == [2, 2]


def test_a_printed_schedule_is_that_of_the_plan() -> None:
    text = call(*ONE, "--budget", "2", "--print-schedule")
    layout = json.loads(call(*ONE, "--budget", "2", "--json"))["layout"]
    plan = Plan.parse(text)
    assert str(plan) == text
    groups = {group.name: group.size for group in plan.placement.groups}
    assert groups["A0"] == layout["attention_ranks"] and groups["F0"] == layout["expert_ranks"]
    assert plan.recompute == layout["recompute"]


LONG = "1" * 400
BESIDE = "nothing beside --seq-len-schedule"
RUN_ONLY = (["--ranks", "3"], ["--steps", "3"], ["--device", "cpu"], ["--results", "kept"])


@pytest.mark.parametrize(
    ("words", "field", "allowed"),
    [
        ([*SCHEDULE, "--layout", "groups=2"], "--layout", BESIDE),
        ([*SCHEDULE, "--print-schedule"], "--print-schedule", BESIDE),
        ([*SCHEDULE, "--refine", "none"], "--refine", BESIDE),
        ([*SCHEDULE, "--refine", "run"], "--refine", BESIDE),
        ([*SCHEDULE, "--seq-len", "64"], "--seq-len", "nothing beside --seq-len-schedule"),
        (ON, "--seq-len", "a number of tokens (it is required), or --seq-len-schedule"),
        *(([*ONE, *given], given[0], "nothing without --refine run") for given in RUN_ONLY),
        ([*ONE, "--refine", "none", "--steps", "3"], "--steps", "nothing without --refine run"),
        ([*ONE, "--layout", "groups=2", "--refine", "none"], "--refine", "nothing beside --layout"),
        ([*ONE, "--layout", "groups=2", "--assumptions", "datasheet"], "--assumptions", "nothing beside --layout"),
        ([*ONE, "--layout", "groups=2", "--set", "gemm=0.5"], "--set", "nothing beside --layout"),
        ([*ONE, "--refine", "run", "--print-schedule"], "--refine", "simulate or none with --print-schedule"),
        ([*ON, "--seq-len-schedule", "64@0.5,128@0.4"], "--seq-len-schedule", "these sum to 0.9"),
        ([*ON, "--seq-len-schedule", "0:5"], "--seq-len-schedule", "greater than or equal to 2"),
        ([*SCHEDULE, "--time-limit", "1e-9"], "--time-limit", "no allocation was found in that time"),
        ([*ONE, "--time-limit", "1e-9"], "--time-limit", "no allocation was found in that time"),
        ([*ONE, "--time-limit", "0"], "--time-limit", "above 0"),
        ([*ONE, "--time-limit", "nan"], "--time-limit", "above 0"),
        ([*ONE, "--time-limit", "5", "--layout", "groups=2"], "--time-limit", "nothing beside --layout"),
        ([*ONE, "--budget", "5", "--layout", "groups=2"], "--budget", "nothing beside --layout"),
        ([*ONE, "--budget", "5", "--refine", "none"], "--budget", "nothing beside --refine none"),
        ([*ON, "--seq-len-schedule", f"{LONG}:5"], "--seq-len-schedule", "LENGTH:STEPS"),
        ([*ON, "--seq-len-schedule", f"64:{LONG}"], "--seq-len-schedule", "LENGTH:STEPS"),
        ([*ON, "--seq-len-schedule", f"64:5,{LONG}:5"], "--seq-len-schedule", "LENGTH:STEPS"),
        ([*ON, "--seq-len-schedule", "128:5,64:5"], "--seq-len-schedule", "ascending"),
        ([*ON, "--seq-len-schedule", "64:5,-128:5"], "--seq-len-schedule", "greater than or equal to 2"),
        ([*ON, "--seq-len-schedule", "64:5,96:5"], "--seq-len-schedule", "that divide the global batch of 1024 tokens"),
        ([*ON, "--seq-len-schedule", "1:5"], "--seq-len-schedule", "greater than or equal to 2"),
        ([*ON, "--seq-len", "0"], "--seq-len", "greater than or equal to 2"),
        ([*ON, "--seq-len-schedule", "60:5,64:5"], "--seq-len-schedule", "that divide the global batch of 1024 tokens"),
        ([*ON, "--seq-len-schedule", "64:5,9999999:5"], "--seq-len-schedule", "less than or equal to"),
        ([*ON, "--seq-len-schedule", "9999999:5"], "--seq-len-schedule", "less than or equal to"),
    ],
)
def test_what_would_go_unheeded_is_refused_in_one_line(words: list[str], field: str, allowed: str) -> None:
    result = CliRunner().invoke(app, ["plan", "disagmoe", *words])
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"moebench: {field}: ")
    assert allowed in line.partition("allowed: ")[2]


def test_a_schedule_out_of_order_is_shown_as_it_was_typed() -> None:
    result = CliRunner().invoke(app, ["plan", "disagmoe", *ON, "--seq-len-schedule", "128:5,64:5"])
    assert "--seq-len-schedule: '128:5,64:5' is not valid" in result.stderr


@pytest.mark.parametrize("given", [["--budget", "3"], ["--time-limit", "3"], ["--refine", "none"]])
def test_options_of_a_planner_need_one(given: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", "ep", *ONE, *given])
    assert result.exit_code == 2
    assert f"moebench: {given[0]}: " in result.stderr and "a planner of its own: disagmoe" in result.stderr
