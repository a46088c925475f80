"""The streams of a stage, written turn by turn. What a turn writes is the same for all micro-batches but for their
number, so it is written once and copied."""

from collections.abc import Callable

import numpy as np

from bench.action import MICROBATCH_STEP, Action, Codes, pack, unpack
from systems.baselines.interleaved import Turn

Streams = dict[str, list[Action]]
Written = dict[str, Codes]

_APART = 1 << 20
"""Numbers of the micro-batches of a written piece lie as far apart; even, as a direction is told by the last bit."""


class Tape:
    """Streams as columns.

    Args:
        write: what turns do, by stream. Depends on a turn's pass and chunk, and on whether its micro-batch is even.
    """

    def __init__(self, write: Callable[..., Streams]) -> None:
        self._write = write
        self._known: dict[tuple[tuple[int, int, int] | None, ...], dict[str, tuple[Codes, Codes]]] = {}
        self._pieces: dict[str, list[Codes]] = {}

    def add(self, *turns: Turn | None) -> None:
        """Appends what `turns` do together."""
        self.put(self.of(*turns))

    def of(self, *turns: Turn | None) -> Written:
        """What `turns` do together, for a later `put`."""
        key = tuple(turn and (int(turn.pass_), turn.chunk, turn.microbatch % 2) for turn in turns)
        if key not in self._known:
            self._known[key] = self._piece(turns)
        numbers = np.array([turn.microbatch if turn else 0 for turn in turns])
        return {stream: base + MICROBATCH_STEP * numbers[whose] for stream, (base, whose) in self._known[key].items()}

    def put(self, written: Written) -> None:
        for stream, codes in written.items():
            self._pieces.setdefault(stream, []).append(codes)

    @property
    def streams(self) -> Written:
        return {stream: np.concatenate(pieces) for stream, pieces in self._pieces.items()}

    def _piece(self, turns: tuple[Turn | None, ...]) -> dict[str, tuple[Codes, Codes]]:
        """By stream, codes of micro-batch 0 and the number of the turn whose micro-batch they are of."""
        apart = [turn and turn._replace(microbatch=turn.microbatch % 2 + i * _APART) for i, turn in enumerate(turns)]
        found = {}
        for stream, actions in self._write(*apart).items():
            if actions:
                codes = pack(actions)
                microbatch = unpack(codes).microbatch
                found[stream] = codes - MICROBATCH_STEP * microbatch, microbatch // _APART
        return found
