"""Where the parts of the model live: groups of ranks, and the home of every part, for one replica.

A replica is one whole pipeline. Its ranks are 0 .. size-1; further replicas are copies at an offset. Rank i of every
group that holds attention, embedding or head works on the same sequences.

A pipeline may run in two directions, as DualPipe's does (DeepSeek-V3, arXiv 2412.19437, section 3.2.1): micro-batch m
goes in direction m % 2, and what direction 0 has on group g of G, direction 1 has on group G - 1 - g. So groups g and
G - 1 - g hold the same parts, each its own copy.
"""

import re
from dataclasses import dataclass, fields, replace
from functools import cached_property

from bench.action import Kind
from bench.errors import BadInput

SHARED_ON = ("attention", "expert")
_GROUP = re.compile(r"(\S+) = ([0-9]{1,9})\.\.([0-9]{1,9})")


@dataclass(frozen=True)
class Group:
    """Consecutive ranks of one replica that hold the same kind of part."""

    name: str
    first: int
    size: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.size)

    def __str__(self) -> str:
        return f"{self.name} = {self.first}..{self.first + self.size - 1}"

    @classmethod
    def parse(cls, text: str) -> "Group":
        match = _GROUP.fullmatch(text)
        if match is None:
            raise BadInput("group", text, "NAME = FIRST..LAST")
        return cls(match[1], int(match[2]), int(match[3]) - int(match[2]) + 1)


@dataclass(frozen=True)
class Placement:
    """Groups of one replica and the home of every part.

    `attention[l]`, `expert[l]` (None for a dense layer) and `join[l]` name the groups that hold layer l's attention,
    its experts, and that form x_{l+1}. `shared_on` says which side computes shared experts. With two `directions`
    these are the homes of direction 0.
    """

    groups: tuple[Group, ...]
    embed: str
    head: str
    attention: tuple[str, ...]
    expert: tuple[str | None, ...]
    join: tuple[str, ...]
    shared_on: str = "attention"
    directions: int = 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __getstate__(self) -> dict[str, object]:
        # Without what was looked up before: hashes of words differ from process to process.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def index(self) -> dict[str, int]:
        return {group.name: i for i, group in enumerate(self.groups)}

    @cached_property
    def size(self) -> int:
        """Ranks of one replica."""
        return sum(group.size for group in self.groups)

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @cached_property
    def data_ranks(self) -> int:
        """M: ranks over which the sequences of a micro-batch are dealt."""
        return self.by_name[self.embed].size

    @cached_property
    def pipeline_ends(self) -> tuple[str, ...]:
        """For layer index 0..L, the group that consumes x_l: attention homes, then the head's."""
        return (*self.attention, self.head)

    def seen_by(self, microbatch: int) -> "Placement":
        """The homes in the direction of a micro-batch."""
        return self._mirrored if microbatch % self.directions else self

    @cached_property
    def _mirrored(self) -> "Placement":
        there = {one.name: other.name for one, other in zip(self.groups, reversed(self.groups), strict=True)}
        return replace(
            self,
            embed=there[self.embed],
            head=there[self.head],
            attention=tuple(there[name] for name in self.attention),
            expert=tuple(name and there[name] for name in self.expert),
            join=tuple(there[name] for name in self.join),
            directions=1,
        )

    @cached_property
    def outline(self) -> "Placement":
        """The same homes on groups of one rank: equal for placements that differ in their ranks alone."""
        groups = tuple(Group(group.name, i, 1) for i, group in enumerate(self.groups))
        return replace(self, groups=groups, shared_on="attention")

    def holders(self, group: str) -> tuple[Group, ...]:
        """The groups that hold what `group` holds, itself among them, in the order of their ranks."""
        mine = self.index[group]
        both = {mine, len(self.groups) - 1 - mine} if self.directions == 2 else {mine}
        return tuple(self.groups[i] for i in sorted(both))

    def home(self, kind: Kind, layer: int = 0, microbatch: int = 0) -> str:
        """The group on which a compute action of that kind, layer and micro-batch runs."""
        if microbatch % self.directions:
            return self._mirrored.home(kind, layer)
        match kind:
            case Kind.EMBED:
                return self.embed
            case Kind.HEAD:
                return self.head
            case Kind.ATTENTION:
                return self.attention[layer]
            case Kind.JOIN:
                return self.join[layer]
            case Kind.EXPERT:
                home = self.expert[layer]
                if home is None:
                    raise BadInput("expert layer", layer, "a layer with experts; this one is dense")
                return home
        raise BadInput("kind", kind.name, "a compute kind; transfers have two ends")

    def homes(self, kind: Kind, layer: int = 0) -> tuple[str, ...]:
        """The groups that hold a part, a copy each."""
        return tuple(group.name for group in self.holders(self.home(kind, layer)))

    def stays(self, layer: int) -> bool:
        """Whether x_{layer+1} is formed on the group that has the layer's attention."""
        return self.join[layer] == self.attention[layer]

    def moves_on(self, layer: int) -> bool:
        """Whether x_{layer+1} is formed on another group than the one that consumes it (so JOIN is an action)."""
        return self.join[layer] != self.pipeline_ends[layer + 1]

    def validate(self) -> None:
        """Raises BadInput where groups overlap, leave gaps, hold different sequences or have no mirror image, or a
        layer has no home.
        """
        layers = {"attention": len(self.attention), "expert": len(self.expert), "join": len(self.join)}
        if len(set(layers.values())) != 1:
            raise BadInput("placement", layers, "a home of attention, of experts (None: dense) and of join a layer")
        if self.shared_on not in SHARED_ON:
            raise BadInput("placement.shared_on", self.shared_on, " or ".join(SHARED_ON))
        expected = 0
        for group in self.groups:
            if group.first != expected or group.size < 1:
                raise BadInput("placement", str(group), f"groups of consecutive ranks; the next begins at {expected}")
            expected += group.size
        if len(self.by_name) != len(self.groups):
            raise BadInput("placement", [g.name for g in self.groups], "groups with different names")
        homes = {self.embed, self.head, *self.attention, *self.join, *(e for e in self.expert if e)}
        unknown = homes - self.by_name.keys()
        if unknown:
            raise BadInput("placement", sorted(unknown), f"known groups: {', '.join(self.by_name)}")
        for name in {self.embed, self.head, *self.attention, *self.join}:
            if self.by_name[name].size != self.data_ranks:
                raise BadInput(
                    "placement", str(self.by_name[name]), f"{self.data_ranks} ranks, as the embedding's group"
                )
        if self.directions not in (1, 2):
            raise BadInput("placement.directions", self.directions, "1 or 2")
        sizes = [group.size for group in self.groups]
        if self.directions == 2 and sizes != sizes[::-1]:
            raise BadInput("placement", sizes, "sizes of groups that read the same backwards, for two directions")
