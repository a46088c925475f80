"""The order of 1F1B and interleaved 1F1B, as megatron-core runs it (pipeline_parallel/schedules.py)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Pass
from bench.errors import BadInput


class Turn(NamedTuple):
    """One model chunk of one micro-batch, forward or backward."""

    pass_: Pass
    chunk: int
    microbatch: int


class Turns(NamedTuple):
    """Turns one after the other, as columns."""

    pass_: NDArray[np.int64]
    chunk: NDArray[np.int64]
    microbatch: NDArray[np.int64]

    def part(self, low: int, high: int | None = None) -> "Turns":
        return Turns(*(column[low:high] for column in self))

    def at(self, place: int) -> Turn:
        pass_, chunk, microbatch = (int(column[place]) for column in self)
        return Turn(Pass(pass_), chunk, microbatch)

    def each(self) -> list[Turn]:
        return [self.at(place) for place in range(len(self.chunk))]


class Order(NamedTuple):
    """What a stage does: warm-up forwards, pairs of one forward and one backward, then the remaining backwards."""

    warmup: Turns
    pairs: tuple[Turns, Turns]
    cooldown: Turns

    def flat(self) -> Turns:
        forwards, backwards = self.pairs
        in_turn = (np.stack(both, axis=1).ravel() for both in zip(forwards, backwards, strict=True))
        return Turns(*(np.concatenate(parts) for parts in zip(self.warmup, in_turn, self.cooldown, strict=True)))


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
    # By groups; in a group chunk after chunk; of a chunk every micro-batch.
    of_group = np.arange(num_microbatches) // size
    chunk, microbatch = (each.ravel() for each in np.indices((vpp, num_microbatches)))
    of_turn = of_group[microbatch]
    forwards, backwards = (
        Turns(np.full(len(by), pass_), chunk[by], microbatch[by])
        for pass_, by in (
            (int(Pass.F), np.lexsort((microbatch, chunk, of_turn))),
            (int(Pass.B), np.lexsort((microbatch, -chunk, of_turn))),
        )
    )
    warmup = num_warmup(stage, pp, vpp, num_microbatches, ahead, group)
    num_pairs = num_microbatches * vpp - warmup
    pairs = forwards.part(warmup), backwards.part(0, num_pairs)
    return Order(forwards.part(0, warmup), pairs, backwards.part(num_pairs))
