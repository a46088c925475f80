"""The tuner: same answer as trying everything, honest about what it left out."""

import math
from itertools import pairwise

import pytest

from bench.assumptions import get_assumptions
from bench.case import CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.evaluate import CostModel, tuned_trial
from bench.models import get_model
from bench.predict import predict
from bench.system import KnowsSeeds, get_system, worthwhile_shares
from bench.tune import SLOWER, tune

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
    assert len(every) <= len(found.candidates)  # seeds of a planner may lie outside the space
    fastest = min(p.metrics.step_time_s for p in every if not p.missing_bytes)
    assert found.best is not None
    if isinstance(get_system(system), KnowsSeeds):
        assert found.best.metrics.step_time_s <= fastest * (1 + 1e-9)
    else:
        assert math.isclose(found.best.metrics.step_time_s, fastest)
    assert found.complete


@pytest.mark.parametrize("system", ["ep", "disagmoe"])
def test_every_layout_of_a_space_can_be_planned(system: str) -> None:
    found = tune(spec(system, "tiny-shared"), ASSUMED, budget=None)
    assert "refused" not in found.counts()


def test_no_shorter_sequence_lacks_a_share_that_a_longer_one_has() -> None:
    """What a layout keeps in memory goes with a rank's tokens, not with the length of a sequence."""

    def tokens_a_rank(seq_len: int) -> set[int]:
        found = spec("ep", "qwen3-235b", "h800x16", 2**22 // seq_len, seq_len)
        return {seq_len // (tp * cp) for tp, cp in worthwhile_shares(found, ranks=8, replicas=1, depth=16)}

    for shorter, longer in pairwise((4096, 8192, 16384, 32768)):
        assert {tokens for tokens in tokens_a_rank(longer) if tokens <= shorter} <= tokens_a_rank(shorter)
    assert tokens_a_rank(4096) == {4096, 2048}
    assert min(tokens_a_rank(16384)) == 2048


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
    every = [predict(spec("ep").with_layout(c.layout), ASSUMED, rough=True) for c in found.candidates]
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


@pytest.mark.parametrize(("system", "choices"), [("tutel", 4), ("comet", 5)])
def test_chunks_share_a_bound_that_holds_for_all_of_them(system: str, choices: int) -> None:
    """Among them those that exchange fastest, or leave the experts most SMs."""
    fixed = ["ep=4", "pp=1", "vpp=1", "replicas=2", "mbs=1", "recompute=none", "copies=rank", "tp=1", "cp=1"]
    assumed = get_assumptions("h200-measured")
    found = tune(spec(system, seq_len=4096), assumed, fixed=fixed, budget=None)
    assert len(found.candidates) == choices
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
