"""One step of one rank: operations of every queue in order, each after what it waits for.

What an operation waits for is waited for by its stream on CUDA, whose threads run ahead of the device, and by its
thread on the CPU. A group's exchange with itself is one post, made by the SEND on behalf of its RECV: the ranks of a
group reach it in the same order, and a send that waits for a receive behind it would wait for ever.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from bench.action import Action
from bench.execute.compute import Compute
from bench.execute.home import Home
from bench.execute.messages import Incoming, Messages
from bench.execute.queues import QueueRunner
from bench.execute.record import StepResult
from bench.execute.streams import Mark, Streams
from bench.execute.transport import DONE, PeerError, Pending, Transport, num_bytes
from bench.execute.values import Stopped, Values
from bench.program import Op

if TYPE_CHECKING:
    from bench.execute.runtime import Worker

GRACE_S = 0.5  # for the threads to come back after an error
PEER_S = 1.0  # by which a rank that only lost its peer lets the one that knows why be heard first
JOIN_S = 0.1
POLL_S = 1e-4


class Hooks(Protocol):
    """The end of a step; called by the thread of the queue in which the action stands, in its stream."""

    def sync(self, worker: Worker) -> None:
        """Sums gradients over the ranks that hold the same parameters."""

    def update(self, worker: Worker) -> None:
        """Clips and updates, after every rank's sums."""


class StepError(RuntimeError):
    """What stopped a step: rank, operation, error; the error is also its `__cause__`."""


class Begun(NamedTuple):
    """A transfer on its way. What was sent of counts only has to be kept until it has left."""

    payload: Pending
    counts: Pending


NO_COUNTS = np.zeros((0, 0), dtype=np.int32)
NOTHING = Begun(DONE, DONE)


class _Ending:
    """The end of an operation: `known` once its mark is in the stream, on the CPU once it is past."""

    __slots__ = ("known", "mark")

    def __init__(self) -> None:
        self.known = threading.Event()
        self.mark: Mark | None = None


class Step:
    """One step in flight; `run` is called once."""

    def __init__(
        self,
        worker: Worker,
        home: Home,
        compute: Compute,
        values: Values,
        streams: Streams,
        transport: Transport,
        hooks: Hooks | None,
    ) -> None:
        self.worker, self.home, self.program = worker, home, home.program
        self.compute, self.values, self.streams, self.transport = compute, values, streams, transport
        self.hooks = hooks
        self.messages = Messages(home, values)
        own = [q for q, (group, _) in enumerate(self.program.queues) if group == home.group.name]
        self.queues = [
            QueueRunner(self, self.program.queues[q][1], range(*self.program.queue_ptr[q : q + 2].tolist()), number)
            for number, q in enumerate(own)
        ]
        self.endings = {k: _Ending() for one in self.queues for k in one.ops}
        self.starts: dict[int, Mark] = {}
        self.bytes: dict[int, int] = {}
        self.posted: dict[int, float] = {}
        self.incoming: dict[int, Incoming] = {}  # by RECV, from its post to its arrival
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
            while thread.is_alive() and self.failure is None and time.monotonic() < deadline:
                thread.join(JOIN_S)
        if any(thread.is_alive() for thread in threads):
            places = "; ".join(place for one in self.queues if (place := one.place()))
            self.fail(places, TimeoutError(f"no end within {timeout_s:g} s"))
        self._wait_for_device(deadline)
        if self.failure is not None:
            until = time.monotonic() + GRACE_S
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))
            where, cause = self.failure
            if isinstance(cause, PeerError):
                time.sleep(PEER_S)
            raise StepError(f"rank {self.home.rank}, {where}: {type(cause).__name__}: {cause}") from cause
        assert not self.values.names, f"never used: {self.values.names}"
        return self._result()

    def execute(self, k: int) -> None:
        """An operation that is no transfer."""
        self.wait_for_inputs(k)
        self.starts[k] = self.streams.mark()
        match Op(self.program.op[k]):
            case Op.COMPUTE:
                if k + 1 in self.endings and self.program.op[k + 1] == Op.COMPUTE:
                    self.compute.fetch(self.program.action(k + 1))
                self.compute.run(self.program.action(k))
            case Op.SYNC if self.hooks is not None:
                self.hooks.sync(self.worker)
            case Op.UPDATE if self.hooks is not None:
                self.hooks.update(self.worker)
        self.end(k)

    def begin(self, k: int) -> Begun:
        """Begins a transfer, as far ahead as its inputs (SEND) or its sizes (RECV) allow."""
        action = self.program.action(k)
        if self.program.op[k] == Op.SEND:
            return self._send(k, action)
        return NOTHING if self._is_within_group(k) else self._receive(k, action)

    def finish(self, k: int, payload: Pending) -> None:
        """Ends what `begin` began; on the CPU, when it is over."""
        payload.wait()
        if self.program.op[k] != Op.SEND:
            self.wait_for_inputs(k)
            if self._is_within_group(k):
                self._wait_for(int(self.program.partner[k]))
                self.starts[k] = self.streams.mark()
            incoming = self.incoming.pop(k)
            self.streams.hold(tuple(packet.tensor for packet in incoming.packets))
            incoming.deliver()
        self.end(k)

    def end(self, k: int) -> None:
        ending = self.endings[k]
        ending.mark = self.streams.mark()
        ending.known.set()

    def wait_for_inputs(self, k: int) -> None:
        """The current stream goes on when the operations that k waits for are over."""
        for before in self._own_waits(k):
            self._wait_for(before)

    def wait_on_host(self, k: int) -> None:
        """The calling thread goes on when k is over."""
        mark = self.endings[k].mark
        if mark is not None:
            self.streams.wait_on_host(mark)

    def fail(self, where: str, cause: BaseException) -> None:
        """Stops the step: the first error counts, and all who wait are let go, here and on other ranks."""
        with self._failing:
            if self.failure is not None:
                return
            self.failure = (where, cause)
        self.values.stop()
        for ending in self.endings.values():
            ending.known.set()
        for one in self.queues:
            one.let_go()
        self.transport.interrupt()

    def _send(self, k: int, action: Action) -> Begun:
        self.wait_for_inputs(k)
        self.starts[k] = self.streams.mark()
        self.messages.prepare(action)
        within, arrival = self._is_within_group(k), int(self.program.partner[k])
        numbers, counts_in = self.messages.incoming_counts(action, k) if within else (NO_COUNTS, [])
        counts = self.transport.post_counts(self.messages.outgoing_counts(action, k), counts_in)
        outgoing = self.messages.pack(action, k)
        self.bytes[k] = num_bytes(self.home.rank, outgoing)
        if not within:
            return Begun(self.transport.post(self.home.channel(action), outgoing, []), counts)
        counts.wait()
        self._expect(arrival, self.messages.expect(action, k, numbers))
        return Begun(self.transport.post(self.home.channel(action), outgoing, self.incoming[arrival].packets), DONE)

    def _receive(self, k: int, action: Action) -> Begun:
        number = int(self.program.partner[k])
        numbers, counts_in = self.messages.incoming_counts(action, number)
        self.transport.post_counts([], counts_in).wait()
        incoming = self.messages.expect(action, number, numbers)
        self.starts[k] = self.streams.mark()
        self._expect(k, incoming)
        return Begun(self.transport.post(self.home.channel(action), [], incoming.packets), DONE)

    def _expect(self, k: int, incoming: Incoming) -> None:
        self.incoming[k] = incoming
        self.bytes[k] = num_bytes(self.home.rank, incoming.packets)
        self.posted[k] = time.perf_counter() - self.streams.base_s

    def _is_within_group(self, k: int) -> bool:
        return bool(self.program.peer[k] == self.program.group[k])

    def _own_waits(self, k: int) -> list[int]:
        """A gradient sum also waits for operations of other ranks: the sum itself sees to these."""
        return [before for before in self.program.waits_for(k) if before in self.endings]

    def _wait_for(self, k: int) -> None:
        ending = self.endings[k]
        ending.known.wait()
        if self.failure is not None:
            raise Stopped
        self.streams.wait(ending.mark)

    def _wait_for_device(self, deadline: float) -> None:
        """Polls: a device that waits for a message that never comes must not hold the host for ever."""
        for k, ending in self.endings.items():
            while self.failure is None and not self.streams.is_past(ending.mark):
                if time.monotonic() > deadline:
                    self.fail(self.program.describe(k), TimeoutError("the device has not come to its end in time"))
                time.sleep(POLL_S)

    def _result(self) -> StepResult:
        ops = np.array(list(self.endings), dtype=np.int32)
        begun = {k: self.streams.seconds(mark) for k, mark in self.starts.items()}
        start = dict(begun)
        end = {k: self.streams.seconds(ending.mark) for k, ending in self.endings.items()}
        for one in self.queues:
            for before, k in zip(one.ops, one.ops[1:], strict=False):
                start[k] = min(max(start[k], end[before]), end[k])
        ready = {k: max([end[d] for d in self._own_waits(k)], default=self.posted.get(k, 0.0)) for k in end}
        return StepResult(
            rank=self.home.rank,
            loss=self.compute.loss(),
            ops=ops,
            ready_s=np.array([min(ready[k], start[k]) for k in end]),
            start_s=np.array([start[k] for k in end]),
            end_s=np.array(list(end.values())),
            begun_s=np.array([begun[k] for k in end]),
            bytes=np.array([self.bytes.get(k, 0) for k in end], dtype=np.int64),
            posted_s=self.posted,
            base_s=self.streams.base_s,
            load=self.compute.load,
            expert_ids={key: ids.cpu() for key, ids in self.compute.expert_ids.items()},
            peak_bytes=self.streams.peak_bytes(),
        )
