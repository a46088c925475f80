"""How much of its transfers a step hides: by hand, of two systems simulated, and of runs whose plans claim to hide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import make_case
from timelines import Row, one_layer, timeline

from bench.assumptions import get_assumptions
from bench.case import Case
from bench.hiding import broken_claim, claims_overlap, exchanges_s, hidden_share, work
from bench.lower import lower
from bench.measured import measure
from bench.predict import costs_of, predict
from bench.program import Op
from bench.serial import serialised
from bench.simulate import simulate
from bench.system import plan_of

pytest.importorskip("torch")


def test_by_hand() -> None:
    """Rank 0 computes 10 s and sends 4 s, of which 3 s beside its computation; it waits 1 s."""
    rows: list[Row] = [
        (0, "A0", "compute", Op.COMPUTE, "attn:F0.0", 0, 6),
        (0, "A0", "send", Op.SEND, "dispatch:F0.0", 3, 7),
        (0, "A0", "compute", Op.COMPUTE, "attn:F0.1", 8, 12),
        (1, "A0", "compute", Op.COMPUTE, "attn:F0.0", 0, 5),
    ]
    found = work(timeline(rows))
    assert found == (10, 4, 10, 12)
    assert found.fraction_of_bound == pytest.approx(10 / 12)
    assert exchanges_s(timeline(rows)) == (4, 3)
    assert hidden_share(serial_s=14, step_s=11, send_s=4) == pytest.approx(0.75)
    assert hidden_share(14, 14, 0) == 1


def test_what_is_serial_hides_nothing_and_overlap_something() -> None:
    """Simulated, with eight ranks on one node."""
    assumed = get_assumptions()
    shares = {}
    for system in ("ep", "megatron-overlap"):
        case = make_case(system, "qwen3-30b", ep=8, seq_len=8192)
        plan = plan_of(case)
        costs = costs_of(case, plan.placement, assumed)
        step, serial = (work(simulate(lower(each, case.model), costs)) for each in (plan, serialised(plan, case.model)))
        shares[system] = hidden_share(serial.step_s, step.step_s, serial.send_s)
        assert claims_overlap(lower(plan, case.model)) is (system != "ep")
    assert shares["ep"] == 0
    assert 0.5 < shares["megatron-overlap"] <= 1


@pytest.mark.parametrize(("system", "claims"), [("reference", False), ("tutel", True), ("disagmoe", True)])
def test_what_plans_claim(system: str, claims: bool) -> None:
    case = make_case(system)
    assert claims_overlap(lower(plan_of(case), case.model)) is claims


def test_one_layer_in_rounds() -> None:
    moving, hidden = exchanges_s(one_layer(scale=1.0))
    assert 0 < hidden < moving


def without_overlap(folder: Path) -> Case:
    """`ep` on one micro-batch with its exchanges in a stream of their own, and weight gradients when all is over.

    So nothing is left that an exchange could hide behind, whatever its stream says.
    """
    case = make_case("ep", ep=2, microbatches=1)
    before, queue = str(plan_of(case)).split("queue S0 compute\n")
    words = queue.split()
    moved = [word for word in words if re.match("dispatch|combine", word)]
    late = [word for word in words if re.match(r"\w+:W", word)]
    ends = ["sync", "update"]
    stays = [word for word in words if word not in {*moved, *late, *ends}]
    text = f"{before}queue S0 compute\n  {' '.join([*stays, *late, *ends])}\nqueue S0 exchange\n  {' '.join(moved)}\n"
    path = folder / "claims.txt"
    path.write_text(text)
    return case.model_copy(update={"system": str(path), "layout": make_case("ep").layout})


def test_a_plan_that_claims_overlap_and_shows_none_fails_its_own_run(tmp_path: Path) -> None:
    found = measure(without_overlap(tmp_path), steps=2)
    assert found.trial.status == "error"
    assert "none was hidden" in found.trial.message


def test_a_plan_that_shows_overlap_does_not() -> None:
    case = make_case("disagmoe", microbatches=8, seq_len=64)
    found = measure(case, steps=2, keep_timeline=True)
    assert found.trial.status == "ok", found.trial.message
    assert found.timeline is not None
    assert broken_claim(lower(plan_of(case), case.model), found.timeline) == ""
    shown = work(found.timeline)
    assert found.trial.metrics["fraction_of_bound"] == shown.fraction_of_bound
    assert 0 < shown.fraction_of_bound <= 1
    serial = measure(case, steps=2, serial=True, keep_timeline=True)
    assert serial.trial.status == "ok", serial.trial.message
    assert serial.timeline is not None
    assert {stream for group, stream in serial.timeline.queues if not stream.startswith("recv")} == {"compute"}
    assert serial.trial.command.endswith("--serial")


def test_a_measured_timeline_counts_the_flops_that_a_simulated_one_does() -> None:
    case = make_case("disagmoe", attention_ranks=1, expert_ranks=2, microbatches=2)
    measured = measure(case, steps=1, keep_timeline=True).timeline
    assert measured is not None
    simulated = predict(case, get_assumptions()).timeline
    assert measured.flops.sum() == pytest.approx(simulated.flops.sum() * simulated.stands_for)
    assert (measured.flops > 0).sum() > 0
