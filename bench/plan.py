"""A `Plan` is a schedule as data: a placement, and for each group an ordered queue of actions per stream.

Text form (`str` and `Plan.parse` are inverse), made to be read, diffed and edited by hand::

    plan disagmoe microbatches=8 copies=rank recompute=none
    group A0 = 0..1
    home embed A0
    home attention A0 A1 A0 A1
    ...
    queue A0 compute
      embed:F0.0 attn:F0.0 ...

A queue's stream is a name. Streams are queues, not resources: all compute of a rank shares its SMs. A transfer stands
in a queue of the group that sends; where it stands in the ``compute`` stream it blocks the computation behind it until
it has arrived (a serial all-to-all), in any other stream it does not.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np

from bench.action import MAX_CHUNKS, Action, BadPlan, Codes, pack, view
from bench.errors import BadInput
from bench.placement import Group, Placement

COMPUTE_STREAM = "compute"
EXECUTABLE_TRAITS = ("two-copies", "pair-order")
"""Every parameter lives twice; the order of a forward and a backward of the system, without the rest of it."""
TRAITS = ("modelled-only", "changes-model", "capacity-padded", "inference", *EXECUTABLE_TRAITS)
COPIES = ("expert", "rank", "node")
RECOMPUTE = ("none", "full", "redispatch")


def obstacles(traits: Iterable[str]) -> tuple[str, ...]:
    """Those that keep a plan from being executed."""
    return tuple(trait for trait in traits if trait not in EXECUTABLE_TRAITS)


class ActionColumn(Sequence[Action]):
    """A queue: one int64 column of packed codes; indexing and iterating give `Action` views."""

    def __init__(self, codes: Codes) -> None:
        given = np.asarray(codes)
        if given.ndim != 1 or (len(given) and given.dtype.kind != "i"):
            raise BadPlan("plan.queue", codes, "a column of codes, as ActionColumn.of(actions) makes one")
        self.codes = given.astype(np.int64, copy=False)
        self.codes.setflags(write=False)

    @classmethod
    def of(cls, actions: Iterable[Action]) -> "ActionColumn":
        return cls(pack(actions))

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> "ActionColumn": ...
    def __getitem__(self, index: int | slice) -> "Action | ActionColumn":
        return ActionColumn(self.codes[index]) if isinstance(index, slice) else view(int(self.codes[index]))

    def __iter__(self) -> Iterator[Action]:
        return (view(int(code)) for code in self.codes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionColumn) and np.array_equal(self.codes, other.codes)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.codes.tobytes())


@dataclass(frozen=True)
class Plan:
    """What every group does in one optimizer step, in which order. One replica; all replicas run the same plan.

    `copies` says which rows of u a dispatch sends ("expert": one per token and expert, "rank": one per token and
    destination rank, "node": one per token and node over the NICs, spread by NVLink inside); `recompute` what the
    backward computes again: "none"; "full", all, from an action's inputs; "redispatch", the same from x alone, with
    attention and its dispatch as actions of their own (pass R). `chunks` is the number of slices in which the tokens of
    a micro-batch pass a layer's experts (see `bench.edges`).
    """

    system: str
    placement: Placement
    queues: Mapping[tuple[str, str], ActionColumn]
    num_microbatches: int
    copies: str = "rank"
    recompute: str = "none"
    traits: tuple[str, ...] = field(default=())
    chunks: int = 1

    @property
    def directions(self) -> int:
        """See `bench.placement`."""
        return self.placement.directions

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("copies", self.copies, COPIES),
            ("recompute", self.recompute, RECOMPUTE),
        ):
            if value not in allowed:
                raise BadPlan(f"plan.{name}", value, " or ".join(allowed))
        if not isinstance(self.num_microbatches, int | np.integer) or not 1 <= self.num_microbatches < 1 << 20:
            raise BadPlan("plan.microbatches", self.num_microbatches, "a whole number, 1 to 1048575")
        if self.num_microbatches % self.directions:
            raise BadPlan("plan.microbatches", self.num_microbatches, "an even number, for two directions")
        if not 1 <= self.chunks <= MAX_CHUNKS:
            raise BadPlan("plan.chunks", self.chunks, f"1 to {MAX_CHUNKS}")
        for trait in self.traits:
            if trait not in TRAITS:
                raise BadPlan("plan.traits", trait, ", ".join(TRAITS))
        for (group, _), queue in self.queues.items():
            if group not in self.placement.by_name:
                raise BadPlan("plan.queue", group, f"a group: {', '.join(self.placement.by_name)}")
            if not isinstance(queue, ActionColumn):
                raise BadPlan("plan.queue", type(queue).__name__, "an ActionColumn, as ActionColumn.of(actions) makes")

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Traits that keep it from being executed."""
        return obstacles(self.traits)

    @property
    def num_actions(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    def __str__(self) -> str:
        traits = f" traits={','.join(self.traits)}" if self.traits else ""
        chunks = f" chunks={self.chunks}" if self.chunks > 1 else ""
        directions = f" directions={self.directions}" if self.directions > 1 else ""
        head = f"plan {self.system} microbatches={self.num_microbatches} copies={self.copies}"
        lines = [f"{head} recompute={self.recompute}{chunks}{directions}{traits}"]
        lines += [f"group {group}" for group in self.placement.groups]
        lines += [f"home {word} {' '.join(names)}" for word, names in _homes(self.placement)]
        for (group, stream), queue in self.queues.items():
            lines.append(f"queue {group} {stream}")
            words = [str(action) for action in queue]
            lines += ["  " + " ".join(words[i : i + 8]) for i in range(0, len(words), 8)]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The inverse of `str`; ``#`` begins a comment. Raises BadInput naming the line."""
        return _PlanReader(text).read()


def _homes(placement: Placement) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The words of `_HOMES` and their names."""
    experts = tuple(name or "-" for name in placement.expert)
    at = placement
    names = ((at.embed,), at.attention, experts, at.join, (at.head,), (at.shared_on,))
    return zip(_HOMES, names, strict=True)


class _PlanReader:
    """Reads a plan's text line by line, so that an error can name its line."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.number = 0
        self.head: dict[str, str] = {}
        self.groups: list[Group] = []
        self.homes: dict[str, list[str]] = {}
        self.queues: dict[tuple[str, str], list[Action]] = {}
        self.key = ("", "")
        self.queue: list[Action] | None = None

    def read(self) -> Plan:
        for number, line in enumerate(self.lines, 1):
            self.number = number
            words = line.split("#")[0].split()
            if words:
                try:
                    self._line(words)
                except BadInput as error:
                    raise self._bad(error.value, error.allowed, error.field) from None
        missing = [word for word in _HOMES if word not in self.homes]
        if not self.head or missing:
            raise self._bad("end of text", f"a 'plan' line and 'home' lines for {', '.join(missing) or 'every part'}")
        return self._plan()

    def _bad(self, value: object, allowed: str, field: str = "") -> BadInput:
        where = f"plan text, line {self.number}"
        return BadInput(where if not field else f"{where}: {field}", value, allowed)

    def _line(self, words: list[str]) -> None:
        match words[0]:
            case "plan":
                self._head(words)
            case "group":
                self.groups.append(Group.parse(" ".join(words[1:])))
            case "home":
                self._home(words)
            case "queue" if len(words) == 3:
                self.key = words[1], words[2]
                self.queue = self.queues.setdefault(self.key, [])
            case _ if self.queue is not None:
                self._actions(words, self.queue)
            case _:
                raise BadInput("words", " ".join(words), "plan, group, home, queue, or actions after a queue line")

    def _head(self, words: list[str]) -> None:
        found = {
            "system": words[1] if len(words) > 1 else "",
            **dict(word.split("=", 1) for word in words[2:] if "=" in word),
        }
        counts = [found.get("microbatches", ""), *(found.get(word, "1") for word in _COUNTS)]
        known = {"system", "microbatches", "copies", "recompute", "traits", *_COUNTS}
        whole = len(found) == len(words) - 1 and found.keys() <= known and "=" not in found["system"]
        if self.head or not whole or not all(_COUNT.fullmatch(count) for count in counts):
            allowed = "once: plan SYSTEM microbatches=N [copies=] [recompute=] [chunks=N] [directions=N] [traits=]"
            raise BadInput("head", " ".join(words), allowed)
        self.head = found

    def _home(self, words: list[str]) -> None:
        part, *names = words[1:] or [""]
        if part not in _HOMES or part in self.homes:
            raise BadInput("home", part, f"each once: {', '.join(_HOMES)}")
        if not names or (part in _ONE_HOME and len(names) != 1):
            raise BadInput(f"home {part}", " ".join(names), "one name" if part in _ONE_HOME else "a name a layer")
        self.homes[part] = names

    def _actions(self, words: list[str], queue: list[Action]) -> None:
        for word in words:
            try:
                queue.append(Action.parse(word))
            except BadInput as error:
                at = f"queue {' '.join(self.key)} [{len(queue)}]"
                raise BadInput(f"{at}: {error.field}", error.value, error.allowed) from None

    def _plan(self) -> Plan:
        homes = self.homes
        placement = Placement(
            tuple(self.groups),
            homes["embed"][0],
            homes["head"][0],
            tuple(homes["attention"]),
            tuple(None if name == "-" else name for name in homes["expert"]),
            tuple(homes["join"]),
            homes["shared"][0],
            int(self.head.get("directions", "1")),
        )
        placement.validate()
        return Plan(
            self.head["system"],
            placement,
            {key: ActionColumn.of(queue) for key, queue in self.queues.items()},
            int(self.head["microbatches"]),
            self.head.get("copies", "rank"),
            self.head.get("recompute", "none"),
            tuple(filter(None, self.head.get("traits", "").split(","))),
            int(self.head.get("chunks", "1")),
        )


_COUNTS = ("chunks", "directions")
_COUNT = re.compile("[1-9][0-9]{0,8}")
_HOMES = ("embed", "attention", "expert", "join", "head", "shared")
_ONE_HOME = ("embed", "head", "shared")
