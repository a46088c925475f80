"""The words a schedule is written in: an `Action` names one thing a group of ranks does, and nothing else.

An action holds no bytes, no seconds and no ranks. Its text form is ``kind:PASSlayer.microbatch[.chunk]``, for
example ``attn:F3.5`` (attention of layer 3, forward, micro-batch 5); ``str`` and ``Action.parse`` are inverse.
Long queues are kept as one int64 column of packed codes (`pack`, `unpack`); an `Action` is a view of one code.
"""

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput

Codes = NDArray[np.int64]


class Kind(IntEnum):
    """What is done. Compute kinds come first, then transfers, then the end of the step."""

    EMBED = 0  # token ids -> x_0
    ATTENTION = 1  # x_l -> h = x + attention(norm x); u = norm h; the router's ids and weights
    EXPERT = 2  # rows of u -> weighted sums of this rank's experts
    JOIN = 3  # h + sum of expert outputs = x_{l+1}; an action only where x_{l+1} moves on to another group
    HEAD = 4  # x_L -> final norm, logits, loss
    DISPATCH = 5  # attention ranks <-> expert ranks: rows of u, pairs (row, weight); back: du, dw
    COMBINE = 6  # expert ranks <-> ranks that form x_{l+1}: expert outputs; back: rows of G = dL/dx_{l+1}
    RESIDUAL = 7  # h and the row map to the group that forms x_{l+1}; back: G
    HOP = 8  # x_l between groups where no expert lies between (layer = the one whose input it is)
    SYNC = 9  # sums gradients over the ranks that hold the same parameters
    UPDATE = 10  # global clip norm, optimizer step


class Pass(IntEnum):
    """Forward, input gradient, weight gradient, and forward once more where the backward needs what was not kept."""

    F = 0
    B = 1
    W = 2
    R = 3


COMPUTE = frozenset({Kind.EMBED, Kind.ATTENTION, Kind.EXPERT, Kind.JOIN, Kind.HEAD})
TRANSFERS = frozenset({Kind.DISPATCH, Kind.COMBINE, Kind.RESIDUAL, Kind.HOP})
END_OF_STEP = frozenset({Kind.SYNC, Kind.UPDATE})
IN_CHUNKS = frozenset({Kind.EXPERT, Kind.DISPATCH, Kind.COMBINE})
"""What is done chunk by chunk where a plan cuts the tokens of a micro-batch; all else is done for the whole."""

_WORD = {
    Kind.EMBED: "embed",
    Kind.ATTENTION: "attn",
    Kind.EXPERT: "expert",
    Kind.JOIN: "join",
    Kind.HEAD: "head",
    Kind.DISPATCH: "dispatch",
    Kind.COMBINE: "combine",
    Kind.RESIDUAL: "residual",
    Kind.HOP: "hop",
    Kind.SYNC: "sync",
    Kind.UPDATE: "update",
}
_KIND = {word: kind for kind, word in _WORD.items()}
_NUMBER = "(0|[1-9][0-9]*)"
_TEXT = re.compile(rf"([a-z]+)(?::([FBWR]){_NUMBER}\.{_NUMBER}(?:\.([1-9][0-9]*))?)?")

# Bits of the packed code, lowest first.
_KIND_BITS, _PASS_BITS, _LAYER_BITS, _CHUNK_BITS = 5, 2, 14, 10
MAX_CHUNKS = 1 << _CHUNK_BITS
LAYER_STEP = 1 << (_KIND_BITS + _PASS_BITS)
MICROBATCH_STEP = 1 << (_KIND_BITS + _PASS_BITS + _LAYER_BITS + _CHUNK_BITS)
"""What a code grows by from one layer, or micro-batch, to the next."""


_LIMITS = {
    "kind": len(Kind),
    "pass": len(Pass),
    "layer": 1 << _LAYER_BITS,
    "micro-batch": 1 << 32,
    "chunk": MAX_CHUNKS,
}
"""The parts of an action in their order, and the first number that is too large for each."""
_MAX_DIGITS = 18  # longer ones are no number of anything here


class BadPlan(BadInput):
    """A plan, or a part of one, that is none whatever the case; `actions` are those at fault."""

    actions: tuple["Action", ...] = ()


class BadAction(BadPlan):
    """Something that stands where an action has to, with a part that is none of its kind's numbers.

    Args:
        part: which one, "" where it is no action at all.
        place: where it stands among those that were given, from 0.
        action: what `actions` has.
        queue: group and stream, where they are known.
    """

    def __init__(
        self, part: str, value: object, place: int, allowed: str, action: "Action | None" = None, queue: str = ""
    ) -> None:
        super().__init__(" ".join(filter(None, ["queue", queue, f"[{place}]{part and f': {part}'}"])), value, allowed)
        self.actions = () if action is None else (action,)
        self._told = part, value, place, allowed, action

    def of_queue(self, group: str, stream: str) -> "BadAction":
        """The same, with the queue."""
        return BadAction(*self._told, queue=f"{group} {stream}")


class Action(NamedTuple):
    """One named piece of work; see the module's text form."""

    kind: Kind
    pass_: Pass = Pass.F
    layer: int = 0
    microbatch: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        if self.kind in END_OF_STEP:
            return _WORD[self.kind]
        tail = f".{self.chunk}" if self.chunk else ""
        return f"{_WORD[self.kind]}:{self.pass_.name}{self.layer}.{self.microbatch}{tail}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The inverse of `str`. Raises BadInput naming the text."""
        match = _TEXT.fullmatch(text)
        kind = _KIND.get(match[1]) if match else None
        if match is None or kind is None or (kind in END_OF_STEP) != (match[2] is None):
            raise BadInput("action", text, f"kind:PASSlayer.microbatch[.chunk] with kind one of {', '.join(_KIND)}")
        if kind in END_OF_STEP:
            return cls(kind)
        numbers = (match[3], match[4], match[5] or "0")
        for part, digits in zip(("layer", "micro-batch", "chunk"), numbers, strict=True):
            if len(digits) > _MAX_DIGITS or int(digits) >= _LIMITS[part]:
                raise BadInput("action", text, f"{part}: {_allowed(part)}")
        return cls(kind, Pass[match[2]], *map(int, numbers))

    @property
    def word(self) -> str:
        return _WORD[self.kind]


def _allowed(part: str) -> str:
    return {"kind": "a Kind", "pass": "a Pass"}.get(part) or f"a whole number from 0 to {_LIMITS[part] - 1}"


def pack(actions: Iterable[Action]) -> Codes:
    """Actions as one int64 column. Raises BadAction for the first that is none."""
    given = list(actions)
    try:
        columns = np.array([tuple(action) for action in given] or np.empty((0, 5), dtype=np.int64))
        found = columns.dtype == np.int64 and columns.shape[1] == len(_LIMITS)
        found = found and not (columns < 0).any() and not (columns >= list(_LIMITS.values())).any()
    except (TypeError, ValueError, OverflowError):  # not sequences, or not all of one length, or of huge numbers
        found = False
    if not found:
        raise _bad_action(given)
    return pack_columns(*columns.T)


def _bad_action(given: Sequence[Any]) -> BadInput:
    """What to say of the first of these that is no action."""
    for place, action in enumerate(given):
        if not isinstance(action, tuple) or len(action) != len(_LIMITS):
            return BadAction("", action, place, f"an Action: {', '.join(_LIMITS)}")
        for (part, limit), value in zip(_LIMITS.items(), action, strict=True):
            if not isinstance(value, int | np.integer) or not 0 <= value < limit:
                return BadAction(part, value, place, _allowed(part), Action(*action))
    return BadInput("actions", given[:1], "whole numbers in every part")


def pack_columns(kind: Codes, pass_: Codes, layer: Codes, microbatch: Codes, chunk: Codes) -> Codes:
    """Columns of integers as one column of codes."""
    code = microbatch << _CHUNK_BITS | chunk
    code = code << _LAYER_BITS | layer
    code = code << _PASS_BITS | pass_
    return code << _KIND_BITS | kind


class Columns(NamedTuple):
    """A packed column taken apart; five int64 arrays of one length."""

    kind: Codes
    pass_: Codes
    layer: Codes
    microbatch: Codes
    chunk: Codes


def unpack(codes: Codes) -> Columns:
    """The inverse of `pack_columns`."""
    kind = codes & (1 << _KIND_BITS) - 1
    rest = codes >> _KIND_BITS
    pass_ = rest & (1 << _PASS_BITS) - 1
    rest = rest >> _PASS_BITS
    layer = rest & (1 << _LAYER_BITS) - 1
    rest = rest >> _LAYER_BITS
    chunk = rest & (1 << _CHUNK_BITS) - 1
    return Columns(kind, pass_, layer, rest >> _CHUNK_BITS, chunk)


def kinds_of(codes: Codes) -> Codes:
    """`unpack(codes).kind` alone."""
    return codes & (1 << _KIND_BITS) - 1


_KINDS, _PASSES = tuple(Kind), tuple(Pass)
_LAYER_AT = _KIND_BITS + _PASS_BITS
_CHUNK_AT = _LAYER_AT + _LAYER_BITS


def view(code: int) -> Action:
    """One code as an `Action`."""
    return Action(
        _KINDS[code & (1 << _KIND_BITS) - 1],
        _PASSES[code >> _KIND_BITS & (1 << _PASS_BITS) - 1],
        code >> _LAYER_AT & (1 << _LAYER_BITS) - 1,
        code >> _CHUNK_AT + _CHUNK_BITS,
        code >> _CHUNK_AT & (1 << _CHUNK_BITS) - 1,
    )


def at_microbatch(codes: Codes, microbatch: Codes | int) -> Codes:
    """The same actions with `microbatch` added to theirs (codes of micro-batch 0 become those of another)."""
    return codes + MICROBATCH_STEP * microbatch


def templates_of(codes: Codes, directions: int = 1) -> Codes:
    """The same actions with micro-batch m % directions in the place of m."""
    microbatch = unpack(codes).microbatch
    return at_microbatch(codes, microbatch % directions - microbatch)
