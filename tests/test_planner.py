"""The planner: its programme against exhaustive search, its coefficients against the cost model, what it refuses."""

import itertools
import json
import math
import re
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.assumptions import get_assumptions
from bench.bound import placement_bound
from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.flops import part_flops
from bench.models import get_model
from bench.predict import QuickStep, costs_of, predict
from bench.system import get_system, plan_of
from bench.timing import Evaluate, StepTime
from bench.tune import tune
from systems.disagmoe.orders import num_weight_gradients
from systems.disagmoe.placement import place, replica_size
from systems.disagmoe.planner.allocation import Outcome, allocate, attempt
from systems.disagmoe.planner.alternatives import alternatives, by_groups
from systems.disagmoe.planner.choices import Choices
from systems.disagmoe.planner.explain import explain
from systems.disagmoe.planner.fitting import Steps
from systems.disagmoe.planner.neighbours import neighbours
from systems.disagmoe.planner.problem import RESOURCES, Problem, problem
from systems.disagmoe.planner.programme import RATE_TOLERANCE
from systems.disagmoe.planner.refine import Refinement, Try, refine
from systems.disagmoe.planner.roofline import roofline
from systems.disagmoe.planner.search import best_of
from systems.disagmoe.planner.state import held_state
from systems.disagmoe.planner.tokens import Option, token_costs
from systems.disagmoe.planner.what_if_words import unequal_in_words
from systems.disagmoe.planner.what_ifs import WhatIf
from systems.disagmoe.planner.words import (
    depth_in_words,
    next_in_words,
    origin_in_words,
    programme_in_words,
)
from systems.disagmoe.shift import Homes
from systems.disagmoe.system import DisagMoE

ASSUMED = get_assumptions("datasheet")


def spec(model: str = "tiny", cluster: str = "h800x1", sequences: int = 16, seq_len: int = 64) -> CaseSpec:
    return CaseSpec(
        model=get_model(model),
        cluster=get_cluster(cluster),
        workload=Workload(seq_len=seq_len, global_batch_tokens=sequences * seq_len),
        system="disagmoe",
    )


def fits(programme: Problem) -> np.ndarray:
    """Candidates within GPUs and memory, by direct comparison."""
    cluster = programme.spec.cluster
    memory = np.maximum(programme.attention_bytes, programme.expert_bytes)
    return (programme.num_gpus <= cluster.num_gpus) & (memory <= cluster.gpu.memory_bytes)


@st.composite
def specs(draw: st.DrawFn) -> CaseSpec:
    return spec(
        draw(st.sampled_from(["tiny", "tiny-shared", "qwen3-30b", "deepseek-moe-16b"])),
        draw(st.sampled_from(["h800x1", "h800x2", "a100x4"])),
        draw(st.sampled_from([6, 16, 60])),
        draw(st.sampled_from([64, 1024])),
    )


@settings(max_examples=12)
@given(specs(), st.sampled_from(["any", "nodes"]))
def test_the_programme_finds_what_exhaustive_search_finds(case: CaseSpec, tiling: str) -> None:
    programme = problem(case, ASSUMED, Choices(tiling=tiling, recompute=("none", "full"), groups=(1, 2, 3)))
    allowed = fits(programme)
    if not allowed.any():
        with pytest.raises(BadInput, match="cluster"):
            allocate(programme)
        return
    rates = np.where(allowed, programme.caps.min(axis=0), 0.0)
    found = allocate(programme)
    assert allowed[found.candidate]
    assert found.proven
    assert math.isclose(found.steps_per_s, rates.max(), rel_tol=1e-5)
    assert found.gap <= 1e-5
    # Among those of the same rate, none uses fewer GPUs.
    ties = rates >= rates.max() * (1 - 1e-7)
    assert found.num_gpus <= programme.num_gpus[ties].min()
    assert found.binding
    assert max(found.seconds.values()) == pytest.approx(found.step_s)


def test_nic_sets_are_dealt_as_exhaustive_search_deals_them() -> None:
    programme = problem(spec("qwen3-30b", "h800x4", 64, 4096), ASSUMED, Choices(nics="sets", recompute=("full",)))
    best = 0.0
    rows = [RESOURCES.index("attention NICs"), RESOURCES.index("expert NICs")]
    for j in np.flatnonzero(fits(programme) & programme.mixed):
        m, n = int(programme.data_ranks[j]), programme.shapes[programme.shape[j]].option.expert_ranks
        others = np.delete(programme.caps[:, j], rows).min()
        for a in range(1, m + n):
            nics = min(programme.caps[rows[0], j] * a / m, programme.caps[rows[1], j] * (m + n - a) / n)
            best = max(best, min(others, nics))
    found = allocate(programme)
    assert math.isclose(found.steps_per_s, best, rel_tol=1e-5)
    m, n = found.layout.attention_ranks, found.layout.expert_ranks
    assert sum(found.nics) <= m + n


@pytest.mark.parametrize(
    ("model", "groups", "recompute", "shares"),
    [
        ("qwen3-30b", 4, "none", (1, 1)),
        ("deepseek-moe-16b", 3, "full", (1, 1)),
        ("gpt-oss-120b", 4, "redispatch", (1, 1)),
        ("qwen3-30b", 4, "none", (2, 4)),
    ],
)
def test_coefficients_are_those_of_the_cost_model(
    model: str, groups: int, recompute: str, shares: tuple[int, int]
) -> None:
    """Seconds of a micro-batch on the busiest group, against the bound of the whole placement."""
    case = spec(model, "h800x16", 64, 4096)
    tp, cp = shares
    option = Option(8, recompute=recompute, tp=tp, cp=cp)
    layout = Layout.make(
        attention_ranks=8, expert_ranks=8, groups=groups, recompute=recompute, replicas=1, tp=tp, cp=cp
    )
    placement = place(case.model, layout)
    costs = costs_of(case.with_layout(layout), placement, ASSUMED)
    exact = placement_bound(placement, costs, 1)
    token = token_costs(case, option, ASSUMED)

    def busiest(column: np.ndarray, head: bool) -> float:
        sums = np.zeros(groups)
        for slot, value in enumerate(column if head else column[:-1]):
            sums[slot % groups] += value
        return float(sums.max()) * case.workload.seq_len / (tp * cp)

    attention, expert = token.attention, token.expert
    compute = [busiest(attention.compute_s, True), busiest(expert.compute_s, False)]
    assert max(compute) <= exact.compute_s * (1 + 1e-9)
    update = max(costs.update_s(group.name) for group in placement.groups)
    assert max(compute) == pytest.approx(exact.compute_s, abs=update * 1.01)
    nic = [busiest(side.port_s[port], True) for side in (attention, expert) for port in (0, 2)]
    assert max(nic) == pytest.approx(exact.nic_s, rel=1e-9)


def test_a_big_cluster_is_solved_to_the_end() -> None:
    found = allocate(problem(spec("qwen3-30b", "h800x256", 1024, 4096), ASSUMED))
    assert found.proven
    assert found.gap <= 1e-5
    assert found.num_gpus <= 2048


def test_the_next_best_are_other_splits_and_never_better() -> None:
    found = alternatives(problem(spec(cluster="h800x2"), ASSUMED), 4)
    assert [a.step_s for a in found] == sorted(a.step_s for a in found)
    splits = {(a.layout.groups, a.layout.attention_ranks, a.layout.expert_ranks) for a in found}
    assert len(splits) == len(found) == 4


def test_every_number_of_groups_has_its_own_best() -> None:
    programme = problem(spec(cluster="h800x2"), ASSUMED)
    found = by_groups(programme)
    assert {a.layout.groups for a in found} == {shape.groups for shape in programme.shapes}
    assert found[0].step_s == pytest.approx(allocate(programme).step_s)


def test_more_network_never_slows_the_optimum() -> None:
    slow = spec("qwen3-30b", "h800x4", 64, 1024)
    fast_cluster = slow.cluster.model_copy(update={"nic_bytes_per_s": slow.cluster.nic_bytes_per_s * 4})
    fast = slow.model_copy(update={"cluster": fast_cluster})
    assert allocate(problem(fast, ASSUMED)).step_s <= allocate(problem(slow, ASSUMED)).step_s


def test_long_sequences_move_gpus_to_attention() -> None:
    """The paper's claim for the split, at the same number of tokens."""
    few = Choices(recompute=("none",), copies=("node",), groups=(4,))
    ratios = []
    for seq_len in (1024, 131072):
        case = spec("qwen3-30b", "b200x16", (1 << 24) // seq_len, seq_len)
        roomy = case.cluster.gpu.model_copy(update={"memory_bytes": 1 << 44})
        case = case.model_copy(update={"cluster": case.cluster.model_copy(update={"gpu": roomy})})
        layout = allocate(problem(case, ASSUMED, few)).layout
        ratios.append(layout.attention_ranks / layout.expert_ranks)
    assert ratios[1] > ratios[0]


def test_a_cluster_that_is_too_small_says_what_is_missing_and_what_fits() -> None:
    too_small = spec("qwen3-235b", "h800x1", 64, 4096)
    told = r"expert memory constraint cannot hold.*GiB more.*; (\d+) nodes of 8 GPUs would fit"
    with pytest.raises(BadInput, match=told) as error:
        explain(too_small, ASSUMED, refinement=False)
    (fewest,) = re.findall(told, str(error.value))

    def found(num_nodes: int) -> bool:
        cluster = too_small.cluster.model_copy(update={"num_nodes": num_nodes})
        outcome = best_of(too_small.model_copy(update={"cluster": cluster}), Steps(ASSUMED), Choices(), 10.0)
        return outcome.allocation is not None

    assert found(int(fewest)) and not found(int(fewest) - 1)
    one = spec(cluster="h200x1gpu")
    with pytest.raises(BadInput, match=r"\(1 GPU\).*at least 2 GPUs"):
        allocate(problem(one, ASSUMED))


def test_a_solver_without_time_is_refused_and_one_with_little_says_so() -> None:
    programme = problem(spec("qwen3-30b", "h800x64", 1024, 4096), ASSUMED)
    with pytest.raises(BadInput, match="time_limit_s"):
        allocate(programme, time_limit_s=0)
    with pytest.raises(BadInput, match=r"time_limit_s.*no allocation was found in that time"):
        allocate(programme, time_limit_s=1e-9)


def test_a_solver_that_is_stopped_before_it_deals_nics_has_no_allocation() -> None:
    programme = problem(spec("qwen3-30b", "h800x16", 256, 4096), ASSUMED, Choices(nics="sets", shares=((1, 1),)))
    refused = 0
    for limit_s in (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 60.0):
        try:
            found = allocate(programme, time_limit_s=limit_s)
            assert min(found.nics) > 0 and math.isfinite(found.step_s)
        except BadInput:
            refused += 1
    assert 0 < refused < 7


@pytest.mark.parametrize(("field", "value"), [("tiling", "halves"), ("nics", "all")])
def test_unknown_choices_are_refused(field: str, value: str) -> None:
    with pytest.raises(BadInput, match=field):
        Choices(**{field: value})


def test_state_goes_to_the_host_and_sequences_are_shared_where_nothing_fits_otherwise() -> None:
    plain = Choices(shares=((1, 1),), offload=("none",))
    small, long = spec("qwen3-30b", "h800x1", 8, 4096), spec("qwen3-30b", "h800x2", 2, 1 << 18)
    for case in (small, long):
        with pytest.raises(BadInput, match="memory constraint cannot hold"):
            allocate(problem(case, ASSUMED, plain))
        found = explain(case, ASSUMED, budget=2).best
        assert found is not None and found.status == "ok"
        assert found.layout.offload == "state" if case is small else found.layout.cp > 1
        near = [layout for layout, _ in neighbours(case, found.layout)]
        assert any(layout.offload != found.layout.offload for layout in near)
        assert case is small or any(layout.cp != found.layout.cp for layout in near)


def test_bytes_of_a_rank_are_those_of_the_cost_model() -> None:
    """With shared sequences, divided heads and offloaded state too."""
    case = spec("qwen3-30b", "h800x4", 16, 16384)
    for tp, cp, offload in ((1, 1, "none"), (2, 1, "none"), (2, 4, "state")):
        option = Option(8, tp=tp, cp=cp, offload=offload)
        state = held_state(case, option, (2, 2), Homes(0, None), ASSUMED)
        layout = Layout.make(
            attention_ranks=8, expert_ranks=8, groups=2, replicas=1, head_group=0, tp=tp, cp=cp, offload=offload
        )
        placement = place(case.model, layout)
        costs = costs_of(case.with_layout(layout), placement, ASSUMED)
        for side in "AF":
            names = [group.name for group in placement.groups if group.name[0] == side]
            held = max(costs.static_bytes(name) for name in names)
            ranks = (np.array([8.0]), np.array([1.0]), np.array([8.0]))
            assert state.static_bytes(side, *ranks)[0] == pytest.approx(held, rel=1e-6)
            update_s = max(costs.update_s(name) for name in names)
            assert state.update_s(side, *ranks)[0] == pytest.approx(update_s, rel=1e-6)


def test_neighbours_can_all_be_planned() -> None:
    case = spec("tiny-shared", "h800x2")
    start = allocate(problem(case, ASSUMED)).layout
    near = list(neighbours(case, start))
    assert len({layout for layout, _ in near}) == len(near) > 5
    for layout, _ in near:
        used = (layout.replicas or 1) * layout.groups * (layout.attention_ranks + layout.expert_ranks)
        assert used <= case.cluster.num_gpus
        place(case.model, layout).validate()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("walk", [True, False])
def test_deferral_and_rounds_end_where_there_is_no_more_of_them(walk: bool, groups: int) -> None:
    """Step by step, in the walk and in the search alike: no list of values ends them."""
    case = spec(sequences=512 // groups)
    start = Layout.make(replicas=4 // groups, groups=groups, round_length=4 * groups)
    whole = num_weight_gradients(case, start)

    def reached(field: str) -> set[int]:
        found, ahead = {getattr(start, field)}, [start]
        while ahead:
            at = ahead.pop()
            for near in (each for each, _ in neighbours(case, at)) if walk else DisagMoE().moves(case, at):
                to = getattr(near, field)
                if near == at.model_copy(update={field: to}) and to not in found:
                    found.add(to)
                    ahead.append(near)
        return found

    assert {0, whole} | {groups * 2**i for i in range(8)} <= reached("deferred_w")
    assert {1, 8 * groups, 16 * groups, 128} <= reached("round_length")
    assert max(reached("deferred_w")) == whole and max(reached("round_length")) == 128
    plans = [plan_of(case.with_layout(start.model_copy(update={"deferred_w": n}))) for n in (whole, 100 * whole)]
    assert str(plans[0]) == str(plans[1])


def test_refinement_is_as_good_as_the_full_grid() -> None:
    case = spec("tiny", "h800x4gpu", sequences=8)
    seeds = [each.layout for each in by_groups(problem(case, ASSUMED))]
    found = refine(case, seeds, ASSUMED, budget=None)
    grid = tune(case, ASSUMED, budget=None)
    assert found.complete
    assert found.best is not None and found.best.step_time_s is not None and grid.best is not None
    assert found.best.step_time_s <= 1.02 * grid.best.metrics.step_time_s
    times = [each.step_time_s or 0.0 for each in found.path]
    assert all(later < earlier for earlier, later in itertools.pairwise(times))


def test_a_refinement_keeps_its_budget_and_says_so() -> None:
    case = spec()
    found = refine(case, [each.layout for each in by_groups(problem(case, ASSUMED))], ASSUMED, budget=3)
    assert found.num_evaluated == 3
    assert not found.complete
    with pytest.raises(BadInput, match="seeds"):
        refine(case, [], ASSUMED)


def test_an_explanation_names_what_binds_and_goes_into_json() -> None:
    found = explain(spec("qwen3-30b", "h800x2", 32, 1024), ASSUMED, budget=2)
    said = " ".join(found.sentences())
    assert found.allocation.binding[0] in said
    assert "next best split" in said
    assert "NICs are half as fast" in said
    content = json.loads(json.dumps(found.to_json()))
    assert content["allocation"]["binding"] == list(found.allocation.binding)
    assert content["refinement"]["source"] == "simulated"
    assert [table.title for table in found.tables()][-1] == "refinement (simulated)"


@pytest.mark.parametrize("model", ["qwen3-235b", "gpt-oss-120b", "deepseek-moe-16b"])
def test_roofline_flops_are_the_one_count(model: str) -> None:
    shape = get_model(model)
    for point in roofline(shape, get_cluster("h800x16"), (4096,), ASSUMED):
        names = {"attention": ("attention", "router", "shared"), "expert": ("expert",)}
        parts = names.get(point.side, (*names["attention"], "expert"))
        layers = range(shape.num_dense_layers, shape.num_layers)
        total = sum(
            part_flops(shape, part, layer, pass_, tokens=1.0, seq_len=4096)
            for part in parts
            for layer in layers
            for pass_ in ("F", "B", "W")
        )
        assert point.flops == pytest.approx(total / len(layers))


def test_roofline_bytes_of_a_copy_per_expert_have_a_closed_form() -> None:
    """Rows of u and of G to the experts and back, with ids, weights and their gradients, and x between the groups."""
    shape = get_model("qwen3-235b")
    attention, expert, together = roofline(shape, get_cluster("h800x16"), (4096,), ASSUMED, copies=("expert",))
    rows = shape.top_k * 2 * shape.hidden_size * 2  # dispatch and combine, bf16
    hidden = 2 * shape.hidden_size * 2
    assert attention.sent_bytes == pytest.approx(rows + hidden, rel=0.01)
    assert expert.sent_bytes == pytest.approx(rows, rel=0.01)
    # 16 ranks on two nodes: half of an exchange stays in its node.
    assert together.sent_bytes == pytest.approx(rows, rel=0.02)


def test_roofline_moves_as_the_formulas_say() -> None:
    shape, cluster = get_model("qwen3-235b"), get_cluster("h800x16")
    points = roofline(shape, cluster, (4096, 32768), ASSUMED, top_ks=(4, 8), copies=("expert", "rank", "node"))
    by = {(p.side, p.top_k, p.copies, p.seq_len): p for p in points}
    for k, way in itertools.product((4, 8), ("expert", "rank", "node")):
        assert by["attention", k, way, 32768].intensity > 2 * by["attention", k, way, 4096].intensity
        assert by["expert", k, way, 32768].intensity == pytest.approx(by["expert", k, way, 4096].intensity)
    for side, k in itertools.product(("attention", "expert"), (4, 8)):
        sent = [by[side, k, way, 4096].sent_bytes for way in ("expert", "rank", "node")]
        assert sent == sorted(sent, reverse=True) and sent[0] > sent[-1]
    assert by["attention", 4, "expert", 4096].intensity > by["attention", 8, "expert", 4096].intensity
    for point in points:
        assert (point.position < 1) == (point.bound_by == "network")
        assert point.attainable_flops_per_s <= point.compute_flops_per_s


@pytest.mark.parametrize("lengths", [(), (0,), (-4, 8), (8192, 4096), (4096, 4096)])
def test_lengths_that_are_not_positive_and_ascending_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="seq-len"):
        roofline(get_model("tiny"), get_cluster("h800x1"), lengths, ASSUMED)


def test_a_roofline_of_ranks_that_do_not_divide_the_experts_is_refused() -> None:
    with pytest.raises(BadInput, match="expert_ranks"):
        roofline(get_model("tiny"), get_cluster("h800x1"), (64,), ASSUMED, expert_ranks=3)


def test_unequal_depth_puts_layers_in_turn_on_each_kind_of_group() -> None:
    model = get_model("tiny")
    layout = Layout.make(groups=3, expert_groups=2, attention_ranks=1, expert_ranks=2)
    placement = place(model, layout)
    placement.validate()
    assert placement.attention == ("A0", "A1", "A2", "A0")
    assert placement.expert == ("F0", "F1", "F0", "F1")
    assert placement.size == replica_size(layout) == 3 + 2 * 2
    with pytest.raises(BadInput, match=r"layout\.expert_groups"):
        place(model, Layout.make(expert_groups=5))


@pytest.mark.parametrize("layout", [{"groups": 1, "expert_groups": 3}, {"groups": 3, "expert_groups": 2, "mbs": 2}])
def test_unequal_depth_is_planned_checked_and_simulated(layout: dict[str, int]) -> None:
    case = spec().with_layout(Layout.make(replicas=1, **layout))
    found = predict(case, ASSUMED)
    assert {group.name for group in found.program.plan.placement.groups} >= {"A0", "F0", "F1"}
    assert found.bound_s <= found.metrics.step_time_s


def test_unequal_depth_is_allocated_like_any_other_split() -> None:
    programme = problem(spec("qwen3-30b", "h800x2", 60, 64), ASSUMED, Choices(unequal=True, recompute=("full",)))
    rates = np.where(fits(programme), programme.caps.min(axis=0), 0.0)
    found = allocate(programme)
    assert found.layout.expert_groups not in (None, found.layout.groups)
    assert math.isclose(found.steps_per_s, rates.max(), rel_tol=1e-5)
    assert found.num_gpus == (found.layout.replicas or 1) * replica_size(found.layout)


def test_the_system_explains_itself_and_its_schedule() -> None:
    system = get_system("disagmoe")
    assert isinstance(system, DisagMoE)
    case = spec()
    found = system.explain(case, ASSUMED, refinement=False)
    assert found.layout == allocate(problem(case, ASSUMED)).layout
    assert found.to_json()["refinement"] is None
    phases = system.explain_schedule(case, "64:10,128:10", ASSUMED, budget=1)
    assert [each.phase.seq_len for each in phases.phases] == [64, 128]


def test_a_solver_that_is_stopped_gives_what_it_has_and_says_so() -> None:
    programme = problem(spec("qwen3-30b", "h800x256", 2048, 4096), ASSUMED)
    best = allocate(programme)
    limit_s, stopped = 1e-4, None
    while stopped is None:  # how far a solver comes in a time differs from machine to machine
        with suppress(BadInput):  # nothing found yet
            found = allocate(programme, time_limit_s=limit_s)
            stopped = None if found.proven else found
        limit_s = limit_s * 1.2 if limit_s < 60 else 1e-3
    assert stopped.step_s >= best.step_s
    assert best.step_s / stopped.step_s >= 1 / (1 + stopped.gap) - 1e-6
    assert fits(programme)[stopped.candidate]
    said = explain(programme.spec, ASSUMED, refinement=False)
    assert "ran out of time" not in " ".join(said.sentences())
    told = replace(said, allocation=stopped)
    assert "the solver ran out of time, this is its best so far" in " ".join(told.sentences())
    assert told.to_json()["allocation"]["proven"] is False


def test_whatever_a_stopped_solver_found_is_said_not_to_be_proven() -> None:
    said = explain(spec("qwen3-30b", "h800x2", 32, 1024), ASSUMED, refinement=False)
    assert "not proven" not in " ".join(said.sentences()) and "in its time" not in " ".join(said.sentences())

    def stopped(outcome: Outcome) -> Outcome:
        assert outcome.allocation is not None
        return Outcome(replace(outcome.allocation, proven=False))

    found = replace(
        said,
        others=tuple(stopped(each) for each in said.others),
        what_ifs=tuple(WhatIf(each.condition, stopped(each.outcome)) for each in said.what_ifs),
        unequal=stopped(said.unequal),
        nic_sets=stopped(said.nic_sets),
    )
    compared = [each for each in found.sentences() if each.startswith("What if") or "next best" in each]
    assert len(compared) == 1 + len(found.what_ifs) + 2
    assert all("(not proven: the solver ran out of time)" in each for each in compared)
    assert not any("gain nothing by" in each for each in compared)
    nothing = Outcome(None, True)
    late = replace(said, others=(nothing,), unequal=nothing, nic_sets=nothing, what_ifs=(WhatIf("later", nothing),))
    assert sum("in its time" in each for each in late.sentences()) == 4
    told = late.to_json()["unequal"]
    assert told["allocation"] is None and told["timed_out"] is True
    # What is proven says little beside a split that is not.
    weak = replace(said, allocation=replace(said.allocation, proven=False))
    assert sum("(compared with a split that is not proven)" in each for each in weak.sentences()) == len(compared)


def test_a_plan_says_what_unequal_depth_gains_in_steps() -> None:
    equal, unequal = Layout.make(groups=2), Layout.make(groups=2, expert_groups=1)

    def told(*tried: Try) -> str | None:
        return depth_in_words(Refinement((), tried, True), "simulated")

    slow, fast = Try(equal, "seed", "ok", 1.1), Try(unequal, "expert_groups=1", "ok", 1.0)
    assert told(slow) is None and told(fast) is None
    said = told(slow, fast, Try(equal, "seed", "infeasible", 0.5), Try(unequal, "mbs=2", "ok", 1.5))
    assert (
        said is not None
        and "takes 1 s and" in said
        and "takes 1.1 s: unequal depth takes 9.1 % less than equal depth" in said
    )
    assert "unequal depth takes 100.0 % longer than" in (told(fast, Try(equal, "seed", "ok", 0.5)) or "")
    planned = explain(spec(), ASSUMED, refinement=False)
    found = replace(planned, refinement=Refinement((slow, fast), (slow, fast), True))
    assert sum("unequal depth" in each for each in found.sentences() if each.startswith("Refinement")) == 1


def test_gains_and_losses_are_told_apart() -> None:
    said = explain(spec("qwen3-30b", "h800x2", 32, 1024), ASSUMED, refinement=False)
    chosen = said.allocation
    slower, faster = (replace(chosen, steps_per_s=chosen.steps_per_s * share) for share in (1 / 1.043, 1.043))
    longer = unequal_in_words(Outcome(slower), chosen)
    assert "gain nothing" in longer and "takes 4.3 % longer than its split" in longer
    assert "would take 4.1 % less than its split" in unequal_in_words(Outcome(faster), chosen)
    assert "takes as long as its split" in unequal_in_words(Outcome(chosen), chosen)
    late = next_in_words(Outcome(slower), chosen)
    assert "takes 4.3 % longer than its own" in late and "stopped" not in late
    assert "4.1 % less than its own (the solver was stopped before it" in next_in_words(Outcome(faster), chosen)
    took = {name: QuickStep(step_s, 0.0, 0.0, "A0") for name, step_s in (("own", 2.0), ("other", 1.5))}
    both = next_in_words(Outcome(slower, step=took["other"]), chosen, took["own"])
    assert "simulated, neither of them refined, 25.0 % less than it (1.5 s beside 2 s)" in both
    nearly = replace(chosen, proven=False, most_steps_per_s=chosen.steps_per_s * (1 + 1e-6))
    assert "may take up to less than 0.01 % less" in programme_in_words(nearly)
    assert "fewer GPUs" in programme_in_words(replace(chosen, settled=False)) and chosen.settled


def test_what_a_stopped_solver_cannot_be_beaten_in_is_proven() -> None:
    """Its bound is the rate of the best candidate: an incumbent that reaches it needs no longer search."""
    programme = problem(spec("qwen3-30b", "h800x16", 256, 4096), ASSUMED)
    for limit_s in (1e-3, 3e-3, 1e-2, 3e-2, 0.1):
        found = attempt(programme, time_limit_s=limit_s).allocation
        if found is not None:
            assert found.proven == (found.gap <= RATE_TOLERANCE)


def test_rounds_are_no_longer_than_there_are_micro_batches() -> None:
    case = spec(sequences=16)
    start = allocate(problem(case, ASSUMED)).layout.model_copy(update={"round_length": 500})
    found = refine(case, [start], ASSUMED, budget=12)
    for each in found.tried:
        lanes = (each.layout.replicas or 1) * each.layout.attention_ranks * each.layout.mbs
        assert each.layout.round_length <= 16 * each.layout.sequence_ranks // lanes, each.change
    assert len({each.layout for each in found.tried}) == len(found.tried)


def test_the_plan_says_where_the_walk_began() -> None:
    case = spec()
    seeds = [each.layout for each in by_groups(problem(case, ASSUMED))]
    own, other = seeds[:2]

    def timed(fast: Layout) -> Evaluate:
        def evaluate(of: Case) -> StepTime:
            step_s = 1.0 if of.layout == fast else 2.0
            return StepTime("ok", step_s, step_s, step_s)

        return evaluate

    for fast in (own, other):
        found = refine(case, seeds, ASSUMED, evaluate=timed(fast), budget=12)
        assert found.start is not None and found.start.layout == fast and found.from_seed
        said = origin_in_words(own, found, None, "measured")
        assert said.startswith("it is the programme's split" if fast == own else "of the programme's splits that were")
        assert "as it is" in said
    assert "the layout that was given" in origin_in_words(own, found, other, "measured")

    def frugal(of: Case) -> StepTime:
        return StepTime("ok" if of.layout.recompute == "full" else "infeasible", 1.0, 1.0, 1.0)

    assert all(seed.recompute == "none" for seed in seeds)
    found = refine(case, seeds, ASSUMED, evaluate=frugal, budget=99)
    assert not found.from_seed and found.start == found.path[0]
    assert "no split of the programme fits" in origin_in_words(own, found, None, "measured")


def test_the_plan_tells_the_programme_from_the_refinement() -> None:
    found = explain(spec("qwen3-30b", "h800x2", 32, 1024), ASSUMED, budget=6)
    assert found.best is not None
    said = found.sentences()
    kinds = [sentence.partition(":")[0] for sentence in said]
    assert list(dict.fromkeys(kinds)) == ["Plan", "Programme", "Refinement", "What if"]
    beside = {str(row[0]): row[1:] for row in found.tables()[0].rows}
    before, after = found.allocation.layout, found.layout
    assert list(beside["round_length"]) == [before.round_length, after.round_length]
    assert list(beside["M:N"]) == [f"{each.attention_ranks}:{each.expert_ranks}" for each in (before, after)]
    assert list(beside["step s, by the programme"]) == [found.allocation.step_s, None]
    assert beside["step s, simulated"][1] == found.best.step_time_s
    assert found.refinement is not None and found.refinement.start is not None
    before = found.refinement.start.layout
    changed = {name for name in Layout.model_fields if getattr(before, name) != getattr(after, name)}
    assert changed and all(f"{name} {getattr(before, name)} -> {getattr(after, name)}" in said[1] for name in changed)
    alone = explain(spec(), ASSUMED, refinement=False)
    assert "nothing was refined" in alone.sentences()[1]


def test_a_refinement_by_times_takes_only_what_is_surely_faster() -> None:
    case = spec()
    seed = allocate(problem(case, ASSUMED)).layout
    faster = {layout: 0.99 for layout, _ in neighbours(case, seed)}

    def timed(width: float) -> Evaluate:
        def evaluate(of: Case) -> StepTime:
            step_s = faster.get(of.layout, 1.0)
            return StepTime("ok", step_s, step_s - width / 2, step_s + width / 2, trial=str(of.layout))

        return evaluate

    sure = refine(case, [seed], ASSUMED, evaluate=timed(0.002), budget=8)
    assert [each.step_time_s for each in sure.path] == [1.0, 0.99]
    assert sure.path[-1].trial == str(sure.path[-1].layout)
    assert len(refine(case, [seed], ASSUMED, evaluate=timed(0.05), budget=8).path) == 1
    # A bound of the cost model says nothing of a machine that is faster than it.
    assert all(each.status != "bound" for each in sure.tried)
