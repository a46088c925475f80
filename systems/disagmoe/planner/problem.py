"""The allocation problem in numbers: every shape of a replica that may be chosen, and what each resource allows.

A shape is one choice of p groups, N expert ranks and an option of the layer; a candidate is a shape with R replicas
and M attention ranks. Of a candidate with costs C (GPU-seconds of a step) and V (port-seconds), each resource caps the
rate:

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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout
from bench.errors import BadInput
from bench.flops import step_flops
from bench.system import divisors, worthwhile_offloads, worthwhile_shares
from systems.disagmoe.planner.choices import Choices
from systems.disagmoe.planner.kinds import Kind, Shape, Table, tiles
from systems.disagmoe.planner.tokens import Option, costs_of_options

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


LEAST_TOKENS = 2048
"""Of a micro-batch on a rank: the programme shares sequences by no more ranks than leave it as many."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Candidates as columns; all arrays are over candidates but `caps`, which is [resources, candidates].

    Args:
        shape: number of the candidate's shape in `shapes`.
        replicas, data_ranks: R and M.
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
    replicas: NDArray[np.int64]
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

    def of_shape(self, what: Callable[[Shape], float]) -> NDArray[np.int64]:
        """[candidates]: a whole number of each one's shape."""
        return np.array([what(shape) for shape in self.shapes], dtype=np.int64)[self.shape]

    @cached_property
    def expert_ranks(self) -> NDArray[np.int64]:
        """[candidates]: N."""
        return self.of_shape(lambda shape: shape.option.expert_ranks)

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
            replicas=int(self.replicas[candidate]),
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
    options = list(_options(spec, chosen))
    table = Table.of(options, costs_of_options(spec, options, assumptions))
    shapes: list[Shape] = []
    found: list[list[Floats]] = []
    for depths in _depths(spec, chosen):
        kind = Kind(spec, chosen, assumptions, depths, table)
        number, replicas, data = kind.candidates(sequences)
        if len(data):
            columns = kind.columns(sequences, number, replicas, data)
            found.append([(number + len(shapes)).astype(float), replicas, data, *columns])
            shapes += kind.shapes()
    if not found:
        raise BadInput("tiling", chosen.tiling, f"a tiling with groups that fit {spec.cluster.name}")
    columns = [np.concatenate(each) for each in zip(*found, strict=True)]
    whole, held, caps = [column.astype(np.int64) for column in columns[:6]], columns[6:10], columns[10:]
    experts = np.array([each.option.expert_ranks for each in shapes])[whole[0]]
    return Problem(
        spec,
        chosen,
        tuple(shapes),
        shape=whole[0],
        replicas=whole[1],
        data_ranks=whole[2],
        num_gpus=whole[3],
        num_microbatches=whole[4],
        in_flight=whole[5],
        caps=np.stack(caps),
        attention_bytes=held[0],
        expert_bytes=held[1],
        attention_kept=held[2],
        expert_kept=held[3],
        mixed=_mixed(spec, whole[2], experts) & (not chosen.unequal),
        nics_per_gpu=spec.cluster.nics_per_node / spec.cluster.gpus_per_node,
        step_flops=step_flops(spec.model, spec.workload.seq_len, spec.workload.global_batch_tokens),
    )


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
        if n < max(2, spec.cluster.num_gpus) and tiles(spec.cluster, choices.tiling, n):
            for recompute, shared_on, copy, (tp, cp), offload in ways:
                yield Option(n, recompute, shared_on, copy, tp, cp, offload)


def _shares(spec: CaseSpec, mbs: int) -> tuple[tuple[int, int], ...]:
    """(tp, cp) for sequences that are long, or too few for the cluster; tp only where nothing can be cut by cp.

    Sequences that are shared come one at a time. The walk tries the others.
    """
    too_few = spec.workload.num_sequences < 2 * spec.cluster.num_gpus
    shares = [
        (tp, cp)
        for tp, cp in worthwhile_shares(spec, spec.cluster.gpus_per_node)
        if (tp, cp) == (1, 1) or (min(tp, cp) == 1 and (too_few or spec.workload.seq_len >= LEAST_TOKENS * tp * cp))
    ]
    by_tokens = [(tp, cp) for tp, cp in shares if tp == 1]
    return tuple(by_tokens if len(by_tokens) > 1 else shares) if mbs == 1 else ((1, 1),)


def _mixed(spec: CaseSpec, attention: NDArray[np.int64], expert: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether the ranks of a group of each kind fill nodes, each with the same number of attention ranks."""
    per_node, pair = spec.cluster.gpus_per_node, attention + expert
    return (pair % per_node == 0) & (attention * per_node % pair == 0)
