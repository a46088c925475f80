"""Every queue of a program: those of a plan, with the receiving half behind each exchange that blocks, then those in
which groups receive."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Codes, Kind, Pass, kinds_of, view
from bench.errors import BadInput
from bench.plan import COMPUTE_STREAM, Plan
from bench.program import Ints, Op
from bench.templates import Templates


class Queues(NamedTuple):
    """Columns with one entry an operation, queue after queue: queue q has ptr[q] .. ptr[q + 1] - 1.

    names: (group, stream). template: number of the action's. turn: number of its micro-batch in its direction.
    """

    names: tuple[tuple[str, str], ...]
    ptr: Ints
    op: NDArray[np.int8]
    code: Codes
    group: NDArray[np.int16]
    template: Ints
    turn: NDArray[np.int64]


class Given(NamedTuple):
    """What a plan's queues have, one after the other: codes, numbers of their templates and of their micro-batches in
    their direction, and the number of the queue in `names`."""

    codes: Codes
    template: Ints
    turn: NDArray[np.int64]
    queue: NDArray[np.int64]
    names: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, plan: Plan, templates: Templates) -> "Given":
        columns = [queue.codes for queue in plan.queues.values()]
        codes = np.concatenate([np.zeros(0, dtype=np.int64), *columns])
        kind = kinds_of(codes)
        # The end of a step is of no layer and of no micro-batch, whatever is written there.
        codes = np.where((kind == Kind.SYNC) | (kind == Kind.UPDATE), kind, codes)
        queue = np.repeat(np.arange(len(columns)), [len(column) for column in columns])
        return cls(codes, *templates.of(codes), queue, tuple(plan.queues))


def is_complete(plan: Plan, given: Given, templates: Templates) -> bool:
    """Whether every template stands once in a queue of its group for every micro-batch, nothing else does, and every
    group's compute queue ends with its sync and its update.

    `bench.check.require_complete` says what is wrong where this is false; of an end of step in another order, whether
    it is wrong.
    """
    number, turn = given.template, given.turn
    num_turns = plan.num_microbatches // plan.directions
    if (number < 0).any() or (turn >= num_turns).any():
        return False
    ends = templates.ends_step[number]
    once = np.bincount(number[~ends] * num_turns + turn[~ends], minlength=len(templates) * num_turns) == 1
    groups = np.array([plan.placement.index[group] for group, _ in plan.queues], dtype=np.int64)
    at_home = templates.source[number[~ends]] == groups[given.queue[~ends]]
    if not once.reshape(-1, num_turns)[~templates.ends_step].all() or not at_home.all():
        return False
    return _ends_in_order(plan, int(ends.sum()))


def _ends_in_order(plan: Plan, num_ends: int) -> bool:
    """Whether one queue of every group ends with sync and update, and nothing else of the kind stands anywhere."""
    sync, update = int(Kind.SYNC), int(Kind.UPDATE)
    ending = [key[0] for key, queue in plan.queues.items() if queue.codes[-2:].tolist() == [sync, update]]
    names = [group.name for group in plan.placement.groups]
    return sorted(ending) == sorted(names) and num_ends == 2 * len(names)


def queues_of(plan: Plan, given: Given, templates: Templates) -> Queues:
    """Of a plan that is complete. Raises BadInput where a group sends on one channel from two streams."""
    codes, template, turn, queue, names = given
    sends = templates.moves[template]
    # A transfer inside a group that stands in the compute stream is an exchange that the queue waits for.
    in_compute = np.array([stream == COMPUTE_STREAM for _, stream in names])[queue]
    blocks = sends & in_compute & (templates.source == templates.target)[template]
    op = np.full(len(codes), Op.COMPUTE, dtype=np.int8)
    op[sends] = Op.SEND
    op[codes == int(Kind.SYNC)] = Op.SYNC
    op[codes == int(Kind.UPDATE)] = Op.UPDATE
    # Its receiving half follows its sending half at once.
    own = np.repeat(np.arange(len(codes)), 1 + blocks)
    op = op[own]
    op[np.flatnonzero(np.diff(own) == 0) + 1] = Op.RECV
    channels = _channels(given, templates, np.flatnonzero(sends & ~blocks))
    receivers = _receivers(given, templates, channels, [group.name for group in plan.placement.groups])
    every = np.concatenate([own, *channels])
    sizes = [*np.bincount(queue[own], minlength=len(names)).tolist(), *map(len, channels)]
    homes = np.array([plan.placement.index[group] for group, _ in (*names, *receivers)], dtype=np.int16)
    return Queues(
        names=(*names, *receivers),
        ptr=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        op=np.concatenate([op, np.full(len(every) - len(own), Op.RECV, dtype=np.int8)]),
        code=codes[every],
        group=np.repeat(homes, sizes),
        template=template[every],
        turn=turn[every],
    )


def _channels(given: Given, templates: Templates, beside: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The places of the transfers `beside` the computation, by channel: a receiving group, a kind, a pass and a sending
    queue. In the order of their first transfers."""
    if not len(beside):
        return []
    arrives = (templates.target * len(Kind) + templates.kind) * len(Pass) + templates.pass_
    _, kind_of = np.unique(arrives, return_inverse=True)
    channel = (given.queue * (int(kind_of.max()) + 1) + kind_of[given.template])[beside]
    # Channels are few, and numbers of two bytes sorted in one go.
    order = np.argsort(channel.astype(np.uint16) if channel.max() < 1 << 16 else channel, kind="stable")
    starts = np.flatnonzero(np.diff(channel[order]))
    return sorted(np.split(beside[order], starts + 1), key=lambda channel: int(channel[0]))


def _receivers(
    given: Given, templates: Templates, channels: list[NDArray[np.int64]], groups: list[str]
) -> list[tuple[str, str]]:
    """Group and stream of the queue that receives each channel. Raises BadInput for one that is sent on two streams."""
    senders: dict[tuple[str, str], str] = {}
    for channel in channels:
        first = channel[0]
        group, stream = given.names[given.queue[first]]
        action = view(int(given.codes[first]))
        key = groups[templates.target[given.template[first]]], f"recv/{action.word}:{action.pass_.name}/{group}"
        if senders.setdefault(key, stream) != stream:
            allowed = f"in {senders[key]}, with its channel's other sends"
            raise BadInput(f"queue {group} {stream}", str(action), allowed)
    return list(senders)
