"""Where the turn of the attention groups moves on by one, so that layers with a window are spread over all groups.

With layers dealt in turn, a model that alternates between windowed and full attention has all its full layers on the
same groups wherever the number of groups is even. One shift of the turn exchanges the two kinds for the layers behind
it and leaves the order of the pipeline as it is everywhere else: no other group waits longer for its next layer.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.flops import Part, has_part, part_flops
from bench.models import Model

WORTH_A_SHIFT = 0.02
"""By how much, relative, the busiest group has to have less to do."""


class Homes(NamedTuple):
    """Where head and layers are on given groups: `head_group` and `shift_at` of a layout."""

    head_group: int
    shift_at: int | None


def turns(num_layers: int, groups: int, chunk: int, shift_at: int | None) -> list[int]:
    """[layers + 1]: number of the attention group of each layer, and of the one that would come next, the head's."""
    moved = num_layers + 1 if shift_at is None else shift_at
    return [(layer // chunk + (layer >= moved)) % groups for layer in range(num_layers + 1)]


def best_shift(work: Sequence[float] | NDArray[np.float64], groups: int, chunk: int = 1) -> int | None:
    """The layer from which on the turn moves on so that the busiest group has least to do; None for none.

    Args:
        work: [layers + 1]: what each layer's attention takes, in any unit, and last the head, which follows in turn.
    """
    column = np.asarray(work, dtype=np.float64)[:, None]
    num_layers, here = len(column) - 1, np.arange(groups)
    turn = np.arange(num_layers + 1) // chunk % groups
    plain, moved = (np.where(each[:, None] == here, column, 0.0) for each in (turn, (turn + 1) % groups))
    # [layers + 1, groups]: in turn before a layer, moved on from it.
    before, behind = np.cumsum(plain, axis=0) - plain, np.cumsum(moved[::-1], axis=0)[::-1]
    busiest = (before + behind).max(axis=1)[chunk:num_layers:chunk]
    best = int(busiest.argmin()) if len(busiest) else 0
    if not len(busiest) or busiest[best] >= (1 - WORTH_A_SHIFT) * plain.sum(axis=0).max():
        return None
    return chunk * (1 + best)


def spreads(model: Model) -> bool:
    """Whether the model's layers differ in attention, so that a shift may even anything out."""
    return len(set(model.window_pattern)) > 1


@lru_cache(maxsize=1024)
def shift_of(model: Model, seq_len: int, groups: int, chunk: int = 1) -> int | None:
    """`best_shift` by the model's FLOPs at that length, of which every pass has the same share."""
    if groups < 2 or chunk < 1 or not spreads(model):
        return None
    parts: tuple[Part, ...] = ("attention", "router", "dense_ffn")

    def flops(part: Part, layer: int) -> float:
        return part_flops(model, part, layer, "F", tokens=1.0, seq_len=seq_len)

    work = [sum(flops(p, layer) for p in parts if has_part(model, p, layer)) for layer in range(model.num_layers)]
    return best_shift([*work, flops("head", 0)], groups, chunk)
