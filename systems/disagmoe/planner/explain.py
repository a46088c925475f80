"""Why this split: the allocation, what binds it, what the next best loses, and what would change the answer."""

from dataclasses import dataclass
from typing import Any, Unpack

from bench.assumptions import Assumptions
from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.predict import QuickStep
from systems.disagmoe.planner import tables
from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, Allocation, Cut, Outcome
from systems.disagmoe.planner.alternatives import next_best
from systems.disagmoe.planner.busy import PlannedStep, planned_step
from systems.disagmoe.planner.memory_words import cuts_in_words, memory_in_words
from systems.disagmoe.planner.plain import (
    plain_allocation,
    plain_cut,
    plain_outcome,
    plain_planned,
    plain_refinement,
    plain_step,
    plain_what_if,
)
from systems.disagmoe.planner.refine import Refinement, Try
from systems.disagmoe.planner.search import Effort, search
from systems.disagmoe.planner.tables import Table
from systems.disagmoe.planner.what_if_words import sets_in_words, unequal_in_words, what_if_in_words
from systems.disagmoe.planner.what_ifs import WhatIf, nic_sets, split_of, what_ifs
from systems.disagmoe.planner.words import (
    binding_in_words,
    busy_in_words,
    depth_in_words,
    next_in_words,
    origin_in_words,
    programme_in_words,
    refined_in_words,
    split_in_words,
)

NUM_ALTERNATIVES = 4
NOTHING_IN_TIME = "the solver found nothing in its time"


@dataclass(frozen=True, eq=False)
class Explanation:
    """A plan's reasons.

    Args:
        allocation: the programme's optimum; `step`: of its plan, simulated, and `split`: what that keeps busy (None
            where it does not fit in any order); `others`: the next best splits.
        cuts: splits that the programme put before it and whose plans do not fit. Where none was found that does,
            `refused` says why, and the allocation is the first of them.
        planned: the plan's step, simulated; None where it cannot be.
        what_ifs: plan and programme under other conditions.
        unequal: with different numbers of attention and expert groups.
        nic_sets: with NIC sets; nothing where no candidate's nodes can hold both kinds of ranks.
        refinement: the search from the programme's seeds; None if it was not asked for.
        source: what the refinement's times are: simulated or measured.
    """

    spec: CaseSpec
    allocation: Allocation
    step: QuickStep | None
    split: PlannedStep | None
    cuts: tuple[Cut, ...]
    refused: BadInput | None
    planned: PlannedStep | None
    others: tuple[Outcome, ...]
    what_ifs: tuple[WhatIf, ...]
    unequal: Outcome
    nic_sets: Outcome
    refinement: Refinement | None
    source: str

    @property
    def layout(self) -> Layout:
        """The layout to use: the refined one, or the programme's."""
        best = self.best
        return self.allocation.layout if best is None else best.layout

    @property
    def best(self) -> Try | None:
        return None if self.refinement is None else self.refinement.best

    @property
    def seed(self) -> Try | None:
        """What the refinement found of the programme's own split; None where it did not look at it."""
        tried = () if self.refinement is None else self.refinement.tried
        return next((each for each in tried if each.layout == self.allocation.layout), None)

    def side(self, which: str) -> tables.Side:
        """A column of the first table: the programme's split, or the plan."""
        if which == "programme":
            return tables.Side(self.allocation.layout, self.allocation.step_s, self.step, self.seed)
        return tables.Side(self.layout, None, self.planned and self.planned.step, self.best)

    def sentences(self) -> list[str]:
        """In words, what was decided first; each begins with what says so."""
        chosen = self.allocation
        given = self.spec.layout if isinstance(self.spec, Case) else None
        origin = origin_in_words(chosen.layout, self.refinement, given, self.source)
        said = [f"Plan: {split_in_words(self.layout, self.spec)}", f"Plan: {origin}"]
        if self.planned is not None:
            said.append(f"Plan: {busy_in_words(self.planned, self.spec)}")
        said += [f"Programme: {sentence}" for sentence in self._programme()]
        if self.refinement is not None:
            said.append(f"Refinement: {refined_in_words(self.refinement, self.seed, chosen, self.source)}")
            depth = depth_in_words(self.refinement, self.source)
            said += [f"Refinement: {depth}"] if depth else []
        return [*said, *(f"What if: {sentence}" for sentence in self._what_ifs())]

    def _programme(self) -> list[str]:
        chosen = self.allocation
        nearest = [next_in_words(self.others[0], chosen, self.step)] if self.others else []
        cut = cuts_in_words(self.cuts, chosen, self.refused)
        said = [programme_in_words(chosen, self.refused is None), *([cut] if cut else [])]
        said += binding_in_words(chosen, self.split)
        return [*said, *nearest, memory_in_words(chosen, self.step)]

    def _what_ifs(self) -> list[str]:
        chosen = self.allocation
        said = [what_if_in_words(each, chosen) for each in self.what_ifs]
        if self.unequal.allocation is not None:
            said.append(unequal_in_words(self.unequal, chosen))
        elif self.unequal.timed_out:
            said.append(f"different numbers of attention and expert groups: {NOTHING_IN_TIME}.")
        if self.nic_sets.allocation is not None:
            said.append(sets_in_words(self.nic_sets.allocation, chosen))
        elif self.nic_sets.timed_out:
            said.append(f"dealing NICs out otherwise: {NOTHING_IN_TIME}.")
        return said

    def tables(self) -> list[Table]:
        chosen, refined = self.allocation, self.refinement
        found = [
            tables.side_by_side(self.side("programme"), self.side("plan"), self.source if refined else None),
            tables.busy(chosen, self.split, self.planned),
            tables.splits(Outcome(chosen, step=self.step), self.others),
            tables.conditions(self.what_ifs),
        ]
        return [*found, tables.walk(refined, self.source)] if refined else found

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "layout": self.layout.model_dump(mode="json"),
            "programme_layout": self.allocation.layout.model_dump(mode="json"),
            "sentences": self.sentences(),
            "plan": None if self.planned is None else plain_planned(self.planned),
            "allocation": plain_allocation(self.allocation),
            "allocation_simulated": plain_step(self.step) if self.split is None else plain_planned(self.split),
            "cut_off": [plain_cut(each) for each in self.cuts],
            "allocation_fits": self.refused is None,
            "others": [plain_outcome(each) for each in self.others],
            "what_ifs": [plain_what_if(each) for each in self.what_ifs],
            "unequal": plain_outcome(self.unequal),
            "nic_sets": plain_outcome(self.nic_sets),
            "refinement": None if self.refinement is None else plain_refinement(self.refinement, self.source),
        }


def explain(
    spec: CaseSpec, assumptions: Assumptions, *, refinement: bool = True, **effort: Unpack[Effort]
) -> Explanation:
    """Plans a spec and says why. Of a case, its layout is one more seed of the refinement.

    Raises BadInput: a cluster too small for the model, with what is missing and what would fit.
    """
    found = search(spec, assumptions, refinement=refinement, **effort)
    chosen, limit_s = found.allocation, effort.get("time_limit_s", DEFAULT_LIMIT_S)
    best = found.refinement.best if found.refinement else None
    layout = chosen.layout if best is None else best.layout
    return Explanation(
        spec=spec,
        allocation=chosen,
        step=found.outcome.step,
        split=split_of(found.outcome, found.steps),
        cuts=found.outcome.cuts,
        refused=found.refused,
        planned=planned_step(spec.with_layout(layout), found.steps),
        others=tuple(next_best(found.programme, chosen, NUM_ALTERNATIVES - 1, found.steps, time_limit_s=limit_s)),
        what_ifs=tuple(what_ifs(chosen, layout, found.steps, limit_s)),
        unequal=found.unequal,
        nic_sets=nic_sets(chosen, found.steps, limit_s),
        refinement=found.refinement,
        source="simulated" if effort.get("evaluate") is None else "measured",
    )
