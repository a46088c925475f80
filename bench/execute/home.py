"""What lives on a rank: which part of which replica it is, its modules, and who it works with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bench.action import Action, Kind
from bench.case import Batch
from bench.errors import BadInput
from bench.execute.exchange import Deal
from bench.execute.host_activations import HostLink
from bench.execute.init import initialise
from bench.execute.island import Island
from bench.execute.parts import AttentionPart, EmbedPart, ExpertPart, HeadPart
from bench.execute.streams import Mark, Streams
from bench.execute.transport import Channel
from bench.placement import Group
from bench.program import Program

Part = tuple[Kind, int]


class Home:
    """A rank's place in the world, and the parts on it.

    Args:
        offload: whether what attention and experts keep for their backward is with the host in between.

    Attributes:
        replica, local, group, index: number of the replica, rank within it, its group, rank within the group.
        tokens: T, of one micro-batch on one data rank.
        chunks: number of slices in which they pass the experts.
        parts, islands: by (kind, layer); layer 0 for the embedding and the head.
    """

    def __init__(
        self,
        program: Program,
        batch: Batch,
        rank: int,
        *,
        seq_len: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        norm_jitter: float = 0.0,
        drawn_on: str = "host",
        offload: bool = False,
    ) -> None:
        placement = program.plan.placement
        if not 0 <= rank < batch.num_replicas * placement.size:
            raise BadInput("rank", rank, f"0 to {batch.num_replicas * placement.size - 1}")
        self.program, self.model, self.placement, self.batch = program, program.model, placement, batch
        self.rank, self.seq_len, self.device, self.dtype = rank, seq_len, device, dtype
        self.replica, self.local = divmod(rank, placement.size)
        self.group = _group_of(placement.groups, self.local)
        self.index = self.local - self.group.first
        self.tokens, self.chunks = batch.mbs * seq_len, program.plan.chunks
        if self.tokens % self.chunks:
            raise BadInput("plan.chunks", self.chunks, f"a divisor of a micro-batch's {self.tokens} tokens a rank")
        self.shared_on_expert = placement.shared_on == "expert" and self.model.num_shared_experts > 0
        self.parts: dict[Part, nn.Module] = dict(self._parts())
        for part in self.parts.values():
            initialise(part, seed, norm_jitter=norm_jitter, drawn_on=drawn_on)
        link = HostLink(device) if offload else None
        self.islands = {
            key: Island(part, link if key[0] in (Kind.ATTENTION, Kind.EXPERT) else None)
            for key, part in self.parts.items()
        }
        self._accumulating = {key: _Turn() for key in self.parts}
        self._channels: dict[Action, Channel] = {}

    def ranks(self, group: str) -> list[int]:
        """Global ranks of a group of this replica."""
        first = self.replica * self.placement.size
        return [first + rank for rank in self.placement.by_name[group].ranks]

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """[T, ...] -> views [T / chunks, ...] of every chunk's tokens."""
        return whole.split(self.tokens // self.chunks)

    def channel(self, transfer: Action) -> Channel:
        """The channel of a transfer of this replica."""
        transfer = transfer._replace(microbatch=transfer.microbatch % self.placement.directions, chunk=0)
        if transfer not in self._channels:
            self._channels[transfer] = Channel.of(transfer, self.placement, self.rank - self.local)
        return self._channels[transfer]

    def deal(self, layer: int) -> Deal:
        """How the tokens of this rank, or of the data rank with this index, reach a layer's experts."""
        num_ranks = self.placement.by_name[self.placement.home(Kind.EXPERT, layer)].size
        per_rank = self.model.num_experts // num_ranks
        return Deal(num_ranks, per_rank, self.program.plan.copies, self.index, self.shared_on_expert)

    def first_sequence(self, microbatch: int) -> int:
        """Number, within the global batch, of the first of this rank's sequences; see `data.sequence_index`."""
        batch = self.batch
        return ((self.replica * batch.num_microbatches + microbatch) * batch.num_ranks + self.index) * batch.mbs

    @contextmanager
    def accumulating(self, part: Part, streams: Streams) -> Iterator[None]:
        """Passes that add to one part's gradients take turns, in whatever queues they stand."""
        turn = self._accumulating[part]
        with turn.lock:
            if turn.last is not None:
                streams.wait(turn.last)
            yield
            turn.last = streams.mark()

    def _parts(self) -> Iterator[tuple[Part, nn.Module]]:
        name, model, placement = self.group.name, self.model, self.placement
        where: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        if name in placement.homes(Kind.EMBED):
            yield (Kind.EMBED, 0), EmbedPart(model, **where)
        for layer in range(model.num_layers):
            if name in placement.homes(Kind.ATTENTION, layer):
                yield (
                    (Kind.ATTENTION, layer),
                    AttentionPart(
                        model,
                        layer,
                        global_sequences=self.batch.num_sequences,
                        shared_on_attention=not self.shared_on_expert,
                        **where,
                    ),
                )
            if not model.is_dense(layer) and name in placement.homes(Kind.EXPERT, layer):
                deal = self.deal(layer)
                yield (
                    (Kind.EXPERT, layer),
                    ExpertPart(
                        model,
                        layer,
                        first_expert=self.index * deal.experts_per_rank,
                        num_local_experts=deal.experts_per_rank,
                        shared_on_expert=self.shared_on_expert,
                        **where,
                    ),
                )
        if name in placement.homes(Kind.HEAD):
            yield (Kind.HEAD, 0), HeadPart(model, **where)


class _Turn:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: Mark | None = None


def _group_of(groups: tuple[Group, ...], local: int) -> Group:
    return next(group for group in groups if local in group.ranks)
