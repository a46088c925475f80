"""A placement's layers by likeness, and how often each group plays which role in them.

Whatever is added up over all actions of a micro-batch (work, bytes through ports, memory kept) is added up from here:
one layer of each likeness is looked at, and of the groups that play the same roles equally often, one.
"""

from collections.abc import Callable, Hashable, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.action import IN_CHUNKS, Action, Kind, Pass
from bench.edges import layer_edges
from bench.models import Model
from bench.nodes import Nodes
from bench.placement import Group, Placement

Floats = NDArray[np.float64]
Value = TypeVar("Value", Floats, float)


class Role(IntEnum):
    """What a group is to a layer, or to the model's ends."""

    ATTENTION = 0
    EXPERT = 1
    JOIN = 2  # forms x of the next layer
    NEXT = 3  # takes x of the next layer
    EMBED = 4
    HEAD = 5


COMPUTES_AT = {
    Kind.EMBED: Role.EMBED,
    Kind.ATTENTION: Role.ATTENTION,
    Kind.EXPERT: Role.EXPERT,
    Kind.JOIN: Role.JOIN,
    Kind.HEAD: Role.HEAD,
}
_BETWEEN = {
    Kind.DISPATCH: (Role.ATTENTION, Role.EXPERT),
    Kind.COMBINE: (Role.EXPERT, Role.JOIN),
    Kind.RESIDUAL: (Role.ATTENTION, Role.JOIN),
    Kind.HOP: (Role.JOIN, Role.NEXT),
}


def carries_between(transfer: Action) -> tuple[Role, Role]:
    """Roles of the groups that a transfer leaves and reaches; `bench.edges.ends` gives their names."""
    roles = _BETWEEN[transfer.kind]
    if transfer.kind is Kind.HOP and transfer.layer == 0:
        roles = (Role.EMBED, Role.NEXT)
    return roles[::-1] if transfer.pass_ is Pass.B else roles


class Likeness(NamedTuple):
    """Layers of one placement (`layer` None: what stands before the first layer and behind the last) that cost alike.

    `key` is equal for likenesses of two placements where the same actions cost the same; `work` where the same compute
    actions do, wherever the groups lie.
    """

    layer: int | None
    direction: int
    key: Hashable
    work: Hashable


class _Once:
    """A key, equal where its parts are, that is hashed once: its parts are many, and it is looked up often."""

    __slots__ = ("_hash", "parts")

    def __init__(self, *parts: Hashable) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Once) and self._hash == other._hash and self.parts == other.parts)


class Tally(NamedTuple):
    """`plays`: for one group of every kind, how often it has a role in a likeness; `like`: the group that stands for
    each; `alike`: the groups that each of `plays` stands for; `of_layer`
    [directions, 1 + layers]: number of the likeness, first that of the model's ends."""

    likenesses: tuple[Likeness, ...]
    plays: dict[str, dict[tuple[int, Role], int]]
    like: dict[str, str]
    alike: dict[str, tuple[str, ...]]
    of_layer: NDArray[np.int64]

    def sums(self, of: Callable[[Likeness], Mapping[Role, Value]], nothing: Value) -> dict[str, Value]:
        """By group of `plays`: what `of` gives for its roles, added up; `nothing` for a group without any."""
        found = [of(likeness) for likeness in self.likenesses]
        added: dict[str, Value] = {}
        for group, counts in self.plays.items():
            parts = [times * found[i][role] for (i, role), times in counts.items() if role in found[i]]
            added[group] = sum(parts, start=nothing)
        return added


def lie(source: Group, target: Group, nodes: Nodes) -> Hashable:
    """Equal for pairs of groups whose ranks share nodes in the same way, at the same places of these nodes."""
    if nodes.strided:
        node, local = nodes.slot((*source.ranks, *target.ranks))
        seen: dict[int, int] = {}
        return source.size, tuple(seen.setdefault(int(each), len(seen)) for each in node), tuple(local.tolist())
    per_node = nodes.gpus_per_node
    near = source.first // per_node * per_node
    overlap = max(source.first, target.first) // per_node <= min(source.ranks[-1], target.ranks[-1]) // per_node
    there = target.first - near if overlap else (target.first % per_node,)
    return source.size, source.first - near, target.size, there


@lru_cache(maxsize=1024)
def tally(model: Model, placement: Placement, nodes: Nodes, layers_alike: bool) -> Tally:
    """Layers and groups of a placement by likeness.

    Args:
        nodes: where the placement's ranks lie.
        layers_alike: layers differ in placement, window and FFN only (not in routing), so that many are alike.
    """
    numbers: dict[Hashable, int] = {}
    likenesses: list[Likeness] = []
    counts: dict[str, dict[tuple[int, Role], int]] = {group.name: {} for group in placement.groups}
    of_layer = np.zeros((placement.directions, 1 + model.num_layers), dtype=np.int64)
    for direction in range(placement.directions):
        seen = placement.seen_by(direction)
        lies: dict[Hashable, Hashable] = {}
        for layer in (None, *range(model.num_layers)):
            roles = _roles(seen, layer)
            named = tuple(roles.items())
            if named not in lies:
                lies[named] = _Once(_lies(seen, roles, nodes))
            kind = _kind(model, seen, layer)
            key: Hashable = _Once(lies[named], kind)
            work = _work(seen, roles, kind)
            if not layers_alike:
                key = work = _Once(layer, direction, key)
            number = numbers.setdefault(key, len(likenesses))
            if number == len(likenesses):
                likenesses.append(Likeness(layer, direction, key, work))
            of_layer[direction, 0 if layer is None else layer + 1] = number
            for role, name in roles.items():
                mine = counts[name]
                mine[number, role] = mine.get((number, role), 0) + 1
    plays: dict[str, dict[tuple[int, Role], int]] = {}
    first: dict[Hashable, str] = {}
    like: dict[str, str] = {}
    for group in placement.groups:
        mine = counts[group.name]
        like[group.name] = first.setdefault((group.size, frozenset(mine.items())), group.name)
        if like[group.name] == group.name:
            plays[group.name] = mine
    alike = {name: tuple(other for other, stands in like.items() if stands == name) for name in plays}
    return Tally(tuple(likenesses), plays, like, alike, of_layer)


def actions_of(model: Model, placement: Placement, likeness: Likeness, recompute: str) -> list[Action]:
    """The actions of a likeness's layer, chunk 0, and the hop that carries its result on."""
    return list(_actions(model, placement, likeness.direction, likeness.layer, recompute))


@lru_cache(maxsize=4096)
def _actions(
    model: Model, placement: Placement, direction: int, layer: int | None, recompute: str
) -> tuple[Action, ...]:
    seen = placement.seen_by(direction)
    if layer is None:
        found = [Action(Kind.EMBED, pass_) for pass_ in (Pass.F, Pass.B)]
        found += [Action(Kind.HEAD, pass_) for pass_ in (Pass.F, Pass.B, Pass.W)]
        if seen.embed != seen.pipeline_ends[0]:
            found += [Action(Kind.HOP, pass_) for pass_ in (Pass.F, Pass.B)]
    else:
        touched = (end for edge in layer_edges(model, seen, layer, recompute) for end in (edge.src, edge.dst, edge.via))
        own = (end for end in touched if end is not None and end.kind is not Kind.HEAD)
        found = list(dict.fromkeys(end for end in own if end.layer == layer + (end.kind is Kind.HOP)))
    return tuple(action._replace(microbatch=direction) for action in found)


def times(action: Action, chunks: int) -> int:
    """How often an action of chunk 0 stands for itself."""
    return chunks if action.kind in IN_CHUNKS else 1


def _roles(seen: Placement, layer: int | None) -> dict[Role, str]:
    """Names of the groups that have a role in a layer, or at the ends of the model."""
    if layer is None:
        return {Role.EMBED: seen.embed, Role.NEXT: seen.pipeline_ends[0], Role.HEAD: seen.head}
    named = {Role.ATTENTION: seen.attention[layer], Role.JOIN: seen.join[layer]}
    named[Role.NEXT] = seen.pipeline_ends[layer + 1]
    expert = seen.expert[layer]
    return named if expert is None else named | {Role.EXPERT: expert}


def _lies(seen: Placement, roles: dict[Role, str], nodes: Nodes) -> Hashable:
    groups = [(role, seen.by_name[name]) for role, name in roles.items()]
    return tuple((a, b, one is other, lie(one, other, nodes)) for a, one in groups for b, other in groups if a <= b)


def _work(seen: Placement, roles: dict[Role, str], kind: Hashable) -> Hashable:
    """What groups compute for a layer of a kind: by role their sizes, and whether x is formed where it is not used."""
    sizes = tuple((role, seen.by_name[name].size) for role, name in roles.items())
    return _Once(kind, sizes, roles.get(Role.JOIN) != roles[Role.NEXT])


def _kind(model: Model, seen: Placement, layer: int | None) -> Hashable:
    """What a layer computes: its window, and of the layer before whose expert outputs it adds up, the expert ranks."""
    before = (seen.num_layers if layer is None else layer) - 1
    expert = seen.expert[before] if before >= 0 else None
    joined = None if expert is None or seen.moves_on(before) else seen.by_name[expert].size
    return layer is None, None if layer is None else model.window(layer), joined
