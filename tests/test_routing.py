from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.case import Workload
from bench.errors import BadInput
from bench.models import get_model
from bench.routing import Routing

EVERY_NAME = ["balanced", "learned", "zipf:1", "zipf:0.5", "hot-rank", "rotating-hot-rank", "half-idle", "empty-expert"]


def routing(name: str, num_ranks: int = 4, model: str = "tiny", seed: int = 3) -> Routing:
    workload = Workload(seq_len=16, global_batch_tokens=64, routing=name, seed=seed)
    return Routing.of(workload, get_model(model), num_ranks)


def exact_choices(popularity: np.ndarray, top_k: int) -> dict[frozenset[int], float]:
    """Probability of every set of experts, from all orders in which it can be drawn without replacement."""
    found: dict[frozenset[int], float] = {}
    for order in permutations(range(len(popularity)), top_k):
        probability, left = 1.0, 1.0
        for expert in order:
            probability *= popularity[expert] / left if left > 0 else 0.0
            left -= popularity[expert]
        found[frozenset(order)] = found.get(frozenset(order), 0.0) + probability
    return found


@pytest.mark.parametrize(("num_experts", "num_ranks", "top_k"), [(6, 3, 2), (6, 2, 3), (8, 8, 2), (8, 1, 4)])
def test_balanced_copies_count_ranks_of_all_subsets(num_experts: int, num_ranks: int, top_k: int) -> None:
    route = Routing("balanced", 0.0, 0, num_experts, top_k, num_ranks)
    local = num_experts // num_ranks
    subsets = list(combinations(range(num_experts), top_k))
    per_rank = [sum(any(e // local == r for e in subset) for subset in subsets) for r in range(num_ranks)]
    assert route.copies(0, num_ranks, "rank") == pytest.approx([n / len(subsets) for n in per_rank])
    assert route.copies(0, num_ranks, "expert") == pytest.approx([top_k / num_ranks] * num_ranks)


@pytest.mark.parametrize("name", ["zipf:1", "zipf:2", "hot-rank", "rotating-hot-rank", "half-idle", "empty-expert"])
def test_uneven_counts_match_the_exact_law(name: str) -> None:
    route = routing(name)
    exact = exact_choices(route.popularity(5), route.top_k)
    share = np.zeros(8)
    hit = np.zeros(4)
    for chosen, probability in exact.items():
        for expert in chosen:
            share[expert] += probability
        for rank in {expert // 2 for expert in chosen}:
            hit[rank] += probability
    # Five standard deviations of a mean over the sampled tokens.
    assert route.expert_share(5) == pytest.approx(share, abs=5 * 0.5 / 128)
    assert route.copies(5, 4, "rank") == pytest.approx(hit, abs=5 * 0.5 / 128)
    assert route.assignments(5, 4) == pytest.approx(share.reshape(4, 2).sum(axis=1), abs=5 * 0.5 / 64)


def test_half_of_the_ranks_are_idle() -> None:
    route = routing("half-idle", num_ranks=4)  # 8 experts, top 2
    assert route.assignments(0, 4).tolist() == [1, 1, 0, 0]
    assert route.imbalance(0, 4) == 2
    assert routing("half-idle", num_ranks=1).popularity(0).tolist() == [1 / 8] * 8


def test_a_hot_rank_rotates_from_layer_to_layer() -> None:
    route, still = routing("rotating-hot-rank", num_ranks=4), routing("hot-rank", num_ranks=4)
    for layer in range(6):
        assert route.assignments(layer, 4).tolist() == np.roll(still.assignments(0, 4), layer).tolist()
        assert route.copies(layer, 4, "rank").tolist() == np.roll(still.copies(0, 4, "rank"), layer).tolist()
        ids = route.expert_ids(layer, 0, 16)
        assert ids is not None
        assert np.unique(ids // 2).tolist() == [layer % 4]
    assert route.imbalance(5, 4) == 4


def test_zipf_popularity_falls_as_a_power_of_the_place() -> None:
    popularity = np.sort(routing("zipf:1.5").popularity(0))[::-1]
    assert popularity / popularity[0] == pytest.approx(np.arange(1, 9) ** -1.5)


def test_zipf_order_differs_between_layers_and_seeds() -> None:
    route = routing("zipf:1", model="qwen3-30b")
    assert not np.array_equal(route.popularity(0), route.popularity(1))
    assert not np.array_equal(route.popularity(0), routing("zipf:1", model="qwen3-30b", seed=4).popularity(0))


def test_hot_rank_sends_everything_to_the_first_rank() -> None:
    route = routing("hot-rank", num_ranks=4)
    assert route.assignments(0, 4).tolist() == [2, 0, 0, 0]
    assert route.copies(0, 4, "rank").tolist() == [1, 0, 0, 0]
    assert route.imbalance(0, 4) == 4.0


def test_hot_rank_spills_where_it_has_too_few_experts() -> None:
    route = routing("hot-rank", num_ranks=8)  # one expert a rank, top 2
    assert route.assignments(0, 8).tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_empty_expert_leaves_expert_0_and_the_last_rank_without_tokens() -> None:
    share = routing("empty-expert", num_ranks=4).expert_share(2)
    assert share[[0, 6, 7]].tolist() == [0, 0, 0]
    assert share[1:6] == pytest.approx([0.4] * 5)


def test_empty_expert_keeps_enough_experts_for_top_k() -> None:
    route = routing("empty-expert", num_ranks=1, model="mixtral-8x7b")
    assert np.count_nonzero(route.expert_share(0)) == 7
    crowded = Routing("empty-expert", 0.0, 0, num_experts=4, top_k=3, num_ranks=2)
    # Experts 2, 3 and 0 would be empty; two of them have to come back.
    assert np.flatnonzero(crowded.expert_share(0)).tolist() == [1, 2, 3]


@given(st.sampled_from(EVERY_NAME), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3), st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_counts_are_consistent(name: str, num_ranks: int, layer: int, seed: int) -> None:
    route = routing(name, num_ranks, seed=seed)
    assigned = route.assignments(layer, num_ranks)
    copies = route.copies(layer, num_ranks, "rank")
    assert route.popularity(layer).sum() == pytest.approx(1)
    assert assigned.sum() == pytest.approx(route.top_k)
    assert (copies <= np.minimum(assigned, 1) + 1e-12).all()
    assert (copies >= assigned / min(route.top_k, 8 // num_ranks) - 1e-12).all()
    assert route.imbalance(layer, num_ranks) >= 1 - 1e-12
    assert route.assignments(layer, num_ranks, shared=True).sum() == pytest.approx(route.top_k + 1)


def test_shared_expert_adds_a_copy_only_where_the_token_does_not_go_anyway() -> None:
    route = routing("balanced", num_ranks=4)
    hit = 1 - (6 * 5) / (8 * 7)
    assert route.copies(0, 4, "rank", shared=True) == pytest.approx([hit + (1 - hit) / 4] * 4)
    assert route.copies(0, 4, "expert", shared=True) == pytest.approx([3 / 4] * 4)


@pytest.mark.parametrize("name", [name for name in EVERY_NAME if name != "learned"])
def test_ids_follow_the_distribution_that_is_simulated(name: str) -> None:
    route = routing(name, num_ranks=4)
    ids = np.concatenate([route.expert_ids(1, sequence, 512) for sequence in range(8)])
    assert ids.dtype == np.int64
    assert all(len(set(row)) == 2 for row in ids.tolist())
    drawn = np.bincount(ids.ravel(), minlength=8) / len(ids)
    assert drawn == pytest.approx(route.expert_share(1), abs=0.04)  # five standard deviations
    assert (drawn[route.expert_share(1) == 0] == 0).all()


def test_ids_depend_on_seed_layer_and_sequence_alone() -> None:
    route = routing("zipf:1", num_ranks=2)
    ids = route.expert_ids(1, 5, 64)
    assert np.array_equal(ids, routing("zipf:1", num_ranks=8).expert_ids(1, 5, 64))
    for other in (
        route.expert_ids(2, 5, 64),
        route.expert_ids(1, 6, 64),
        routing("zipf:1", seed=4).expert_ids(1, 5, 64),
    ):
        assert not np.array_equal(ids, other)


def test_the_learned_router_has_no_ids_and_even_counts() -> None:
    route = routing("learned")
    assert route.expert_ids(0, 0, 16) is None
    assert route.even
    assert route.assignments(0, 4).tolist() == routing("balanced").assignments(0, 4).tolist()


def test_ranks_must_divide_the_experts() -> None:
    with pytest.raises(BadInput, match="divisor of the 8 experts"):
        routing("balanced", num_ranks=3)
