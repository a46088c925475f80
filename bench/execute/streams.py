"""Where a queue's work runs: on the CPU in its thread, on CUDA also in a stream of its own.

On CUDA a thread puts work into its stream and goes on; `Streams.mark` is then an event in that stream, and waiting for
one is the stream's business. Only `HostCopy.get` and `wait_on_host` make a thread wait for the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.plan import COMPUTE_STREAM

if TYPE_CHECKING:
    from bench.execute.exchange import HostCounts

Mark = Any  # a point in a stream: seconds of perf_counter on the CPU, an event on CUDA


class Streams:
    """One stream for every queue; those that compute have the normal priority, all others a high one."""

    def __init__(self, device: torch.device, queues: Iterable[str]) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._streams: dict[str, torch.cuda.Stream] = {}
        if self.is_cuda:
            for name in queues:
                priority = 0 if name == COMPUTE_STREAM else -1
                self._streams[name] = torch.cuda.Stream(device, priority=priority)
        self._base: Mark = 0.0
        self.base_s = 0.0

    @contextmanager
    def use(self, queue: str) -> Iterator[None]:
        """What the thread does inside the block goes into the queue's stream."""
        if not self.is_cuda:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._streams[queue]):
            yield

    def begin(self) -> None:
        """Sets the zero of `seconds`, with nothing running; all streams wait for what the caller's has."""
        if not self.is_cuda:
            self._base = self.base_s = time.perf_counter()
            return
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self.base_s = time.perf_counter()

    def mark(self) -> Mark:
        """Now, in the current stream."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def wait(self, mark: Mark) -> None:
        """The current stream goes on when `mark` is reached."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def wait_on_host(self, mark: Mark) -> None:
        """The calling thread goes on when `mark` is reached."""
        if self.is_cuda:
            mark.synchronize()

    def is_past(self, mark: Mark) -> bool:
        return not self.is_cuda or bool(mark.query())

    def seconds(self, mark: Mark) -> float:
        """From `begin` to the mark, which is past."""
        if not self.is_cuda:
            return float(mark - self._base)
        return float(self._base.elapsed_time(mark)) / 1e3

    def peak_bytes(self) -> int:
        """Most memory allocated on the GPU since `begin`; 0 on the CPU, where it is not measured."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else 0

    def hold(self, value: Any) -> None:
        """Memory of these tensors, made in another stream, is not given out again before the current one is done."""
        if not self.is_cuda:
            return
        if isinstance(value, Tensor):
            if value.is_cuda:
                value.record_stream(torch.cuda.current_stream(self.device))
        elif isinstance(value, tuple):
            for part in value:
                self.hold(part)


class HostCopy:
    """Numbers on their way from the device to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._reading = threading.Lock()
        if not tensor.is_cuda:
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        # A thread that sleeps until it is woken comes half a millisecond late, with the GPU idle: this one spins.
        self._event = torch.cuda.Event()
        self._event.record()

    def get(self) -> HostCounts:
        """The numbers; waits for the copy, the first time. Of several threads that ask at once, one does."""
        with self._reading:
            if self._event is not None:
                self._event.synchronize()
                self._event = None
        numbers: HostCounts = self._host.numpy()
        return numbers
