"""Two calls of the CUDA driver that torch has no name for: a stream writes a number, or waits for one.

Both are carried out by the stream itself, without a kernel and without the host (CUDA Driver API, "Stream Memory
Operations"). Numbers are compared as signed distances, so that they may wrap around.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

_WAIT_GEQ, _WRITE_DEFAULT = 0, 0
_ANSWER_OK = 0


class DriverError(RuntimeError):
    """The driver refused a call."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def wait_at_least(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """The stream goes on when the 32-bit word at `address`, in memory of its device, is `number` or later."""
    _call("cuStreamWaitValue32_v2", stream, address, number, _WAIT_GEQ)


def write(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """The stream writes `number` into the 32-bit word at `address`, after all that came before."""
    _call("cuStreamWriteValue32_v2", stream, address, number, _WRITE_DEFAULT)


def _call(name: str, stream: torch.cuda.Stream, address: int, number: int, flags: int) -> None:
    word = ctypes.c_uint32(number & 0xFFFFFFFF)
    answer = getattr(_driver(), name)(
        ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), word, ctypes.c_uint(flags)
    )
    if answer != _ANSWER_OK:
        raise DriverError(f"{name} answered {answer}")
