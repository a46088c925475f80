"""The eight steps of DualPipe and of DualPipeV, on one rank (deepseek-ai/DualPipe, dualpipe.py and dualpipev.py).

A rank has a chunk of layers in each of two phases. With h the rank's place in its half, counted from the outer end, H
ranks in a half and m micro-batches a phase; F0, F1 forwards and B0, B1 backwards of the phases, W a weight gradient
that was put off, & a woven pair:

    1. 2 (H - h - 1) x F0                  5. (H - h - 1) x (B1, F1 & B0)
    2. (h + 1) x (F0, F1)                  6. (h + 1) x (B1, B0), from the middle on without weight gradients
    3. (H - h - 1) x (B1 without W, W, F1) 7. (H - h - 1) x (W, B0 without W)
    4. (m - 2 H + h + 1) x (F0 & B1, F1 & B0)
                                           8. every W that is left

At the inner end of a half the first pair of step 4 is F0, then B1: its own last forward is what that backward needs.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count

from bench.action import Pass
from systems.baselines.colocated import Stage
from systems.baselines.interleaved import Turn
from systems.baselines.tape import Streams, Tape, Written
from systems.baselines.weave import PUT_OFF, weave

TurnOf = Callable[[Pass, int, int], Turn]
"""(pass, phase, number of the micro-batch within the phase) -> the turn."""


def eight_steps(stage: Stage, place: int, num_ranks: int, num_microbatches: int, turn_of: TurnOf) -> Written:
    """Streams of one rank.

    Args:
        place, num_ranks: h and H.
        num_microbatches: of one phase, 2 H or more.
    """
    behind = num_ranks - place - 1
    pairs = num_microbatches - 2 * num_ranks + place + 1
    steps = _Steps(stage, turn_of)
    steps.fill(place, behind)
    steps.weave(pairs, behind)
    steps.drain(place, behind)
    return steps.tape.streams


class _Steps:
    def __init__(self, stage: Stage, turn_of: TurnOf) -> None:
        self.turn_of = turn_of
        self.tape = Tape(partial(weave, stage))
        self._stage = stage
        self._next = {(pass_, phase): count() for pass_ in (Pass.F, Pass.B) for phase in (0, 1)}
        self._put_off: deque[Turn] = deque()

    def fill(self, place: int, behind: int) -> None:
        """Steps 1 to 3."""
        for _ in range(2 * behind):
            self._forward(0)
        for _ in range(place + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(behind):
            self._backward(1, put_off=True)
            self._weight()
            self._forward(1)

    def weave(self, pairs: int, behind: int) -> None:
        """Steps 4 and 5."""
        for pair in range(pairs):
            if pair == 0 and behind == 0:
                self._forward(0)
                self._backward(1)
            else:
                self._pair(0, 1)
            self._pair(1, 0)
        for _ in range(behind):
            self._backward(1)
            self._pair(1, 0)

    def drain(self, place: int, behind: int) -> None:
        """Steps 6 to 8."""
        put_off = False
        for i in range(place + 1):
            put_off = put_off or (i == (place + 1) // 2 and place % 2 == 1)
            self._backward(1, put_off)
            put_off = put_off or (i == (place + 1) // 2 and place % 2 == 0)
            self._backward(0, put_off)
        for _ in range(behind):
            self._weight()
            self._backward(0, put_off=True)
        while self._put_off:
            self._weight()

    def _turn(self, pass_: Pass, phase: int) -> Turn:
        return self.turn_of(pass_, phase, next(self._next[pass_, phase]))

    def _forward(self, phase: int) -> None:
        self.tape.add(self._turn(Pass.F, phase), None)

    def _backward(self, phase: int, put_off: bool = False) -> None:
        turn = self._turn(Pass.B, phase)
        if put_off:
            self._put_off.append(turn)
            self.tape.add(turn, write=self._without_weights)
        else:
            self.tape.add(None, turn)

    def _without_weights(self, turn: Turn) -> Streams:
        streams = weave(self._stage, None, turn, put_off=True)
        del streams[PUT_OFF]
        return streams

    def _weights(self, turn: Turn) -> Streams:
        return {"compute": weave(self._stage, None, turn, put_off=True)[PUT_OFF]}

    def _pair(self, forward: int, backward: int) -> None:
        self.tape.add(self._turn(Pass.F, forward), self._turn(Pass.B, backward))

    def _weight(self) -> None:
        self.tape.add(self._put_off.popleft(), write=self._weights)
