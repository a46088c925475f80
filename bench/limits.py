"""What no order of a layout's actions can beat: lower bounds on its step time and on its memory.

A space has thousands of layouts, and many of them differ in the order alone. What they share is looked at once.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from bench.action import Action, Kind, Pass
from bench.assumptions import Assumptions
from bench.bound import placement_bound_s
from bench.case import Batch, Case, CaseSpec, batch_of
from bench.cost import Costs
from bench.least import least_step_s
from bench.placement import Placement
from bench.predict import COST_FIELDS, new_costs
from bench.program import Held
from bench.system import IsSerial, KnowsInFlight, System, get_system
from bench.tally import COMPUTES_AT, Role, times

_IN_PIECES = ("chunks", "comm_sms")
_choice = attrgetter(*(field for field in COST_FIELDS if field not in _IN_PIECES))


class Limit(NamedTuple):
    """Least bytes of a layout's fullest rank, and where the layout may fit, else None: least seconds of its step, and
    those of its busiest resource alone, which layouts that differ in their order or in their chunks share."""

    bytes: float
    step_s: float | None = None
    busy_s: float | None = None


class _Shared(NamedTuple):
    """What layouts that cost the same have in common: `Limit.step_s` and `busy_s`, and what is held."""

    seconds: Callable[[], tuple[float, float]]
    held: "tuple[_HeldBytes, ...]"


class _HeldBytes(NamedTuple):
    """Of groups that are alike: bytes held from beginning to end, and those that a micro-batch's forwards keep."""

    groups: tuple[str, ...]
    static: float
    kept: float

    def least(self, in_flight: Mapping[str, float]) -> float:
        """Bytes of the fullest, with so many micro-batches in flight by group, 1 where not told."""
        return self.static + max(in_flight.get(name, 1.0) for name in self.groups) * self.kept


class Limits:
    """Lower bounds of the layouts of one spec. Neither knows fixed costs of kernels and transfers."""

    def __init__(self, spec: CaseSpec, assumptions: Assumptions) -> None:
        self.system: System = get_system(spec.system)
        self.capacity_bytes = spec.cluster.gpu.memory_bytes
        self.assumptions = assumptions.without_overheads()
        self._in_flight = _in_flight(self.system)
        self._serial = isinstance(self.system, IsSerial) and self.system.serial
        self._known: dict[tuple[object, ...], _Shared] = {}

    def of(self, case: Case) -> Limit:
        """Raises BadInput."""
        placement = self.system.placement(case)
        batch = batch_of(case, placement)
        key = placement, batch.num_replicas, _choice(case.layout)
        shared = self._known.get(key)
        if shared is None:
            shared = self._known[key] = self._shared(case, placement, batch)
        in_flight = self._in_flight(case)
        least = max(held.least(in_flight) for held in shared.held)
        # Seconds are dearer, and of no use where memory decides.
        return Limit(least) if least > self.capacity_bytes else Limit(least, *shared.seconds())

    def _shared(self, case: Case, placement: Placement, batch: Batch) -> _Shared:
        costs = new_costs(_in_one_piece(case), placement, batch.num_replicas, self.assumptions)
        given, serial = (placement, costs, batch.num_microbatches), self._serial
        return _Shared(lambda: (least_step_s(*given, serial=serial), placement_bound_s(*given)), _held(costs))


def _in_one_piece(case: Case) -> Case:
    """The case without chunks and fused kernels: it costs no more, so one bound holds for all of them."""
    layout = case.layout
    if layout.chunks == 1 and not layout.comm_sms:
        return case
    return case.model_copy(update={"layout": layout.model_copy(update={"chunks": 1, "comm_sms": 0})})


def least_bytes(case: Case, placement: Placement, costs: Costs) -> float:
    """Memory that no order of the system's can do without: static state, and what forwards keep until a backward.

    When the first backward of a group begins, everything its forwards kept for that micro-batch is still held, and as
    many micro-batches more as the system says.
    """
    in_flight = _in_flight(get_system(case.system))(case)
    return max(held.least(in_flight) for held in _held(costs))


def _in_flight(system: System) -> Callable[[Case], Mapping[str, float]]:
    return system.in_flight if isinstance(system, KnowsInFlight) else lambda _: {}


def _held(costs: Costs) -> tuple[_HeldBytes, ...]:
    alike = costs.tally.alike
    return tuple(_HeldBytes(alike[name], costs.static_bytes(name), kept) for name, kept in kept_bytes(costs).items())


def kept_bytes(costs: Costs) -> dict[str, float]:
    """For one group of every kind, what the forwards of a micro-batch in each direction keep on its least loaded rank.

    A bound on memory must hold for every rank.
    """
    found: dict[str, float] = costs.of_placement("kept", lambda: _kept_bytes(costs))
    return found


def _kept_bytes(costs: Costs) -> dict[str, float]:
    def kept(actions: list[Action]) -> dict[Role, float]:
        return {
            COMPUTES_AT[action.kind]: times(action, costs.chunks) * float(costs.held_bytes(Held.FORWARD, action).min())
            for action in actions
            if action.pass_ is Pass.F and action.kind in (Kind.ATTENTION, Kind.EXPERT)
        }

    return costs.tally.sums(lambda likeness: costs.of_work("kept", likeness, kept), 0.0)
