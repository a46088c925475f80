"""What the planner names fits: plans are simulated, and cut off where they do not fit; the rest is said of the plan."""

from dataclasses import replace

import pytest

from bench.assumptions import get_assumptions
from bench.bound import placement_bound
from bench.case import CaseSpec, Layout, Workload, batch_of
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.models import get_model
from bench.predict import costs_of, predict
from bench.timing import simulated
from systems.disagmoe.placement import place
from systems.disagmoe.planner import fitting
from systems.disagmoe.planner.allocation import Outcome, allocate
from systems.disagmoe.planner.alternatives import next_best
from systems.disagmoe.planner.busy import busy_of
from systems.disagmoe.planner.explain import Explanation, explain
from systems.disagmoe.planner.fitting import Steps, fit
from systems.disagmoe.planner.plain import plain_what_if
from systems.disagmoe.planner.problem import problem
from systems.disagmoe.planner.refine import same_work
from systems.disagmoe.planner.what_if_words import kept_in_words, what_if_in_words
from systems.disagmoe.planner.what_ifs import WhatIf, kept_plan
from systems.disagmoe.planner.words import (
    binding_in_words,
    changed_in_words,
    short,
    short_of,
    split_in_words,
)

ASSUMED = get_assumptions("datasheet")


def spec(model: str = "tiny", cluster: str = "h800x1", sequences: int = 16, seq_len: int = 64) -> CaseSpec:
    return CaseSpec(
        model=get_model(model),
        cluster=get_cluster(cluster),
        workload=Workload(seq_len=seq_len, global_batch_tokens=sequences * seq_len),
        system="disagmoe",
    )


TIGHT = spec("gpt-oss-120b", "h800x2", 64, 16384)
"""Whose programme's optimum does not fit when its order is made."""


def missing(of: CaseSpec, layout: Layout) -> float:
    return predict(of.with_layout(layout), ASSUMED).missing_bytes


@pytest.fixture(scope="module")
def tight() -> Explanation:
    return explain(TIGHT, ASSUMED, refinement=False)


def test_what_is_named_fits_when_it_is_simulated(tight: Explanation) -> None:
    first = allocate(problem(TIGHT, ASSUMED))
    assert missing(TIGHT, first.layout) > 0
    assert tight.cuts[0].layout == first.layout and tight.refused is None
    assert all(missing(TIGHT, cut.layout) > 0 for cut in tight.cuts)
    named = [tight.layout, *(each.allocation.layout for each in tight.others if each.allocation)]
    assert [missing(TIGHT, layout) for layout in named] == [0.0] * len(named)
    # What was cut off had longer rounds, or is another split; the rest of the programme is as it was.
    assert tight.allocation.step_s >= first.step_s * (1 - 1e-9)
    assert "cut off, as it does not fit" in " ".join(tight.sentences())
    assert len(tight.to_json()["cut_off"]) == len(tight.cuts)


def test_nothing_faster_was_left_out(tight: Explanation) -> None:
    """Whatever the programme puts before its split, in rounds as long as it takes them, does not fit."""
    programme = problem(TIGHT, ASSUMED)
    cut = {short_of(each.layout) for each in tight.cuts}
    rates = programme.caps.min(axis=0)
    fast = [j for j in range(len(programme)) if rates[j] > tight.allocation.steps_per_s * (1 + 1e-5)]
    memory, gpus = TIGHT.cluster.gpu.memory_bytes, TIGHT.cluster.num_gpus
    for j in fast:
        held = max(programme.attention_bytes[j], programme.expert_bytes[j])
        assert held > memory or programme.num_gpus[j] > gpus or short_of(programme.layout(j)) in cut


def test_a_simulated_step_is_that_of_a_prediction() -> None:
    case = spec().with_layout(Layout.make(replicas=1, groups=2, attention_ranks=2))
    steps, known = Steps(ASSUMED), simulated(ASSUMED)
    assert steps.timed(case) == known(case)
    assert steps.quick(case) is steps.quick(case)
    assert steps.quick(case).fullest in {group.name for group in place(case.model, case.layout).groups}
    small = case.cluster.model_copy(update={"gpu": case.cluster.gpu.model_copy(update={"memory_bytes": 1 << 20})})
    case = case.model_copy(update={"cluster": small})
    assert steps.timed(case) == known(case) and steps.timed(case).status == "infeasible"
    for _ in range(2):
        with pytest.raises(BadInput, match="groups"):
            steps.quick(spec().with_layout(Layout.make(replicas=1, groups=9)))


def test_where_no_plan_fits_it_is_an_error_that_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that holds what the programme counts, and not what any order of it needs."""
    of = spec(sequences=64, seq_len=1024)
    programme = problem(of, ASSUMED)
    held = max(allocate(programme).memory_bytes)
    gpu = of.cluster.gpu.model_copy(update={"memory_bytes": int(held * 1.0001)})
    of = of.model_copy(update={"cluster": of.cluster.model_copy(update={"gpu": gpu})})
    monkeypatch.setattr(fitting, "MOST_CUTS", 1)
    monkeypatch.setattr(fitting.fit, "__kwdefaults__", {**fitting.fit.__kwdefaults__, "most": 1})
    found = fit(problem(of, ASSUMED), Steps(ASSUMED))
    assert found.refused is not None and "memory constraint cannot hold" in str(found.refused)
    assert f"{found.outcome.cuts[0].peak_memory_bytes / 2**30:.1f} GiB a GPU" in str(found.refused)
    with pytest.raises(BadInput, match=r"cluster: .*none fits when its order is made.*GiB more than its"):
        explain(of, ASSUMED, refinement=False)


def test_a_cut_shortens_rounds_or_takes_the_bytes_of_the_plan() -> None:
    programme = problem(spec(), ASSUMED)
    chosen = allocate(programme)
    k = chosen.candidate
    step = Steps(ASSUMED).quick(chosen.problem.spec.with_layout(chosen.layout))
    full = step._replace(peak_memory_bytes=float(chosen.memory_of_gpu + 1), fullest="F0")
    assert programme.in_flight[k] > 1
    less = fitting.without(programme, k, full)
    assert less.in_flight[k] == programme.in_flight[k] - 1
    assert less.caps[-1, k] == pytest.approx(programme.caps[-1, k] * less.in_flight[k] / programme.in_flight[k])
    while less.in_flight[k] > 1:
        less = fitting.without(less, k, full)
    last = fitting.without(less, k, full)
    assert last.expert_bytes[k] == full.peak_memory_bytes and last.attention_bytes[k] == less.attention_bytes[k]
    assert allocate(last).candidate != k


def test_the_next_best_fit_too() -> None:
    of = spec("qwen3-235b", "h800x4", 64, 4096)
    steps = Steps(ASSUMED)
    programme, outcome, _ = fit(problem(of, ASSUMED), steps)
    assert outcome.allocation is not None
    unchecked = next_best(programme, outcome.allocation, 1)
    assert unchecked[0].allocation is not None and missing(of, unchecked[0].allocation.layout) > 0
    (checked,) = next_best(programme, outcome.allocation, 1, steps)
    assert checked.allocation is not None and missing(of, checked.allocation.layout) == 0
    assert checked.cuts and checked.step is not None


def test_what_a_plan_keeps_busy_is_what_its_bound_is_made_of() -> None:
    of = spec("qwen3-30b", "h800x2", 32, 1024)
    found = explain(of, ASSUMED, budget=4)
    assert found.planned is not None and found.best is not None and found.layout != found.allocation.layout
    case = of.with_layout(found.layout)
    placement = place(case.model, case.layout)
    bound = placement_bound(placement, costs_of(case, placement, ASSUMED), batch_of(case, placement).num_microbatches)
    busy = busy_of(case, ASSUMED)
    assert found.planned.busy_s == busy
    assert max(busy["attention compute"], busy["expert compute"]) == bound.compute_s
    assert max(busy["attention NICs"], busy["expert NICs"]) == bound.nic_s
    assert found.planned.step.step_time_s == found.best.step_time_s == predict(case, ASSUMED).step_time_s
    said = found.sentences()
    assert any(each.startswith("Plan: simulated") and found.planned.busiest in each for each in said)
    assert found.to_json()["plan"]["step_s"] == found.best.step_time_s


def test_other_conditions_are_simulated_for_the_plan_itself() -> None:
    of = spec("qwen3-30b", "h800x2", 32, 1024)
    found = explain(of, ASSUMED, budget=4)
    half = of.cluster.model_copy(update={"nic_bytes_per_s": of.cluster.nic_bytes_per_s / 2})
    alone = predict(of.model_copy(update={"cluster": half}).with_layout(found.layout), ASSUMED).step_time_s
    kept = next(each.kept for each in found.what_ifs if "half as fast" in each.condition)
    assert kept is not None and kept.step_time_s == alone
    assert any(
        "half as fast: this plan, its order made anew, takes" in each and f"{alone:.4g} s" in each
        for each in found.sentences()
    )
    longer = next(each for each in found.what_ifs if "2048" in each.condition)
    told = replace(found, what_ifs=(longer._replace(kept=replace(kept, status="infeasible", peak_memory_bytes=1e12)),))
    assert any(
        "this plan does not fit in any order that was tried (931.3 GiB a GPU" in each for each in told.sentences()
    )


def test_a_plan_that_does_not_fit_elsewhere_is_priced_in_an_order_that_does() -> None:
    """All weight gradients put off take more than there is; half as many, or shorter rounds, fit."""
    of, steps = spec("deepseek-moe-16b", "h800x16", 2048, 4096), Steps(ASSUMED)
    held = Layout.make(replicas=4, attention_ranks=16, expert_ranks=16, round_length=4, deferred_w=464, copies="node")
    assert missing(of, held) > 0
    kept, order = kept_plan(of.with_layout(held), steps)
    assert order is not None and kept.status == "ok" and same_work(order, held)
    assert kept.step_time_s == predict(of.with_layout(order), ASSUMED).step_time_s
    said = kept_in_words(kept, order)
    assert f"fits with rounds of {order.round_length} and {order.deferred_w} weight gradients put off" in said
    told = plain_what_if(WhatIf("elsewhere", Outcome(None), kept, order))
    assert told["plan"]["order"]["deferred_w"] == order.deferred_w
    light = held.model_copy(update={"deferred_w": 0})
    assert kept_plan(of.with_layout(light), steps) == (steps.timed(of.with_layout(light)), None)


def test_what_a_split_chooses_otherwise_is_said() -> None:
    found = explain(spec("qwen3-30b", "h800x2", 32, 1024), ASSUMED, refinement=False)
    chosen, (what, *_) = found.allocation, found.what_ifs
    same = what._replace(outcome=Outcome(chosen))
    assert f"its own split stays {short(chosen)}, estimated" in what_if_in_words(same, chosen)
    near = (replace(chosen, candidate=j) for j in range(len(chosen.problem)))
    other = next(each for each in near if short(each) == short(chosen) and each.layout.recompute == "full")
    full = what_if_in_words(what._replace(outcome=Outcome(other)), chosen)
    assert f"its own split stays {short(chosen)} (" in full and "recompute none -> full" in full


def test_a_programme_without_a_plan_that_fits_does_not_say_that_one_does(tight: Explanation) -> None:
    assert "whose plan fits" in tight.sentences()[3]
    refused = BadInput("cluster", "small", "more memory")
    said = " ".join(replace(tight, refused=refused).sentences())
    assert "whose plan fits is faster" not in said and "no split was found whose plan fits: 1 were simulated" in said


def test_splits_are_named_in_full() -> None:
    assert short_of(Layout.make(groups=4, attention_ranks=16, expert_ranks=8)) == "p=4 M:N=16:8 replicas=1"
    put_off = Layout.make(groups=2, mbs=4, deferred_w=8, layers_per_chunk=2, round_length=2, replicas=1)
    said = split_in_words(put_off, spec(sequences=16))
    assert (
        "1 attention and 1 expert GPU in each of 2 groups" in said
        and "rounds of 2 micro-batches of 4 sequences" in said
    )
    assert "put off by up to 8" in said and "2 layers at a time" in said
    assert changed_in_words(Layout.make(groups=5), Layout.make(groups=5, expert_groups=6)) == "expert_groups 5 -> 6"
    assert changed_in_words(Layout.make(head_group=1), Layout.make()) == "head_group 1 -> as by default"
    shared = Layout.make(groups=4, attention_ranks=16, expert_ranks=8, replicas=2, tp=2, cp=4, expert_groups=3)
    assert short_of(shared) == "p=4:3 M:N=16:8 replicas=2 tp=2 cp=4"


def test_sentences_about_what_binds_agree() -> None:
    chosen = allocate(problem(spec("qwen3-30b", "h800x4", 1, 4096), ASSUMED))
    assert chosen.binding == ("micro-batches in flight",)
    said = " ".join(binding_in_words(chosen))
    assert "bound by" not in said and "micro-batches in flight (with" in said


def test_an_estimate_stands_beside_what_its_plan_keeps_busy() -> None:
    """Where attention and experts share nodes, part of their traffic never crosses a NIC: the estimate is far off."""
    of = spec("mixtral-8x7b", "h800x2", 256, 4096)
    found = explain(of, ASSUMED, refinement=False)
    case = of.with_layout(found.allocation.layout)
    busy = busy_of(case, ASSUMED)
    assert found.split is not None and found.split.busy_s == busy
    assert found.allocation.seconds["attention NICs"] > 1.5 * busy["attention NICs"] > 0
    busiest = max(busy, key=lambda name: busy[name])
    (said,) = [each for each in found.sentences() if each.startswith("Programme: simulated, that split takes")]
    assert f"its busiest resource is {busiest}, for {busy[busiest]:.4g} s" in said
    assert f"attention NICs {busy['attention NICs']:.4g} s" in said.partition("far from")[2]
    rows = {row[0]: row for row in found.tables()[1].rows}
    assert rows["attention NICs"][4] == busy["attention NICs"]
    assert found.to_json()["allocation_simulated"]["busy_s"] == busy
    for what, row in zip(found.what_ifs, found.tables()[3].rows, strict=True):
        if what.outcome.allocation is not None:
            assert what.split is not None and row[-1] == what.split.busiest
            assert f"its busiest resource is {what.split.busiest}" in what_if_in_words(what, found.allocation)


def test_every_seed_on_the_path_says_what_it_is() -> None:
    found = explain(spec("qwen3-30b", "h800x2", 32, 1024), ASSUMED, budget=12)
    assert found.refinement is not None
    seeds = [each for each in found.refinement.tried if each.change.startswith("seed")]
    assert len(seeds) > 1 and len({each.change for each in seeds}) == len(seeds)
    assert seeds[0].change == "seed: the programme's split"
    rows = [row[0] for row in found.tables()[-1].rows]
    later = [row for row in rows[1:] if str(row).startswith("seed")]
    assert all("->" in str(row) for row in later)
