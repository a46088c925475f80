"""The streams of a stage, written turn by turn. What a turn writes is the same for all micro-batches but for their
number, so it is written once and copied."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import MICROBATCH_STEP, Action, Codes, pack, unpack
from systems.baselines.interleaved import Turn

Streams = dict[str, list[Action]]
Written = dict[str, Codes]
Write = Callable[..., Streams]
"""What turns do, by stream. Depends on a turn's pass and chunk, and on whether its micro-batch is even."""

_APART = 1 << 20
"""Numbers of the micro-batches of a written piece lie as far apart; even, as a direction is told by the last bit."""


class _Piece(NamedTuple):
    """Of one stream, codes of micro-batch 0 and the number of the turn whose micro-batch they are of."""

    base: Codes
    whose: NDArray[np.int64]


_NOTHING = _Piece(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


class Tape:
    """Streams as columns.

    Args:
        write: what turns do, where `add` is not told.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._known: dict[object, int] = {}
        self._pieces: list[dict[str, _Piece]] = []
        self._places: list[int] = []  # of what was added: its piece, the micro-batches of its turns and where they are
        self._microbatches: list[int] = []
        self._first: list[int] = []

    def add(self, *turns: Turn | None, write: Write | None = None) -> None:
        """Appends what `turns` do together."""
        # A pass and a chunk as one number: keys are made for every turn.
        key = write, *[turn and (turn[0] << 1 | turn[2] & 1, turn[1]) for turn in turns]
        piece = self._known.get(key)
        if piece is None:
            piece = self._known[key] = len(self._pieces)
            self._pieces.append(_piece(write or self._write, turns))
        self._places.append(piece)
        self._first.append(len(self._microbatches))
        self._microbatches += [turn[2] if turn else 0 for turn in turns]

    @property
    def streams(self) -> Written:
        names = dict.fromkeys(stream for place in self._places for stream in self._pieces[place])
        places, first = np.array(self._places, dtype=np.int64), np.array(self._first, dtype=np.int64)
        microbatches = np.array(self._microbatches, dtype=np.int64)
        return {name: self._stream(name, places, first, microbatches) for name in names}

    def _stream(
        self, name: str, places: NDArray[np.int64], first: NDArray[np.int64], microbatches: NDArray[np.int64]
    ) -> Codes:
        pieces = [piece.get(name, _NOTHING) for piece in self._pieces]
        size = np.array([len(piece.base) for piece in pieces])
        start, length = (np.cumsum(size) - size)[places], size[places]
        # Where each code is written, and which addition it belongs to.
        added = np.repeat(np.arange(len(places)), length)
        read = np.arange(len(added)) + (start - (np.cumsum(length) - length))[added]
        base, whose = (np.concatenate(columns)[read] for columns in zip(*pieces, strict=True))
        return base + MICROBATCH_STEP * microbatches[first[added] + whose]


def _piece(write: Write, turns: tuple[Turn | None, ...]) -> dict[str, _Piece]:
    apart = [turn and turn._replace(microbatch=turn.microbatch % 2 + i * _APART) for i, turn in enumerate(turns)]
    found = {}
    for stream, actions in write(*apart).items():
        if actions:
            codes = pack(actions)
            microbatch = unpack(codes).microbatch
            found[stream] = _Piece(codes - MICROBATCH_STEP * microbatch, microbatch // _APART)
    return found
