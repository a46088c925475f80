"""Calls of the CUDA driver that torch has no name for: words that streams write and wait for, shared memory.

A stream writes a word, waits for one and copies by itself, without a kernel and without the host (CUDA Driver API,
"Stream Memory Operations" and "Memory Management"). Numbers are compared as signed distances, so that they may wrap
around. Memory is that of the plain interprocess handles: `share` gives one, `mapped` opens it in another process on
this host, on a GPU that reaches the one where the memory is.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch

_WAIT_GEQ, _WRITE_DEFAULT, _ENABLE_PEER_ACCESS = 0, 0, 1
_OK = 0
HANDLE_BYTES = 64


class DriverError(RuntimeError):
    """The driver refused a call."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Bound(threading.local):
    """Whether torch's context is this thread's."""

    done = False


_bound = _Bound()


def wait_at_least(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """The stream goes on when the 32-bit word at `address`, in memory of its device, is `number` or later."""
    _call("cuStreamWaitValue32_v2", _stream(stream), _address(address), _word(number), ctypes.c_uint(_WAIT_GEQ))


def write(stream: torch.cuda.Stream, address: int, number: int) -> None:
    """The stream writes `number` into the 32-bit word at `address`, after all that came before."""
    _call("cuStreamWriteValue32_v2", _stream(stream), _address(address), _word(number), ctypes.c_uint(_WRITE_DEFAULT))


def copy(stream: torch.cuda.Stream, target: int, source: int, num_bytes: int) -> None:
    """The stream copies bytes between addresses of any GPUs that this process can reach."""
    _call("cuMemcpyAsync", _address(target), _address(source), ctypes.c_size_t(num_bytes), _stream(stream))


def allocate(num_bytes: int) -> int:
    """Address of new memory on the current device, all zero: a whole allocation, as handles are of."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    clear(address.value, num_bytes)
    return address.value


def clear(address: int, num_bytes: int) -> None:
    """Zero bytes, when this returns."""
    _call("cuMemsetD8_v2", _address(address), ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
    torch.cuda.synchronize()


def share(address: int) -> bytes:
    """A handle of memory from `allocate`, for other processes."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), _address(address))
    return bytes(handle.reserved)


def mapped(handle: bytes) -> int:
    """Address here of the memory behind another process's handle. Its owner may not free it while it is mapped."""
    address = ctypes.c_uint64()
    whole = _Handle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), whole, ctypes.c_uint(_ENABLE_PEER_ACCESS))
    return address.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _stream(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)


def _address(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(address)


def _word(number: int) -> ctypes.c_uint32:
    return ctypes.c_uint32(number & 0xFFFFFFFF)


def _call(name: str, *args: Any) -> None:
    if not _bound.done:
        # The driver's calls are about the thread's context, which torch's first work on the device makes its own.
        torch.cuda.current_stream().record_event()
        _bound.done = True
    answer = getattr(_driver(), name)(*args)
    if answer != _OK:
        raise DriverError(f"{name} answered {answer} ({_name_of(answer)})")


def _name_of(answer: int) -> str:
    name = ctypes.c_char_p()
    known = _driver().cuGetErrorName(answer, ctypes.byref(name)) == _OK and name.value is not None
    return name.value.decode() if known and name.value else "unknown"
