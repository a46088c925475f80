"""A rank's part of the training state, by global name: which box of which tensor, and the memory that it lies in.

Names and shapes are the model's, never a layout's, so what any layout saves any other can load:

    model.{name}                   main weights, fp32 also where the model trains in bf16
    optimizer.exp_avg.{name}       first moments
    optimizer.exp_avg_sq.{name}    second moments

with the global names of `bench.execute.init`: experts one by one, layers by their number in the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench.execute.init import named_global, parameter_shapes
from bench.execute.optimizer import AdamW
from bench.execute.sync import GradientSync
from bench.models import Model

STATE = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")


class Shard(NamedTuple):
    """A box of a global tensor. `tensor` has the box's sizes, and shares its memory with the training state."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


class Box(NamedTuple):
    """Part of a tensor whose elements are neighbours in memory, `start` elements after the first of them all."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def global_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a model's training state."""
    return {f"{state}.{name}": shape for state in STATE for name, shape in parameter_shapes(model).items()}


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """The elements low to high - 1 of a matrix or a vector, counted row by row, as few boxes.

    An interval of a matrix begins and ends within a row: up to three boxes.
    """
    if len(shape) == 1:
        if low < high:
            yield Box((low,), (high - low,), low)
        return
    columns = math.prod(shape[1:])
    first_whole, last_whole = -(-low // columns), high // columns
    if first_whole > last_whole:  # within one row
        yield Box((low // columns, low % columns), (1, high - low), low)
        return
    if low % columns:
        yield Box((low // columns, low % columns), (1, first_whole * columns - low), low)
    if first_whole < last_whole:
        yield Box((first_whole, 0), (last_whole - first_whole, columns), first_whole * columns)
    if high % columns:
        yield Box((last_whole, 0), (1, high % columns), last_whole * columns)


def held_shards(parts: Iterable[nn.Module], gradients: GradientSync) -> list[Shard]:
    """What this rank keeps up to date: all of its parameters, or with sharded state its slices of them."""
    return list(_shards(parts, gradients, share_out=False))


def saved_shards(parts: Iterable[nn.Module], gradients: GradientSync) -> list[Shard]:
    """What this rank writes. What several ranks hold they share out, so that every element is written once."""
    return list(_shards(parts, gradients, share_out=True))


def whole_shards(parameters: Mapping[str, Tensor], optimizer: AdamW) -> list[Shard]:
    """Of a process that holds the whole model; the optimizer has the parameters in the same order."""
    return [
        Shard(f"{state}.{name}", tuple(tensor.shape), (0,) * tensor.dim(), tensor)
        for state, tensors in zip(STATE, _tensors(optimizer), strict=True)
        for name, tensor in zip(parameters, tensors, strict=True)
    ]


def _tensors(optimizer: AdamW) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return optimizer.main, optimizer.first_moments, optimizer.second_moments


def _shards(parts: Iterable[nn.Module], gradients: GradientSync, *, share_out: bool) -> Iterator[Shard]:
    named = [(name, value) for part in parts for name, value, _ in named_global(part)]
    states = zip(*_tensors(gradients.optimizer), strict=True)
    for flat in gradients.flats:
        storage = flat.weights.untyped_storage().data_ptr()
        inside = [(name, value) for name, value in named if value.untyped_storage().data_ptr() == storage]
        own = flat.slice_of(flat.index) if share_out else range(len(flat.weights))
        for piece, tensors in zip(flat.pieces, states, strict=False):
            first = int(piece.storage_offset())
            for name, value in inside:
                begin = int(value.storage_offset())
                low = max(begin, first, own.start)
                high = min(begin + value.numel(), first + piece.numel(), own.stop)
                for box in boxes(value.shape, low - begin, high - begin) if low < high else ():
                    start = begin + box.start - first
                    for state, tensor in zip(STATE, tensors, strict=True):
                        view = tensor.view(-1)[start : start + math.prod(box.sizes)].view(box.sizes)
                        yield Shard(f"{state}.{name}", tuple(value.shape), box.offsets, view)


@torch.no_grad()
def after_loading(gradients: GradientSync, num_steps: int) -> None:
    """Makes parameters of the main weights that were loaded, and gives every rank the slices of the others."""
    gradients.optimizer.restore(num_steps)
    for flat in gradients.flats:
        flat.gather_weights()
    if gradients.device.type == "cuda":
        torch.cuda.synchronize(gradients.device)  # before other streams read the weights
