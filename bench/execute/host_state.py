"""Optimizer state in the host's memory, from where an update streams it: a slice comes while another is worked on.

`HostState.through` hands out copies of slices on the device in turn. Fetching, work and writing back are three streams;
two sets of buffers go round between them, so that the device never holds more than two slices. On a CPU the same copies
are made in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FETCHED_BYTES = 2**26
"""Of each list of state, what an update has on the device at a time, twice."""
SETS = 2

Slices = Sequence[Sequence[Tensor]]


class _Fetched(NamedTuple):
    """A slice on the device: what it is a copy of, the copies, the set of buffers that they lie in."""

    host: Slices
    copies: list[list[Tensor]]
    set_: int


class HostState:
    """Memory of the host for a device's state; pinned for a GPU, so that copies run beside everything else."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.is_cuda)

    def copy_of(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The values in a precision, in the host's memory."""
        held = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=self.is_cuda)
        return held if tensor.is_meta else held.copy_(tensor)

    def through(self, slices: Sequence[Slices]) -> Iterator[list[list[Tensor]]]:
        """Copies on the device of one slice after another, to be changed in place: what is done is written back.

        Args:
            slices: lists of fp32 tensors of the host, as `bench.execute.optimizer.slices` cuts them.
        """
        size = max(sum(tensor.numel() for tensors in one for tensor in tensors) for one in slices)
        buffers = [torch.empty(size, dtype=torch.float32, device=self.device) for _ in slices[:SETS]]
        streams = _Streams(self.device) if self.is_cuda else None
        fetched: _Fetched | None = None
        for number, host in enumerate(slices):
            coming = self._fetch(host, number % SETS, buffers, streams)
            if fetched is not None:
                yield from self._hand_out(fetched, streams)
            fetched = coming
        assert fetched is not None
        yield from self._hand_out(fetched, streams)
        if streams is not None:
            streams.join()

    def _fetch(self, host: Slices, set_: int, buffers: list[Tensor], streams: _Streams | None) -> _Fetched:
        sizes = [tensor.numel() for tensors in host for tensor in tensors]
        pieces = iter(buffers[set_][: sum(sizes)].split(sizes))
        copies = [[next(pieces).view(tensor.shape) for tensor in tensors] for tensors in host]
        with streams.fetching(set_) if streams is not None else contextlib.nullcontext():
            _copy(host, copies)
        return _Fetched(host, copies, set_)

    def _hand_out(self, fetched: _Fetched, streams: _Streams | None) -> Iterator[list[list[Tensor]]]:
        if streams is not None:
            streams.wait_for_fetch(fetched.set_)
        yield fetched.copies
        with streams.writing(fetched.set_) if streams is not None else contextlib.nullcontext():
            _copy(fetched.copies, fetched.host)


def _copy(source: Slices, into: Slices) -> None:
    for values, targets in zip(source, into, strict=True):
        for value, target in zip(values, targets, strict=True):
            target.copy_(value, non_blocking=True)


class _Streams:
    """Of one update: fetching and writing back beside the stream in which it was called; events by set of buffers."""

    def __init__(self, device: torch.device) -> None:
        self._work = torch.cuda.current_stream(device)
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._fetched: dict[int, Any] = {}
        self._written: dict[int, Any] = {}
        self._in.wait_stream(self._work)

    @contextlib.contextmanager
    def fetching(self, set_: int) -> Iterator[None]:
        """Into a set of buffers, once what was in it is written back."""
        if set_ in self._written:
            self._in.wait_event(self._written[set_])
        with torch.cuda.stream(self._in):
            yield
        self._fetched[set_] = self._in.record_event()

    def wait_for_fetch(self, set_: int) -> None:
        self._work.wait_event(self._fetched[set_])

    @contextlib.contextmanager
    def writing(self, set_: int) -> Iterator[None]:
        """What the work until now has made of a set of buffers."""
        self._out.wait_stream(self._work)
        with torch.cuda.stream(self._out):
            yield
        self._written[set_] = self._out.record_event()

    def join(self) -> None:
        """The work's stream, and what follows in it, waits for all copies; buffers may be given back after."""
        self._work.wait_stream(self._in)
        self._work.wait_stream(self._out)
