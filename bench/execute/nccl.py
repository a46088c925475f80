"""Payload over NCCL, one communicator a channel; counts over gloo.

Operations of one communicator run in the order in which they were posted, on every rank the same. Channels are posted
to by different threads in no common order, so each has a communicator of its own. A send waits on the device for its
receive and the other way round: receives of a group that also sends on the channel must be in the same launch.

Kernels that wait for a peer sit in hardware queues: with fewer queues than streams one can block another that it waits
for. The process that starts the ranks has to set CUDA_DEVICE_MAX_CONNECTIONS to `DEVICE_CONNECTIONS` before CUDA is
initialised.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.errors import BadInput
from bench.execute.transport import Channel, GlooTransport, Packet, Pending, Works, local_copies
from bench.transports import NCCL_BLOCKS

DEVICE_CONNECTIONS = 32


class NcclTransport(GlooTransport):
    """See the module. Communicators are kept by their ranks, kind and pass, so that layouts share them.

    Args:
        blocks: thread blocks that a communicator's kernels may have on one GPU.
    """

    occupies_gpu: bool = True

    def __init__(self, device: torch.device, timeout_s: float, blocks: int = NCCL_BLOCKS) -> None:
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        if not connections.isdigit() or int(connections) < DEVICE_CONNECTIONS:
            raise BadInput("CUDA_DEVICE_MAX_CONNECTIONS", connections, f"{DEVICE_CONNECTIONS} before CUDA starts")
        super().__init__(timeout_s)
        self.blocks = blocks
        self.device, self.timeout = device, timedelta(seconds=timeout_s)
        self._groups: dict[Channel, Any] = {}

    def open(self, channels: Iterable[Channel]) -> None:
        for channel in channels:
            if channel not in self._groups:
                self._groups[channel] = self._connect(channel)

    def _connect(self, channel: Channel) -> Any:
        """A communicator whose connections are all made: NCCL makes them at first use, with the host waiting."""
        if len(channel.ranks) == 1:  # only messages to itself, which are copies
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = self.blocks
        name = f"{channel.kind.name}:{channel.pass_.name}"
        group = dist.new_group(channel.ranks, backend="nccl", timeout=self.timeout, pg_options=options, group_desc=name)
        if self.rank not in channel.ranks:
            return None
        self._groups[channel] = group
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        self.post(channel, *self._warm_up(channel)).wait()
        torch.cuda.synchronize(self.device)
        return group

    def _warm_up(self, channel: Channel) -> tuple[list[Packet], list[Packet]]:
        sends, receives = [], []
        for i, source in enumerate(channel.sources):
            for j, target in enumerate(channel.targets):
                if channel.pairwise and i != j:
                    continue
                if source == self.rank:
                    sends.append(Packet(target, 0, torch.zeros(1, device=self.device)))
                if target == self.rank:
                    receives.append(Packet(source, 0, torch.zeros(1, device=self.device)))
        return sends, receives

    def post(self, channel: Channel, sends: Sequence[Packet], receives: Sequence[Packet]) -> Pending:
        sends, receives = local_copies(self.rank, sends, receives)
        group = self._groups[channel]
        launch = [dist.P2POp(dist.isend, p.tensor, p.rank, group) for p in sends]
        launch += [dist.P2POp(dist.irecv, p.tensor, p.rank, group) for p in receives]
        tensors: list[Tensor] = [p.tensor for p in (*sends, *receives)]
        return Works(dist.batch_isend_irecv(launch) if launch else [], tensors)

    def interrupt(self) -> None:
        super().interrupt()
        for group in filter(None, self._groups.values()):
            with contextlib.suppress(RuntimeError):
                group.abort()
