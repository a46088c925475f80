"""megatron-core 0.16.1 on the CPU: stand-ins for what it asks of CUDA, for as long as a block runs.

It allocates on ``cuda`` by name, compares types with ``torch.cuda.FloatTensor``, and makes streams and events. On the
CPU everything is in order as it is issued, so that a stream and an event have nothing to do. With CUDA nothing changes.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


@contextlib.contextmanager
def running_on(device: torch.device) -> Iterator[None]:
    """Inside, megatron-core runs on the device: on a GPU as it is, on the CPU with stand-ins, which are gone after."""
    if device.type == "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, value in _stand_ins():
            stack.callback(_put, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(warnings.catch_warnings())
        # Of the mode itself, which is handed what C++ would look at, and of names that torch 2.13 has others for.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")
        stack.enter_context(_OnCpu())
        yield


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    in_order = _InOrder()
    yield torch.cuda, "current_device", lambda: CPU
    yield torch.cuda, "synchronize", _nothing
    yield torch.cuda, "Stream", _InOrder
    yield torch.cuda, "Event", _InOrder
    yield torch.cuda, "current_stream", lambda *_: in_order
    yield torch.cuda, "default_stream", lambda *_: in_order
    yield torch.cuda, "stream", lambda _: contextlib.nullcontext()
    # Of combined 1F1B, around every node of a layer.
    yield torch.cuda.nvtx, "range_push", _nothing
    yield torch.cuda.nvtx, "range_pop", _nothing
    yield Tensor, "record_stream", _nothing
    # Of a recomputed layer, around its second forward.
    yield random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()
    yield random, "_set_cuda_rng_state", _nothing
    # Counts that are on the host already stay tensors there, which all_to_all_single does not take as split sizes.
    move = token_dispatcher.maybe_move_tensor_to_cpu
    yield token_dispatcher, "maybe_move_tensor_to_cpu", lambda *args, **options: _moved(move, *args, **options)
    yield token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", in_order


def _put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _moved(move: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    moved = move(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved


class _InOrder:
    """A stream or an event of work that is over when it is issued."""

    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    wait = record = synchronize = wait_stream = wait_event = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _InOrder()

    def query(self) -> bool:
        return True


class _OnCpu(TorchFunctionMode):
    """Tensors asked for on ``cuda`` come to be on the CPU, and types are named as they would be on CUDA."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is Tensor.type and len(args) == 1 and not options:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda":
            options["device"] = CPU
        return func(*args, **options)
