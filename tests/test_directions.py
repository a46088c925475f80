"""Placements that run in two directions: homes, text, what is refused, lowering, and the end of the step."""

import numpy as np
import pytest

from bench.action import Action, Kind, Pass
from bench.assumptions import get_assumptions
from bench.bound import placement_bound
from bench.check import PlanError, check
from bench.edges import edges, ends
from bench.errors import BadInput
from bench.limits import least_bytes
from bench.lower import lower, parse_program
from bench.models import get_model
from bench.placement import Group, Placement
from bench.plan import ActionColumn, Plan
from bench.predict import costs_of, predict
from bench.program import Op
from bench.system import plan_of
from tests.cases import make_case
from tests.random_plans import random_plan

HOMES = ("S0", "S0", "S1", "S2")
THREE = Placement(
    groups=tuple(Group(f"S{i}", 2 * i, 2) for i in range(3)),
    embed="S0",
    head="S2",
    attention=HOMES,
    expert=("S0", "S0", "S1", None),
    join=HOMES,
    directions=2,
)


def test_a_micro_batch_finds_its_homes_by_its_direction() -> None:
    assert [THREE.home(Kind.ATTENTION, layer, 4) for layer in range(4)] == ["S0", "S0", "S1", "S2"]
    assert [THREE.home(Kind.ATTENTION, layer, 5) for layer in range(4)] == ["S2", "S2", "S1", "S0"]
    assert (THREE.home(Kind.EMBED, 0, 1), THREE.home(Kind.HEAD, 0, 1)) == ("S2", "S0")
    assert THREE.seen_by(3).expert == ("S2", "S2", "S1", None)
    holders = {name: [group.name for group in THREE.holders(name)] for name in ("S0", "S1", "S2")}
    assert holders == {"S0": ["S0", "S2"], "S1": ["S1"], "S2": ["S0", "S2"]}
    assert ends(THREE, Action(Kind.HOP, Pass.F, 2, 0)) == ("S0", "S1")
    assert ends(THREE, Action(Kind.HOP, Pass.F, 2, 1)) == ("S2", "S1")
    assert ends(THREE, Action(Kind.HOP, Pass.B, 3, 7)) == ("S0", "S1")


def test_dependencies_of_both_directions_are_the_same_but_for_the_micro_batch() -> None:
    model = get_model("tiny").model_copy(update={"num_dense_layers": 0})
    at = plan_of(make_case("dualpipe", model, microbatches=4, pp=2)).placement
    graph = list(edges(model, at))
    there, back = ([e for e in graph if e.src.microbatch == m] for m in (0, 1))
    assert len(there) + len(back) == len(graph)
    assert [e.of_microbatch(1) for e in there] == back


@pytest.mark.parametrize("pp", [2, 4])
def test_programs_print_and_parse(pp: int) -> None:
    case = make_case("dualpipe", "tiny-shared", microbatches=8, ep=2, pp=pp)
    program = lower(plan_of(case), case.model)
    again = parse_program(program.to_text())
    assert again.plan.placement == program.plan.placement
    assert np.array_equal(again.code, program.code) and np.array_equal(again.deps, program.deps)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("directions=2", "directions=3", "1 or 2"),
        ("directions=2", "directions=both", "directions=N"),
        ("microbatches=4", "microbatches=3", "an even number"),
        ("group S1 = 1..1", "group S1 = 1..2", "read the same backwards"),
    ],
)
def test_text_that_has_no_mirror_image_is_refused(old: str, new: str, says: str) -> None:
    text = str(plan_of(make_case("dualpipe", microbatches=4, pp=2)))
    # Groups of sequences that differ in size are refused as such, so S1 has experts alone.
    for part in ("attention", "join"):
        text = text.replace(f"home {part} S0 S0 S1 S1", f"home {part} S0 S0 S0 S0")
    text = text.replace("home head S1", "home head S0")
    assert old in text
    with pytest.raises(BadInput, match=says):
        Plan.parse(text.replace(old, new, 1))


def test_an_action_on_the_group_of_the_other_direction_is_shown() -> None:
    case = make_case("dualpipe", microbatches=4, pp=2)
    made = plan_of(case)
    queue = [a._replace(microbatch=a.microbatch ^ (a.kind is Kind.ATTENTION)) for a in made.queues["S0", "compute"]]
    wrong = Plan(made.system, made.placement, {**made.queues, ("S0", "compute"): ActionColumn.of(queue)}, 4)
    with pytest.raises(PlanError, match="on group S1"):
        lower(wrong, case.model)


def test_a_missing_micro_batch_of_one_direction_is_named() -> None:
    case = make_case("dualpipe", microbatches=4, pp=2)
    made = plan_of(case)
    queue = [a for a in made.queues["S1", "compute"] if str(a) != "expert:W1.3"]
    wrong = Plan(made.system, made.placement, {**made.queues, ("S1", "compute"): ActionColumn.of(queue)}, 4)
    with pytest.raises(PlanError, match=r"expert:W1\.3 is missing"):
        lower(wrong, case.model)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_that_respects_the_dependencies_ends(seed: int) -> None:
    model = get_model("tiny-shared" if seed % 2 else "tiny-sigmoid")
    program = lower(random_plan(model, 4, seed, directions=2), model)
    check(program)
    assert np.array_equal(program.code % (1 << 31), program.templates[program.template] % (1 << 31))
    steady = np.flatnonzero((program.op != Op.SYNC) & (program.op != Op.UPDATE)).tolist()
    waits = [(k, d) for k in steady for d in program.waits_for(k)]
    assert all(program.group[k] == program.group[d] for k, d in waits)
    assert all(program.action(k).microbatch == program.action(d).microbatch for k, d in waits)


def test_gradient_sums_of_both_copies_begin_together_and_after_both() -> None:
    case = make_case("dualpipe", cluster="h800x2", microbatches=8, seq_len=4096, ep=4, pp=4)
    found = predict(case, get_assumptions())
    timeline = found.timeline
    group = np.array([int(timeline.queues[q][0][1:]) for q in timeline.queue])
    begins = [timeline.start_s[(timeline.op == Op.SYNC) & (group == g)].min() for g in range(4)]
    computed = [timeline.end_s[(timeline.op == Op.COMPUTE) & (group == g)].max() for g in range(4)]
    for one, other in ((0, 3), (1, 2)):
        assert begins[one] == pytest.approx(begins[other])
        assert begins[one] >= max(computed[one], computed[other])


@pytest.mark.parametrize("recompute", ["none", "full", "redispatch"])
@pytest.mark.parametrize(("model", "pp"), [("tiny", 4), ("tiny-shared", 2), ("tiny-shared", 4)])
def test_no_order_needs_less_than_the_least_bytes(model: str, pp: int, recompute: str) -> None:
    """Also where dense layers keep less at one end of the pipeline than layers with experts at the other."""
    case = make_case("dualpipe", model, "h800x2", microbatches=8, seq_len=2048, ep=2, pp=pp, recompute=recompute)
    found = predict(case, get_assumptions())
    placement = found.program.plan.placement
    least, static = least_bytes(case, placement, found.costs), found.costs.static_bytes("S0")
    assert static < least <= found.peak_memory_bytes


def test_the_bound_is_that_of_half_the_micro_batches_each_way() -> None:
    """Both directions load both ends with the embedding and the head; two copies of ep's stages, half of the work."""
    assumed = get_assumptions()
    two = make_case("dualpipe", "qwen3-30b", microbatches=16, ep=4, pp=2, seq_len=2048)
    one = make_case("ep", "qwen3-30b", microbatches=16, ep=4, pp=2, seq_len=2048)
    costs = [costs_of(case, plan_of(case).placement, assumed) for case in (two, one)]
    compute = [
        placement_bound(c.placement, c, 16).compute_s - c.update_s("S0") for c in costs
    ]  # the update reads both copies
    embed, head = (
        sum(float(costs[1].without_overheads().seconds(Action(kind, p)).max()) for p in passes)
        for kind, passes in ((Kind.EMBED, (Pass.F, Pass.B)), (Kind.HEAD, (Pass.F, Pass.B, Pass.W)))
    )
    assert embed < head
    # Of ep the last stage is the busiest; two directions share the difference out.
    assert compute[0] == pytest.approx(compute[1] - 16 * (head - embed) / 2, rel=1e-3)
