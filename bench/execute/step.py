"""One step of one rank: a thread for every queue, operations in order, each after what it waits for.

A queue that computes runs everything in its own thread. A queue of transfers only has two: one begins transfers, up to
`WINDOW` ahead of the one that sees them end, so that a receive is posted long before it is needed and the next message
is packed while the last one travels. On CUDA what an operation waits for is waited for by its stream; the threads run
ahead of the device. A group's exchange with itself is one post, made by the SEND on behalf of its RECV.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bench.action import Action
from bench.execute.compute import Compute
from bench.execute.home import Home
from bench.execute.messages import Incoming, Messages
from bench.execute.record import StepResult
from bench.execute.streams import Mark, Streams
from bench.execute.transport import Channel, Pending, Transport, num_bytes
from bench.execute.values import Stopped, Values
from bench.program import Op

if TYPE_CHECKING:
    from bench.execute.runtime import Worker

WINDOW = 3  # transfers of a queue that have begun and not ended
GRACE_S = 5.0  # for the threads to come back after an error


class Hooks(Protocol):
    """The end of a step; called by the thread of the queue in which the action stands, in its stream."""

    def sync(self, worker: Worker) -> None:
        """Sums gradients over the ranks that hold the same parameters."""

    def update(self, worker: Worker) -> None:
        """Clips and updates."""


class StepError(RuntimeError):
    """What stopped a step: the operation, and in `__cause__` the error."""


class _Ending:
    """The end of one operation: `there` once it is known where in its stream that is."""

    __slots__ = ("mark", "there")

    def __init__(self) -> None:
        self.there = threading.Event()
        self.mark: Mark | None = None


class Step:
    """One step in flight. `run` may be called once."""

    def __init__(
        self, worker: Worker, home: Home, compute: Compute, values: Values, streams: Streams, transport: Transport
    ) -> None:
        self.worker, self.home, self.program = worker, home, home.program
        self.compute, self.values, self.streams, self.transport = compute, values, streams, transport
        self.messages = Messages(home, values)
        program, group = self.program, home.placement.index[home.group.name]
        self.queues = [
            _Queue(self, stream, range(int(program.queue_ptr[q]), int(program.queue_ptr[q + 1])))
            for q, (name, stream) in enumerate(program.queues)
            if name == home.group.name
        ]
        self.ops = np.flatnonzero(program.group == group).astype(np.int32)
        self.endings = {int(k): _Ending() for k in self.ops}
        self.starts: dict[int, Mark] = {}
        self.sizes: dict[int, int] = {}
        self.posted: dict[int, float] = {}
        self.exchanges: dict[int, Incoming] = {}  # SEND -> what it receives within its group
        self._failing = threading.Lock()
        self.failure: tuple[str, BaseException] | None = None

    def run(self, timeout_s: float) -> StepResult:
        """Runs all queues. Raises StepError for the first error, or where the step does not end in time."""
        deadline = time.monotonic() + timeout_s
        self.streams.begin()
        threads = [thread for one in self.queues for thread in one.threads()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._wait_for_device(deadline)
        if any(thread.is_alive() for thread in threads):
            places = "; ".join(one.place() for one in self.queues if one.current is not None)
            self.fail(places, TimeoutError(f"no end within {timeout_s:g} s"))
        if self.failure is not None:
            until = time.monotonic() + GRACE_S
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
            where, cause = self.failure
            raise StepError(f"rank {self.home.rank}, {where}: {type(cause).__name__}: {cause}") from cause
        return self._result()

    def _wait_for_device(self, deadline: float) -> None:
        """Polls: a device that waits for a message that never comes must not hold the host for ever."""
        for ending in self.endings.values():
            while self.failure is None and ending.mark is not None and not self.streams.is_past(ending.mark):
                if time.monotonic() > deadline:
                    self.fail("on the device", TimeoutError("the device has not finished in time"))
                time.sleep(1e-4)

    def fail(self, where: str, cause: BaseException) -> None:
        """Stops the step: the first error counts, and all who wait are let go."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = (where, cause)
        self.values.stop()
        for ending in self.endings.values():
            ending.there.set()
        for one in self.queues:
            one.let_go()
        self.transport.interrupt()

    def begin(self, k: int) -> Pending | None:
        """Begins a transfer: packs and posts a SEND, or posts a RECV, waiting for what that takes."""
        action, send = self.program.action(k), self.program.op[k] == Op.SEND
        if send:
            self.wait_for_inputs(k)
            self.starts[k] = self.streams.mark()
        elif self._within_group(k):
            return None
        counts = self._exchange_counts(action, k, send)
        outgoing = self.messages.pack(action, k) if send else []
        incoming = Incoming([], _nothing)
        if not send or self._within_group(k):
            number = int(self.program.partner[k]) if not send else k
            arrival = k if not send else int(self.program.partner[k])
            incoming = self.messages.expect(action, number, counts)
            self.sizes[arrival] = num_bytes(self.home.rank, incoming.packets)
            self.posted[arrival] = time.perf_counter() - self.streams.base_s
            self.exchanges[arrival] = incoming
        if send:
            self.sizes[k] = num_bytes(self.home.rank, outgoing)
        else:
            self.starts[k] = self.streams.mark()
        channel = Channel.of(action, self.home.placement, self.home.rank - self.home.local)
        return self.transport.post(channel, outgoing, incoming.packets)
