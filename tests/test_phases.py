"""Plans for workloads that change: schedules, moves between placements, and when a move pays."""

import json
from dataclasses import replace
from typing import Any, Literal

import pytest

from bench.assumptions import get_assumptions
from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.flops import num_parameters, parameters
from bench.models import get_model
from bench.sequence import CUT
from bench.timing import Evaluate, StepTime, simulated
from systems.disagmoe.planner import fitting
from systems.disagmoe.planner.allocation import Allocation
from systems.disagmoe.planner.explain import explain
from systems.disagmoe.planner.move import Move, move
from systems.disagmoe.planner.neighbours import neighbours
from systems.disagmoe.planner.phases import held_by, plan_phases
from systems.disagmoe.planner.phases_words import PhasePlan, PhasesPlan
from systems.disagmoe.planner.problem import Problem
from systems.disagmoe.planner.schedule import Phase, parse_schedule

ASSUMED = get_assumptions("datasheet")
STATE_BYTES, WEIGHT_BYTES = 12, 2


def spec(seq_len: int = 64, tokens: int = 4096) -> CaseSpec:
    return CaseSpec(
        model=get_model("tiny"),
        cluster=get_cluster("h800x1"),
        workload=Workload(seq_len=seq_len, global_batch_tokens=tokens),
        system="disagmoe",
    )


def case(**layout: object) -> Case:
    return spec().with_layout(Layout.make(**layout))


def test_a_move_to_where_everything_is_costs_nothing() -> None:
    here = case(attention_ranks=2, expert_ranks=2, groups=2, replicas=1)
    other_order = case(attention_ranks=2, expert_ranks=2, groups=2, replicas=1, round_length=4, recompute="full")
    assert move(here, other_order, ASSUMED) == (0.0, 0.0)


def test_a_move_to_other_gpus_carries_every_weight_and_every_state_once() -> None:
    """One replica of one rank each side, swapped for one of two: all that changes hands is countable."""
    small = case(attention_ranks=1, expert_ranks=1, groups=1, replicas=1)
    model = small.model
    wide = case(attention_ranks=1, expert_ranks=2, groups=1, replicas=1)
    experts = model.num_layers * 3 * model.num_experts * model.hidden_size * model.expert_hidden_size
    # Attention stays on GPU 0; half of the experts go from GPU 1 to GPU 2.
    assert move(small, wide, ASSUMED).total_bytes == pytest.approx(experts / 2 * (WEIGHT_BYTES + STATE_BYTES))
    # Back again the same half comes home.
    assert move(wide, small, ASSUMED).total_bytes == pytest.approx(experts / 2 * (WEIGHT_BYTES + STATE_BYTES))


def test_more_replicas_copy_weights_and_only_deal_out_state() -> None:
    one = case(attention_ranks=1, expert_ranks=1, groups=1, replicas=1)
    two = case(attention_ranks=1, expert_ranks=1, groups=1, replicas=2)
    params = num_parameters(one.model).total
    # The second replica receives all weights, and half of the state, which the first one gives away.
    expected = params * (WEIGHT_BYTES + STATE_BYTES / 2)
    assert move(one, two, ASSUMED).total_bytes == pytest.approx(expected)
    assert move(one, two, ASSUMED).seconds > 0


def test_heads_that_are_divided_travel_alone() -> None:
    """Two ranks that share heads instead of sequences: each keeps its half, so weights stay and state is dealt anew."""
    whole = case(attention_ranks=2, expert_ranks=1, groups=1, replicas=1, cp=2)
    divided = case(attention_ranks=2, expert_ranks=1, groups=1, replicas=1, tp=2)
    model = whole.model
    cut = sum(n for name, n in parameters(model, "attention", 0).items() if name in CUT) * model.num_layers
    # Each held a half of the state of every head, and needs all of that of its own heads; its weights are there. Back,
    # each lacks the weights of the other's heads.
    assert move(whole, divided, ASSUMED).total_bytes == pytest.approx(0.5 * cut * STATE_BYTES)
    back = move(divided, whole, ASSUMED).total_bytes
    assert back == pytest.approx(cut * WEIGHT_BYTES + 0.5 * cut * STATE_BYTES)


def test_state_that_goes_to_the_host_passes_its_link() -> None:
    here = case(attention_ranks=1, expert_ranks=1, groups=1, replicas=1)
    there = case(attention_ranks=1, expert_ranks=1, groups=1, replicas=1, offload="state")
    model, gpu = here.model, here.cluster.gpu
    experts = model.num_layers * 3 * model.num_experts * model.hidden_size * model.expert_hidden_size
    attention = num_parameters(model).total - experts
    fullest = max(experts, attention) * STATE_BYTES
    for one, other in ((here, there), (there, here)):
        found = move(one, other, ASSUMED)
        assert found.total_bytes == 0.0
        assert found.seconds == pytest.approx(fullest / (gpu.host_bytes_per_s * ASSUMED.host_link))
    assert move(there, there, ASSUMED).seconds == 0.0


@pytest.mark.parametrize(
    "text",
    [
        *("", "64", "64:0", "64:-1", "128:5,64:5", "64:5,64:5", "-64:5", "0:5", "64:x", "64@0", "64@nan", "64:1.5"),
        *(f"64:{'1' * 400}", f"{'1' * 400}:5", "64:5,128", "64@1,128:2", "64:1e3", "64@inf", "64:1_0"),
    ],
)
def test_schedules_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="seq-len"):
        parse_schedule(text)


def test_shares_of_a_mixture_are_of_one_or_whole_weights() -> None:
    for text in ("64@3,128@1", "64@0.75,128@0.25", "64@0.7499,128@0.25"):
        mixture = parse_schedule(text)
        assert mixture.mixed
        assert sum(phase.num_steps for phase in mixture.phases) == pytest.approx(1.0, rel=1e-12)
        assert mixture.phases[1].num_steps == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize(("text", "total"), [("64@0.8,128@0.1", "0.9"), ("64@1,128@0.2", "1.2"), ("64@0.5", "0.5")])
def test_shares_that_do_not_sum_to_one_are_refused(text: str, total: str) -> None:
    with pytest.raises(BadInput, match=f"seq-len-schedule.*sum to {total}"):
        parse_schedule(text)


def timed(seconds: dict[tuple[int, int], float]) -> Evaluate:
    """Steps timed by sequence length and number of groups, so that it is known which layout is best where."""

    def evaluate(of: Case) -> StepTime:
        step_s = seconds[of.workload.seq_len, 1 if of.layout.groups == 1 else 2]
        return StepTime("ok", step_s, step_s, step_s)

    return evaluate


def test_a_long_phase_is_worth_a_move_and_a_short_one_is_not() -> None:
    # One group is best for short sequences, more for long ones, by 1 ms a step; a move takes microseconds.
    evaluate = timed({(64, 1): 1e-3, (64, 2): 2e-3, (128, 1): 2e-3, (128, 2): 1e-3})
    found = plan_phases(spec(), parse_schedule("64:1000,128:1000"), ASSUMED, evaluate=evaluate, budget=12)
    first, second = found.phases
    assert first.layout.groups == 1 and second.layout.groups > 1
    assert (first.verdict, second.verdict) == ("first", "pays")
    assert second.kept_layout is not None and held_by(second.kept_layout) == held_by(first.layout)
    assert second.move is not None and second.own_move == second.move and second.move.seconds > 0
    assert second.kept_step_s == 2e-3 and second.own_step_s == 1e-3
    assert second.pays_after_steps == pytest.approx(second.move.seconds / 1e-3)
    assert found.unmoved_s == pytest.approx(3.0)
    assert found.total_s == pytest.approx(2.0 + second.move.seconds)
    said = found.sentences()
    assert f"pays after {second.pays_after_steps:.3g} steps, and it moves" in said[1]
    assert "0.002 s, on its own 0.001 s" in said[1] and "re-allocating saves 33 % of that" in said[-1]

    # Where a step gains ten nanoseconds, the second phase is too short and keeps what it finds.
    evaluate = timed({(64, 1): 1e-6, (64, 2): 1.1e-6, (128, 1): 1e-6, (128, 2): 0.99e-6})
    found = plan_phases(spec(), parse_schedule("64:1,128:1"), ASSUMED, evaluate=evaluate, budget=12)
    second = found.phases[1]
    assert second.move is None and second.verdict == "stays"
    assert "would pay after" in found.sentences()[1]
    assert second.pays_after_steps is not None and second.pays_after_steps > 1
    assert "and it stays" in found.sentences()[1] and "nothing moves" in found.sentences()[-1]
    assert found.total_s == pytest.approx(found.unmoved_s)


def test_a_move_never_pays_where_the_placement_before_is_as_fast() -> None:
    """The phase's own plan is another placement, which keeping equals: there is nothing to win back."""
    evaluate = timed({(64, 1): 1e-3, (64, 2): 2e-3, (128, 1): 1e-3, (128, 2): 1e-3})
    found = plan_phases(spec(), parse_schedule("64:5,128:5"), ASSUMED, evaluate=evaluate, budget=12)
    second = found.phases[1]
    assert second.kept_step_s == second.own_step_s and second.move is None and second.pays_after_steps is None
    assert second.verdict in ("same", "never")
    equal = PhasePlan(
        Phase(128, 5), second.layout, 1e-3, second.layout, 1e-3, second.layout, 1e-3, True, Move(1.0, 1.0), None
    )
    assert equal.verdict == "never" and equal.pays_after_steps is None
    told = PhasesPlan(found.schedule, (found.phases[0], equal), 1.0, 1.0)
    assert "re-allocating never pays" in told.sentences()[1]
    assert told.tables()[0].rows[1][6] == "never"


def test_a_placement_that_does_not_do_for_a_length_has_to_go() -> None:
    def evaluate(of: Case) -> StepTime:
        wanted = 1 if of.workload.seq_len == 64 else 2
        status: Literal["ok", "infeasible"] = "ok" if of.layout.groups == wanted else "infeasible"
        return StepTime(status, 1e-3, 1e-3, 1e-3)

    found = plan_phases(spec(), parse_schedule("64:5,128:5"), ASSUMED, evaluate=evaluate, budget=40)
    assert found.unmoved_s is None
    assert found.phases[1].verdict == "must" and found.phases[1].kept_step_s is None and found.phases[1].move
    assert "does not do for this length" in found.sentences()[1]
    assert "no placement fits every length" in found.sentences()[-1]
    with pytest.raises(BadInput, match=r"seq-len-schedule.*one placement fits"):
        plan_phases(spec(), parse_schedule("64@5,128@5"), ASSUMED, evaluate=evaluate, budget=40)


def test_a_phase_is_planned_as_well_as_its_length_alone() -> None:
    lengths = (64, 256)
    found = plan_phases(spec(), parse_schedule("64:100,256:10"), ASSUMED, budget=5)
    for seq_len, phase in zip(lengths, found.phases, strict=True):
        alone = explain(spec(seq_len), ASSUMED, budget=5).best
        assert alone is not None and alone.step_time_s is not None
        assert phase.own_step_s <= alone.step_time_s


def test_what_is_kept_is_refined_like_what_is_new() -> None:
    """By hand: no choice that moves nothing is faster than what keeping is said to take."""
    found = plan_phases(wide(512), parse_schedule("512:100,2048:10"), ASSUMED)
    second = found.phases[1]
    assert second.kept_layout is not None and second.kept_step_s is not None
    placement = held_by(second.kept_layout)
    assert placement == held_by(found.phases[0].layout)
    timing = simulated(ASSUMED)
    for layout, change in neighbours(wide(2048), second.kept_layout):
        if held_by(layout) == placement:
            step = timing(wide(2048).with_layout(layout))
            assert step.status != "ok" or (step.step_time_s or 0.0) >= second.kept_step_s * 0.998, change


def wide(seq_len: int) -> CaseSpec:
    work = Workload(seq_len=seq_len, global_batch_tokens=1 << 16)
    return spec().model_copy(update={"model": get_model("tiny-shared"), "workload": work})


def test_a_simulated_schedule_is_never_slower_for_being_allowed_to_move() -> None:
    found = plan_phases(spec(), parse_schedule("64:100,256:10"), ASSUMED, budget=3)
    assert found.unmoved_s is not None
    assert found.total_s <= found.unmoved_s * (1 + 1e-12)
    content = json.loads(json.dumps(found.to_json()))
    assert [phase["seq_len"] for phase in content["phases"]] == [64, 256]
    assert len(found.tables()[0].rows) == 2


def test_a_mixture_stays_on_one_placement() -> None:
    evaluate = timed({(64, 1): 1e-3, (64, 2): 2e-3, (128, 1): 3e-3, (128, 2): 1e-3})
    found = plan_phases(spec(), parse_schedule("64@3,128@1"), ASSUMED, evaluate=evaluate, budget=12)
    assert len({held_by(each.layout) for each in found.phases}) == 1
    assert found.total_s == found.unmoved_s == pytest.approx(0.75 * 1e-3 + 0.25 * 3e-3)
    first, second = found.phases
    assert first.layout.groups == 1 and first.verdict == "same"
    # To be worth it, a run of long steps has to pay for the way there and the way back.
    there = move(spec(128).with_layout(second.layout), spec(128).with_layout(second.own_layout), ASSUMED)
    back = move(spec(128).with_layout(second.own_layout), spec(128).with_layout(second.layout), ASSUMED)
    assert second.pays_after_steps == pytest.approx((there.seconds + back.seconds) / 2e-3)
    said = found.sentences()
    assert "25 % of the steps of 128 tokens" in said[1] and "of this length in a row" in said[1]
    assert second.verdict == found.to_json()["phases"][1]["verdict"] == "stays" and "stays where it is" in said[1]
    assert "one placement takes 50 % longer" in said[-1]


def test_a_phase_whose_solver_was_stopped_says_so() -> None:
    found = plan_phases(spec(), parse_schedule("64:10,128:10"), ASSUMED, budget=1)
    assert all(each.gap is None for each in found.phases) and "out of time" not in " ".join(found.sentences())
    stopped = replace(found, phases=(found.phases[0], replace(found.phases[1], gap=0.12)))
    first, second, _ = stopped.sentences()
    assert "out of time" not in first
    assert "At this length the solver ran out of time" in second and "may take up to 11 % less" in second
    assert [phase["proven"] for phase in stopped.to_json()["phases"]] == [True, False]


def test_the_gap_of_a_stopped_solver_reaches_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fitting.allocate
    best = {}

    def stopped(programme: Problem, **options: Any) -> Allocation:
        found = real(programme, **options)
        best[programme.spec.workload.seq_len] = found
        return replace(found, proven=False, most_steps_per_s=2 * found.steps_per_s)

    monkeypatch.setattr(fitting, "allocate", stopped)
    found = plan_phases(spec(), parse_schedule("64:10,128:10"), ASSUMED, budget=1)
    assert [each.gap for each in found.phases] == [pytest.approx(1.0)] * 2 and set(best) == {64, 128}


def test_a_length_that_does_not_fit_is_named() -> None:
    big = spec(64).model_copy(update={"model": get_model("deepseek-v3")})
    with pytest.raises(BadInput, match=r"cluster.*for sequences of 64: .*memory constraint cannot hold.*would fit"):
        plan_phases(big, parse_schedule("64:10,128:10"), ASSUMED)


def test_a_length_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(BadInput, match=r"seq-len-schedule: 100 .*divide the global batch of 4096 tokens"):
        plan_phases(spec(), parse_schedule("64:10,100:10"), ASSUMED)


def test_phases_say_whether_their_refinement_ended_by_itself() -> None:
    ended, cut = (plan_phases(spec(), parse_schedule("64:10,128:10"), ASSUMED, budget=budget) for budget in (None, 1))
    for found, settled in ((ended, True), (cut, False)):
        plain = found.to_json()["phases"]
        assert {each["settled"] for each in plain} == {each["own_settled"] for each in plain} == {settled}
        assert [each["kept_settled"] for each in plain] == [None, settled]
        assert [row[-1] for row in found.tables()[0].rows] == ["yes" if settled else "no"] * 2
        assert all(("The budget ended the refinement" in each) != settled for each in found.sentences()[:2])
