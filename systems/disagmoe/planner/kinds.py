"""Candidates of one depth and option in numbers: what they hold, and what each resource allows; see `problem`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.assumptions import Assumptions
from bench.case import CaseSpec
from bench.clusters import Cluster
from bench.system import divisors
from systems.disagmoe.planner.choices import Choices
from systems.disagmoe.planner.state import held_state
from systems.disagmoe.planner.tokens import NIC_RECEIVE, NIC_SEND, Option, Side, TokenCosts, token_costs
from systems.disagmoe.shift import Homes, best_shift, spreads, turns

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """p, p_F, N, R and the layer's option; `load` are seconds of one step for one rank a group, by resource."""

    groups: int
    expert_groups: int
    option: Option
    replicas: int
    homes: Homes
    load: tuple[float, ...]
    latency: "Latency"


class Latency(NamedTuple):
    """Seconds per token of a micro-batch's way forth and back, with nothing else in the way.

    attention_s, expert_s, transfer_s of a token on its attention rank; expert_s and expert_transfer_s times M / N.
    """

    attention_s: Floats | float
    expert_s: Floats | float
    transfer_s: Floats | float
    expert_transfer_s: Floats | float

    def of(self, tokens: Floats | float, attention: Floats, expert: Floats | int) -> Floats:
        """Of a micro-batch of `tokens` an attention rank, over candidates; the seconds may be over candidates, too."""
        more = attention / expert
        transfer_s = np.maximum(self.transfer_s, self.expert_transfer_s * more)
        return np.asarray(tokens * (self.attention_s + self.expert_s * more + transfer_s))


class Dealt(NamedTuple):
    """[candidates] of R and of M, and for each side the numbers of ranks or replicas that its state is spread over."""

    replicas: Floats
    data: Floats
    attention: "Numbers"
    expert: "Numbers"


class Numbers(NamedTuple):
    """Different numbers, ascending, and of every candidate the place of its own."""

    different: tuple[int, ...]
    which: NDArray[np.int64]

    @classmethod
    def of(cls, column: Floats) -> "Numbers":
        different, which = np.unique(column.astype(int), return_inverse=True)
        return cls(tuple(different.tolist()), which)


class Kind:
    """Candidates of one depth and option: all numbers of replicas and of data ranks."""

    def __init__(
        self, spec: CaseSpec, choices: Choices, assumptions: Assumptions, depths: tuple[int, int], option: Option
    ) -> None:
        self.depths, self.option = depths, option
        costs = token_costs(spec, option, assumptions)
        self.busiest = _busiest(spec, costs, *depths)
        self.state = held_state(spec, option, depths, self.busiest.homes, assumptions)
        self.kept = _kept(spec, option, costs, self.busiest, choices.mbs)
        self.latency = _latency(costs, depths[0])
        sequences = spec.workload.num_sequences // choices.mbs
        shared = option.tp * option.cp
        self.dealt = _dealt_out(spec.cluster, choices.tiling, sequences, depths, option.expert_ranks, shared)

    def shape(self, replicas: int) -> Shape:
        busiest = self.busiest
        return Shape(*self.depths, self.option, replicas, busiest.homes, busiest.load, self.latency)


class Columns(NamedTuple):
    """Over the candidates of several kinds, one kind after the other: M, GPUs, micro-batches, those in flight, bytes of
    the fullest attention and expert rank with one micro-batch in flight, its activations alone, and [resources,
    candidates] caps."""

    data: Floats
    used: Floats
    microbatches: Floats
    in_flight: Floats
    attention_bytes: Floats
    expert_bytes: Floats
    attention_kept: Floats
    expert_kept: Floats
    caps: Floats


def columns(spec: CaseSpec, choices: Choices, kinds: Sequence[Kind]) -> Columns:
    """Of all candidates of the kinds."""
    counts = [len(kind.dealt.data) for kind in kinds]

    def each(values: Iterable[float]) -> Floats:
        return np.repeat(np.array(list(values), dtype=float), counts)

    groups, expert_groups = (each(kind.depths[side] for kind in kinds) for side in (0, 1))
    experts = each(kind.option.expert_ranks for kind in kinds)
    shared = each(kind.option.tp * kind.option.cp for kind in kinds)
    replicas, data = (np.concatenate([kind.dealt[column] for kind in kinds]) for column in (0, 1))
    microbatches = spec.workload.num_sequences // choices.mbs * shared / (replicas * data)
    depth = (groups + expert_groups) / 2
    fill = 1.0 + (4 * depth - 1) * depth / (microbatches * spec.model.num_layers)
    state = _States.of(kinds)
    loads = zip(*(kind.busiest.load for kind in kinds), strict=True)
    with np.errstate(divide="ignore"):
        busy = [each(load) * fill / (replicas * n) for n, load in zip(_ranks(data, experts), loads, strict=True)]
        busy[0], busy[1] = busy[0] + state.attention_update_s, busy[1] + state.expert_update_s
        lanes = [1.0 / seconds for seconds in busy]
    kept, expert_kept, passing, expert_passing = (each(column) for column in zip(*(k.kept for k in kinds), strict=True))
    expert_kept = expert_kept * data
    held = state.attention_bytes + passing + kept, state.expert_bytes + expert_passing * data + expert_kept
    in_flight = _in_flight(float(spec.cluster.gpu.memory_bytes), *held, kept, expert_kept)
    in_flight = np.minimum(np.minimum(in_flight, np.rint(4 * depth)), microbatches)
    latency = Latency(*(each(column) for column in zip(*(kind.latency for kind in kinds), strict=True)))
    tokens = choices.mbs * spec.workload.seq_len / shared
    together = in_flight / (microbatches * latency.of(tokens, data, experts))
    used = replicas * (groups * data + expert_groups * experts)
    return Columns(data, used, microbatches, in_flight, *held, kept, expert_kept, np.stack([*lanes, together]))


class _States(NamedTuple):
    """[candidates]: bytes and seconds of the optimizer step, of the fullest attention and expert rank."""

    attention_bytes: Floats
    expert_bytes: Floats
    attention_update_s: Floats
    expert_update_s: Floats

    @classmethod
    def of(cls, kinds: Sequence[Kind]) -> "_States":
        # Kinds that share a state have their candidates alike.
        known: dict[tuple[int, int], tuple[Floats, ...]] = {}
        for kind in kinds:
            key = id(kind.state), id(kind.dealt)
            if key not in known:
                attention, expert = kind.dealt.attention, kind.dealt.expert
                sides = (("A", attention), ("F", expert))
                static = [kind.state.static_bytes(name, each.different)[each.which] for name, each in sides]
                update = [kind.state.update_s(name, each.different)[each.which] for name, each in sides]
                known[key] = (*static, *update)
        found = [known[id(kind.state), id(kind.dealt)] for kind in kinds]
        return cls(*(np.concatenate(column) for column in zip(*found, strict=True)))


@lru_cache(maxsize=4096)
def _dealt_out(
    cluster: Cluster, tiling: str, sequences: int, depths: tuple[int, int], expert_ranks: int, shared: int
) -> Dealt:
    """[candidates] of R and of M, `shared` ranks to each of a replica's lanes.

    Of every number of replicas that leaves room; of one replica at least one M, for what is missing.
    """
    found: list[tuple[int, int]] = []
    for replicas in divisors(sequences):
        most = (cluster.num_gpus // replicas - depths[1] * expert_ranks) // depths[0]
        if most < 1 and replicas > 1:
            break
        ranks = (shared * lanes for lanes in divisors(sequences // replicas))
        found += [(replicas, m) for m in ranks if m <= max(most, shared) and tiles(cluster, tiling, m)]
    both = np.array(found, dtype=float).reshape(-1, 2)
    return Dealt(both[:, 0], both[:, 1], Numbers.of(both[:, 1] * both[:, 0]), Numbers.of(both[:, 0]))


def _ranks(attention: Floats, expert: Floats) -> tuple[Floats, ...]:
    """Ranks of a group whose work or ports make up each of `RESOURCES` but the last."""
    return (attention, expert) * 3


def tiles(cluster: Cluster, tiling: str, ranks: int) -> bool:
    """Whether groups of so many ranks take whole nodes or equal parts of one, where `tiling` asks for that."""
    per_node = cluster.gpus_per_node
    return tiling == "any" or ranks % per_node == 0 or per_node % ranks == 0


def _dealt(column: Floats, groups: int, shift_at: int | None = None) -> Floats:
    """[..., groups]: sums over the layers of each group; the last slot, the head's, is left out."""
    layers = column.shape[-1] - 1
    moved = layers if shift_at is None else shift_at
    sums = np.zeros((*column.shape[:-1], groups))
    for g in range(groups):
        behind = moved + (g - 1 - moved) % groups
        sums[..., g] = column[..., g:moved:groups].sum(axis=-1) + column[..., behind:layers:groups].sum(axis=-1)
    return sums


class _Busiest(NamedTuple):
    """The best group for the head and the best shift; GPU- or port-seconds of a step on the busiest group, by resource;
    bytes a token that the fullest attention and expert group keep."""

    homes: Homes
    load: tuple[float, ...]
    attention_kept: float
    expert_kept: float


@lru_cache(maxsize=4096)
def _busiest(spec: CaseSpec, costs: TokenCosts, groups: int, expert_groups: int) -> _Busiest:
    shift_at = best_shift(costs.attention.compute_s, groups) if groups > 1 and spreads(spec.model) else None
    attention, expert = _rows(costs.attention, groups), _rows(costs.expert, groups)
    work, kept, *ports = _dealt(attention, groups, shift_at)
    expert_work, expert_kept, *expert_ports = _dealt(expert, expert_groups)
    work[0] += costs.embed_s
    # The group with the least to do gets the head; behind a shift, the one whose turn it is.
    head = int(np.argmin(work)) if shift_at is None else turns(spec.model.num_layers, groups, 1, shift_at)[-1]
    work[head] += costs.attention.compute_s[-1]
    for port, of_head in zip(ports, attention[2:, -1], strict=True):
        port[head] += of_head
    times = spec.workload.global_batch_tokens
    busiest = [work.max(), expert_work.max()]
    for first in (NIC_SEND, NIC_SEND + 1):
        other = first + NIC_RECEIVE - NIC_SEND
        busiest += [max(each[first].max(), each[other].max()) for each in (ports, expert_ports)]
    load = tuple(times * float(seconds) for seconds in busiest)
    return _Busiest(Homes(head, shift_at), load, float(kept.max()), float(expert_kept.max()))


def _rows(side: Side, groups: int) -> Floats:
    """[6, slots]: seconds of compute, bytes kept, seconds of the ports."""
    ports = side.port_s if groups > 1 else side.port_s - side.moving_port_s
    return np.vstack([side.compute_s, side.kept_bytes, ports])


@lru_cache(maxsize=4096)
def _latency(costs: TokenCosts, groups: int) -> Latency:
    """Weight gradients are waited for by nobody; a residual travels beside the dispatch and the combine."""
    sides = (costs.attention, costs.expert)
    compute = [float((side.compute_s - side.weight_s).sum()) for side in sides]
    # A transfer takes the longer of NIC and NVLink of the busier end.
    moved = [float((side.port_s - side.moving_port_s).reshape(2, 2, -1).max(axis=1).sum()) for side in sides]
    return Latency(compute[0] + costs.embed_s, compute[1], *moved)


def _in_flight(memory: float, attention: Floats, expert: Floats, attention_kept: Floats, expert_kept: Floats) -> Floats:
    """Micro-batches whose activations fit, at least one."""
    more = np.minimum((memory - attention) / attention_kept, (memory - expert) / expert_kept)
    return np.asarray(1.0 + np.maximum(0.0, np.trunc(more)))


class _Kept(NamedTuple):
    """Bytes of one micro-batch's activations, and of what passes: on an attention rank; on an expert rank, those of one
    data rank's tokens."""

    attention: float
    expert: float
    passing_attention: float
    passing_expert: float


def _kept(spec: CaseSpec, option: Option, costs: TokenCosts, busiest: _Busiest, mbs: int) -> _Kept:
    tokens = mbs * spec.workload.seq_len / (option.tp * option.cp)
    return _Kept(
        tokens * busiest.attention_kept,
        tokens * busiest.expert_kept / option.expert_ranks,
        tokens * float(costs.attention.passing_bytes.max()),
        tokens * float(costs.expert.passing_bytes.max()) / option.expert_ranks,
    )
