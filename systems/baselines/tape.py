"""The streams of a stage, written turn by turn. What a turn writes is the same for all micro-batches but for their
number, so it is written once and copied."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import MICROBATCH_STEP, Action, Codes, pack, unpack
from systems.baselines.interleaved import Turn, Turns

Streams = dict[str, list[Action]]
Written = dict[str, Codes]
Write = Callable[..., Streams]
"""What turns do, by stream. Depends on a turn's pass and chunk; its micro-batch is a number to be written, no more."""

_APART = 1 << 20
"""Numbers of the micro-batches of a written piece lie as far apart."""


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
        # Of what was added: its piece, and the micro-batches of its turns.
        self._added: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, *turns: Turn | None, write: Write | None = None) -> None:
        """Appends what `turns` do together."""
        piece = self._number(turns, write)
        self._added.append((np.array([piece]), np.array([[turn.microbatch if turn else 0 for turn in turns]])))

    def add_all(self, *turns: Turns | None) -> None:
        """Appends what the first of each do together, then the second of each, and so on."""
        num = next(len(each.chunk) for each in turns if each is not None)
        keys = np.zeros((num, 2 * len(turns)), dtype=np.int64)
        for i, each in enumerate(turns):
            if each is not None:
                keys[:, 2 * i : 2 * i + 2] = np.stack([each.pass_, each.chunk], axis=1)
        limits = keys.max(axis=0, initial=0) + 1
        _, first, which = np.unique(
            np.ravel_multi_index(tuple(keys.T), tuple(limits)), return_index=True, return_inverse=True
        )
        pieces = [self._number([each and each.at(place) for each in turns], None) for place in first.tolist()]
        numbers = [np.zeros(num, dtype=np.int64) if each is None else each.microbatch for each in turns]
        self._added.append((np.array(pieces, dtype=np.int64)[which], np.stack(numbers, axis=1)))

    def _number(self, turns: Sequence[Turn | None], write: Write | None) -> int:
        """The number of the piece that turns write."""
        key = write, *(turn and (int(turn.pass_), turn.chunk) for turn in turns)
        if key not in self._known:
            self._known[key] = len(self._pieces)
            self._pieces.append(_piece(write or self._write, turns))
        return self._known[key]

    @property
    def streams(self) -> Written:
        places = np.concatenate([pieces for pieces, _ in self._added])
        microbatches = np.concatenate([numbers.ravel() for _, numbers in self._added])
        # Where those of each addition begin.
        widths = np.concatenate([np.full(len(numbers), numbers.shape[1]) for _, numbers in self._added])
        first = np.cumsum(widths) - widths
        names = dict.fromkeys(stream for place in dict.fromkeys(places.tolist()) for stream in self._pieces[place])
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


def _piece(write: Write, turns: Sequence[Turn | None]) -> dict[str, _Piece]:
    apart = [turn and turn._replace(microbatch=i * _APART) for i, turn in enumerate(turns)]
    found = {}
    for stream, actions in write(*apart).items():
        if actions:
            codes = pack(actions)
            microbatch = unpack(codes).microbatch
            found[stream] = _Piece(codes - MICROBATCH_STEP * microbatch, microbatch // _APART)
    return found
