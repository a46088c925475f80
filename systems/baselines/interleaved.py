"""The order of 1F1B and interleaved 1F1B, as megatron-core runs it (pipeline_parallel/schedules.py)."""

from typing import NamedTuple

from bench.action import Pass
from bench.errors import BadInput


class Turn(NamedTuple):
    """One model chunk of one micro-batch, forward or backward."""

    pass_: Pass
    chunk: int
    microbatch: int


class Order(NamedTuple):
    """What a stage does: warm-up forwards, pairs of one forward and one backward, then the remaining backwards."""

    warmup: list[Turn]
    pairs: list[tuple[Turn, Turn]]
    cooldown: list[Turn]

    def flat(self) -> list[Turn]:
        return [*self.warmup, *(turn for pair in self.pairs for turn in pair), *self.cooldown]


def num_warmup(stage: int, pp: int, vpp: int, num_microbatches: int, ahead: int = 0) -> int:
    """Forwards before the first pair on a stage: P-s-1 for vpp = 1, else 2 (P-s-1) + (v-1) P; at most m v.

    `ahead` more where forward and backward of a pair run at the same time, so that neither needs the other.
    """
    behind = pp - stage - 1
    warmup = behind if vpp == 1 else 2 * behind + (vpp - 1) * pp
    return min(warmup + ahead, num_microbatches * vpp)


def order(stage: int, pp: int, vpp: int, num_microbatches: int, ahead: int = 0) -> Order:
    """Forwards go in groups of `pp` micro-batches through chunk 0, then 1, ...; backwards from the last chunk down.

    Raises BadInput where chunks are interleaved and `pp` does not divide the micro-batches.
    """
    if vpp > 1 and num_microbatches % pp:
        raise BadInput("layout.vpp", vpp, f"1 where pp does not divide the {num_microbatches} micro-batches")
    forwards, backwards = [], []
    for first in range(0, num_microbatches, pp):
        group = range(first, min(first + pp, num_microbatches))
        forwards += [Turn(Pass.F, chunk, m) for chunk in range(vpp) for m in group]
        backwards += [Turn(Pass.B, chunk, m) for chunk in reversed(range(vpp)) for m in group]
    warmup = num_warmup(stage, pp, vpp, num_microbatches, ahead)
    pairs = list(zip(forwards[warmup:], backwards, strict=False))
    return Order(forwards[:warmup], pairs, backwards[len(pairs) :])
