"""What a forward keeps for its backward, in the host's memory in between.

Every floating-point tensor that autograd saves is copied to the host as it is saved, beside the computation that goes
on, and let go on the device when the forward is over; the backward, or whoever knows that it comes next, fetches them
all again. Parameters stay, and so do integers: the choice of experts and what follows from it. On a CPU the same copies
are made in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class HostLink:
    """A device's way to the host's memory: a stream in each direction on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.device = device
        if self.is_cuda:
            self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)


@dataclass
class _Copy:
    """A tensor with the host; `fetched` is what has come back."""

    host: Tensor
    written: Any = None
    fetched: Tensor | None = None
    arrived: Any = None


class Away:
    """What one forward of a part keeps.

    Args:
        parameters: of the part, which stay.

    Attributes:
        num_bytes: that are with the host.
        here: other tensors that are kept, where they were.
        input_grads: number of an input -> its gradient, after the backward.
    """

    def __init__(self, link: HostLink, parameters: Iterable[Tensor]) -> None:
        self._link = link
        self._stay = {param.untyped_storage().data_ptr() for param in parameters}
        self._copies: dict[tuple[Any, ...], _Copy] = {}
        self._saved: list[Tensor] = []
        self.here: list[Tensor] = []
        self.input_grads: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(copy.host.nbytes for copy in self._copies.values())

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Around the forward."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        # Until here nothing else could come to lie at an address that is known.
        self._saved.clear()

    def enter(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs of the forward whose memory nothing of this holds, and whose gradients come to `input_grads`."""
        token = torch.empty(0, device=self._link.device, requires_grad=True)

        def entered(number: int, value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_floating_point()):
                return value
            return _Entry.apply(value.detach(), token, self.input_grads, number)

        return tuple(entered(number, value) for number, value in enumerate(inputs))

    def fetch(self) -> None:
        """Begins to bring everything back, once."""
        link = self._link
        if not link.is_cuda:
            return
        with torch.cuda.stream(link.back):
            for copy in self._copies.values():
                if copy.fetched is None:
                    link.back.wait_event(copy.written)
                    copy.fetched = torch.empty_like(copy.host, device=link.device, pin_memory=False)
                    copy.fetched.copy_(copy.host, non_blocking=True)
                    copy.arrived = link.back.record_event()

    def _pack(self, tensor: Tensor) -> Tensor | _Copy:
        if tensor.untyped_storage().data_ptr() in self._stay or not tensor.is_floating_point():
            self.here.append(tensor)
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._copies:
            self._copies[key] = self._sent(tensor)
            self._saved.append(tensor)
        return self._copies[key]

    def _sent(self, tensor: Tensor) -> _Copy:
        link = self._link
        host = torch.empty_like(tensor, device="cpu", pin_memory=link.is_cuda, requires_grad=False)
        if not link.is_cuda:
            return _Copy(host.copy_(tensor.detach()))
        link.out.wait_stream(torch.cuda.current_stream(link.device))
        with torch.cuda.stream(link.out):
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(link.out)
        return _Copy(host, link.out.record_event())

    def _unpack(self, kept: Tensor | _Copy) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not self._link.is_cuda:
            return kept.host
        self.fetch()
        assert kept.fetched is not None
        stream = torch.cuda.current_stream(self._link.device)
        stream.wait_event(kept.arrived)
        kept.fetched.record_stream(stream)
        return kept.fetched


class _Entry(torch.autograd.Function):
    """The value itself. A leaf would be held by its own gradient's place in the graph."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, grads: dict[int, Tensor], number: int) -> Tensor:
        ctx.grads, ctx.number = grads, number
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.grads[ctx.number] = grad
        return None, None, None, None
