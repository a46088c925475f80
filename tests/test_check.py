"""Checking: right plans pass, each kind of fault gives its own error with the queue around it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.action import Action, Pass, view
from bench.case import Case
from bench.check import PlanError, _Rendezvous, check
from bench.lower import lower
from bench.models import get_model
from bench.plan import ActionColumn, Plan
from bench.program import Program
from bench.rendezvous import num_finished
from bench.system import plan_of
from tests.cases import cases, make_case

Queue = list[Action]


def edited(plan: Plan, key: tuple[str, str], edit: Callable[[Queue], Queue]) -> Plan:
    return replace(plan, queues={**plan.queues, key: ActionColumn.of(edit(list(plan.queues[key])))})


def fault(plan: Plan) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check(lower(plan, get_model("tiny")))
    return caught.value


@settings(max_examples=60, deadline=None)
@given(cases())
def test_plans_of_all_layouts_are_complete_and_end(case: Case) -> None:
    check(lower(plan_of(case), case.model))


@pytest.fixture
def plan() -> Plan:
    return plan_of(make_case("disagmoe", microbatches=2, groups=2, attention_ranks=2, round_length=2))


def test_a_missing_action_is_named(plan: Plan) -> None:
    error = fault(edited(plan, ("F0", "compute"), lambda q: [a for a in q if str(a) != "expert:W2.1"]))
    assert "expert:W2.1 is missing" in str(error) and "F0" in error.grid
    line, marker = error.grid.splitlines()
    assert line[marker.index("^") :].startswith(("expert:B2.1", "expert:F2.1"))


def test_how_many_are_missing_is_said(plan: Plan) -> None:
    error = fault(edited(plan, ("F0", "compute"), lambda q: [a for a in q if a.pass_ != Pass.W]))
    assert "is missing, and 3 more" in str(error)


def test_a_chunk_that_is_missing_or_too_many_is_named() -> None:
    plan = plan_of(make_case("tutel", microbatches=2, ep=2, chunks=2))
    error = fault(edited(plan, ("S0", "all-to-all"), lambda q: [a for a in q if str(a) != "combine:B2.1.1"]))
    assert "combine:B2.1.1 is missing" in str(error)
    error = fault(edited(plan, ("S0", "compute"), lambda q: [Action.parse("expert:F0.0.2"), *q]))
    assert error.value == "expert:F0.0.2"
    error = fault(edited(plan, ("S0", "compute"), lambda q: [Action.parse("attn:F0.0.1"), *q]))
    assert error.value == "attn:F0.0.1"


def test_an_action_done_twice_is_shown(plan: Plan) -> None:
    error = fault(edited(plan, ("A1", "compute"), lambda q: [q[0], *q]))
    assert error.value == "attn:F1.0" and "once" in str(error)
    assert error.grid.splitlines()[1].strip() == "^" * len("attn:F1.0")


def test_an_action_on_the_wrong_group_is_shown(plan: Plan) -> None:
    stray = Action.parse("attn:F1.0")
    error = fault(edited(plan, ("A0", "compute"), lambda q: [stray, *q]))
    assert "on group A1" in str(error) and "^" in error.grid


def test_an_action_the_model_does_not_have_is_refused(plan: Plan) -> None:
    stray = Action.parse("expert:F9.0")
    error = fault(edited(plan, ("F0", "compute"), lambda q: [*q[:3], stray, *q[3:]]))
    assert error.value == "expert:F9.0"
    marker, line = error.grid.splitlines()[1], error.grid.splitlines()[0]
    assert line[marker.index("^") :].startswith("expert:F9.0")


def test_a_microbatch_that_is_not_there_is_refused(plan: Plan) -> None:
    error = fault(edited(plan, ("F0", "compute"), lambda q: [Action.parse("expert:F0.7"), *q]))
    assert "0 to 1" in str(error)


@pytest.mark.parametrize("word", ["sync", "update"])
def test_the_end_of_the_step_is_needed_once_and_last(plan: Plan, word: str) -> None:
    without = fault(edited(plan, ("A0", "compute"), lambda q: [a for a in q if str(a) != word]))
    assert f"0 x {word}" in str(without)
    early = fault(edited(plan, ("A0", "compute"), lambda q: [Action.parse(word), *(a for a in q if str(a) != word)]))
    assert early.value == word


@pytest.mark.parametrize("compiled_from", [0, 1 << 30])
def test_a_deadlock_names_every_blocked_queue(plan: Plan, compiled_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of a layer before its forward: its group waits for itself."""
    monkeypatch.setattr("bench.check.COMPILED_FROM", compiled_from)

    def swap(queue: Queue) -> Queue:
        words = [str(a) for a in queue]
        i, j = words.index("attn:F1.1"), words.index("attn:B1.0")
        queue[i], queue[j] = queue[j], queue[i]
        return queue

    error = fault(edited(plan, ("A1", "compute"), swap))
    assert "deadlock" in str(error)
    assert "attn:B1.0" in error.grid and "waits for" in error.grid


def test_stages_in_crossing_order_deadlock() -> None:
    """S1 wants micro-batch 2 first, which S0 only begins after the backward of micro-batch 0."""
    plan = plan_of(make_case("ep", microbatches=3, ep=1, pp=2))

    def other_first(queue: Queue) -> Queue:
        return [a for a in queue if a.microbatch == 2] + [a for a in queue if a.microbatch != 2]

    assert "deadlock" in str(fault(edited(plan, ("S1", "compute"), other_first)))


@settings(max_examples=40, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_random_swaps_either_run_in_python_too_or_are_deadlocks(case: Case, random: object) -> None:
    """The checker agrees with a plain fixed-point run of the same program, whatever order the queues are in."""
    plan = plan_of(case)
    key = random.choice(sorted(plan.queues))  # type: ignore[attr-defined]
    codes = plan.queues[key].codes.copy()
    body = len(codes) - 2 if len(codes) > 3 else len(codes)
    i, j = random.randrange(body), random.randrange(body)  # type: ignore[attr-defined]
    codes[[i, j]] = codes[[j, i]]
    shuffled = replace(plan, queues={**plan.queues, key: ActionColumn(codes)})
    try:
        program = lower(shuffled, case.model)
    except PlanError:
        assert {str(view(int(codes[i]))), str(view(int(codes[j])))} & {"sync", "update"}
        return
    try:
        check(program)
        ends = True
    except PlanError:
        ends = False
    assert ends == runs_by_brute_force(program)
    assert num_finished(program) == finished_one_by_one(program)


def finished_one_by_one(program: Program) -> int:
    run = _Rendezvous(program)
    run.run()
    return run.num_done


def runs_by_brute_force(program) -> bool:  # type: ignore[no-untyped-def]
    """Sweep over all queues until nothing moves; sends and receives finish together."""
    done: set[int] = set()
    syncs = {k for k in range(program.num_ops) if program.op[k] == 3}
    heads = dict(enumerate(int(p) for p in program.queue_ptr[:-1]))
    queue_of = program.queue_of()

    def at_head(k: int, leaving: int) -> bool:
        q = int(queue_of[k])
        return heads[q] == k or (heads[q] == leaving and leaving == k - 1)

    def ready(k: int) -> bool:
        waits = syncs if program.op[k] == 4 else set(program.waits_for(k))
        return waits <= done

    moved = True
    while moved:
        moved = False
        for q in list(heads):
            while heads[q] < program.queue_ptr[q + 1]:
                k = heads[q]
                if k in done:
                    heads[q] += 1
                    continue
                other = int(program.partner[k])
                pair = {k} if other < 0 or other in done else {k, other}
                if not all(ready(x) and at_head(x, k) for x in pair):
                    break
                done |= pair
                moved = True
    return len(done) == program.num_ops
