"""How messages get from rank to rank: the interface, and gloo.

Payload and counts travel apart. Counts, a few integers that say how large a payload is, are always on the host and
always go over gloo, so that nobody waits for a device to learn a size. A channel is what one kind of transfer in one
pass uses between two groups; messages of a channel are received in the order in which they are sent.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.action import Action, Kind, Pass, view
from bench.edges import ends
from bench.errors import BadInput
from bench.execute.rank import rank_carrier
from bench.placement import Placement
from bench.program import Op, Program
from bench.transports import Carrier

DEFAULT_TIMEOUT_S = 300.0
PARTS_PER_OPERATION = 4  # tags of one operation: up to three tensors, and the counts
COUNTS_PART = PARTS_PER_OPERATION - 1
_INTERRUPT_TAG = 2**31 - 1


class Channel(NamedTuple):
    """One kind of transfer in one pass between two groups of a replica; ranks are global."""

    kind: Kind
    pass_: Pass
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.sources, *self.targets})

    @property
    def pairwise(self) -> bool:
        """Whether rank i sends to rank i only; otherwise every source sends to every target."""
        return self.kind in (Kind.RESIDUAL, Kind.HOP)

    @classmethod
    def of(cls, action: Action, placement: Placement, first_rank: int) -> Channel:
        """The channel of a transfer in the replica that begins at `first_rank`."""
        source, target = (placement.by_name[name].ranks for name in ends(placement, action))
        shifted = (tuple(rank + first_rank for rank in ranks) for ranks in (source, target))
        return cls(action.kind, action.pass_, *shifted)


def channels_of(program: Program, num_replicas: int) -> list[Channel]:
    """Every channel of every replica, in the same order on all ranks."""
    placement = program.plan.placement
    sent = np.unique(program.template[program.op == Op.SEND])
    actions = [view(int(code)) for code in program.templates[sent]]
    found = [Channel.of(one, placement, r * placement.size) for r in range(num_replicas) for one in actions]
    return list(dict.fromkeys(found))


class Packet(NamedTuple):
    """A contiguous tensor to or from a global rank. `tag` tells packets between the same two ranks apart."""

    rank: int
    tag: int
    tensor: Tensor


class Pending(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Until they have arrived or left; on CUDA it is the current stream that waits."""


class Transport(Protocol):
    """Sends and receives packets of this rank. Those to itself are copied; empty ones are neither sent nor awaited."""

    broken: bool
    occupies_gpu: bool
    """Whether a message that has not come yet can keep a GPU from coming to its end; see `bench.execute.staged`."""

    def open(self, channels: Iterable[Channel]) -> None:
        """Connects what is not connected yet. Called by all ranks with the same channels."""

    def post(self, channel: Channel, sends: Sequence[Packet], receives: Sequence[Packet]) -> Pending:
        """Begins to send and to receive payload, in the current stream. A group's exchange with itself is one post."""

    def post_counts(self, sends: Sequence[Packet], receives: Sequence[Packet]) -> Pending:
        """The same for counts, which are on the host."""

    def interrupt(self) -> None:
        """After an error: nobody waits for a message any longer, here or on the other ranks. Ends the transport."""


class PeerError(ConnectionError):
    """A message could not be sent or received: the other rank failed, died or took too long."""


class PeerTimeoutError(PeerError, TimeoutError):
    """It took too long."""


# What gloo and NCCL say in a collective when the process at the other end of a connection is gone.
_GONE = re.compile(r"closed by peer|reset by peer|broken pipe|remote process exited", re.IGNORECASE)


def lost_peer(error: BaseException) -> bool:
    """Whether all that an exception says is that another rank is gone, so that the cause is to be looked for there."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, PeerError):
            return not isinstance(found, PeerTimeoutError)
        if isinstance(found, dist.DistNetworkError) or (isinstance(found, RuntimeError) and _GONE.search(str(found))):
            return True
        found = found.__cause__
    return False


@contextlib.contextmanager
def _between_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        said = _short(str(error))
        raise (PeerTimeoutError if "timed out" in said.lower() else PeerError)(said) from error


def _short(message: str) -> str:
    """gloo's and NCCL's messages begin with a source file and end with advice."""
    return re.sub(r"^\[[^]]*\] ", "", message.splitlines()[0]).split(". This ")[0]


class Works:
    """`Pending` of torch's works; keeps the tensors until they are done."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[Tensor] = ()) -> None:
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        """Raises PeerError."""
        with _between_ranks():
            for work in self._works:
                work.wait()
        self._works, self._tensors = (), ()


DONE = Works([])


class GlooTransport:
    """Everything over one gloo group of the whole world, messages told apart by tags.

    A group per channel would cost tens of milliseconds each and buy nothing: gloo matches by (sender, tag) and holds
    no order between tags. The group is not the default one, so that an interrupt leaves that one alone.
    """

    occupies_gpu: bool = False

    def __init__(self, timeout_s: float) -> None:
        self.broken = False
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="messages")

    def open(self, channels: Iterable[Channel]) -> None:
        """Nothing to do: all ranks are connected."""

    def post(self, channel: Channel, sends: Sequence[Packet], receives: Sequence[Packet]) -> Pending:
        return self.post_counts(sends, receives)

    def post_counts(self, sends: Sequence[Packet], receives: Sequence[Packet]) -> Pending:
        sends, receives = local_copies(self.rank, sends, receives)
        with _between_ranks():
            works = [dist.isend(p.tensor, p.rank, group=self._group, tag=p.tag) for p in sends]
            works += [dist.irecv(p.tensor, p.rank, group=self._group, tag=p.tag) for p in receives]
        return Works(works, [p.tensor for p in (*sends, *receives)])

    def interrupt(self) -> None:
        """A receive that times out has gloo close all connections of its group, and peers notice that at once.

        Tried with every peer: a connection that a peer has closed already fails before it can time out.
        """
        self.broken = True
        for peer in {*range(self.world_size)} - {self.rank}:
            with contextlib.suppress(RuntimeError):
                never = dist.irecv(torch.empty(1), peer, group=self._group, tag=_INTERRUPT_TAG)
                assert never is not None
                never.wait(timedelta(milliseconds=1))


def local_copies(rank: int, sends: Sequence[Packet], receives: Sequence[Packet]) -> tuple[list[Packet], list[Packet]]:
    """Copies what `rank` sends to itself and returns what crosses a link."""
    mine = {packet.tag: packet.tensor for packet in receives if packet.rank == rank}
    for packet in sends:
        if packet.rank == rank:
            mine[packet.tag].copy_(packet.tensor)
    crosses = [[p for p in packets if p.rank != rank and p.tensor.numel()] for packets in (sends, receives)]
    return crosses[0], crosses[1]


def num_bytes(rank: int, packets: Iterable[Packet]) -> int:
    """Bytes of the packets that cross a link."""
    return sum(p.tensor.numel() * p.tensor.element_size() for p in packets if p.rank != rank)


class _Opened:
    """The transports of this process, which belong to one default process group."""

    world: Any = None
    transports: ClassVar[dict[Carrier, Transport]] = {}


def open_transport(
    device: torch.device, timeout_s: float = DEFAULT_TIMEOUT_S, carrier: Carrier | None = None
) -> Transport:
    """A transport of the default process group, the pool's if none is named. Made once, by all ranks together.

    `timeout_s`, of the first call, is how long a message may take. Raises BadInput where torch.distributed is not
    initialised.
    """
    if not dist.is_initialized():
        raise BadInput("transport", "no process group", "an initialised torch.distributed")
    if _Opened.world is not dist.group.WORLD:
        _Opened.transports.clear()
        _Opened.world = dist.group.WORLD
    chosen = carrier or rank_carrier()
    if chosen not in _Opened.transports or _Opened.transports[chosen].broken:
        _Opened.transports[chosen] = _made(chosen, device, timeout_s)
    return _Opened.transports[chosen]


def _made(carrier: Carrier, device: torch.device, timeout_s: float) -> Transport:
    match carrier.name:
        case "nccl":
            from bench.execute.nccl import NcclTransport

            return NcclTransport(device, timeout_s, carrier.blocks)
        case "copy":
            from bench.execute.copy_engine import CopyTransport

            return CopyTransport(device, timeout_s)
        case "host":
            from bench.execute.staged import StagedTransport

            return StagedTransport(GlooTransport(timeout_s))
    return GlooTransport(timeout_s)
