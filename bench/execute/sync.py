"""The end of a step: gradient sums, the global clip norm and the optimizer step, over the ranks that hold the same.

Two sets of parameters live on a rank of a group: those that every rank of the group holds (attention, embedding, head,
shared experts), the same on all replicas; and its own shard of the routed experts, the same on the replicas only. Where
a placement has two directions, the group's mirror image holds the same, and its ranks belong to either set. A
set's parameters and fp32 gradients lie in one flat buffer each, in the same order on all of its ranks, so that a sum
is one collective. With sharded state a rank has the sum, the main weights and the moments of one slice of the buffer
only (ZeRO stage 2, arXiv 1910.02054): reduce-scatter, update, all-gather; the flat order is the slices' order.

A gradient is the sum over the tokens of the global batch of what the loss, divided by the global batch, gives: nothing
here divides by a number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.errors import BadInput
from bench.execute.collectives import all_gather, all_reduce, reduce_scatter
from bench.execute.optimizer import AdamW, clip_scale, square_sum
from bench.execute.parts import ExpertPart
from bench.execute.rank import process_group
from bench.placement import Placement

ALIGNMENT = 64  # elements: every parameter begins at a multiple of 128 bytes in bf16, as GEMM kernels want

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and clipping, equal for all systems.

    The learning rate rises linearly over the first ``warmup_steps`` steps and is constant from then on: step s (from
    0) has lr x min(1, (s + 1) / warmup_steps).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "max_norm"):
            if not getattr(self, name) > 0:
                raise BadInput(f"optimizer.{name}", getattr(self, name), "more than 0")
        if self.warmup_steps < 0:
            raise BadInput("optimizer.warmup_steps", self.warmup_steps, "0 or more")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> OptimizerSettings:
        """From its fields as JSON has them. Raises BadInput."""
        try:
            values: dict[str, Any] = {**fields, "betas": tuple(fields["betas"])}
            return cls(**values)
        except (KeyError, TypeError):
            raise BadInput("optimizer", ", ".join(fields), f"the fields {', '.join(cls.__annotations__)}") from None

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.lr

    def adamw(self, params: Iterable[Tensor], *, offload: bool = False) -> AdamW:
        decay = self.weight_decay
        return AdamW(params, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=decay, offload=offload)


def replicated_ranks(placement: Placement, num_replicas: int, group: str) -> Ranks:
    """Global ranks that hold what every rank of a group holds."""
    ranks = [rank for holder in placement.holders(group) for rank in holder.ranks]
    return tuple(replica * placement.size + rank for replica in range(num_replicas) for rank in ranks)


def shard_ranks(placement: Placement, num_replicas: int, group: str, index: int) -> Ranks:
    """Global ranks that hold the routed experts of a group's rank number ``index``."""
    ranks = [holder.first + index for holder in placement.holders(group)]
    return tuple(replica * placement.size + rank for replica in range(num_replicas) for rank in ranks)


def parameter_sets(placement: Placement, num_replicas: int) -> Iterator[Ranks]:
    """Every set of ranks that may sum gradients, in an order on which all ranks agree."""
    for group in placement.groups:
        yield replicated_ranks(placement, num_replicas, group.name)
        for index in range(group.size):
            yield shard_ranks(placement, num_replicas, group.name, index)


class FlatParameters:
    """The parameters of one set on this rank, as views of one buffer, and their gradients as views of another.

    Args:
        ranks: global ranks of the set; `index` is this rank's place among them.
        shard: whether this rank updates one slice of the buffer, or all of it.
    """

    def __init__(self, params: Sequence[nn.Parameter], ranks: Ranks, index: int, *, shard: bool) -> None:
        self.ranks, self.index, self.shard = ranks, index, shard and len(ranks) > 1
        dtypes = {param.dtype for param in params}
        assert len(dtypes) == 1, dtypes
        self.group = process_group(ranks) if len(ranks) > 1 else None
        offsets = [0]
        for param in params:
            offsets.append(_aligned(offsets[-1] + param.numel()))
        self.chunk = _aligned(-(-offsets[-1] // len(ranks)))
        size, device, dtype = self.chunk * len(ranks), params[0].device, params[0].dtype
        self.weights = torch.zeros(size, dtype=dtype, device=device)
        self.grads = torch.zeros(size, dtype=torch.promote_types(dtype, torch.float32), device=device)
        own = self.slice_of(index) if self.shard else range(size)
        self.pieces = list(self._move(params, offsets, own))

    def _move(self, params: Sequence[nn.Parameter], offsets: Sequence[int], own: range) -> Iterator[Tensor]:
        """Moves parameters into the buffers; yields what this rank updates of them, each with its gradient."""
        for param, offset in zip(params, offsets, strict=False):
            stop = offset + param.numel()
            view = self.weights[offset:stop].view(param.shape)
            view.copy_(param.detach())
            param.data = view
            param.main_grad = self.grads[offset:stop].view(param.shape)  # type: ignore[attr-defined]
            low, high = max(offset, own.start), min(stop, own.stop)
            if low < high:
                # The optimizer tells by the number of dimensions what decays, so a piece keeps having two.
                shape = (1, -1) if param.dim() > 1 else (-1,)
                piece = self.weights[low:high].view(shape)
                piece.main_grad = self.grads[low:high].view(shape)  # type: ignore[attr-defined]
                yield piece

    @property
    def counted(self) -> list[Tensor]:
        """Gradients that this rank contributes to the norm: each element counts on one rank of the set."""
        mine = self.shard or self.index == 0
        return [piece.main_grad for piece in self.pieces] if mine else []  # type: ignore[attr-defined]

    def sum_gradients(self) -> None:
        """Sums over the set: with sharded state this rank's slice, and what is outside it is undefined after."""
        if self.group is None:
            return
        if self.shard:
            reduce_scatter(self._slice(self.grads), self.grads, self.group)
        else:
            all_reduce(self.grads, self.group)

    def gather_gradients(self) -> None:
        """After `sum_gradients`: the whole sum on every rank, to be looked at."""
        self._gather(self.grads)

    def gather_weights(self) -> None:
        """Gives every rank the slices that the others have updated."""
        self._gather(self.weights)

    def _gather(self, buffer: Tensor) -> None:
        if self.group is not None and self.shard:
            all_gather(buffer, self._slice(buffer), self.group)

    def slice_of(self, index: int) -> range:
        """The elements of the buffer that are shared out to a rank of the set."""
        return range(index * self.chunk, (index + 1) * self.chunk)

    def _slice(self, buffer: Tensor) -> Tensor:
        own = self.slice_of(self.index)
        return buffer[own.start : own.stop]


class GradientSync:
    """Gradient sums and updates of one rank.

    Made on all ranks together, before the first step: the parameters of ``parts`` are moved into flat buffers.

    Args:
        parts: the parts of the model that this rank holds, in an order on which the ranks of its group agree.
        rank: global rank.
        shard_state: whether the ranks of a set share the optimizer's state out among them.
        offload: whether it lives with the host, see `AdamW`.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        placement: Placement,
        rank: int,
        num_replicas: int,
        settings: OptimizerSettings,
        *,
        device: torch.device,
        shard_state: bool = True,
        offload: bool = False,
    ) -> None:
        self.settings, self.device = settings, device
        for ranks in parameter_sets(placement, num_replicas):
            if len(ranks) > 1:
                process_group(ranks)
        place = rank % placement.size
        group = next(group for group in placement.groups if place in group.ranks)
        routed, others = split_parameters(parts)
        everywhere = replicated_ranks(placement, num_replicas, group.name)
        copies = shard_ranks(placement, num_replicas, group.name, place - group.first)
        self.flats = [
            FlatParameters(params, ranks, ranks.index(rank), shard=shard_state)
            for params, ranks in ((others, everywhere), (routed, copies))
            if params
        ]
        self.optimizer = settings.adamw((piece for flat in self.flats for piece in flat.pieces), offload=offload)
        self.norm = torch.zeros((), dtype=torch.float64, device=device)
        if device.type == "cuda":
            self._connect()

    def _connect(self) -> None:
        """Runs every collective once, on zeros and on weights that all ranks have: NCCL connects at first use, with
        the host waiting, and in the middle of a step other ranks may be waiting for what this host has yet to do.
        """
        for flat in self.flats:
            flat.sum_gradients()
            flat.gather_weights()
        all_reduce(self.norm)
        self.optimizer.warm_up()
        torch.cuda.synchronize(self.device)

    @property
    def state_bytes(self) -> int:
        """Bytes of moments, and of main weights that are not the parameters, on this rank or with its host."""
        return sum(tensor.nbytes for tensor in self.optimizer.state)

    def sync(self) -> None:
        """Action SYNC: sums this rank's gradients over the ranks that hold the same parameters."""
        for flat in self.flats:
            flat.sum_gradients()

    def update(self, step: int) -> Tensor:
        """Action UPDATE of a step, after every rank's `sync`: clip, AdamW, weights to all, gradients to zero.

        Returns:
            the norm of all gradients before clipping, an fp64 scalar on the device, equal on all ranks.
        """
        counted = [grad for flat in self.flats for grad in flat.counted]
        squares = square_sum(counted, self.device)
        if dist.get_world_size() > 1:
            all_reduce(squares)
        self.norm = squares.sqrt()
        self.optimizer.lr = self.settings.lr_at(step)
        self.optimizer.step(clip_scale(self.norm, self.settings.max_norm))
        for flat in self.flats:
            flat.gather_weights()
            flat.grads.zero_()
        return self.norm


def split_parameters(parts: Sequence[nn.Module]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of routed experts, which differ between the ranks of a group, and all others."""
    shard: list[nn.Parameter] = []
    replicated: list[nn.Parameter] = []
    for part in parts:
        for name, param in part.named_parameters():
            routed = isinstance(part, ExpertPart) and name in ("fc1", "fc2")
            (shard if routed else replicated).append(param)
    return shard, replicated


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
