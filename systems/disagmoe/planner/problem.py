"""The allocation problem in numbers: every shape of a replica that may be chosen, and what each resource allows.

A shape is one choice of p groups, N expert ranks, R replicas and an option of the layer; a candidate is a shape with M
attention ranks. Of a candidate with costs C (GPU-seconds of a step) and V (port-seconds), each resource caps the rate:

    attention compute   r C_A <= p R M        attention NICs   r V_A <= NICs of all attention groups
    expert compute      r C_F <= p_F R N      expert NICs      r V_F <= NICs of all expert groups

p_F is p unless unequal depths are asked for. C and V are those of the busiest group times the number of groups, so
that layers dealt unevenly and the head count. Both are stretched by the time in which a pipeline of 2 p groups and 2 p
transfers fills and drains: (4 p - 1) / (m v) of the step for m micro-batches and v = L / p turns, with p the mean of p
and p_F: the bubble of an interleaved pipeline with transfers as stages of their own. The optimizer step is added to the
compute of its ranks.

A sixth cap is Little's law: a micro-batch takes a latency l from its embedding to its last gradient, so m of them take
m l / q when q are in flight, and q is as many as memory holds, and at most 4 p. Without it the best split on paper
would be one whose activations leave room for a single micro-batch, where attention and experts wait for each other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout
from bench.errors import BadInput
from bench.flops import step_flops
from bench.system import divisors, worthwhile_offloads, worthwhile_shares
from systems.disagmoe.planner.state import HeldState, held_state
from systems.disagmoe.planner.tokens import NIC_RECEIVE, NIC_SEND, Option, Side, TokenCosts, token_costs
from systems.disagmoe.shift import Homes, best_shift, spreads, turns

Floats = NDArray[np.float64]

RESOURCES = (
    "attention compute",
    "expert compute",
    "attention NICs",
    "expert NICs",
    "attention NVLink",
    "expert NVLink",
    "micro-batches in flight",
)
MAX_GROUPS = 16
MAX_UNEQUAL = 8  # p + p_F where they differ: a pair of ratios such as 5:3 needs no more


@dataclass(frozen=True)
class Choices:
    """What the planner may choose from, next to M and N. None: what the model and the batch allow.

    Args:
        groups: values of p.
        unequal: numbers of expert groups that differ from p, instead of equal ones.
        recompute, shared_on, copies: values of the layout's fields of these names.
        tiling: "any", or "nodes": every group takes whole nodes or an equal part of one.
        nics: "own": a rank uses its share of its node's NICs. "sets": the NICs of a node are dealt to its attention
            and its expert ranks as is best, where every node holds both in equal parts. No transport here can honour
            sets, nor does the placement lay groups over nodes in that way: the gain is a bound.
        mbs: sequences of a micro-batch on an attention rank.
        shares: (tp, cp), ranks that share a sequence; what a sequence's length or the number of sequences calls for.
        offload: where the optimizer's state lives; with the host too where it crowds the GPUs.
    """

    groups: tuple[int, ...] | None = None
    unequal: bool = False
    recompute: tuple[str, ...] = ("none", "full", "redispatch")
    shared_on: tuple[str, ...] | None = None
    copies: tuple[str, ...] | None = None
    tiling: str = "any"
    nics: str = "own"
    mbs: int = 1
    shares: tuple[tuple[int, int], ...] | None = None
    offload: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("tiling", ("any", "nodes")), ("nics", ("own", "sets"))):
            if getattr(self, name) not in allowed:
                raise BadInput(name, getattr(self, name), " or ".join(allowed))


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


@dataclass(frozen=True, eq=False)
class Problem:
    """Candidates as columns; all arrays are over candidates but `caps`, which is [resources, candidates].

    Args:
        shape: number of the candidate's shape in `shapes`.
        data_ranks: M.
        num_gpus: GPUs used.
        in_flight: micro-batches that memory holds, at most 4 p and all there are.
        caps: steps/s that each resource allows.
        attention_bytes, expert_bytes: of a rank with one micro-batch in flight: state, activations, buffers.
        attention_kept, expert_kept: of one micro-batch's activations alone.
        mixed: whether every node can hold attention and expert ranks in equal parts.
    """

    spec: CaseSpec
    choices: Choices
    shapes: tuple[Shape, ...]
    shape: NDArray[np.int64]
    data_ranks: NDArray[np.int64]
    num_gpus: NDArray[np.int64]
    num_microbatches: NDArray[np.int64]
    in_flight: NDArray[np.int64]
    caps: Floats
    attention_bytes: Floats
    expert_bytes: Floats
    attention_kept: Floats
    expert_kept: Floats
    mixed: NDArray[np.bool_]
    nics_per_gpu: float
    step_flops: float

    def __len__(self) -> int:
        return len(self.shape)

    def kept_bytes(self, candidate: int) -> tuple[float, float]:
        """Activations of one micro-batch, on an attention and on an expert rank."""
        return float(self.attention_kept[candidate]), float(self.expert_kept[candidate])

    def layout(self, candidate: int) -> Layout:
        """The candidate as a layout, with rounds of as many micro-batches as memory holds."""
        shape = self.shapes[self.shape[candidate]]
        return Layout.make(
            attention_ranks=int(self.data_ranks[candidate]),
            expert_ranks=shape.option.expert_ranks,
            groups=shape.groups,
            expert_groups=_or_none(shape.groups, shape.expert_groups),
            replicas=shape.replicas,
            head_group=shape.homes.head_group,
            shift_at=shape.homes.shift_at,
            mbs=self.choices.mbs,
            recompute=shape.option.recompute,
            shared_on=shape.option.shared_on,
            copies=shape.option.copies,
            tp=shape.option.tp,
            cp=shape.option.cp,
            offload=shape.option.offload,
            round_length=int(self.in_flight[candidate]),
        )


def problem(spec: CaseSpec, assumptions: Assumptions, choices: Choices | None = None) -> Problem:
    """All candidates of a spec, those that exceed the cluster's GPUs or memory among them: the programme decides.

    Raises BadInput where the global batch holds no whole micro-batch.
    """
    chosen = choices or Choices()
    sequences, left = divmod(spec.workload.num_sequences, chosen.mbs)
    if left or not sequences:
        raise BadInput("layout.mbs", chosen.mbs, f"a divisor of the batch's {spec.workload.num_sequences} sequences")
    shapes: list[Shape] = []
    found: list[list[Floats]] = []
    for depths, option in product(_depths(spec, chosen), _options(spec, chosen)):
        kind = _Kind(spec, chosen, assumptions, depths, option)
        for replicas in divisors(sequences):
            most = (spec.cluster.num_gpus // replicas - depths[1] * option.expert_ranks) // depths[0]
            if most < 1 and replicas > 1:
                break
            data = kind.data_ranks(sequences // replicas, most)
            if len(data):
                number = np.full(len(data), float(len(shapes)))
                found.append([number, *kind.columns(sequences, replicas, data)])
                shapes.append(kind.shape(replicas))
    if not found:
        raise BadInput("tiling", chosen.tiling, f"a tiling with groups that fit {spec.cluster.name}")
    number, data, used, microbatches, in_flight, *rest = (np.concatenate(each) for each in zip(*found, strict=True))
    held, caps = rest[:4], rest[4:]
    shape = number.astype(np.int64)
    experts = np.array([each.option.expert_ranks for each in shapes])[shape]
    return Problem(
        spec,
        chosen,
        tuple(shapes),
        shape=shape,
        data_ranks=data.astype(np.int64),
        num_gpus=used.astype(np.int64),
        num_microbatches=microbatches.astype(np.int64),
        in_flight=in_flight.astype(np.int64),
        caps=np.stack(caps),
        attention_bytes=held[0],
        expert_bytes=held[1],
        attention_kept=held[2],
        expert_kept=held[3],
        mixed=_mixed(spec, data.astype(np.int64), experts) & (not chosen.unequal),
        nics_per_gpu=spec.cluster.nics_per_node / spec.cluster.gpus_per_node,
        step_flops=step_flops(spec.model, spec.workload.seq_len, spec.workload.global_batch_tokens),
    )


class _Kind:
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

    def data_ranks(self, sequences: int, most: int) -> Floats:
        """M that deal a replica's sequences out: tp x cp ranks to each lane. At least one, for what is missing."""
        shared = self.option.tp * self.option.cp
        ranks = (shared * lanes for lanes in divisors(sequences))
        fits = [m for m in ranks if m <= max(most, shared) and _tiles(self.spec, self.choices, m)]
        return np.array(fits, dtype=float)

    def columns(self, sequences: int, replicas: int, data: Floats) -> list[Floats]:
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


def _ranks(attention: Floats, expert: Floats) -> tuple[Floats, ...]:
    """Ranks of a group whose work or ports make up each of `RESOURCES` but the last."""
    return (attention, expert) * 3


def _groups(spec: CaseSpec, choices: Choices) -> Iterable[int]:
    if choices.groups is not None:
        return choices.groups
    most = min(MAX_GROUPS, spec.model.num_layers, max(1, spec.cluster.num_gpus // 2))
    return [p for p in range(1, most + 1) if p <= 8 or p % 4 == 0]


def _depths(spec: CaseSpec, choices: Choices) -> list[tuple[int, int]]:
    """Pairs of p and p_F."""
    found = _groups(spec, choices)
    if not choices.unequal:
        return [(p, p) for p in found]
    return [(a, f) for a in found for f in found if a != f and a + f <= MAX_UNEQUAL]


def _or_none(groups: int, expert_groups: int) -> int | None:
    return None if expert_groups == groups else expert_groups


def _options(spec: CaseSpec, choices: Choices) -> Iterator[Option]:
    shared = choices.shared_on or (("attention", "expert") if spec.model.num_shared_experts else ("attention",))
    copies = choices.copies or (("rank", "node") if spec.cluster.num_nodes > 1 else ("rank",))
    shares = choices.shares or _shares(spec, choices.mbs)
    offloads = choices.offload or worthwhile_offloads(spec, choices.mbs)
    ways = list(product(choices.recompute, shared, copies, shares, offloads))
    for n in divisors(spec.model.num_experts):
        if n < max(2, spec.cluster.num_gpus) and _tiles(spec, choices, n):
            for recompute, shared_on, copy, (tp, cp), offload in ways:
                yield Option(n, recompute, shared_on, copy, tp, cp, offload)


def _shares(spec: CaseSpec, mbs: int) -> tuple[tuple[int, int], ...]:
    """(tp, cp) for sequences that are long, or too few for the cluster; tp only where nothing can be cut by cp.

    Sequences that are shared come one at a time.
    """
    per_node = spec.cluster.gpus_per_node
    found = list(worthwhile_shares(spec, per_node, max(1, spec.cluster.num_gpus // per_node), 1))
    by_tokens = [(tp, cp) for tp, cp in found if tp == 1]
    return tuple(by_tokens if len(by_tokens) > 1 else found) if mbs == 1 else ((1, 1),)


def _tiles(spec: CaseSpec, choices: Choices, ranks: int) -> bool:
    per_node = spec.cluster.gpus_per_node
    return choices.tiling == "any" or ranks % per_node == 0 or per_node % ranks == 0


def _mixed(spec: CaseSpec, attention: NDArray[np.int64], expert: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the ranks of a group of each kind fill nodes, each with the same number of attention ranks."""
    per_node, pair = spec.cluster.gpus_per_node, attention + expert
    return (pair % per_node == 0) & (attention * per_node % pair == 0)


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

    def beside(self, state: HeldState, data: Floats, replicas: int) -> tuple[Floats, Floats, Floats, Floats]:
        """Of the fullest attention and expert rank: all bytes with one micro-batch in flight, then the activations."""
        kept = (np.full(len(data), self.attention), self.expert * data)
        attention = state.static_bytes("A", data, replicas) + self.passing_attention + kept[0]
        expert = state.static_bytes("F", data, replicas) + self.passing_expert * data + kept[1]
        return attention, expert, *kept
