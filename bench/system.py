"""What a training system is to this harness: a name, a space of layouts, and a pure function from a case to a plan."""

import importlib
import math
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, Protocol, runtime_checkable

from bench.assumptions import Assumptions
from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput, unknown
from bench.flops import num_parameters
from bench.placement import Placement
from bench.plan import Plan

STATE_BYTES = 12  # a parameter: main weight and two moments in fp32
ENTRY_POINTS = "moebench.systems"
TRAINERS = ("plan", "native")
"""What trains a case: this harness, which executes the system's plan; or the system's own code."""

SYSTEM_PARTS = ("name", "summary", "fields", "space", "placement", "plan")
NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
NAME_RULE = "lower-case letters, digits and hyphens, beginning with a letter"


class BrokenPackage(UserWarning):
    """An installed package offers a system that cannot be had."""


@runtime_checkable
class System(Protocol):
    """One way of training a mixture-of-experts model."""

    name: str
    summary: str
    fields: frozenset[str]
    """Layout fields that this system uses."""

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        """Layouts worth trying for `spec`, likeliest first. All of them divide; they may not fit in memory."""
        ...

    def placement(self, case: Case) -> Placement:
        """Where the parts live. Raises BadInput naming the layout field that cannot be."""
        ...

    def plan(self, case: Case) -> Plan:
        """The schedule. Raises BadInput naming the layout field that cannot be."""
        ...


@runtime_checkable
class KnowsInFlight(Protocol):
    """A system that can tell, before it makes a plan, how much its order keeps in flight: the tuner rejects sooner."""

    def in_flight(self, case: Case) -> Mapping[str, float]:
        """For each group, micro-batches of its forward work that are held at once at the least."""
        ...


@runtime_checkable
class IsSerial(Protocol):
    """A system of which a search may know that nothing hides an exchange of tokens."""

    serial: bool
    """Whether dispatch and combine stand in the queue of the computation."""


@runtime_checkable
class KnowsSeeds(Protocol):
    """A system with a planner of its own: its layouts are simulated first, within the same budget as everybody's."""

    def seeds(self, spec: CaseSpec, assumptions: Assumptions) -> Iterable[Layout]:
        """Layouts to begin with, likeliest first; none where there is nothing to say."""
        ...


@runtime_checkable
class KnowsMoves(Protocol):
    """A system whose space has few values of fields that have many, or one: the tuner goes on from its best layouts,
    step by step and within everybody's budget, so that no list of values ends a search."""

    stepped: tuple[str, ...]
    """Layout fields that change nothing but the order of the same work, and what it holds meanwhile."""

    def moves(self, spec: CaseSpec, layout: Layout) -> Iterable[Layout]:
        """Layouts one step away, likeliest first. Some may not be possible."""
        ...

    def leaner(self, layout: Layout) -> Layout | None:
        """The same work in an order that holds less; None where there is none to try."""
        ...

    def in_order_of(self, layout: Layout, other: Layout) -> Layout:
        """A layout's work in the order of another's."""
        ...


@runtime_checkable
class KnowsConsequences(Protocol):
    """A system of whose layout fields some follow from others: where a user fixes these, those are made anew."""

    def completed(self, spec: CaseSpec, layout: Layout, fixed: Set[str]) -> Layout:
        """The layout, in which fields were fixed by name, with what follows from them."""
        ...


@runtime_checkable
class KnowsDefaults(Protocol):
    """A system whose layouts have other values where nothing is said."""

    defaults: Mapping[str, object]
    """Layout fields and their values."""


@runtime_checkable
class RunsAsItself(Protocol):
    """A system that exists outside of this harness, whose own code can train a case instead of its plan's execution."""

    trainers: tuple[str, ...]
    """Of `TRAINERS`, the one that a run takes unless told first."""
    native: str
    """``module:class`` of its own trainer, see `bench.execute.trainer.Trainer`."""

    def require_native(self, case: Case) -> None:
        """Raises BadInput for the first thing about the case that its own code cannot do."""
        ...


@cache
def systems() -> dict[str, System]:
    """Known systems by name: those of the `systems` package, and of installed packages by entry point.

    Warns of a package whose system cannot be had, and leaves it out.
    """
    known = dict(_own())
    for name in _offered():
        try:
            known[name] = _installed(name)
        except BadInput as error:
            warnings.warn(f"{error}; it is left out", BrokenPackage, stacklevel=2)
    return known


@cache
def _own() -> dict[str, System]:
    return dict(importlib.import_module("systems").SYSTEMS)


@cache
def _offered() -> dict[str, EntryPoint]:
    """What installed packages offer, by name; of two that have one name the first."""
    offered: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        offered.setdefault(entry.name, entry)
    return offered


@cache
def _installed(name: str) -> System:
    """The system that a package offers. Raises BadInput naming the package."""
    entry = _offered()[name]
    where = f"package {entry.dist.name if entry.dist else entry.value}: system {name}"
    if name in _own() or not NAME.fullmatch(name):
        raise BadInput(where, name, f"{NAME_RULE}, and none of {', '.join(_own())}")
    try:
        with redirect_stdout(sys.stderr):  # stdout is for results
            system = entry.load()
            require_system(where, system)
    except (Exception, SystemExit) as error:
        if isinstance(error, BadInput):
            raise
        said = f"{type(error).__name__}: {error}"
        raise BadInput(where, said, f"an entry point that loads ({entry.value})") from None
    if system.name != name:
        raise BadInput(f"{where}: name", system.name, f"{name}, as its entry point")
    made: System = system
    return made


def require_name(field: str, name: object) -> None:
    """Raises BadInput for a name of a new system that is none or is taken."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadInput(field, name, NAME_RULE)
    taken = dict.fromkeys([*_own(), *_offered()])
    if name in taken:
        raise BadInput(field, name, f"a name that is not taken; taken are {', '.join(taken)}")


def require_system(where: str, thing: Any) -> None:
    """Raises BadInput where something is no system: an object with every part of one, and fields that a layout has."""
    if isinstance(thing, type):
        raise BadInput(where, thing.__name__, f"an object, {thing.__name__}(), not the class")
    missing = [part for part in SYSTEM_PARTS if not hasattr(thing, part)]
    if missing:
        raise BadInput(f"{where}: missing", missing, f"{', '.join(SYSTEM_PARTS)}, all of them")
    fields = thing.fields
    if isinstance(fields, str) or not isinstance(fields, Iterable):
        raise BadInput(f"{where}: fields", fields, "names of layout fields")
    strange = [field for field in fields if field not in Layout.model_fields]
    if strange:
        raise BadInput(f"{where}: fields", strange, f"of {', '.join(Layout.model_fields)}")


def get_system(name: str) -> System:
    """A system by name, or that of a schedule file, see `bench.loading`.

    Raises BadInput listing the known systems, or naming the package whose system cannot be had.
    """
    from bench.loading import is_schedule_file, load

    if is_schedule_file(name):
        return load(name)
    if name in _own():
        return _own()[name]
    if name in _offered():
        return _installed(name)
    raise unknown("system", name, [*systems(), "a schedule file (.py or .txt)"])


def plan_of(case: Case) -> Plan:
    """The plan of a case, after refusing layout fields that its system does not use."""
    system = get_system(case.system)
    case.layout.require_only(system.name, system.fields)
    return system.plan(case)


def default_layout(system: System) -> Layout:
    """A system's layout where nothing is said about it."""
    return Layout.make(**system.defaults) if isinstance(system, KnowsDefaults) else Layout()


def trainers_of(system: System) -> tuple[str, ...]:
    """What can train a system's cases, of `TRAINERS`; what a run takes unless told first."""
    return system.trainers if isinstance(system, RunsAsItself) else TRAINERS[:1]


def trainer_of(case: Case, trainer: str | None = None) -> str:
    """What trains a case: as asked for, or what the system takes first.

    Raises BadInput where the system has no code of its own, or its code cannot do this case.
    """
    system = get_system(case.system)
    offered = trainers_of(system)
    chosen = offered[0] if trainer is None else trainer
    if chosen not in TRAINERS:
        raise unknown("trainer", chosen, TRAINERS)
    if chosen not in offered:
        raise BadInput("trainer", chosen, f"plan: {case.system} has no code of its own")
    if chosen == "native" and isinstance(system, RunsAsItself):
        system.require_native(case)
    return chosen


def divisors(whole: int) -> list[int]:
    """Ascending."""
    small = [n for n in range(1, math.isqrt(max(0, whole)) + 1) if whole % n == 0]
    return small + [whole // n for n in reversed(small) if n * n != whole]


def worthwhile_copies(spec: CaseSpec) -> tuple[Literal["rank", "node"], ...]:
    """Dispatch copies worth trying: one row per expert is never less than one per rank; a node is several ranks."""
    return ("rank", "node") if spec.cluster.num_nodes > 1 else ("rank",)


OFFLOADED_SHARE = 0.1
"""Optimizer state that takes a smaller share of the GPUs' memory is not worth moving to the host."""


def worthwhile_offloads(spec: CaseSpec, mbs: int) -> tuple[Literal["none", "state"], ...]:
    """Where the state could be held: with the host where it crowds the GPUs, for the smallest micro-batches."""
    state_bytes = STATE_BYTES * num_parameters(spec.model).total
    memory_bytes = spec.cluster.num_gpus * spec.cluster.gpu.memory_bytes
    return ("none", "state") if mbs == 1 and state_bytes > OFFLOADED_SHARE * memory_bytes else ("none",)


SHARES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1))
"""(tp, cp) that a space lists; more may be fixed, or reached by moves."""


def worthwhile_shares(spec: CaseSpec, ranks: int) -> Iterator[tuple[int, int]]:
    """(tp, cp) worth trying: (1, 1), and those that share sequences, which saves memory and makes up for too few.

    What sequences keep in memory grows with a rank's tokens, not with their length, so sequences of any length are
    shared as far as a node goes. Context parallelism moves keys and values alone, which grouped-query models have few
    of; tensor parallelism moves whole rows, and is worth it for attention's weights at most.

    Args:
        ranks: ranks of a group that holds attention.
    """
    model, seq_len = spec.model, spec.workload.seq_len
    for tp, cp in SHARES:
        alike = model.num_heads % tp == 0 and model.num_kv_heads % tp == 0
        inside = ranks % (tp * cp) == 0 and spec.cluster.gpus_per_node % (tp * cp) == 0
        if alike and inside and seq_len % (tp * (2 * cp if cp > 1 else 1)) == 0:
            yield tp, cp


def beside(values: Iterable[int], value: int) -> list[int]:
    """Of some values the next larger and the next smaller one, where there are any."""
    kept = sorted(values)
    return [each for each in kept if each > value][:1] + [each for each in kept if each < value][-1:]


def require_divides(field: str, value: int, whole: int, what: str) -> None:
    """Raises BadInput where `value` does not divide `whole`."""
    if whole % value:
        raise BadInput(field, value, f"a divisor of {what} ({whole})")
