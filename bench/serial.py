"""A plan without overlap: the same computation in the same order, and every transfer behind what makes it."""

from collections import defaultdict
from dataclasses import replace

from bench.action import TRANSFERS, Action
from bench.edges import edges
from bench.models import Model
from bench.plan import COMPUTE_STREAM, ActionColumn, Plan


def serialised(plan: Plan, model: Model) -> Plan:
    """Each group's transfers in its compute stream; those that do not stand there yet directly behind what makes them.

    There a transfer blocks the computation of the group that sends until it has left, and inside one group until it
    has arrived: nothing of it is hidden behind the sender's computation. What a step takes longer than by `plan` is
    what that plan hides.
    """
    carried: dict[Action, list[Action]] = defaultdict(list)
    directions = plan.placement.directions
    for edge in edges(model, plan.placement, plan.recompute, plan.chunks):
        if edge.via is not None and edge.via not in carried[edge.src]:
            carried[edge.src].append(edge.via)
    queues = {}
    for (group, stream), actions in plan.queues.items():
        if stream != COMPUTE_STREAM:
            continue
        serial = {action for action in actions if action.kind in TRANSFERS}
        order: list[Action] = []
        for action in actions:
            order.append(action)
            first = action._replace(microbatch=action.microbatch % directions)
            behind = [via._replace(microbatch=action.microbatch) for via in carried.get(first, ())]
            order += [via for via in behind if via not in serial]
        queues[group, stream] = ActionColumn.of(order)
    return replace(plan, queues=queues)
