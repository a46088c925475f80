"""Plans for workloads that change: schedules, moves between placements, and when a move pays."""

import json

import pytest

from bench.assumptions import get_assumptions
from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.flops import num_parameters
from bench.models import get_model
from bench.timing import Evaluate, StepTime
from systems.disagmoe.planner.move import move
from systems.disagmoe.planner.phases import parse_schedule, plan_phases

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


@pytest.mark.parametrize(
    "text", ["", "64", "64:0", "64:-1", "128:5,64:5", "64:5,64:5", "-64:5", "0:5", "64:x", "64@0", "64@nan", "64:1.5"]
)
def test_schedules_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="seq-len"):
        parse_schedule(text)


def test_shares_of_a_mixture_add_up() -> None:
    mixture = parse_schedule("64@3,128@1")
    assert mixture.mixed
    assert [phase.num_steps for phase in mixture.phases] == [0.75, 0.25]


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
    assert second.move is not None and second.move.seconds > 0
    assert second.pays_after_steps is not None and second.pays_after_steps < 1000
    assert found.unmoved_s == pytest.approx(3.0)
    assert found.total_s == pytest.approx(2.0 + second.move.seconds)
    assert "re-allocating gains" in found.sentences()[-1]

    # Where a step gains a nanosecond, the second phase keeps what it finds.
    evaluate = timed({(64, 1): 1e-6, (64, 2): 1.1e-6, (128, 1): 1e-6, (128, 2): 0.99e-6})
    found = plan_phases(spec(), parse_schedule("64:1,128:1"), ASSUMED, evaluate=evaluate, budget=12)
    assert found.phases[1].move is None or found.phases[1].move.total_bytes == 0
    assert found.total_s == pytest.approx(found.unmoved_s)


def test_a_simulated_schedule_is_never_slower_for_being_allowed_to_move() -> None:
    found = plan_phases(spec(), parse_schedule("64:100,256:10"), ASSUMED, budget=3)
    assert found.unmoved_s is not None
    assert found.total_s <= found.unmoved_s * (1 + 1e-12)
    content = json.loads(json.dumps(found.to_json()))
    assert [phase["seq_len"] for phase in content["phases"]] == [64, 256]
    assert len(found.tables()[0].rows) == 2


def test_a_mixture_stays_on_one_placement() -> None:
    found = plan_phases(spec(), parse_schedule("64@1,256@1"), ASSUMED, budget=3)
    held = {(p.layout.groups, p.layout.attention_ranks, p.layout.expert_ranks, p.layout.replicas) for p in found.phases}
    assert len(held) == 1
    assert found.total_s == pytest.approx(sum(p.phase.num_steps * p.step_s for p in found.phases))


def test_a_length_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(BadInput, match="global_batch_tokens"):
        plan_phases(spec(), parse_schedule("64:10,100:10"), ASSUMED)
