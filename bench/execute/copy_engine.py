"""Payload pushed by copy engines into memory that the ranks of a node share; counts over gloo.

A channel has a ring of landing places on every target for every source. For a piece of a message the source's stream
waits until the place is free, copies, and writes the piece's number into a word on the target; the target's stream
waits for that number, copies the piece to where it belongs, and writes the number into a word on the source: the place
is free again. A copy between two GPUs that can reach each other's memory is a copy engine's work, and so are the words
here: no kernel takes streaming multiprocessors from the computation. Both ends know all sizes and number the pieces
alike.

A stream waits for nothing that has not been submitted: a word to the other host goes ahead, over gloo, once a copy is
in its stream. So GPUs always come to an end by themselves, whatever hardware queues their streams share, and nothing
has to be warmed up.

The shared memory is torch's symmetric memory, of which only the mapping of a peer's memory is used.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from bench.execute import driver
from bench.execute.pieces import Segment, cut
from bench.execute.transport import DONE, Channel, GlooTransport, Packet, Pending, local_copies

SLOT_BYTES = 16 * 2**20
NUM_SLOTS = 4
WORD_BYTES = 128  # apart, so that two writers never share a sector
RELEASED = 1 << 30  # in words for which nobody is to wait any longer
SUBMITTED_TAG = 1 << 30  # of words between hosts: two a channel, for what is pushed and for what is freed


class CopyTransport(GlooTransport):
    """See the module. Lines are kept by their channel, so that layouts share them."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.device = device
        # Names of groups are never used twice in a process, and the default group may be another next time.
        number = torch.randint(2**62, (1,))
        dist.broadcast(number, 0)
        self._prefix = f"copy-{number.item()}"
        self._lines: dict[Channel, _Line | None] = {}

    def open(self, channels: Iterable[Channel]) -> None:
        for channel in channels:
            if channel not in self._lines:
                taken = len(channel.ranks) > 1 and self.rank in channel.ranks
                tag = SUBMITTED_TAG + 2 * len(self._lines)
                self._lines[channel] = _Line(self, channel, tag, self._prefix) if taken else None

    def post(self, channel: Channel, sends: Sequence[Packet], receives: Sequence[Packet]) -> Pending:
        """Waits until the other ranks have submitted what they send, and what frees the places that are needed."""
        sends, receives = local_copies(self.rank, sends, receives)
        line = self._lines[channel]
        if line is None or not (sends or receives):
            return DONE
        return line.post(sends, receives)

    def interrupt(self) -> None:
        super().interrupt()
        for line in filter(None, self._lines.values()):
            with contextlib.suppress(RuntimeError):
                line.release()

    @property
    def device_bytes(self) -> int:
        """Of landing places and words, which torch's allocator does not count."""
        return sum(line.memory.nbytes for line in self._lines.values() if line is not None)


class _Line:
    """One rank's end of a channel. All ranks of the channel make theirs together."""

    def __init__(self, transport: CopyTransport, channel: Channel, tag: int, prefix: str) -> None:
        rank, device, ranks = transport.rank, transport.device, channel.ranks
        arriving = max(len(sources_of(channel, one)) for one in ranks)
        leaving = max(len(targets_of(channel, one)) for one in ranks)
        self._first_slot = (arriving + leaving) * WORD_BYTES
        size = self._first_slot + arriving * NUM_SLOTS * SLOT_BYTES
        self.memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        self.memory.zero_()
        torch.cuda.synchronize(device)
        name = f"{prefix}-{tag - SUBMITTED_TAG}"
        _SymmetricMemory.set_group_info(name, ranks.index(rank), len(ranks), PrefixStore(name, _get_default_store()))
        self._shared = _SymmetricMemory.rendezvous(self.memory, name)
        self._lock = threading.Lock()
        self._in, self._out = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        for number, source in enumerate(sources_of(channel, rank)):
            credit = arriving + targets_of(channel, source).index(rank)
            peer = self._of(ranks.index(source), size)
            words, hosts = _Words(self._in, _word(self.memory, number), _word(peer, credit)), (transport, source, tag)
            self._incoming[source] = _Incoming(words, _Hosts(*hosts), self._slots(self.memory, number))
        for number, target in enumerate(targets_of(channel, rank)):
            place = sources_of(channel, target).index(rank)
            peer = self._of(ranks.index(target), size)
            words = _Words(self._out, _word(self.memory, arriving + number), _word(peer, place))
            self._outgoing[target] = _Outgoing(words, _Hosts(transport, target, tag), self._slots(peer, place))

    def post(self, sends: Sequence[Packet], receives: Sequence[Packet]) -> Pending:
        """Piece by piece in both directions: what arrives makes room for what leaves, however long the messages."""
        begun = torch.cuda.current_stream().record_event()
        used = [stream for stream, packets in ((self._out, sends), (self._in, receives)) if packets]
        with self._lock:
            for stream in used:
                stream.wait_event(begun)
            moves = [_Move(self._outgoing[rank], tensors) for rank, tensors in _messages(sends)]
            moves += [_Move(self._incoming[rank], tensors) for rank, tensors in _messages(receives)]
            for number in range(max(len(move.pieces) for move in moves)):
                for move in moves:
                    move.step(number)
            ends = [stream.record_event() for stream in used]
        return _Arrival(ends, [packet.tensor for packet in (*sends, *receives)])

    def release(self) -> None:
        """Lets all streams go on that wait for a word of this rank."""
        with torch.cuda.stream(torch.cuda.Stream(self.memory.device)):
            self.memory[: self._first_slot].view(torch.int32).fill_(RELEASED)

    def _of(self, index: int, size: int) -> Tensor:
        peer: Tensor = self._shared.get_buffer(index, (size,), torch.uint8)
        return peer

    def _slots(self, memory: Tensor, number: int) -> list[Tensor]:
        first = self._first_slot + number * NUM_SLOTS * SLOT_BYTES
        whole = memory[first : first + NUM_SLOTS * SLOT_BYTES]
        return list(whole.split(SLOT_BYTES))


class _Words:
    """The word on this GPU that the peer writes and `stream` waits for, and the one on the peer."""

    def __init__(self, stream: torch.cuda.Stream, mine: Tensor, theirs: Tensor) -> None:
        self.stream, self._mine, self._theirs = stream, mine, theirs
        self._number = torch.empty(1, dtype=torch.int32, device=mine.device)

    def wait_for(self, number: int) -> None:
        driver.wait_at_least(self.stream, self._mine.data_ptr(), number)

    def tell(self, number: int) -> None:
        """In the current stream, which is `stream`. Copied, since only copies are sure to follow what was copied."""
        driver.write(self.stream, self._number.data_ptr(), number)
        self._theirs.copy_(self._number)


class _Hosts:
    """Words between two hosts that something has been submitted, in the order of the pieces."""

    def __init__(self, transport: GlooTransport, peer: int, tag: int) -> None:
        self._transport, self._peer, self._tag = transport, peer, tag
        self._told: deque[Pending] = deque(maxlen=4 * NUM_SLOTS)  # their tensors live until they have left

    def tell(self, freed: bool) -> None:
        packet = Packet(self._peer, self._tag + freed, torch.ones(1, dtype=torch.int32))
        self._told.append(self._transport.post_counts([packet], []))

    def hear(self, freed: bool) -> Pending:
        packet = Packet(self._peer, self._tag + freed, torch.empty(1, dtype=torch.int32))
        return self._transport.post_counts([], [packet])


class _Ring:
    """One direction between two ranks: its landing places on the target, and how many pieces have passed."""

    def __init__(self, words: _Words, hosts: _Hosts, slots: list[Tensor]) -> None:
        self.words, self.hosts, self._slots = words, hosts, slots
        self.passed = 0

    def move(self, flat: Sequence[Tensor], piece: Sequence[Segment]) -> None:
        """Submits the next piece of tensors that are flat bytes."""
        with torch.cuda.stream(self.words.stream):
            self._copy(flat, piece, self._slots[self.passed % NUM_SLOTS])
            self.passed += 1
            self.words.tell(self.passed)
        self._submitted()

    def _copy(self, flat: Sequence[Tensor], piece: Sequence[Segment], slot: Tensor) -> None:
        raise NotImplementedError

    def _submitted(self) -> None:
        raise NotImplementedError


class _Outgoing(_Ring):
    def __init__(self, words: _Words, hosts: _Hosts, slots: list[Tensor]) -> None:
        super().__init__(words, hosts, slots)
        self._freed: deque[Pending] = deque()

    def _copy(self, flat: Sequence[Tensor], piece: Sequence[Segment], slot: Tensor) -> None:
        if self.passed >= NUM_SLOTS:
            self._freed.popleft().wait()
            self.words.wait_for(self.passed - NUM_SLOTS + 1)
        for tensor, start, stop, place in piece:
            slot[place : place + stop - start].copy_(flat[tensor][start:stop])

    def _submitted(self) -> None:
        self.hosts.tell(freed=False)
        self._freed.append(self.hosts.hear(freed=True))


class _Incoming(_Ring):
    def _copy(self, flat: Sequence[Tensor], piece: Sequence[Segment], slot: Tensor) -> None:
        self.hosts.hear(freed=False).wait()
        self.words.wait_for(self.passed + 1)
        for tensor, start, stop, place in piece:
            flat[tensor][start:stop].copy_(slot[place : place + stop - start])

    def _submitted(self) -> None:
        self.hosts.tell(freed=True)


class _Move:
    """A message on its ring."""

    def __init__(self, ring: _Ring, tensors: Sequence[Tensor]) -> None:
        self._ring = ring
        self._flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        self.pieces = cut([one.numel() for one in self._flat], SLOT_BYTES)

    def step(self, number: int) -> None:
        if number < len(self.pieces):
            self._ring.move(self._flat, self.pieces[number])


class _Arrival:
    def __init__(self, ends: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self._ends, self._tensors = ends, tensors

    def wait(self) -> None:
        for end in self._ends:
            torch.cuda.current_stream().wait_event(end)
        self._ends, self._tensors = (), ()


def sources_of(channel: Channel, target: int) -> list[int]:
    """Other ranks that send to `target`, in the order of the channel."""
    return [source for source, to in _pairs(channel) if to == target]


def targets_of(channel: Channel, source: int) -> list[int]:
    """Other ranks to which `source` sends, in the order of the channel."""
    return [to for one, to in _pairs(channel) if one == source]


def _pairs(channel: Channel) -> Iterator[tuple[int, int]]:
    for i, source in enumerate(channel.sources):
        for j, target in enumerate(channel.targets):
            if source != target and not (channel.pairwise and i != j):
                yield source, target


def _messages(packets: Sequence[Packet]) -> Iterator[tuple[int, list[Tensor]]]:
    """(rank, tensors) of every message: packets of a rank stand together, in the order of their tags on both ends."""
    for rank, group in groupby(packets, key=lambda packet: packet.rank):
        yield rank, [packet.tensor for packet in group]


def _word(memory: Tensor, number: int) -> Tensor:
    return memory[number * WORD_BYTES : number * WORD_BYTES + 4].view(torch.int32)
