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


def num_warmup(stage: int, pp: int, vpp: int, num_microbatches: int, ahead: int = 0, group: int | None = None) -> int:
    """Forwards before the first pair on a stage: P-s-1 for vpp = 1, else 2 (P-s-1) + (v-1) G; at most m v.

    G is `group`, P where not given; see `order`. `ahead` more where forward and backward of a pair run at the same
    time, so that neither needs the other.
    """
    behind = pp - stage - 1
    warmup = behind if vpp == 1 else 2 * behind + (vpp - 1) * (group or pp)
    return min(warmup + ahead, num_microbatches * vpp)


def order(stage: int, pp: int, vpp: int, num_microbatches: int, ahead: int = 0, group: int | None = None) -> Order:
    """Forwards go in groups of G micro-batches through chunk 0, then 1, ...; backwards from the last chunk down.

    G is `group`, `pp` where not given: megatron-core's microbatch_group_size_per_vp_stage. Raises BadInput where
    chunks are interleaved and G is not from `pp` to all micro-batches, or leaves a last group smaller than `pp`.
    """
    size = group or pp
    if group is not None and (vpp == 1 or not pp <= group <= num_microbatches):
        allowed = f"{pp} (pp) to {num_microbatches} micro-batches, where vpp is 2 or more"
        raise BadInput("layout.microbatch_group", group, allowed)
    if vpp > 1 and 0 < num_microbatches % size < pp:
        if group is not None:
            allowed = f"one that leaves none or {pp} (pp) or more of {num_microbatches} micro-batches"
            raise BadInput("layout.microbatch_group", group, allowed)
        raise BadInput("layout.vpp", vpp, f"1 where pp does not divide the {num_microbatches} micro-batches")
    forwards, backwards = [], []
    for first in range(0, num_microbatches, size):
        together = range(first, min(first + size, num_microbatches))
        forwards += [Turn(Pass.F, chunk, m) for chunk in range(vpp) for m in together]
        backwards += [Turn(Pass.B, chunk, m) for chunk in reversed(range(vpp)) for m in together]
    warmup = num_warmup(stage, pp, vpp, num_microbatches, ahead, group)
    pairs = list(zip(forwards[warmup:], backwards, strict=False))
    return Order(forwards[:warmup], pairs, backwards[len(pairs) :])
