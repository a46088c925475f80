"""How tokens choose experts: one distribution, seen as expected counts (simulation) and as expert ids (execution).

A token draws `top_k` different experts one after the other, each with probability proportional to its popularity among
those left (a Plackett-Luce draw; Gumbel top-k gives the same law, arXiv 1903.06059). Popularity by name:

- ``balanced``, and ``learned`` where it has to be simulated: equal.
- ``zipf:ALPHA``: the n-th most popular expert has n^-ALPHA; which expert that is differs from layer to layer.
- ``hot-rank``: only the experts of the first expert rank, equally; where these are fewer than top_k, the next ones too.
- ``rotating-hot-rank``: the same with another rank in every layer, the first, the second and so on.
- ``half-idle``: only the experts of the first half of the expert ranks (rounded up), equally; top_k of them at least.
- ``empty-expert``: all but expert 0 and the experts of the last rank, equally; where these leave fewer than top_k, the
  last rank's experts come back one by one, from its first, and expert 0 last.
- ``recorded:DIGEST``: the counts of a step that a run recorded; see `bench.recorded` and, for how a token gets its
  experts, `bench.replay`.

Counts are expectations, equal for all micro-batches and source ranks. A model's limit to some expert groups
(`router_groups`) is not part of these distributions.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from bench.case import Workload
from bench.errors import BadInput
from bench.models import Model
from bench.recorded import Recorded
from bench.replay import expert_ids, sample

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

SAMPLED_TOKENS = 16384
"""Draws behind the counts of an uneven distribution: they leave a few per cent of error in an expert's share."""
MAX_SAMPLED_TIMES = 1 << 23  # tokens x experts; fewer tokens are drawn where there are more experts

_SAMPLES, _ORDERS, _SEQUENCES = range(3)  # streams of random numbers, kept apart under one seed


@dataclass(frozen=True)
class Routing:
    """A distribution of expert choices.

    Args:
        name: ``balanced``, ``learned``, ``zipf``, ``hot-rank``, ``rotating-hot-rank``, ``half-idle``, ``empty-expert``,
            ``recorded``.
        num_ranks: expert ranks (N) that share the experts; decides which experts are hot, or without tokens.
        recorded: counts, where they were recorded; first_layer: number of the layer of the first of these.
    """

    name: str
    alpha: float
    seed: int
    num_experts: int
    top_k: int
    num_ranks: int = 1
    recorded: Recorded | None = None
    first_layer: int = 0

    @classmethod
    def of(cls, workload: Workload, model: Model, num_ranks: int = 1) -> "Routing":
        """The routing of a workload. Raises BadInput where `num_ranks` does not divide the experts."""
        if num_ranks < 1 or model.num_experts % num_ranks:
            raise BadInput("num_ranks", num_ranks, f"a divisor of the {model.num_experts} experts of {model.name}")
        name, _, alpha = workload.routing.partition(":")
        if name == "recorded":
            replayed = workload.recorded, model.num_dense_layers
            return cls(name, 0.0, workload.seed, model.num_experts, model.top_k, num_ranks, *replayed)
        return cls(name, float(alpha or 0), workload.seed, model.num_experts, model.top_k, num_ranks)

    @property
    def even(self) -> bool:
        """Whether every expert is as popular as every other, in every layer."""
        return self.name in ("balanced", "learned") or (self.name == "zipf" and self.alpha == 0)

    def popularity(self, layer: int) -> Floats:
        """[experts], summing to 1; 0 for experts that get no token."""
        if self.recorded is not None:
            return self.expert_share(layer) / self.top_k
        popularity = np.empty(self.num_experts)
        popularity[self._order(layer)] = self._by_popularity
        return popularity

    def expert_share(self, layer: int) -> Floats:
        """[experts]: expected assignments of a token to each expert; sums to top_k."""
        if self.recorded is not None:
            return np.array(self.recorded.counts[layer - self.first_layer]) / self.recorded.tokens
        share = np.empty(self.num_experts)
        share[self._order(layer)] = self._share_by_popularity
        return share

    def assignments(self, layer: int, num_ranks: int, *, shared: bool = False) -> Floats:
        """[ranks]: expected (token, expert) pairs of a token on each expert rank.

        With `shared`, a shared expert lives on every expert rank and tokens are dealt to them evenly: one more
        assignment a token.
        """
        per_rank = _assignments(self, layer, num_ranks)
        return per_rank + 1.0 / num_ranks if shared else per_rank

    def copies(self, layer: int, num_ranks: int, copies: str, *, shared: bool = False) -> Floats:
        """[ranks]: expected rows of a token sent to each expert rank.

        ``expert``: one an assignment. ``rank``: one where at least one assignment is on the rank, which for equally
        popular experts has probability 1 - C(E - E/N, k) / C(E, k).
        """
        if copies == "expert":
            return self.assignments(layer, num_ranks, shared=shared)
        hit = _hit(self, layer, num_ranks)
        if self.recorded is not None:  # counted on fewer tokens than the assignments
            hit = np.minimum(hit, self.assignments(layer, num_ranks))
        return hit + (1.0 - hit) / num_ranks if shared else hit

    def reached(self, layer: int, block_of_rank: Ids, *, shared: bool = False) -> Floats:
        """[ranks]: expected rows of a token sent to the block (a node, say) of each expert rank, one a block."""
        blocks, place, sizes = np.unique(block_of_rank, return_inverse=True, return_counts=True)
        hit = _hit_blocks(self, layer, tuple(place.tolist()), len(blocks))
        if shared:
            hit = hit + (1.0 - hit) * sizes / len(block_of_rank)
        return hit[place]

    def imbalance(self, layer: int, num_ranks: int) -> float:
        """Largest over mean number of assignments on an expert rank."""
        load = self.assignments(layer, num_ranks)
        return float(load.max() / load.mean())

    def expert_ids(self, layer: int, sequence_index: int, seq_len: int) -> Ids | None:
        """[seq_len, top_k] different experts for every token of a sequence, or None where the router learns.

        Depends on seed, layer and the sequence's number in the global batch alone, so every placement gets the same.
        """
        if self.name == "learned":
            return None
        if self.recorded is not None:
            return expert_ids(self.recorded, layer - self.first_layer, self.seed, sequence_index, seq_len)
        random = np.random.default_rng((self.seed, _SEQUENCES, layer, sequence_index))
        return _draw(random, self.popularity(layer), seq_len, self.top_k)

    @property
    def _flat(self) -> bool:
        """Whether all experts that get tokens are equally popular, so that counts have closed forms."""
        return self.name not in ("zipf", "recorded") or (self.name == "zipf" and self.alpha == 0)

    @cached_property
    def _num_eligible(self) -> int:
        return int((self._by_popularity > 0).sum())

    @cached_property
    def _by_popularity(self) -> Floats:
        """Popularity by expert; for zipf, from the most to the least popular one."""
        num, local = self.num_experts, self.num_experts // self.num_ranks
        weight = np.ones(num)
        if self.name == "zipf":
            weight = np.arange(1, num + 1, dtype=np.float64) ** -self.alpha
        elif self.name == "half-idle":
            weight[max((self.num_ranks + 1) // 2 * local, self.top_k) :] = 0.0
        elif self.name in ("hot-rank", "rotating-hot-rank"):
            weight[max(local, self.top_k) :] = 0.0
        elif self.name == "empty-expert":
            emptied = [*range(num - local, num), 0] if local < num else [0]
            spared = max(0, self.top_k - (num - len(set(emptied))))
            weight[emptied[spared:]] = 0.0
        return weight / weight.sum()

    @cached_property
    def _share_by_popularity(self) -> Floats:
        if self._flat:
            return np.where(self._by_popularity > 0, self.top_k / self._num_eligible, 0.0)
        return np.bincount(self._draws.ravel(), minlength=self.num_experts) / len(self._draws)

    @property
    def _draws(self) -> Ids:
        """[sampled tokens, top_k] places in the order of popularity."""
        return _sample(self.seed, self.alpha, self.num_experts, self.top_k)

    def _order(self, layer: int) -> Ids:
        """[experts]: the expert at each place of the order of popularity."""
        if self._flat:
            turned = layer * (self.num_experts // self.num_ranks) if self.name == "rotating-hot-rank" else 0
            return (np.arange(self.num_experts) + turned) % self.num_experts
        return np.random.default_rng((self.seed, _ORDERS, layer)).permutation(self.num_experts)


@lru_cache(maxsize=4096)
def _assignments(routing: Routing, layer: int, num_ranks: int) -> Floats:
    return _fixed(routing.expert_share(layer).reshape(num_ranks, -1).sum(axis=1))


def _fixed(counts: Floats) -> Floats:
    counts.setflags(write=False)
    return counts


def _hit(routing: Routing, layer: int, num_ranks: int) -> Floats:
    """[ranks]: probability that a token has an assignment on each."""
    return _hit_blocks(routing, layer, tuple(range(num_ranks)), num_ranks)


@lru_cache(maxsize=4096)
def _hit_blocks(routing: Routing, layer: int, block_of_rank: tuple[int, ...], num_blocks: int) -> Floats:
    """[blocks]: probability that a token has an assignment on a rank of each."""
    block_of_expert = np.repeat(block_of_rank, routing.num_experts // len(block_of_rank))
    if routing._flat:
        eligible = np.bincount(block_of_expert, routing.popularity(layer) > 0, num_blocks)
        total = comb(routing._num_eligible, routing.top_k)
        misses = [comb(routing._num_eligible - int(local), routing.top_k) for local in eligible]
        return np.array([1.0 - miss / total for miss in misses])
    if routing.recorded is not None:
        blocks = block_of_expert[sample(routing.recorded, layer - routing.first_layer, routing.seed)]
    else:
        blocks = block_of_expert[routing._order(layer)[routing._draws]]
    hit = np.zeros((len(blocks), num_blocks), dtype=bool)
    hit[np.arange(len(blocks))[:, None], blocks] = True
    return np.asarray(hit.mean(axis=0), dtype=np.float64)


@lru_cache(maxsize=8)
def _sample(seed: int, alpha: float, num_experts: int, top_k: int) -> Ids:
    weight = np.arange(1, num_experts + 1, dtype=np.float64) ** -alpha
    num_tokens = max(1, min(SAMPLED_TOKENS, MAX_SAMPLED_TIMES // num_experts))
    draws = _draw(np.random.default_rng((seed, _SAMPLES)), weight, num_tokens, top_k)
    draws.setflags(write=False)
    return draws


def _draw(random: np.random.Generator, popularity: Floats, num_tokens: int, top_k: int) -> Ids:
    """[tokens, top_k]: the arrivals that come first, where expert e arrives after an exponential time of rate p_e."""
    with np.errstate(divide="ignore"):
        arrival = random.standard_exponential((num_tokens, len(popularity))) / popularity
    return np.argpartition(arrival, top_k - 1, axis=1)[:, :top_k].astype(np.int64)
