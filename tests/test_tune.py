"""The tuner: same answer as trying everything, honest about what it left out."""

from contextlib import suppress

import pytest

from bench.assumptions import get_assumptions
from bench.case import CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.evaluate import CostModel, tuned_trial
from bench.models import get_model
from bench.predict import predict
from bench.search import SLOWER
from bench.system import KnowsMoves, KnowsSeeds, get_system, worthwhile_shares
from bench.tune import tune

ASSUMED = get_assumptions("datasheet")


def spec(system: str, model: str = "tiny", cluster: str = "h800x1", sequences: int = 16, seq_len: int = 64) -> CaseSpec:
    return CaseSpec(
        model=get_model(model),
        cluster=get_cluster(cluster),
        workload=Workload(seq_len=seq_len, global_batch_tokens=sequences * seq_len),
        system=system,
    )


@pytest.mark.parametrize("system", ["ep", "dualpipe-v", "disagmoe"])
def test_the_search_finds_what_trying_everything_finds(system: str) -> None:
    found = tune(spec(system), ASSUMED, budget=None)
    every = [predict(spec(system).with_layout(layout), ASSUMED) for layout in get_system(system).space(spec(system))]
    assert len(every) <= len(found.candidates)  # moves and seeds of a planner may lie outside the space
    fastest = min(p.metrics.step_time_s for p in every if not p.missing_bytes)
    assert found.best is not None
    assert found.best.metrics.step_time_s <= fastest * (1 + 1e-9)
    assert found.complete


@pytest.mark.parametrize("system", ["ep", "disagmoe"])
def test_every_layout_of_a_space_can_be_planned(system: str) -> None:
    found = tune(spec(system, "tiny-shared"), ASSUMED, budget=None)
    refused = {each.layout for each in found.candidates if each.status == "refused"}  # a step may be
    assert refused.isdisjoint(get_system(system).space(found.spec))


@pytest.mark.parametrize("seq_len", [4096, 8192, 32768])
def test_sequences_of_any_length_are_shared_as_far_as_a_node_goes(seq_len: int) -> None:
    found = spec("ep", "qwen3-235b", "h800x16", 2**22 // seq_len, seq_len)
    assert {cp for tp, cp in worthwhile_shares(found, ranks=8) if tp == 1} == {1, 2, 4, 8}
    assert max(tp * cp for tp, cp in worthwhile_shares(found, ranks=4)) == 4


@pytest.mark.parametrize("system", ["ep", "megatron-overlap", "dualpipe", "dualpipe-v", "tutel", "comet", "disagmoe"])
def test_every_space_shares_short_sequences(system: str) -> None:
    found = spec(system, "qwen3-235b", "h800x8", 2**22 // 8192, 8192)
    assert {layout.cp for layout in get_system(system).space(found)} == {1, 2, 4, 8}


def test_a_pipeline_in_two_directions_fits_with_sequences_of_any_length() -> None:
    """235 billion parameters, of which each rank has two copies: only with sequences that are shared."""
    layout = Layout(replicas=1, ep=8, pp=16, cp=4, offload="state")
    found = spec("dualpipe", "qwen3-235b", "h800x16", 2**22 // 8192, 8192)
    assert layout in set(get_system("dualpipe").space(found))
    assert not predict(found.with_layout(layout), get_assumptions("h200-measured"), rough=True).missing_bytes


def test_a_budget_is_kept_and_named() -> None:
    found = tune(spec("disagmoe"), ASSUMED, budget=2)
    counts = found.counts()
    assert counts["ok"] == 2
    assert counts["budget"] > 0
    assert not found.complete


def test_a_budget_counts_what_was_left_before_its_end() -> None:
    counts = tune(spec("ep"), ASSUMED, budget=16).counts()
    tried = {status: number for status, number in counts.items() if status not in ("bound", "budget")}
    assert counts["slower"] > 0
    assert sum(tried.values()) == 16


def test_the_second_best_is_that_of_simulating_everything() -> None:
    found = tune(spec("ep"), ASSUMED, budget=None)
    possible = [c.layout for c in found.candidates if c.status != "refused"]
    every = [predict(spec("ep").with_layout(layout), ASSUMED, rough=True) for layout in possible]
    second = sorted(p.step_time_s for p in every if not p.missing_bytes)[1]
    assert found.runner_up is not None
    assert found.best is not None
    # What its bound ruled out could not have won, but may be as fast as the second.
    assert second <= found.runner_up.step_time_s
    bound = [c.bound_s for c in found.candidates if c.status == "bound"]
    assert found.runner_up.step_time_s <= second or second >= min(bound)


def test_fixed_fields_are_not_chosen() -> None:
    found = tune(spec("ep"), ASSUMED, fixed=["ep=2", "recompute=full"], budget=None)
    assert {(c.layout.ep, c.layout.recompute) for c in found.candidates} == {(2, "full")}
    with pytest.raises(BadInput, match="did you mean"):
        tune(spec("ep"), ASSUMED, fixed=["recomput=full"])


def test_what_does_not_fit_is_rejected_with_the_missing_memory() -> None:
    """235 billion parameters and their optimizer state do not fit on one node."""
    found = tune(spec("ep", "qwen3-235b", sequences=8, seq_len=4096), ASSUMED, budget=None)
    assert found.best is None
    closest = found.closest
    assert closest is not None
    assert "GiB missing" in closest.reason
    assert closest.peak_memory_bytes is not None
    assert closest.peak_memory_bytes > get_cluster("h800x1").gpu.memory_bytes


def test_a_record_says_what_came_second_and_why_others_were_rejected() -> None:
    model = CostModel.named("datasheet")
    fits = tuned_trial(tune(spec("disagmoe"), ASSUMED, budget=2), model, (), 2).search
    assert fits["runner_up"]["step_time_s"] > 0
    assert fits["rejected"]["budget"]["why"] == "not tried: the budget was spent"
    left = tuned_trial(tune(spec("ep"), ASSUMED, budget=None), model, (), None).search
    assert left["candidates"]["slower"] > 0
    assert f"{left['left_at']} times the best" in left["rejected"]["slower"]["why"]
    big = tune(spec("ep", "qwen3-235b", sequences=8, seq_len=4096), ASSUMED, budget=None)
    search = tuned_trial(big, model, (), None).search
    assert search["runner_up"] is None
    assert big.closest is not None
    assert search["rejected"]["infeasible"]["layout"] == str(big.closest.layout)
    assert "GiB missing" in search["rejected"]["infeasible"]["why"]


@pytest.mark.parametrize("system", ["megatron-overlap", "disagmoe"])
def test_pruned_candidates_could_not_have_won(system: str) -> None:
    found = tune(spec(system), ASSUMED, budget=None)
    assert found.best is not None
    assert found.counts()["slower"] > 0
    for candidate in found.candidates:
        if candidate.status == "bound":
            assert candidate.bound_s is not None
            assert candidate.bound_s >= found.best.metrics.step_time_s
        if candidate.status == "slower":
            step_s = predict(found.spec.with_layout(candidate.layout), ASSUMED, rough=True).step_time_s
            assert step_s >= SLOWER * found.best.metrics.step_time_s
        if candidate.status == "ok":
            assert candidate.step_time_s is not None
            assert candidate.bound_s is not None
            assert candidate.bound_s <= candidate.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("system", ["ep", "megatron-overlap", "dualpipe", "tutel", "disagmoe"])
def test_no_step_beats_the_answer_of_a_search_without_a_budget(system: str) -> None:
    given = spec(system)
    found, known = tune(given, ASSUMED, budget=None), get_system(system)
    assert found.best is not None and isinstance(known, KnowsMoves)
    near = list(known.moves(given, found.best.case.layout))
    assert near
    possible = 0
    for layout in near:
        with suppress(BadInput):
            step = predict(given.with_layout(layout), ASSUMED, rough=True)
            possible += 1
            assert step.missing_bytes or step.step_time_s >= found.best.step_time_s, str(layout)
    assert possible


def test_a_step_keeps_what_was_fixed() -> None:
    found = tune(spec("disagmoe"), ASSUMED, fixed=["deferred_w=0", "cp=1", "tp=1"])
    assert {(c.layout.deferred_w, c.layout.cp, c.layout.tp) for c in found.candidates} == {(0, 1, 1)}


@pytest.mark.parametrize(("system", "least"), [("tutel", 3), ("comet", 4)])
def test_chunks_share_a_bound_that_holds_for_all_of_them(system: str, least: int) -> None:
    """Among them those that exchange fastest, or leave the experts most SMs."""
    fixed = ["ep=4", "pp=1", "vpp=1", "replicas=2", "mbs=1", "recompute=none", "copies=rank", "tp=1", "cp=1"]
    assumed = get_assumptions("h200-measured")
    found = tune(spec(system, seq_len=4096), assumed, fixed=fixed, budget=None)
    choices = len(found.candidates)
    assert choices >= least
    steps = {c.layout: predict(found.spec.with_layout(c.layout), assumed).metrics.step_time_s for c in found.candidates}
    assert len(set(steps.values())) == choices
    for candidate in found.candidates:
        assert candidate.bound_s is not None
        assert candidate.bound_s <= steps[candidate.layout]
    assert found.best is not None
    assert steps[found.best.case.layout] == min(steps.values())


def test_a_planners_seeds_are_simulated_first() -> None:
    """Half of a small budget goes to the planner's own layouts."""
    disagmoe = get_system("disagmoe")
    assert isinstance(disagmoe, KnowsSeeds)
    seeds = set(disagmoe.seeds(spec("disagmoe"), ASSUMED))
    assert seeds
    found = tune(spec("disagmoe"), ASSUMED, budget=4)
    simulated = {c.layout for c in found.candidates if c.step_time_s is not None}
    assert len(simulated & seeds) >= 2
