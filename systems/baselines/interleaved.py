"""The order of 1F1B and interleaved 1F1B, as megatron-core runs it (pipeline_parallel/schedules.py)."""

from typing import NamedTuple

from bench.action import Pass


class Turn(NamedTuple):
    """One model chunk of one micro-batch, forward or backward."""

    pass_: Pass
    chunk: int
    microbatch: int


def num_warmup(stage: int, pp: int, vpp: int, num_microbatches: int, group: int) -> int:
    """Forwards before the first backward on a stage: P-s-1 for vpp = 1, else 2 (P-s-1) + (v-1) G; at most m v."""
    ahead = pp - stage - 1
    warmup = ahead if vpp == 1 else 2 * ahead + (vpp - 1) * group
    return min(warmup, num_microbatches * vpp)


def turns(stage: int, pp: int, vpp: int, num_microbatches: int) -> list[Turn]:
    """What a stage does in order: warm-up forwards, one forward one backward, then the remaining backwards.

    Forwards go in groups of `pp` micro-batches through chunk 0, then chunk 1, ...; backwards from the last chunk down.
    """
    forwards, backwards = [], []
    for first in range(0, num_microbatches, pp):
        group = range(first, min(first + pp, num_microbatches))
        forwards += [Turn(Pass.F, chunk, m) for chunk in range(vpp) for m in group]
        backwards += [Turn(Pass.B, chunk, m) for chunk in reversed(range(vpp)) for m in group]
    warmup = num_warmup(stage, pp, vpp, num_microbatches, pp)
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warmup :]
