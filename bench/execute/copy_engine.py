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

The memory of a line stays for as long as the process does, since nobody may free what another process has mapped; a
later default group of the same processes finds it again.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.execute import driver
from bench.execute.pieces import Segment, cut
from bench.execute.transport import DONE, Channel, GlooTransport, Packet, Pending, local_copies

SLOT_BYTES = 32 * 2**20
NUM_SLOTS = 4
WORD_BYTES = 128  # apart, so that two writers never share a sector
WORD_SIZE = 4
RELEASED = 1 << 30  # in words for which nobody is to wait any longer
SUBMITTED_TAG = 1 << 30  # of words between hosts: two a channel, for what is pushed and for what is freed


class CopyTransport(GlooTransport):
    """See the module. Lines are kept by their channel, so that layouts share them."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.device = device
        self._lines: dict[Channel, _Line | None] = {}

    def open(self, channels: Iterable[Channel]) -> None:
        """All ranks make their memory, learn the others' handles, and map what they push to."""
        for channel in channels:
            if channel in self._lines:
                continue
            taken = len(channel.ranks) > 1 and self.rank in channel.ranks
            memory = Shared.of(channel, self.rank) if taken else None
            handles: list[bytes | None] = [None] * self.world_size
            # Also the point from which on nobody writes into what a rank has yet to clear.
            dist.all_gather_object(handles, memory.handle if memory is not None else None, group=self._group)
            if memory is not None:
                memory.map({rank: handle for rank, handle in enumerate(handles) if handle is not None})
            tag = SUBMITTED_TAG + 2 * len(self._lines)
            self._lines[channel] = _Line(self, channel, tag, memory) if memory is not None else None

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


class Shape(NamedTuple):
    """How the memory of a channel is laid out, on all of its ranks alike.

    Attributes:
        arriving: words and rings for what arrives, one a source.
        leaving: words for the places that are free again, one a target.
    """

    arriving: int
    leaving: int

    @classmethod
    def of(cls, channel: Channel) -> Shape:
        return cls(
            max(len(sources_of(channel, one)) for one in channel.ranks),
            max(len(targets_of(channel, one)) for one in channel.ranks),
        )

    @property
    def num_words(self) -> int:
        return self.arriving + self.leaving

    @property
    def num_bytes(self) -> int:
        return self.num_words * WORD_BYTES + self.arriving * NUM_SLOTS * SLOT_BYTES

    def word(self, number: int) -> int:
        """Where a word is."""
        return number * WORD_BYTES

    def slots(self, number: int) -> list[int]:
        """Where the landing places of a ring are."""
        first = self.num_words * WORD_BYTES + number * NUM_SLOTS * SLOT_BYTES
        return [first + slot * SLOT_BYTES for slot in range(NUM_SLOTS)]


class Shared:
    """A rank's memory of a channel, and that of the others as it is mapped here."""

    _made: ClassVar[dict[Channel, Shared]] = {}

    def __init__(self, channel: Channel, rank: int) -> None:
        self.rank, self.shape = rank, Shape.of(channel)
        self.address = driver.allocate(self.shape.num_bytes)
        self.handle = driver.share(self.address)
        self.addresses: dict[int, int] = {}

    @classmethod
    def of(cls, channel: Channel, rank: int) -> Shared:
        """That of an earlier group of these processes, with its words set back, or a new one."""
        if channel in cls._made:
            found = cls._made[channel]
            driver.clear(found.address, found.shape.num_words * WORD_BYTES)
            return found
        return cls._made.setdefault(channel, cls(channel, rank))

    def map(self, handles: Mapping[int, bytes]) -> None:
        """Reaches the memory of the ranks whose handles these are, unless it does already."""
        for rank, handle in handles.items():
            if rank not in self.addresses:
                self.addresses[rank] = self.address if rank == self.rank else driver.mapped(handle)


class _Line:
    """One rank's end of a channel. All ranks of the channel make theirs together."""

    def __init__(self, transport: CopyTransport, channel: Channel, tag: int, shared: Shared) -> None:
        rank, device, shape = transport.rank, transport.device, shared.shape
        self._shared, self._device = shared, device
        self._lock = threading.Lock()
        self._in, self._out = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        mine = shared.address
        for number, source in enumerate(sources_of(channel, rank)):
            peer = shared.addresses[source]
            credit = shape.arriving + targets_of(channel, source).index(rank)
            words = _Words(self._in, mine + shape.word(number), peer + shape.word(credit))
            slots = [mine + place for place in shape.slots(number)]
            self._incoming[source] = _Incoming(words, _Hosts(transport, source, tag), slots)
        for number, target in enumerate(targets_of(channel, rank)):
            peer = shared.addresses[target]
            place = sources_of(channel, target).index(rank)
            words = _Words(self._out, mine + shape.word(shape.arriving + number), peer + shape.word(place))
            slots = [peer + slot for slot in shape.slots(place)]
            self._outgoing[target] = _Outgoing(words, _Hosts(transport, target, tag), slots)

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
        shared = self._shared
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream(self._device)
            for number in range(shared.shape.num_words):
                driver.write(stream, shared.address + shared.shape.word(number), RELEASED)


class _Words:
    """Addresses of the word on this GPU that the peer writes and `stream` waits for, and of the one on the peer."""

    def __init__(self, stream: torch.cuda.Stream, mine: int, theirs: int) -> None:
        self.stream, self._mine, self._theirs = stream, mine, theirs
        self._number = torch.empty(1, dtype=torch.int32, device=stream.device)

    def wait_for(self, number: int) -> None:
        driver.wait_at_least(self.stream, self._mine, number)

    def tell(self, number: int) -> None:
        """Copied, since only copies are sure to follow what was copied."""
        driver.write(self.stream, self._number.data_ptr(), number)
        driver.copy(self.stream, self._theirs, self._number.data_ptr(), WORD_SIZE)


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


class _Ring(ABC):
    """One direction between two ranks: its landing places on the target, and how many pieces have passed."""

    def __init__(self, words: _Words, hosts: _Hosts, slots: Sequence[int]) -> None:
        self.words, self.hosts, self._slots = words, hosts, slots
        self.passed = 0

    def move(self, flat: Sequence[Tensor], piece: Sequence[Segment]) -> None:
        """Submits the next piece of tensors that are flat bytes."""
        self._copy(flat, piece, self._slots[self.passed % NUM_SLOTS])
        self.passed += 1
        self.words.tell(self.passed)
        self._submitted()

    @abstractmethod
    def _copy(self, flat: Sequence[Tensor], piece: Sequence[Segment], slot: int) -> None:
        """Copies one piece to or from a landing place."""

    @abstractmethod
    def _submitted(self) -> None:
        """Tells the other side's host that the piece is in this side's stream."""


class _Outgoing(_Ring):
    def __init__(self, words: _Words, hosts: _Hosts, slots: Sequence[int]) -> None:
        super().__init__(words, hosts, slots)
        self._freed: deque[Pending] = deque()

    def _copy(self, flat: Sequence[Tensor], piece: Sequence[Segment], slot: int) -> None:
        if self.passed >= NUM_SLOTS:
            self._freed.popleft().wait()
            self.words.wait_for(self.passed - NUM_SLOTS + 1)
        for tensor, start, stop, place in piece:
            driver.copy(self.words.stream, slot + place, flat[tensor].data_ptr() + start, stop - start)

    def _submitted(self) -> None:
        self.hosts.tell(freed=False)
        self._freed.append(self.hosts.hear(freed=True))


class _Incoming(_Ring):
    def _copy(self, flat: Sequence[Tensor], piece: Sequence[Segment], slot: int) -> None:
        self.hosts.hear(freed=False).wait()
        self.words.wait_for(self.passed + 1)
        for tensor, start, stop, place in piece:
            driver.copy(self.words.stream, flat[tensor].data_ptr() + start, slot + place, stop - start)

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
