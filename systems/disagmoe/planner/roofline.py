"""The compute-communication roofline: what a GPU of each side computes for a byte it sends, and what that allows.

Intensity is model FLOPs over bytes sent, of a token's way forth and back through one mean mixture layer. The ridge is
the rate of computation over the rate of a GPU's own NICs: left of it the network decides, right of it the GPU. The
colocated point is the aggregated system: attention and experts share GPUs, hence one ratio of work to bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Workload
from bench.clusters import Cluster
from bench.errors import BadInput
from bench.models import Model
from systems.disagmoe.planner.tokens import (
    NIC_RECEIVE,
    NIC_SEND,
    NVLINK_RECEIVE,
    NVLINK_SEND,
    Counts,
    Option,
    Side,
    token_costs,
    token_counts,
)

SIDES = ("attention", "expert", "colocated")
DEFAULT_EXPERT_RANKS = 16
LEAST_LENGTH = 2
"""Tokens of the shortest sequence, as of `bench.case.Workload`."""


@dataclass(frozen=True)
class Point:
    """One side of one model at one sequence length, per token and mean mixture layer, forward and backward.

    Args:
        side: attention, expert, or colocated (both on the same GPUs).
        top_k, copies, expert_ranks: what the bytes depend on.
        flops, sent_bytes: a token's, all ranks of the side together.
        compute_flops_per_s: rate of the side's kernels, communication left out.
        link_bytes_per_s: rate at which a GPU's own links take what is sent; NICs, or NVLink on one node.
    """

    model: str
    seq_len: int
    side: str
    top_k: int
    copies: str
    expert_ranks: int
    flops: float
    sent_bytes: float
    compute_flops_per_s: float
    link_bytes_per_s: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte sent."""
        return self.flops / self.sent_bytes

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which computation and network take equally long."""
        return self.compute_flops_per_s / self.link_bytes_per_s

    @property
    def attainable_flops_per_s(self) -> float:
        """min(rate of computation, intensity x rate of the links), of one GPU."""
        return min(self.compute_flops_per_s, self.intensity * self.link_bytes_per_s)

    @property
    def position(self) -> float:
        """Intensity over the ridge: below 1 the network decides."""
        return self.intensity / self.ridge

    @property
    def bound_by(self) -> str:
        return "network" if self.position < 1 else "compute"


def roofline(
    model: Model,
    cluster: Cluster,
    seq_lens: Sequence[int],
    assumptions: Assumptions,
    *,
    top_ks: Sequence[int] = (),
    copies: Sequence[str] = ("rank",),
    expert_ranks: int | None = None,
    dtype: str = "bf16",
) -> list[Point]:
    """Points of every length, top-k (the model's own if none is given), way of copying, and side.

    Args:
        expert_ranks: N, or the ranks of a colocated group; 16, or as many as divide the experts.
    Raises:
        BadInput: lengths that are not positive or not ascending; a model, rank number or dtype that cannot be.
    """
    check_lengths(seq_lens)
    found: list[Point] = []
    for top_k in top_ks or (model.top_k,):
        shape = Model.from_fields({**model.model_dump(), "top_k": top_k})
        ranks = _ranks(shape, expert_ranks)
        for way in copies:
            for seq_len in seq_lens:
                workload = Workload.make(seq_len=seq_len, global_batch_tokens=seq_len, dtype=dtype)
                spec = CaseSpec.make(model=shape, cluster=cluster, workload=workload, system="any")
                found += _points(spec, ranks, way, assumptions)
    return found


def check_lengths(seq_lens: Sequence[int], field: str = "seq-len") -> None:
    """Raises BadInput where there is none, or they are too short or not ascending."""
    if not seq_lens:
        raise BadInput(field, "", "at least one sequence length")
    if min(seq_lens) < LEAST_LENGTH:
        raise BadInput(field, min(seq_lens), f"greater than or equal to {LEAST_LENGTH}")
    if any(later <= earlier for earlier, later in pairwise(seq_lens)):
        raise BadInput(field, ",".join(map(str, seq_lens)), "ascending sequence lengths, each once")


def _ranks(model: Model, asked: int | None) -> int:
    if asked is None:
        return max(n for n in range(1, DEFAULT_EXPERT_RANKS + 1) if model.num_experts % n == 0)
    if asked < 1 or model.num_experts % asked:
        raise BadInput("expert_ranks", asked, f"a divisor of the {model.num_experts} experts of {model.name}")
    return asked


def _points(spec: CaseSpec, ranks: int, copies: str, assumptions: Assumptions) -> Iterator[Point]:
    option = Option(ranks, copies=copies)
    costs, counts = token_costs(spec, option, assumptions), token_counts(spec, option, assumptions)
    mixture = np.array([not spec.model.is_dense(layer) for layer in range(spec.model.num_layers)])
    attention, expert = (
        _Totals.of(*each, mixture) for each in zip((costs.attention, costs.expert), counts, strict=True)
    )
    together = _together(attention, expert, spec.cluster, ranks)
    for side, total in zip(SIDES, (attention, expert, together), strict=True):
        yield Point(
            spec.model.name,
            spec.workload.seq_len,
            side,
            spec.model.top_k,
            copies,
            ranks,
            total.flops,
            total.sent_bytes,
            total.flops / total.compute_s,
            total.sent_bytes / total.link_s,
        )


def _together(attention: "_Totals", expert: "_Totals", cluster: Cluster, ranks: int) -> "_Totals":
    """Both sides on the same `ranks`, packed into nodes.

    The residual stays. Of an exchange inside one group, what stays in the node does not cross a NIC; where the group is
    within a node, its links are NVLink, over which only what stays on its rank does not go.
    """
    flops, compute_s = attention.flops + expert.flops, attention.compute_s + expert.compute_s
    sent = attention.sent_bytes - attention.residual_bytes + expert.sent_bytes
    link_s = attention.link_s - attention.residual_s + expert.link_s
    on_node = min(ranks, cluster.gpus_per_node)
    if cluster.num_nodes > 1 and ranks > on_node:
        away = 1.0 - on_node / ranks
    else:
        away = 1.0 - 1.0 / ranks if ranks > 1 else 1.0
        if cluster.num_nodes > 1:
            link_s *= cluster.nic_bytes_per_s_per_gpu / cluster.gpu.nvlink_bytes_per_s
    return _Totals(flops, sent * away, compute_s, link_s * away, 0.0, 0.0)


@dataclass(frozen=True)
class _Totals:
    """Sums over a mean mixture layer. link_s: of the direction that takes longer."""

    flops: float
    sent_bytes: float
    compute_s: float
    link_s: float
    residual_bytes: float
    residual_s: float

    @classmethod
    def of(cls, side: Side, counts: Counts, mixture: np.ndarray) -> "_Totals":
        def mean(column: np.ndarray) -> float:
            return float(column[..., :-1][..., mixture].mean())

        def busiest(ports: np.ndarray) -> float:
            nic = max(mean(ports[NIC_SEND]), mean(ports[NIC_RECEIVE]))
            return nic or max(mean(ports[NVLINK_SEND]), mean(ports[NVLINK_RECEIVE]))

        link_s, residual_s = busiest(side.port_s), busiest(side.moving_port_s)
        sent = mean(counts.sent_bytes)
        return cls(
            mean(counts.flops),
            sent,
            mean(side.compute_s),
            link_s,
            sent * residual_s / link_s if link_s else 0.0,
            residual_s,
        )
