"""Candidates of one depth in numbers: what they hold, and what each resource allows; see `problem`."""

from collections.abc import Iterator, Sequence
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
from systems.disagmoe.planner.tokens import NIC_RECEIVE, NIC_SEND, Option, Side, TokenCosts
from systems.disagmoe.shift import Homes, best_shift, spreads, turns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_SIDES = "AF"


@dataclass(frozen=True)
class Shape:
    """p, p_F and the layer's option, N among it; where head and layers are."""

    groups: int
    expert_groups: int
    option: Option
    homes: Homes


class Table(NamedTuple):
    """What a token of every option costs: `costs` has one more axis than those of one option, the first, of options."""

    options: tuple[Option, ...]
    costs: TokenCosts

    @classmethod
    def of(cls, options: Sequence[Option], costs: Sequence[TokenCosts]) -> "Table":
        def stacked(name: str) -> Side:
            sides = [getattr(each, name) for each in costs]
            return Side(*(np.stack([getattr(side, field) for side in sides]) for field in vars(sides[0])))

        embed_s = np.array([each.embed_s for each in costs])
        return cls(tuple(options), TokenCosts(stacked("attention"), stacked("expert"), embed_s))

    def each(self, field: str) -> Floats:
        return np.array([getattr(option, field) for option in self.options], dtype=float)


class Kind:
    """Candidates of one depth: all options, numbers of replicas and of data ranks."""

    def __init__(
        self, spec: CaseSpec, choices: Choices, assumptions: Assumptions, depths: tuple[int, int], table: Table
    ) -> None:
        self.spec, self.choices, self.assumptions, self.depths, self.table = spec, choices, assumptions, depths, table
        self.homes = _homes(spec, table.costs, depths[0])
        self.load = _load(spec, table.costs, depths, self.homes)
        self.shared = table.each("tp") * table.each("cp")
        self.tokens = choices.mbs * spec.workload.seq_len / self.shared
        self.latency = _Latency.of(table.costs)

    def shapes(self) -> list[Shape]:
        """One for every option."""
        return [Shape(*self.depths, *each) for each in zip(self.table.options, self.homes, strict=True)]

    def candidates(self, sequences: int) -> tuple[Ints, Floats, Floats]:
        """[candidates] of options' numbers, of R and of M: numbers of replicas and data ranks that deal them out."""
        cluster, tiling = self.spec.cluster, self.choices.tiling
        found = [
            _dealt_out(cluster, tiling, sequences, self.depths, option.expert_ranks, option.tp * option.cp)
            for option in self.table.options
        ]
        number = np.repeat(np.arange(len(found)), [len(data) for _, data in found])
        replicas, data = (np.concatenate(each) for each in zip(*found, strict=True))
        return number, replicas, data

    def columns(self, sequences: int, number: Ints, replicas: Floats, data: Floats) -> list[Floats]:
        """GPUs, micro-batches, those in flight, four of bytes, and caps of every resource, over candidates."""
        (groups, expert_groups), spec = self.depths, self.spec
        experts, shared = self.table.each("expert_ranks")[number], self.shared[number]
        microbatches = sequences * shared / (replicas * data)
        depth = (groups + expert_groups) / 2
        fill = 1.0 + (4 * depth - 1) * depth / (microbatches * spec.model.num_layers)
        held, update_s = self._held(number, replicas, data, experts)
        with np.errstate(divide="ignore"):
            ranks = (data, experts) * 3
            busy = [c[number] * fill / (replicas * n) for n, c in zip(ranks, self.load, strict=True)]
            lanes = [1.0 / each for each in (busy[0] + update_s[0], busy[1] + update_s[1], *busy[2:])]
        used = replicas * (groups * data + expert_groups * experts)
        in_flight = _in_flight(float(spec.cluster.gpu.memory_bytes), *held)
        in_flight = np.minimum(np.minimum(in_flight, round(4 * depth)), microbatches)
        latency_s = self.latency.seconds(self.tokens[number], number, data / experts)
        return [used, microbatches, in_flight, *held, *lanes, in_flight / (microbatches * latency_s)]

    def _held(
        self, number: Ints, replicas: Floats, data: Floats, experts: Floats
    ) -> tuple[tuple[Floats, Floats, Floats, Floats], tuple[Floats, Floats]]:
        """Of the fullest attention and expert rank: bytes with one micro-batch in flight, then its activations; and
        seconds of their optimizer steps."""
        static, update_s = np.zeros((2, 2, len(number)))
        for state, of_options in self._states():
            here = np.flatnonzero(of_options[number])
            ranks = (data[here], replicas[here], experts[here])
            for side, name in enumerate(_SIDES):
                static[side, here] = state.static_bytes(name, *ranks)
                update_s[side, here] = state.update_s(name, *ranks)
        attention, expert = self.table.costs.attention, self.table.costs.expert
        shifts = [homes.shift_at for homes in self.homes]
        attention_kept = self.tokens * _dealt(attention.kept_bytes, self.depths[0], shifts).max(axis=-1)
        expert_kept = self.tokens * _dealt(expert.kept_bytes, self.depths[1]).max(axis=-1)
        passing = [self.tokens * side.passing_bytes.max(axis=-1) for side in (attention, expert)]
        kept = (attention_kept[number], expert_kept[number] * data / experts)
        first = static[0] + passing[0][number] + kept[0]
        second = static[1] + passing[1][number] * data / experts + kept[1]
        return (first, second, *kept), (update_s[0], update_s[1])

    def _states(self) -> Iterator[tuple[HeldState, NDArray[np.bool_]]]:
        """What ranks hold, and the options that it is of."""
        keys = [
            (homes, option.shared_on, option.tp, option.cp, option.offload)
            for option, homes in zip(self.table.options, self.homes, strict=True)
        ]
        for key in dict.fromkeys(keys):
            of_options = np.array([each == key for each in keys])
            option = self.table.options[int(of_options.argmax())]
            yield held_state(self.spec, option, self.depths, key[0], self.assumptions), of_options


@lru_cache(maxsize=4096)
def _dealt_out(
    cluster: Cluster, tiling: str, sequences: int, depths: tuple[int, int], expert_ranks: int, shared: int
) -> tuple[Floats, Floats]:
    """[candidates] of R and of M, `shared` ranks to each of a replica's lanes.

    Of every number of replicas that leaves room; of one replica at least one M, for what is missing.
    """
    replicas, lanes = _lanes(sequences)
    most = (cluster.num_gpus // replicas - depths[1] * expert_ranks) // depths[0]
    ranks = shared * lanes
    fits = ((most >= 1) | (replicas == 1)) & (ranks <= np.maximum(most, shared))
    per_node = cluster.gpus_per_node
    if tiling != "any":
        fits &= (ranks % per_node == 0) | (per_node % ranks == 0)
    return replicas[fits].astype(float), ranks[fits].astype(float)


@lru_cache(maxsize=64)
def _lanes(sequences: int) -> tuple[Ints, Ints]:
    """Pairs of numbers whose product divides the sequences, ascending."""
    pairs = [(replicas, lanes) for replicas in divisors(sequences) for lanes in divisors(sequences // replicas)]
    both = np.array(pairs, dtype=np.int64)
    return both[:, 0], both[:, 1]


def tiles(cluster: Cluster, tiling: str, ranks: int) -> bool:
    """Whether groups of so many ranks take whole nodes or equal parts of one, where `tiling` asks for that."""
    per_node = cluster.gpus_per_node
    return tiling == "any" or ranks % per_node == 0 or per_node % ranks == 0


def _dealt(column: Floats, groups: int, shifts: Sequence[int | None] | None = None) -> Floats:
    """[options, ..., groups]: sums over the layers of each group; the last slot, the head's, is left out."""
    if shifts is not None and any(shift is not None for shift in shifts):
        sums = np.zeros((*column.shape[:-1], groups))
        for shift in set(shifts):
            same = np.array([each == shift for each in shifts])
            sums[same] = _turned(column[same], groups, shift)
        return sums
    return _turned(column, groups, None)


def _turned(column: Floats, groups: int, shift_at: int | None) -> Floats:
    layers = column.shape[-1] - 1
    moved = layers if shift_at is None else shift_at
    sums = np.zeros((*column.shape[:-1], groups))
    for g in range(groups):
        sums[..., g] = column[..., g:moved:groups].sum(axis=-1)
        if moved < layers:
            sums[..., g] += column[..., moved + (g - 1 - moved) % groups : layers : groups].sum(axis=-1)
    return sums


def _homes(spec: CaseSpec, costs: TokenCosts, groups: int) -> list[Homes]:
    """Of every option the best group for the head and the best shift: the group with the least to do gets the head;
    behind a shift, the one whose turn it is."""
    compute_s = costs.attention.compute_s
    shifts: list[int | None] = [None] * len(compute_s)
    if groups > 1 and spreads(spec.model):
        rows, which = np.unique(compute_s, axis=0, return_inverse=True)
        of_rows = [best_shift(row, groups) for row in rows]
        shifts = [of_rows[k] for k in which.ravel().tolist()]
    work = _dealt(compute_s, groups, shifts)
    work[:, 0] += costs.embed_s
    least = work.argmin(axis=1).tolist()
    behind = {shift: turns(spec.model.num_layers, groups, 1, shift)[-1] for shift in set(shifts)}
    return [Homes(head if shift is None else behind[shift], shift) for head, shift in zip(least, shifts, strict=True)]


def _load(spec: CaseSpec, costs: TokenCosts, depths: tuple[int, int], homes: Sequence[Homes]) -> list[Floats]:
    """[options] of every resource but the last: GPU- or port-seconds of a step on the busiest group."""
    groups, expert_groups = depths
    attention, expert = costs.attention, costs.expert
    shifts = [each.shift_at for each in homes]
    each, head = np.arange(len(homes)), np.array([each.head_group for each in homes])
    work = _dealt(attention.compute_s, groups, shifts)
    work[:, 0] += costs.embed_s
    work[each, head] += attention.compute_s[:, -1]
    ports = _dealt(_ports(attention, groups), groups, shifts)
    ports[each, :, head] += _ports(attention, groups)[..., -1]
    expert_ports = _dealt(_ports(expert, groups), expert_groups)
    busiest = [work.max(axis=1), _dealt(expert.compute_s, expert_groups).max(axis=1)]
    for first in (NIC_SEND, NIC_SEND + 1):
        both = [first, first + NIC_RECEIVE - NIC_SEND]
        busiest += [side[:, both].max(axis=(1, 2)) for side in (ports, expert_ports)]
    return [spec.workload.global_batch_tokens * seconds for seconds in busiest]


class _Latency(NamedTuple):
    """Seconds per token of a micro-batch's way forth and back, with nothing else in the way, [options].

    attention_s, expert_s, transfer_s of a token on its attention rank; expert_s and expert_transfer_s times M / N.
    """

    attention_s: Floats
    expert_s: Floats
    transfer_s: Floats
    expert_transfer_s: Floats

    @classmethod
    def of(cls, costs: TokenCosts) -> "_Latency":
        """Weight gradients are waited for by nobody; a residual travels beside the dispatch and the combine."""
        sides = (costs.attention, costs.expert)
        compute = [(side.compute_s - side.weight_s).sum(axis=-1) for side in sides]
        # A transfer takes the longer of NIC and NVLink of the busier end.
        moved = [side.port_s - side.moving_port_s for side in sides]
        longer = [each.reshape(len(each), 2, 2, -1).max(axis=2).sum(axis=(1, 2)) for each in moved]
        return cls(compute[0] + costs.embed_s, compute[1], *longer)

    def seconds(self, tokens: Floats, number: Ints, more: Floats) -> Floats:
        """[candidates] of options: of a micro-batch of `tokens` an attention rank; `more` is M / N."""
        transfer_s = np.maximum(self.transfer_s[number], self.expert_transfer_s[number] * more)
        return np.asarray(tokens * (self.attention_s[number] + self.expert_s[number] * more + transfer_s))


def _in_flight(memory: float, attention: Floats, expert: Floats, attention_kept: Floats, expert_kept: Floats) -> Floats:
    """Micro-batches whose activations fit, at least one."""
    more = np.minimum((memory - attention) / attention_kept, (memory - expert) / expert_kept)
    return np.asarray(1.0 + np.maximum(0.0, np.trunc(more)))


def _ports(side: Side, groups: int) -> Floats:
    return side.port_s if groups > 1 else side.port_s - side.moving_port_s
