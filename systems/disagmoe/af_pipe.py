"""AF-Pipe: the order in which every group works, found by list scheduling on expected durations and then frozen.

Each group has a fixed order of forwards and a fixed order of backwards: rounds of `round_length` micro-batches pass
layer after layer (backwards from the last layer up). How the two interleave is decided by playing the step through: a
free group takes its next backward if the input gradient has arrived, else what that backward or the next few need
computed again, else its next forward unless too many micro-batches are in flight, else a waiting weight gradient. The
result is an in-order plan; run time decides nothing.
The paper names the goal (one micro-batch's attention, another's experts and a third's transfer at the same time,
forward and backward interleaved) but gives no order; this construction is ours.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bench.action import MICROBATCH_STEP, Action, Codes, Kind, pack
from bench.placement import Placement
from bench.plan import ActionColumn
from systems.disagmoe.flow import NONE, Flow

if TYPE_CHECKING:
    from systems.disagmoe.play import Parts, Queues

Floats = NDArray[np.float64]
Duration = Callable[[Codes], Floats]
"""Expected seconds of actions of micro-batch 0."""


class AFPipe:
    """Plays one step through; `run` returns the queues of every group.

    Args:
        flow: what one micro-batch does on the placement.
        duration: expected seconds of compute and transfer actions.
        round_length: micro-batches that pass a layer together.
        deferred: weight gradients that a group may put off; beyond, they come before anything else.
        lookahead: attentions computed again (where the flow has them) before the first of them has its backward.
    """

    def __init__(
        self,
        placement: Placement,
        flow: Flow,
        num_microbatches: int,
        duration: Duration,
        round_length: int,
        deferred: int,
        lookahead: int = 1,
    ) -> None:
        self.placement, self.flow, self.duration = placement, flow, duration
        self.num_microbatches = num_microbatches
        self.round_length = round_length
        self.deferred = deferred
        self.lookahead = lookahead

    @property
    def in_flight_limits(self) -> dict[str, int]:
        """Forwards of a group without their backward: a round of every part, and one more."""
        own = zip(self.placement.groups, self.flow.num_parts, strict=True)
        return {group.name: (num + 1) * self.round_length for group, num in own}

    def run(self) -> dict[tuple[str, str], ActionColumn]:
        """Queues of the compute and the send stream of every group."""
        from systems.disagmoe.play import play

        order, sends = play(
            self._parts(),
            self._fixed_orders(),
            np.array(list(self.in_flight_limits.values()), dtype=np.int64),
            self.deferred,
            self.lookahead,
            self.num_microbatches,
            MICROBATCH_STEP,
        )
        end = pack([Action(Kind.SYNC), Action(Kind.UPDATE)])
        queues = {}
        for group, computed, sent in zip(self.placement.groups, order, sends, strict=True):
            queues[group.name, "compute"] = ActionColumn(np.concatenate([computed, end]))
            if len(sent):
                queues[group.name, "send"] = ActionColumn(sent)
        return queues

    def _parts(self) -> "Parts":
        from systems.disagmoe.play import Parts

        flow = self.flow
        sends = flow.feed_code != NONE
        seconds = self.duration(np.concatenate([flow.code, flow.feed_code[sends]]))
        feed_s = np.zeros(len(sends))
        feed_s[sends] = seconds[len(flow.code) :]
        return Parts(
            group=flow.group,
            code=flow.code,
            seconds=seconds[: len(flow.code)],
            num_inputs=flow.num_inputs,
            weight=flow.weight,
            after_again=flow.after_again,
            feed_ptr=flow.feed_ptr,
            feed_to=flow.feed_to,
            feed_code=flow.feed_code,
            feed_s=feed_s,
        )

    def _fixed_orders(self) -> "Queues":
        from systems.disagmoe.play import Queues

        whole, left = divmod(self.num_microbatches, self.round_length)
        turns = np.arange(whole * self.round_length).reshape(whole, 1, self.round_length)
        last = np.arange(self.num_microbatches - left, self.num_microbatches)
        sizes, numbers, microbatches = [0], [], []
        for mine in (order for orders in self.flow.orders for order in orders):
            in_rounds = (whole, len(mine), self.round_length)
            # [rounds, parts, micro-batches of a round], then the round that is not whole.
            numbers += [np.broadcast_to(mine[:, None], in_rounds).ravel(), np.repeat(mine, left)]
            microbatches += [np.broadcast_to(turns, in_rounds).ravel(), np.tile(last, len(mine))]
            sizes.append(len(mine) * self.num_microbatches)
        starts = np.cumsum(sizes)
        by_group = np.stack([starts[i * 3 : i * 3 + 4] for i in range(len(self.placement.groups))])
        return Queues(by_group, np.concatenate(numbers), np.concatenate(microbatches))
