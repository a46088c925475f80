"""Candidates of one depth and option in numbers: what they hold, and what each resource allows; see `problem`."""

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
from systems.disagmoe.planner.state import HeldState, held_state
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

    attention_s: float
    expert_s: float
    transfer_s: float
    expert_transfer_s: float

    def of(self, tokens: float, attention: Floats, expert: int) -> Floats:
        """Of a micro-batch of `tokens` an attention rank, over candidates."""
        more = attention / expert
        transfer_s = np.maximum(self.transfer_s, self.expert_transfer_s * more)
        return np.asarray(tokens * (self.attention_s + self.expert_s * more + transfer_s))


class Kind:
    """Candidates of one depth and option: all numbers of replicas and of data ranks."""

    def __init__(
        self, spec: CaseSpec, choices: Choices, assumptions: Assumptions, depths: tuple[int, int], option: Option
    ) -> None:
        self.spec, self.choices, self.depths, self.option = spec, choices, depths, option
        costs = token_costs(spec, option, assumptions)
        self.homes, self.load = _load(spec, costs, *depths)
        self.state = held_state(spec, option, depths, self.homes, assumptions)
        self.kept = _Kept(spec, option, depths, self.homes.shift_at, costs, choices.mbs)
        self.latency = _latency(costs, depths[0])

    def shape(self, replicas: int) -> Shape:
        return Shape(*self.depths, self.option, replicas, self.homes, self.load, self.latency)

    def candidates(self, sequences: int) -> tuple[Floats, Floats]:
        """[candidates] of R and of M: numbers of replicas and of data ranks that deal the sequences out."""
        option = self.option
        shared = option.tp * option.cp
        return _dealt_out(self.spec.cluster, self.choices.tiling, sequences, self.depths, option.expert_ranks, shared)

    def columns(self, sequences: int, replicas: Floats, data: Floats) -> list[Floats]:
        """M, GPUs, micro-batches, those in flight, four of bytes, and caps of every resource, over candidates."""
        (groups, expert_groups), option, spec = self.depths, self.option, self.spec
        shared = option.tp * option.cp
        microbatches = sequences * shared / (replicas * data)
        depth = (groups + expert_groups) / 2
        fill = 1.0 + (4 * depth - 1) * depth / (microbatches * spec.model.num_layers)
        ranks = _ranks(data, np.full(len(data), float(option.expert_ranks)))
        with np.errstate(divide="ignore"):
            busy = [c * fill / (replicas * n) for n, c in zip(ranks, self.load, strict=True)]
            for side, name in enumerate("AF"):
                busy[side] = busy[side] + self.state.update_s(name, data, replicas)
            lanes = [1.0 / seconds for seconds in busy]
        used = replicas * (groups * data + expert_groups * option.expert_ranks)
        held = self.kept.beside(self.state, data, replicas)
        in_flight = _in_flight(float(spec.cluster.gpu.memory_bytes), *held)
        in_flight = np.minimum(np.minimum(in_flight, round(4 * depth)), microbatches)
        tokens = self.choices.mbs * spec.workload.seq_len / shared
        together = in_flight / (microbatches * self.latency.of(tokens, data, option.expert_ranks))
        return [data, used, microbatches, in_flight, *held, *lanes, together]


@lru_cache(maxsize=1024)
def _dealt_out(
    cluster: Cluster, tiling: str, sequences: int, depths: tuple[int, int], expert_ranks: int, shared: int
) -> tuple[Floats, Floats]:
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
    return both[:, 0], both[:, 1]


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


def _load(spec: CaseSpec, costs: TokenCosts, groups: int, expert_groups: int) -> tuple[Homes, tuple[float, ...]]:
    """The best group for the head and the best shift, and GPU- or port-seconds of a step on the busiest group, by
    resource."""
    attention, expert = costs.attention, costs.expert
    shift_at = best_shift(attention.compute_s, groups) if groups > 1 and spreads(spec.model) else None
    work = _dealt(attention.compute_s, groups, shift_at)
    work[0] += costs.embed_s
    # The group with the least to do gets the head; behind a shift, the one whose turn it is.
    head = int(np.argmin(work)) if shift_at is None else turns(spec.model.num_layers, groups, 1, shift_at)[-1]
    work[head] += attention.compute_s[-1]
    ports = _dealt(_ports(attention, groups), groups, shift_at)
    ports[:, head] += _ports(attention, groups)[:, -1]
    expert_ports = _dealt(_ports(expert, groups), expert_groups)
    times = spec.workload.global_batch_tokens
    busiest = [work.max(), _dealt(expert.compute_s, expert_groups).max()]
    for first in (NIC_SEND, NIC_SEND + 1):
        busiest += [each[[first, first + NIC_RECEIVE - NIC_SEND]].max() for each in (ports, expert_ports)]
    return Homes(head, shift_at), tuple(times * float(seconds) for seconds in busiest)


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


def _ports(side: Side, groups: int) -> Floats:
    return side.port_s if groups > 1 else side.port_s - side.moving_port_s


class _Kept:
    """Activations of a rank on each side."""

    def __init__(
        self,
        spec: CaseSpec,
        option: Option,
        depths: tuple[int, int],
        shift_at: int | None,
        costs: TokenCosts,
        mbs: int,
    ) -> None:
        tokens = mbs * spec.workload.seq_len / (option.tp * option.cp)
        self.attention = tokens * float(_dealt(costs.attention.kept_bytes, depths[0], shift_at).max())
        self.expert = tokens * float(_dealt(costs.expert.kept_bytes, depths[1]).max()) / option.expert_ranks
        self.passing_attention = tokens * float(costs.attention.passing_bytes.max())
        self.passing_expert = tokens * float(costs.expert.passing_bytes.max()) / option.expert_ranks

    def beside(self, state: HeldState, data: Floats, replicas: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Of the fullest attention and expert rank: all bytes with one micro-batch in flight, then the activations."""
        kept = (np.full(len(data), self.attention), self.expert * data)
        attention = state.static_bytes("A", data, replicas) + self.passing_attention + kept[0]
        expert = state.static_bytes("F", data, replicas) + self.passing_expert * data + kept[1]
        return attention, expert, *kept
