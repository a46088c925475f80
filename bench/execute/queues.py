"""The threads of a queue.

A queue that computes runs everything in its own thread. A queue of transfers only has two: one begins transfers, up to
`WINDOW` ahead of the other, which sees them end. So a receive is posted long before it is needed, and the next message
is packed while the last one travels.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from bench.execute.rank import flight
from bench.execute.values import Stopped
from bench.program import Op

if TYPE_CHECKING:
    from bench.execute.step import Begun, Step

WINDOW = 3  # transfers of a queue that have begun and not ended

_TRANSFERS = frozenset({int(Op.SEND), int(Op.RECV)})


class QueueRunner:
    """Runs the operations of one queue of a step, the `number`-th of its group."""

    def __init__(self, step: Step, stream: str, ops: range, number: int) -> None:
        self.step, self.stream, self.ops, self.number = step, stream, ops, number
        self._flight = flight()
        self.only_transfers = _TRANSFERS.issuperset(step.program.op[ops.start : ops.stop].tolist())
        self._begun: queue.SimpleQueue[tuple[int, Begun] | None] = queue.SimpleQueue()
        self._window = threading.Semaphore(WINDOW)
        self._at: dict[str, int] = {}  # thread -> the operation at which it stands

    def threads(self) -> list[threading.Thread]:
        """Threads to be started, which end when the queue does or the step fails."""
        parts = [self._begin_all, self._finish_all] if self.only_transfers else [self._run_all]
        name = f"{self.step.home.group.name} {self.stream}"
        return [
            threading.Thread(target=self._guard, args=(part,), name=f"{name} {part.__name__}", daemon=True)
            for part in parts
        ]

    def place(self) -> str:
        """The first operation that has not ended, in words; empty where there is none."""
        return self.step.program.describe(min(self._at.values())) if self._at else ""

    def let_go(self) -> None:
        """Ends all waiting, after an error."""
        self._window.release(len(self.ops) + 1)

    def _guard(self, part: Callable[[], None]) -> None:
        try:
            with self.step.streams.use(self.stream):
                part()
            self._at.pop(part.__name__, None)
        except Stopped:
            pass
        except BaseException as error:
            at = self._at.get(part.__name__, self.ops.start)
            self.step.fail(self.step.program.describe(at), error)
        finally:
            if part == self._begin_all:
                self._begun.put(None)

    def _run_all(self) -> None:
        for k in self._each("_run_all"):
            if self.step.program.op[k] in _TRANSFERS:
                begun = self.step.begin(k)
                self.step.finish(k, begun.payload)
                begun.counts.wait()
            else:
                self.step.execute(k)
            self._flight.end(self.number, k)

    def _begin_all(self) -> None:
        for k in self._each("_begin_all"):
            self._window.acquire()
            if self.step.failure is not None:
                raise Stopped
            begun = self.step.begin(k)
            if self.step.streams.is_cuda:
                # Here only the stream waits; the other thread waits for the device and gives the window back.
                self.step.finish(k, begun.payload)
            self._begun.put((k, begun))

    def _finish_all(self) -> None:
        while (one := self._begun.get()) is not None:
            k, begun = one
            self._at["_finish_all"] = k
            begun.counts.wait()
            if self.step.streams.is_cuda:
                self.step.wait_on_host(k)
            else:
                self.step.finish(k, begun.payload)
            self._flight.end(self.number, k)
            self._window.release()

    def _each(self, part: str) -> Iterator[int]:
        for k in self.ops:
            if self.step.failure is not None:
                raise Stopped
            self._at[part] = k
            self._flight.begin(self.number, k)
            yield k
