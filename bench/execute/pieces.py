"""How a message, several tensors one after another, is cut into pieces that fit into a landing place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 16  # bytes: where a tensor's part begins in a landing place


class Segment(NamedTuple):
    """Bytes [start, stop) of tensor number `tensor`, at `place` in the landing place."""

    tensor: int
    start: int
    stop: int
    place: int


def cut(sizes_bytes: Sequence[int], slot_bytes: int) -> list[list[Segment]]:
    """Pieces of at most `slot_bytes` each, filled in order; both ends of a message find the same.

    Args:
        sizes_bytes: of the tensors, each more than 0.
        slot_bytes: a multiple of `ALIGNMENT`.
    """
    pieces: list[list[Segment]] = []
    place = slot_bytes
    for tensor, size in enumerate(sizes_bytes):
        start = 0
        while start < size:
            if place >= slot_bytes:
                pieces.append([])
                place = 0
            stop = min(size, start + slot_bytes - place)
            pieces[-1].append(Segment(tensor, start, stop, place))
            place += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
            start = stop
    return pieces
