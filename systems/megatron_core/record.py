"""What megatron-core does in a step, with times: attention, experts, all-to-alls, head, sums, update.

Every piece of a layer has an entry and an exit in the graph, where its tensors pass through unchanged. A forward passes
the entry first, its backward the exit; a mark is taken in whatever stream that happens. Nothing of megatron-core's
order changes. Messages between stages are not noted: they are gaps.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.action import Action, Kind, Pass
from bench.execute.record import NativeSpan
from bench.execute.streams import Mark, Streams
from bench.program import Op

Moved = Callable[[Pass, Sequence[Tensor]], int]
"""Bytes that leave the rank, by pass and the tensors at the entry."""


class Recorder:
    """Times of one step of the chunks of a rank.

    Args:
        recomputes: whether layers run once more in the backward; their second forward is pass R.
    """

    def __init__(self, chunks: Sequence[Any], device: torch.device, *, recomputes: bool) -> None:
        self._chunks, self._recomputes = chunks, recomputes
        self._streams = Streams(device, ())
        self._seen: Counter[tuple[Kind, int, Pass]] = Counter()
        self._done: list[tuple[Op, Action, Mark, Mark, int]] = []

    @property
    def base_s(self) -> float:
        """Start of the step on the host's monotonic clock."""
        return self._streams.base_s

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around a step."""
        with contextlib.ExitStack() as stack:
            for chunk in self._chunks:
                self._watch_ends(chunk, stack)
                for layer in chunk.decoder.layers:
                    self._watch_layer(layer, stack)
            self._streams.begin()
            yield

    @contextlib.contextmanager
    def span(self, op: Op, kind: Kind) -> Iterator[None]:
        """Around something at the end of a step."""
        begun = self._streams.mark()
        yield
        self._done.append((op, Action(kind), begun, self._streams.mark(), 0))

    def spans(self) -> tuple[NativeSpan, ...]:
        """All that was noted; waits for the device."""
        if self._streams.is_cuda:
            torch.cuda.synchronize(self._streams.device)
        seconds = self._streams.seconds
        return tuple(
            NativeSpan(op, action, seconds(begun), seconds(ended), moved)
            for op, action, begun, ended, moved in self._done
        )

    def _watch_ends(self, chunk: Any, stack: contextlib.ExitStack) -> None:
        if chunk.pre_process:
            embed = _Piece(self, Op.COMPUTE, Kind.EMBED, 0)
            stack.callback(chunk.embedding.register_forward_pre_hook(embed.before).remove)
            stack.callback(chunk.embedding.register_forward_hook(embed.after).remove)
        if chunk.post_process:
            head = _Piece(self, Op.COMPUTE, Kind.HEAD, 0)
            stack.callback(chunk.output_layer.register_forward_pre_hook(head.before).remove)
            _wrap(stack, chunk, "compute_language_model_loss", leave=head.leave)

    def _watch_layer(self, layer: Any, stack: contextlib.ExitStack) -> None:
        number = layer.layer_number - 1
        attention = _Piece(self, Op.COMPUTE, Kind.ATTENTION, number)
        stack.callback(layer.input_layernorm.register_forward_pre_hook(attention.before).remove)
        dispatcher = getattr(layer.mlp, "token_dispatcher", None)
        if dispatcher is None:  # a dense layer's FFN is the attention's
            stack.callback(layer.mlp.register_forward_hook(attention.after).remove)
            return
        experts = _Piece(self, Op.COMPUTE, Kind.EXPERT, number)
        dispatch = _Piece(self, Op.SEND, Kind.DISPATCH, number, partial(_moved, dispatcher, sends=Pass.F))
        combine = _Piece(self, Op.SEND, Kind.COMBINE, number, partial(_moved, dispatcher, sends=Pass.B))
        _wrap(stack, dispatcher, "dispatch_preprocess", leave=attention.leave)
        _wrap(stack, dispatcher, "token_dispatch", enter=dispatch.enter, leave=dispatch.leave)
        _wrap(stack, dispatcher, "dispatch_postprocess", enter=experts.enter)
        _wrap(stack, dispatcher, "combine_preprocess", leave=experts.leave)
        _wrap(stack, dispatcher, "token_combine", enter=combine.enter, leave=combine.leave)

    def _microbatch(self, kind: Kind, layer: int) -> tuple[Pass, int]:
        """Pass and micro-batch of a forward that begins: they come in order."""
        pass_ = Pass.R if self._recomputes and torch.is_grad_enabled() and kind is not Kind.HEAD else Pass.F
        self._seen[kind, layer, pass_] += 1
        return pass_, self._seen[kind, layer, pass_] - 1


class _Piece:
    """One piece of a layer: forwards and backwards from its entry to its exit and back."""

    def __init__(self, recorder: Recorder, op: Op, kind: Kind, layer: int, moved: Moved | None = None) -> None:
        self._recorder, self._op, self._kind, self._layer, self._moved = recorder, op, kind, layer, moved
        self._forward: tuple[Pass, int, Mark, int] | None = None
        self._backward: dict[int, tuple[Mark, int]] = {}

    def enter(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        pass_, m = self._recorder._microbatch(self._kind, self._layer)
        moved = 0 if self._moved is None else self._moved(Pass.F, tensors)
        self._forward = pass_, m, self._recorder._streams.mark(), moved
        return _passed(tensors, partial(self._backward_ends, m))

    def leave(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert self._forward is not None
        pass_, m, begun, moved = self._forward
        self._note(pass_, m, begun, moved)
        back = 0 if self._moved is None else self._moved(Pass.B, tensors)
        return _passed(tensors, partial(self._backward_begins, m, back))

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """`enter` as a hook of a module, whose first input counts where it has a gradient."""
        first, *others = inputs or (None,)
        if isinstance(first, Tensor) and first.is_floating_point():
            return (*self.enter(first), *others)
        self.enter()
        return inputs

    def after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """`leave` as a hook of a module."""
        if isinstance(output, tuple):
            return (*self.leave(output[0]), *output[1:])
        return self.leave(output)[0]

    def _backward_begins(self, m: int, moved: int) -> None:
        self._backward[m] = self._recorder._streams.mark(), moved

    def _backward_ends(self, m: int) -> None:
        if m in self._backward:
            self._note(Pass.B, m, *self._backward.pop(m))

    def _note(self, pass_: Pass, m: int, begun: Mark, moved: int) -> None:
        action = Action(self._kind, pass_, self._layer, m)
        self._recorder._done.append((self._op, action, begun, self._recorder._streams.mark(), moved))


def _wrap(
    stack: contextlib.ExitStack,
    owner: Any,
    name: str,
    *,
    enter: Callable[..., tuple[Tensor, ...]] | None = None,
    leave: Callable[..., tuple[Tensor, ...]] | None = None,
) -> None:
    """Has a method's tensors pass an entry before it, and what it returns an exit after it, until the stack unwinds."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        if enter is not None:
            args = _through(enter, args)
        out = method(*args, **options)
        if leave is None:
            return out
        return _through(leave, out) if isinstance(out, tuple) else _through(leave, (out,))[0]

    setattr(owner, name, wrapped)
    stack.callback(delattr, owner, name)


def _through(point: Callable[..., tuple[Tensor, ...]], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values, their floating-point tensors having passed a point."""
    floats = [isinstance(value, Tensor) and value.is_floating_point() for value in values]
    passed = iter(point(*(value for value, is_float in zip(values, floats, strict=True) if is_float)))
    return tuple(next(passed) if is_float else value for value, is_float in zip(values, floats, strict=True))


def _passed(tensors: tuple[Tensor, ...], on_backward: Callable[[], None]) -> tuple[Tensor, ...]:
    if not any(tensor.requires_grad for tensor in tensors):
        return tensors
    out: tuple[Tensor, ...] = _Point.apply(on_backward, *tensors)
    return out


class _Point(torch.autograd.Function):
    """The tensors themselves; the call comes when all of their gradients are there."""

    @staticmethod
    def forward(ctx: Any, on_backward: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.on_backward = on_backward
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.on_backward()
        return None, *grads


def _moved(dispatcher: Any, pass_: Pass, tensors: Sequence[Tensor], *, sends: Pass) -> int:
    """Bytes of an all-to-all to other ranks: the rows that this rank sends in one pass come back in the other."""
    splits = dispatcher.input_splits if pass_ is sends else dispatcher.output_splits
    if splits is None:
        return 0
    rows = [int(number) for number in splits]
    elsewhere = sum(rows) - rows[dispatcher.ep_group.rank()]
    return elsewhere * sum(tensor[0].numel() * tensor.element_size() for tensor in tensors if len(tensor))
