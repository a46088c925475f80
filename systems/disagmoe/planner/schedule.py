"""A schedule of sequence lengths: steps of several lengths one after the other, or mixed.

``4096:2000,16384:500``: 2000 steps of 4K, then 500 of 16K. ``4096@0.8,32768@0.2``: four steps of five are of 4K, in no
order. Shares are of 1 and sum to it, or they are weights, which are whole numbers: ``4096@4,32768@1`` is the same.
"""

import re
from typing import NamedTuple

from bench.errors import BadInput
from systems.disagmoe.planner.roofline import LEAST_LENGTH, check_lengths

FIELD = "seq-len-schedule"
MOST_STEPS = 10**12
ROUNDED = 0.005
"""Shares such as 0.33 are rounded: three of them sum to 1 within this."""
_WORD = {
    ":": re.compile(r"\s*(-?\d{1,9})\s*:\s*(\d{1,13})\s*", re.ASCII),
    "@": re.compile(r"\s*(-?\d{1,9})\s*@\s*(\d{0,13}\.?\d{0,13}(?:[eE]-?\d{1,2})?)\s*", re.ASCII),
}


class Phase(NamedTuple):
    """Steps of one length; in a mixture `num_steps` is a share of all steps."""

    seq_len: int
    num_steps: float


class Schedule(NamedTuple):
    """Phases in their order, or (`mixed`) shares of lengths without one."""

    phases: tuple[Phase, ...]
    mixed: bool


def parse_schedule(text: str) -> Schedule:
    """``LEN:STEPS,...`` or ``LEN@SHARE,...``.

    Raises BadInput: not positive, not sorted, absurdly large, shares that do not sum to 1.
    """
    mixed = "@" in text
    phases = [_phase(word, "@" if mixed else ":") for word in text.split(",")]
    lengths = [phase.seq_len for phase in phases]
    try:
        check_lengths(lengths, FIELD)
    except BadInput as error:
        # Of several lengths together, what was typed.
        raise BadInput(FIELD, text if min(lengths) >= LEAST_LENGTH else error.value, error.allowed) from None
    if mixed:
        total = sum(phase.num_steps for phase in phases)
        weights = all(phase.num_steps.is_integer() for phase in phases)
        if not weights and abs(total - 1) > ROUNDED:
            weights_too = "or weights, which are whole numbers (4096@4,32768@1)"
            raise BadInput(FIELD, text, f"shares that sum to 1 (these sum to {total:.6g}), {weights_too}")
        phases = [Phase(phase.seq_len, phase.num_steps / total) for phase in phases]
    return Schedule(tuple(phases), mixed)


def _phase(word: str, mark: str) -> Phase:
    found = _WORD[mark].fullmatch(word)
    try:
        number = (float if mark == "@" else int)(found[2]) if found else 0.0
    except ValueError:
        number = 0.0
    if not found or not 0 < number <= MOST_STEPS:
        raise BadInput(FIELD, word, f"LENGTH:STEPS or LENGTH@SHARE, numbers above 0, of steps at most {MOST_STEPS:.0e}")
    return Phase(int(found[1]), number)
