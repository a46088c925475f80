"""Plans that no system would make: random placements, and any order of actions that respects the edges."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from bench.action import COMPUTE, IN_CHUNKS, Action, Kind, Pass
from bench.edges import Edge, edges, ends
from bench.models import Model
from bench.placement import Group, Placement
from bench.plan import ActionColumn, Plan


def random_placement(model: Model, chance: random.Random, directions: int = 1) -> Placement:
    """Up to two groups that hold sequences and two of other size, with every part on any group that may have it.

    With two directions the groups read the same from either end, one of the others standing in the middle.
    """
    data_ranks, expert_ranks = chance.choice([1, 2]), chance.choice([1, 2])
    num_data, num_expert = chance.randint(1, 2), chance.randint(0, 2)
    sizes = [(f"D{i}", data_ranks) for i in range(num_data)] + [(f"E{i}", expert_ranks) for i in range(num_expert)]
    if directions == 2:
        sizes = [("D0", data_ranks), *[("E0", expert_ranks)] * bool(num_expert), ("D1", data_ranks)]
    groups, first = [], 0
    for name, size in sizes:
        groups.append(Group(name, first, size))
        first += size
    data = [group.name for group in groups if group.name.startswith("D")]
    return Placement(
        groups=tuple(groups),
        embed=chance.choice(data),
        head=chance.choice(data),
        attention=(attention := tuple(chance.choice(data) for _ in range(model.num_layers))),
        expert=tuple(
            None if model.is_dense(layer) else chance.choice(groups).name for layer in range(model.num_layers)
        ),
        join=tuple(
            attention[layer] if model.is_dense(layer) else chance.choice(data) for layer in range(model.num_layers)
        ),
        shared_on=chance.choice(["attention", "expert"]) if model.num_shared_experts else "attention",
        directions=directions,
    )


def random_plan(model: Model, num_microbatches: int, seed: int, directions: int = 1) -> Plan:
    """Queues in one random order of all actions; which stream a channel's or a group's weight gradients use, also."""
    chance = random.Random(seed)
    placement = random_placement(model, chance, directions)
    recompute = chance.choice(["none", "full", "redispatch"])
    chunks = (1, 2, 1, 4)[seed % 4]
    queues: dict[tuple[str, str], list[Action]] = {(group.name, "compute"): [] for group in placement.groups}
    streams: dict[tuple[str, Kind, Pass], str] = {}
    for action in _random_order(list(edges(model, placement, recompute, chunks)), num_microbatches, chance):
        if action.kind in COMPUTE:
            group = placement.home(action.kind, action.layer, action.microbatch)
            choices = ["compute", "weights"] if action.pass_ is Pass.W else ["compute"]
        else:
            group = ends(placement, action)[0]
            choices = ["compute", "send", f"send-{action.word}"]
        key = (group, action.kind, action.pass_)
        stream = streams.setdefault(key, chance.choice(choices))
        queues.setdefault((group, stream), []).append(action)
    for group in placement.groups:
        queues[group.name, "compute"] += [Action(Kind.SYNC), Action(Kind.UPDATE)]
    return Plan(
        "random",
        placement,
        {key: ActionColumn.of(queue) for key, queue in queues.items()},
        num_microbatches,
        chance.choice(["expert", "rank"]),
        recompute,
        chunks=chunks,
    )


def in_chunks(plan: Plan, chunks: int) -> Plan:
    """The same plan with chunk after chunk in the place of the whole micro-batch."""

    def cut(action: Action) -> list[Action]:
        return [action._replace(chunk=c) for c in range(chunks if action.kind in IN_CHUNKS else 1)]

    queues = {
        key: ActionColumn.of(piece for action in queue for piece in cut(action)) for key, queue in plan.queues.items()
    }
    return replace(plan, queues=queues, chunks=chunks)


def _random_order(graph: list[Edge], num_microbatches: int, chance: random.Random) -> list[Action]:
    after: dict[Action, set[Action]] = {}
    for edge in graph:
        steps = [edge.src, *([edge.via] if edge.via else []), edge.dst]
        for before, behind in pairwise(steps):
            after.setdefault(behind, set()).add(before)
            after.setdefault(before, set())
    # A combine is received by the row map, which comes with the residual.
    for action in [one for one in after if one.kind is Kind.COMBINE and one.pass_ is Pass.F]:
        residual = action._replace(kind=Kind.RESIDUAL, chunk=0)
        after[action] |= {residual} & after.keys()
    # Rows that come once more are counted as the first time.
    for action in [one for one in after if one.kind is Kind.DISPATCH and one.pass_ is Pass.R]:
        after[action].add(action._replace(pass_=Pass.F))
    directions = 1 + max(action.microbatch for action in after)
    waiting = {
        action._replace(microbatch=m): {before._replace(microbatch=m) for before in needed}
        for m in range(num_microbatches)
        for action, needed in after.items()
        if action.microbatch == m % directions
    }
    order: list[Action] = []
    while waiting:
        action = chance.choice([action for action, needed in waiting.items() if not needed])
        del waiting[action]
        for needed in waiting.values():
            needed.discard(action)
        order.append(action)
    return order
