"""What no order of a layout's actions can beat: lower bounds on its step time and on its memory.

A space has thousands of layouts, and many of them differ in the order alone. What they share is looked at once.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter

from bench.action import Action, Kind, Pass
from bench.assumptions import Assumptions
from bench.bound import placement_bound_s
from bench.case import Case, CaseSpec, batch_of
from bench.cost import Costs
from bench.placement import Placement
from bench.predict import COST_FIELDS, costs_of
from bench.program import Held
from bench.system import KnowsInFlight, System, get_system
from bench.tally import COMPUTES_AT, Role, times

_choice = attrgetter(*COST_FIELDS)


class Limits:
    """Lower bounds of the layouts of one spec. Neither knows fixed costs of kernels and transfers."""

    def __init__(self, spec: CaseSpec, assumptions: Assumptions) -> None:
        self.system: System = get_system(spec.system)
        self.capacity_bytes = spec.cluster.gpu.memory_bytes
        self.assumptions = assumptions.without_overheads()
        self._in_flight = _in_flight(self.system)
        self._costs: dict[tuple[object, ...], Costs] = {}

    def of(self, case: Case) -> tuple[float | None, float]:
        """Seconds of a step, None where the layout cannot fit, and bytes of the fullest rank. Raises BadInput."""
        placement = self.system.placement(case)
        batch = batch_of(case, placement)
        whole = _in_one_piece(case)
        key = (placement, batch.num_replicas, _choice(whole.layout))
        if key not in self._costs:
            self._costs[key] = costs_of(whole, placement, self.assumptions)
        costs = self._costs[key]
        least = _least_bytes(costs, kept_bytes(placement, costs), self._in_flight(case))
        # The dearer of the two, and of no use where memory decides.
        bound_s = None if least > self.capacity_bytes else placement_bound_s(placement, costs, batch.num_microbatches)
        return bound_s, least


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
    return _least_bytes(costs, kept_bytes(placement, costs), _in_flight(get_system(case.system))(case))


def _in_flight(system: System) -> Callable[[Case], Mapping[str, float]]:
    return system.in_flight if isinstance(system, KnowsInFlight) else lambda _: {}


def _least_bytes(costs: Costs, kept: Mapping[str, float], in_flight: Mapping[str, float]) -> float:
    like = costs.tally.like
    return max(costs.static_bytes(like[name]) + in_flight.get(name, 1.0) * held for name, held in kept.items())


def kept_bytes(placement: Placement, costs: Costs) -> dict[str, float]:
    """For each group, what the forwards of one micro-batch in each direction keep on its least loaded rank.

    A bound on memory must hold for every rank.
    """
    found: dict[str, float] = costs.of_placement("kept", lambda: _kept_bytes(placement, costs))
    return found


def _kept_bytes(placement: Placement, costs: Costs) -> dict[str, float]:
    def kept(actions: list[Action]) -> dict[Role, float]:
        return {
            COMPUTES_AT[action.kind]: times(action, costs.chunks) * float(costs.held_bytes(Held.FORWARD, action).min())
            for action in actions
            if action.pass_ is Pass.F and action.kind in (Kind.ATTENTION, Kind.EXPERT)
        }

    counted = costs.tally
    sums = counted.sums(lambda likeness: costs.of_likeness("kept", likeness, kept), 0.0)
    return {group.name: sums[counted.like[group.name]] for group in placement.groups}
