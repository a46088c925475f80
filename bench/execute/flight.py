"""The flight recorder: what every rank did last, in a file that its process cannot take with it.

A rank notes when it begins and ends an operation of a queue, in memory that is mapped from a file: a few dozen
nanoseconds each, and readable from outside when the rank is killed, stopped or caught in a loop.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

from bench.program import Program

MAX_QUEUES = 64  # of one rank; what happens in more is not noted
# Phase, step, time, and what makes a time of this process one of the clock on the wall, so that others can read it;
# of a queue the operations begun and ended last, and the time. Times are in ns.
_HEAD, _PER_QUEUE = 4, 3
_NUM_SLOTS = _HEAD + _PER_QUEUE * MAX_QUEUES


class Phase(IntEnum):
    """What a rank is about, beside the queues of a step."""

    STARTING = 0
    LOADING = 1
    STEP = 2
    DONE = 3
    SAVING = 4


_IN_WORDS = {
    Phase.STARTING: "setting up",
    Phase.LOADING: "loading a checkpoint",
    Phase.STEP: "in step {step}",
    Phase.DONE: "after step {step}",
    Phase.SAVING: "saving after step {step}",
}


class Flight:
    """The recorder of this process. Queues are numbered as those of the rank's own group in the program.

    Args:
        path: of its file; None where nobody is to read it.
    """

    def __init__(self, path: Path | None) -> None:
        if path is None:
            memory = mmap.mmap(-1, 8 * _NUM_SLOTS)
        else:
            with path.open("w+b") as file:
                file.truncate(8 * _NUM_SLOTS)
                memory = mmap.mmap(file.fileno(), 8 * _NUM_SLOTS)
        self._slots = memoryview(memory).cast("q")
        self._slots[3] = time.time_ns() - time.monotonic_ns()

    def phase(self, phase: Phase, step: int = 0) -> None:
        """Steps count from 0. A step begins with nothing begun."""
        if phase == Phase.STEP:
            for slot in range(_HEAD, _NUM_SLOTS):
                self._slots[slot] = 0
        self._slots[0], self._slots[1], self._slots[2] = phase, step, time.monotonic_ns()

    def begin(self, queue: int, k: int) -> None:
        """Operation k of the program begins in a queue."""
        self._note(queue, 0, k)

    def end(self, queue: int, k: int) -> None:
        """Operation k has ended; on CUDA, as far as the host waits for it."""
        self._note(queue, 1, k)

    def _note(self, queue: int, which: int, k: int) -> None:
        if queue < MAX_QUEUES:
            slot = _HEAD + _PER_QUEUE * queue
            self._slots[slot + which], self._slots[slot + 2] = k + 1, time.monotonic_ns()


def read_slots(path: Path) -> tuple[int, ...]:
    """What a rank has noted in its file; empty where there is none."""
    try:
        return struct.unpack(f"={_NUM_SLOTS}q", path.read_bytes())
    except (OSError, struct.error):
        return ()


def last_noted_s(flights: Sequence[Sequence[int]]) -> float | None:
    """When any rank last noted anything, by the clock on the wall; None where none did."""
    noted = [slots[3] + max(slots[2], *slots[_HEAD + 2 :: _PER_QUEUE]) for slots in flights if slots]
    return max(noted) / 1e9 if noted else None


def last_actions(
    flights: Sequence[Sequence[int]], program: Program | None = None, now_s: float | None = None
) -> tuple[str, ...]:
    """What every rank did last, a line each; `flights` has their slots by rank.

    now_s: the time up to which is counted how long, by the clock on the wall; now where not given.
    """
    now_ns = time.time_ns() if now_s is None else int(1e9 * now_s)
    return tuple(in_words(rank, slots, program, now_ns) for rank, slots in enumerate(flights))


def in_words(rank: int, slots: Sequence[int], program: Program | None, now_ns: int) -> str:
    """One line of what a rank did last, of its queues where it runs a program.

    ``rank 1: in step 3: compute in attn:F2.1 for 3.0 s; comm after send dispatch:F1.1 -> F0``
    """
    if not slots:
        return f"rank {rank}: not started"
    phase, step = Phase(slots[0]), slots[1]
    said = f"rank {rank}: {_IN_WORDS[phase].format(step=step + 1)}"
    queues = _queues(rank, slots, program, now_ns) if program is not None and phase == Phase.STEP else []
    if queues:
        return f"{said}: {'; '.join(queues)}"
    return said if slots[2] == 0 else f"{said}, for {_seconds(slots, slots[2], now_ns)} s"


def _seconds(slots: Sequence[int], at_ns: int, now_ns: int) -> str:
    return f"{max(0, now_ns - at_ns - slots[3]) / 1e9:.1f}"


def _queues(rank: int, slots: Sequence[int], program: Program, now_ns: int) -> list[str]:
    placement = program.plan.placement
    group = next(one for one in placement.groups if rank % placement.size in one.ranks)
    streams = [stream for name, stream in program.queues if name == group.name]
    said = []
    for queue, stream in enumerate(streams[:MAX_QUEUES]):
        slot = _HEAD + _PER_QUEUE * queue
        begun, ended, at_ns = slots[slot : slot + 3]
        if begun:
            what = program.describe(begun - 1).removeprefix(f"{group.name} ")
            where = "after" if ended >= begun else "in"
            said.append(f"{stream} {where} {what} for {_seconds(slots, at_ns, now_ns)} s")
    return said
