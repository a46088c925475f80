"""Splits whose plans fit: what the programme takes for one is simulated, and cut off where its plan does not fit.

The programme's memory is that of a few micro-batches, whatever the order. The order of a plan may hold more: weight
gradients that wait, messages on their way, a round of the next part before the last backward of this one. So what is
to be named is simulated first, as `moebench simulate` would. A plan that does not fit gives a constraint that the
programme did not know, of that candidate alone: its rounds are shorter by what is missing; where they are of one
micro-batch, it takes the bytes that its plan takes. Then the programme is solved again.
"""

import math
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.assumptions import Assumptions
from bench.case import Case
from bench.errors import BadInput
from bench.limits import least_bytes
from bench.predict import GIB, QuickStep, costs_of, does_not_fit, quick_step
from bench.timing import StepTime
from systems.disagmoe.placement import place
from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, TIME_LIMIT, Allocation, Cut, Outcome, allocate
from systems.disagmoe.planner.problem import RESOURCES, Problem

MOST_CUTS = 24
"""Plans of one programme that are simulated and do not fit before it is given up."""
MOST_CUTS_BESIDE = 8
"""The same of what stands beside a plan: the next best, other conditions."""
_IN_FLIGHT = RESOURCES.index("micro-batches in flight")


class Steps:
    """Simulated steps of cases, each case's once. The numbers are those of `bench.predict.predict`."""

    def __init__(self, assumptions: Assumptions) -> None:
        self.assumptions = assumptions
        self._known: dict[Hashable, QuickStep | BadInput] = {}

    def quick(self, case: Case) -> QuickStep:
        """Raises BadInput for a case that cannot be."""
        if case not in self._known:
            try:
                self._known[case] = quick_step(case, self.assumptions)
            except BadInput as error:
                self._known[case] = error
        found = self._known[case]
        if isinstance(found, BadInput):
            raise found
        return found

    def timed(self, case: Case) -> StepTime:
        """The same as `bench.timing.simulated` says it."""
        found = self.quick(case)
        missing = found.peak_memory_bytes > case.cluster.gpu.memory_bytes
        return StepTime(
            "infeasible" if missing else "ok",
            found.step_time_s,
            found.step_time_s,
            found.step_time_s,
            found.bound_s,
            found.peak_memory_bytes,
            does_not_fit(case, found.peak_memory_bytes) if missing else "",
        )


class Fitted(NamedTuple):
    """What was found.

    Args:
        programme: without what was cut off.
        outcome: the best allocation whose plan fits. Where none does, the first that was found, and `refused` says why.
    """

    programme: Problem
    outcome: Outcome
    refused: BadInput | None = None


def fit(
    programme: Problem,
    steps: Steps,
    *,
    time_limit_s: float = DEFAULT_LIMIT_S,
    excluded: NDArray[np.bool_] | None = None,
    most: int = MOST_CUTS,
) -> Fitted:
    """`allocate`, until the plan of what is found fits when it is simulated, at most `most` times.

    Raises BadInput as `allocate` does, where it finds nothing to begin with.
    """
    cuts: list[Cut] = []
    first: Outcome | None = None
    while True:
        try:
            found = allocate(programme, time_limit_s=time_limit_s, excluded=excluded)
        except BadInput as error:
            if first is None or error.field == TIME_LIMIT:
                raise
            return Fitted(programme, first._replace(cuts=tuple(cuts)), error)
        step = _step_of(found, steps)
        if step.peak_memory_bytes <= found.memory_of_gpu:
            return Fitted(programme, Outcome(found, step=step, cuts=tuple(cuts)))
        first = first or Outcome(found, step=step)
        cuts.append(Cut(found.layout, step.peak_memory_bytes))
        if len(cuts) == most:
            return Fitted(programme, first._replace(cuts=tuple(cuts)), _given_up(programme, cuts))
        programme = without(programme, found.candidate, step)


def attempt_fit(programme: Problem, steps: Steps, **options: object) -> Fitted:
    """`fit` where having none is an answer."""
    try:
        found = fit(programme, steps, **{"most": MOST_CUTS_BESIDE, **options})  # type: ignore[arg-type]
    except BadInput as error:
        return Fitted(programme, Outcome(None, error.field == TIME_LIMIT))
    return found if found.refused is None else found._replace(outcome=Outcome(None, cuts=found.outcome.cuts))


def without(programme: Problem, candidate: int, step: QuickStep) -> Problem:
    """The programme with what a simulated step of a candidate's plan says of its memory."""
    in_flight = int(programme.in_flight[candidate])
    if in_flight > 1:
        missing = step.peak_memory_bytes - programme.spec.cluster.gpu.memory_bytes
        fewer = max(1, in_flight - max(1, math.ceil(missing / max(programme.kept_bytes(candidate)))))
        rounds, caps = programme.in_flight.copy(), programme.caps.copy()
        rounds[candidate] = fewer
        caps[_IN_FLIGHT, candidate] *= fewer / in_flight
        return replace(programme, in_flight=rounds, caps=caps)
    name = "attention_bytes" if step.fullest.startswith("A") else "expert_bytes"
    needed = getattr(programme, name).copy()
    needed[candidate] = step.peak_memory_bytes
    return replace(programme, **{name: needed})


def _step_of(found: Allocation, steps: Steps) -> QuickStep:
    """The step of an allocation's plan; not played where no order of it fits."""
    spec, layout = found.problem.spec, found.layout
    case, placement = spec.with_layout(layout), place(spec.model, layout)
    costs = costs_of(case, placement, steps.assumptions)
    least = least_bytes(case, placement, costs)
    if least > found.memory_of_gpu:
        static = {group.name: costs.static_bytes(group.name) for group in placement.groups}
        return QuickStep(None, 0.0, least, max(static, key=lambda name: static[name]))
    return steps.quick(case)


def _given_up(programme: Problem, cuts: list[Cut]) -> BadInput:
    """That no plan fits, and what the one needs that misses least."""
    cluster = programme.spec.cluster
    least = min(cuts, key=lambda cut: cut.peak_memory_bytes)
    need, have = least.peak_memory_bytes / GIB, cluster.gpu.memory_bytes / GIB
    return BadInput(
        "cluster",
        cluster.name,
        f"more memory or more GPUs: the memory constraint cannot hold; of the {len(cuts)} fastest splits that fit by "
        f"the programme's estimates none fits when its order is made: the one that misses least needs {need:.1f} GiB a "
        f"GPU ({least.layout}), {need - have:.1f} GiB more than its {have:.1f}",
    )
