"""Payload through host memory: for ranks that share a GPU, and for a first step before NCCL is used.

An NCCL kernel occupies the GPU until its peer sends or receives. What a program does for the first time (a kernel is
compiled, its code is loaded, a library makes its workspace) waits until the GPU is idle, and holds the host meanwhile:
with both on one GPU, and the peer in the same position, nobody goes on. Over gloo nothing occupies the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bench.execute.runtime import Sequences, Worker
from bench.execute.transport import Channel, Packet, Pending, Transport, local_copies


class StagedTransport:
    """Payload copied to pinned host memory, sent over the counts' way of another transport, and copied to the device.

    The thread that posts waits until what is sent has been computed, and the one that waits for an arrival holds the
    host: correct with any number of ranks on a GPU, and no measure of speed.
    """

    occupies_gpu: bool = False

    def __init__(self, transport: Transport) -> None:
        self._inner, self.broken = transport, False
        self._rank = dist.get_rank()

    def open(self, channels: Iterable[Channel]) -> None:
        self._inner.open(channels)

    def post(self, channel: Channel, sends: Sequence[Packet], receives: Sequence[Packet]) -> Pending:
        """Waits until what is sent has been computed."""
        sends, receives = local_copies(self._rank, sends, receives)
        outgoing = [packet._replace(tensor=_host_like(packet.tensor)) for packet in sends]
        for packet, host in zip(sends, outgoing, strict=True):
            host.tensor.copy_(packet.tensor, non_blocking=True)
        if any(packet.tensor.is_cuda for packet in sends):
            torch.cuda.current_stream().synchronize()
        incoming = [packet._replace(tensor=_host_like(packet.tensor)) for packet in receives]
        return _Arrival(self._inner.post_counts(outgoing, incoming), incoming, receives)

    def post_counts(self, sends: Sequence[Packet], receives: Sequence[Packet]) -> Pending:
        return self._inner.post_counts(sends, receives)

    def interrupt(self) -> None:
        self.broken = True
        self._inner.interrupt()


class _Arrival:
    def __init__(self, pending: Pending, on_host: Sequence[Packet], on_device: Sequence[Packet]) -> None:
        self._pending, self._packets = pending, list(zip(on_host, on_device, strict=True))

    def wait(self) -> None:
        """Holds the host until the messages are there."""
        self._pending.wait()
        for host, device in self._packets:
            device.tensor.copy_(host.tensor, non_blocking=True)
        self._packets = []


def _host_like(tensor: Tensor) -> Tensor:
    """Host memory for a tensor, pinned for one on the GPU: its copies then run beside the host."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def warm_up(worker: Worker, sequences: Sequences) -> None:
    """Runs a step without its end, over host memory; weights are left as they are and gradients are zero.

    Called by all ranks together, after their transports are connected.
    """
    transport, hooks = worker.transport, worker.hooks
    worker.transport, worker.hooks = StagedTransport(transport), None
    try:
        worker.run_step(0, sequences)
    finally:
        worker.transport, worker.hooks = transport, hooks
    for _, _, grad in worker.named_parameters():
        grad.zero_()
