"""Triton kernels for what lies between the matrix products, a module for each purpose.

Arguments that differ from call to call are not specialised on: another variant would be compiled and loaded in the
middle of a step, and loading waits for the GPU to be idle, which it is not while a message is awaited.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor


@cache
def _module(name: str) -> ModuleType | None:
    try:
        return import_module(f"{__name__}.{name}")
    except ImportError:
        return None


def kernels(name: str, tensor: Tensor) -> ModuleType | None:
    """The module of that name for a tensor on CUDA; None elsewhere, and where Triton is not installed."""
    return _module(name) if tensor.is_cuda else None
