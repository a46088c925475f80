"""When the workload changes: a plan for every phase of a schedule of lengths, and whether re-allocating for it pays.

Between phases weights and optimizer state can move to another placement; in a mixture the placement stays. What pays is
decided between two searches of equal care: the phase's plan is that of `systems.disagmoe.planner.search`, and every
other phase's placement is refined for it in all that can change without moving anything (rounds, recomputation,
copies, micro-batch, ranks that share a sequence's tokens, state on the GPU or its host).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Unpack

import numpy as np

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout, Workload
from bench.errors import BadInput
from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, attempt
from systems.disagmoe.planner.move import STAYS, Move, move
from systems.disagmoe.planner.phases_words import PhasePlan, PhasesPlan
from systems.disagmoe.planner.problem import Problem
from systems.disagmoe.planner.refine import DEFAULT_BUDGET, Try, refine
from systems.disagmoe.planner.schedule import FIELD, Schedule
from systems.disagmoe.planner.search import Effort, Progress, Search, search

WORKS = ("mbs", "round_length", "deferred_w", "recompute", "copies", "lookahead", "cp", "offload")
"""Fields of a layout that say how GPUs work; the others say what they hold. State may go to the GPU's own host."""


class _Found(NamedTuple):
    """The best of a placement for a phase, and whether its search ended by itself (and not by its budget)."""

    best: Try
    settled: bool


class _Own(NamedTuple):
    """A phase planned by itself: the best layout, and the search that it came from."""

    search: Search
    found: _Found


def plan_phases(
    spec: CaseSpec,
    schedule: Schedule,
    assumptions: Assumptions,
    **effort: Unpack[Effort],
) -> PhasesPlan:
    """The fastest way through a schedule at the global batch of `spec`, by dynamic programming over placements.

    Placements are those of all phases' own plans. `budget` is of each phase's own search, and of each refinement of a
    placement for a phase; `time_limit_s` of each programme.
    Raises BadInput where a length does not divide the batch, or nothing fits it.
    """
    specs = [spec_of_length(spec, phase.seq_len) for phase in schedule.phases]
    time_limit_s, progress = effort.get("time_limit_s", DEFAULT_LIMIT_S), effort.get("progress")

    def planned(number: int) -> _Own:
        own_effort: Effort = {**effort, "progress": _named(progress, specs[number])}
        length = specs[number].workload.seq_len
        try:
            found = search(specs[number], assumptions, **own_effort)
        except BadInput as error:
            raise BadInput(error.field, error.value, f"for sequences of {length}: {error.allowed}") from None
        best = found.refinement.best if found.refinement else None
        if best is None or found.refinement is None:
            raise BadInput("cluster", spec.cluster.name, f"a cluster on which sequences of {length} fit")
        return _Own(found, _Found(best, found.refinement.complete))

    own = [planned(number) for number in range(len(specs))]
    held = list(dict.fromkeys(held_by(each.found.best.layout) for each in own))

    def kept(number: int, placement: Layout) -> _Found | None:
        """The best of a placement for a phase."""
        if held_by(own[number].found.best.layout) == placement:
            return own[number].found
        known = [each.found.best.layout for each in own]
        found = refine(
            specs[number],
            _seeds_on(placement, own[number].search.programme, known, time_limit_s),
            assumptions,
            evaluate=effort.get("evaluate"),
            simulate=own[number].search.steps.timed,
            budget=effort.get("budget", DEFAULT_BUDGET),
            within=lambda layout: held_by(layout) == placement,
            progress=_named(progress, specs[number]),
        )
        return None if found.best is None else _Found(found.best, found.complete)

    tries = [[kept(number, placement) for placement in held] for number in range(len(specs))]
    allocations = [each.search.allocation for each in own]
    gaps = [None if each.proven else each.gap for each in allocations]
    return _Ways(specs, schedule, tries, gaps, assumptions).plan()


def held_by(layout: Layout) -> Layout:
    """The layout with only what decides which GPU holds what."""
    return Layout.make(**{name: value for name, value in layout.model_dump().items() if name not in WORKS})


def _named(progress: Progress | None, spec: CaseSpec) -> Progress | None:
    if progress is None:
        return None
    return lambda done, most, change: progress(done, most, f"sequences of {spec.workload.seq_len}: {change}")


def spec_of_length(spec: CaseSpec, seq_len: int) -> CaseSpec:
    """The spec at a length of a schedule. Raises BadInput, of the schedule, for one that it cannot have."""
    try:
        workload = Workload.make(**{**spec.workload.model_dump(), "seq_len": seq_len})
        _ = workload.num_sequences
    except BadInput as error:
        if error.field.endswith("global_batch_tokens"):
            batch = f"lengths that divide the global batch of {spec.workload.global_batch_tokens} tokens"
            raise BadInput(FIELD, seq_len, batch) from None
        raise BadInput(FIELD, seq_len, error.allowed) from None
    return CaseSpec(model=spec.model, cluster=spec.cluster, workload=workload, system=spec.system)


def _seeds_on(placement: Layout, programme: Problem, known: Sequence[Layout], time_limit_s: float) -> dict[Layout, str]:
    """Where a refinement on one placement begins, each with what it is: what other phases do on it, and the
    programme's best of every way to recompute; last, what needs least memory."""
    found = {layout: "what another length does there" for layout in known if held_by(layout) == placement}
    shapes = [programme.layout(int(first)) for first in _first_of_shapes(programme)]
    for recompute in programme.choices.recompute:
        fits = np.array([_is_on(shape, placement) and shape.recompute == recompute for shape in shapes])
        here = fits[programme.shape] & (programme.data_ranks == placement.attention_ranks)
        here &= programme.replicas == (placement.replicas or 1)
        if not here.any():
            continue
        best = attempt(programme, time_limit_s=time_limit_s, excluded=~here).allocation
        if best is not None:  # else too large for the memory, by the programme
            layout = best.layout.model_copy(update=_homes(placement))
            found.setdefault(layout, f"the best with recompute={recompute}")
    found.setdefault(placement.model_copy(update={"recompute": "redispatch"}), "what needs least memory")
    return found


def _first_of_shapes(programme: Problem) -> np.ndarray:
    """[shapes]: a candidate of each."""
    return np.unique(programme.shape, return_index=True)[1]


def _is_on(layout: Layout, placement: Layout) -> bool:
    """Whether a layout with as many attention ranks and replicas, and head and layers there, would hold the same."""
    same = {"attention_ranks": placement.attention_ranks, "replicas": placement.replicas, **_homes(placement)}
    return held_by(layout.model_copy(update=same)) == placement


def _homes(placement: Layout) -> dict[str, int | None]:
    """What says where head and layers are, beside the groups."""
    return {"head_group": placement.head_group, "shift_at": placement.shift_at}


@dataclass(frozen=True)
class _Ways:
    """All ways through the phases.

    Args:
        tries: [phases][placements], None where a placement does not do for a length.
        gaps: [phases], as `PhasePlan.gap`.
    """

    specs: Sequence[CaseSpec]
    schedule: Schedule
    tries: Sequence[Sequence[_Found | None]]
    gaps: Sequence[float | None]
    assumptions: Assumptions

    def plan(self) -> PhasesPlan:
        unmoved, unmoved_s = self.unmoved()
        way, total_s = (unmoved, unmoved_s) if self.schedule.mixed else self.best()
        if total_s == math.inf:
            lengths = [phase.seq_len for phase in self.schedule.phases]
            raise BadInput(FIELD, lengths, "lengths that one placement fits")
        phases = tuple(self.phase_plan(number, way) for number in range(len(way)))
        return PhasesPlan(self.schedule, phases, total_s, unmoved_s if unmoved_s < math.inf else None)

    def step_s(self, number: int, k: int) -> float:
        """Seconds of a step of a phase on a placement."""
        found = self.tries[number][k]
        return math.inf if found is None or found.best.step_time_s is None else found.best.step_time_s

    def moved(self, number: int, before: int, after: int) -> Move:
        """Into phase `number`; of a mixture, from a step of that length to another."""
        old, new = self.tries[max(0, number - 1)][before], self.tries[number][after]
        if self.schedule.mixed:
            old = self.tries[number][before]
        if before == after and (old is None or new is None or old.best.layout.offload == new.best.layout.offload):
            return STAYS
        if old is None or new is None:
            return Move(math.inf, math.inf)
        there = self.specs[number if self.schedule.mixed else max(0, number - 1)]
        layouts = (old.best.layout, new.best.layout)
        return move(there.with_layout(layouts[0]), self.specs[number].with_layout(layouts[1]), self.assumptions)

    def unmoved(self) -> tuple[list[int], float]:
        """The best placement for all phases together, and its seconds."""
        phases = self.schedule.phases
        totals = [
            sum(phase.num_steps * self.step_s(number, k) for number, phase in enumerate(phases))
            for k in range(len(self.tries[0]))
        ]
        best = int(np.argmin(totals))
        return [best] * len(phases), totals[best]

    def best(self) -> tuple[list[int], float]:
        """Number of the placement of every phase, and the seconds of all; moves are paid between phases."""
        every = range(len(self.tries[0]))
        steps = [phase.num_steps for phase in self.schedule.phases]
        reached = [(steps[0] * self.step_s(0, k), [k]) for k in every]
        for number in range(1, len(steps)):
            spent = [steps[number] * self.step_s(number, k) for k in every]
            reached = [
                min((before + self.moved(number, way[-1], k).seconds + spent[k], [*way, k]) for before, way in reached)
                for k in every
            ]
        total_s, way = min(reached)
        return way, total_s

    def phase_plan(self, number: int, way: Sequence[int]) -> PhasePlan:
        here = way[number]
        own = min(range(len(self.tries[number])), key=lambda k: self.step_s(number, k))
        before = way[number - 1] if number and not self.schedule.mixed else here
        chosen, alone, kept = (self.tries[number][k] for k in (here, own, before))
        assert chosen is not None and alone is not None
        compared = number > 0 or self.schedule.mixed
        away = self.moved(number, before, own)
        if self.schedule.mixed and own != here:
            back = self.moved(number, own, here)
            away = Move(away.total_bytes + back.total_bytes, away.seconds + back.seconds)
        return PhasePlan(
            phase=self.schedule.phases[number],
            layout=chosen.best.layout,
            step_s=self.step_s(number, here),
            own_layout=alone.best.layout,
            own_step_s=self.step_s(number, own),
            kept_layout=kept.best.layout if compared and kept is not None else None,
            kept_step_s=self.step_s(number, before) if compared and kept is not None else None,
            compared=compared,
            own_move=away if compared and own != before else None,
            move=self.moved(number, before, here) if here != before else None,
            gap=self.gaps[number],
            settled=chosen.settled,
            own_settled=alone.settled,
            kept_settled=kept.settled if compared and kept is not None else None,
            elsewhere=here not in (before, own),
        )
