"""Why this split: the allocation, what binds it, what the next best loses, and what would change the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout
from bench.errors import BadInput
from bench.timing import Evaluate
from systems.disagmoe.placement import replica_size
from systems.disagmoe.planner.allocation import DEFAULT_LIMIT_S, TIME_LIMIT, Allocation, allocate
from systems.disagmoe.planner.alternatives import next_best
from systems.disagmoe.planner.plain import plain_allocation, plain_refinement
from systems.disagmoe.planner.problem import Choices, problem
from systems.disagmoe.planner.refine import DEFAULT_BUDGET, Refinement, Try
from systems.disagmoe.planner.search import Progress, best_of, like, search
from systems.disagmoe.planner.words import (
    GIB,
    binding_in_words,
    changed_in_words,
    memory_in_words,
    programme_in_words,
    refined_in_words,
    sets_in_words,
    short,
    split_in_words,
    unequal_in_words,
    what_if_in_words,
)

SHOWN_FIELDS = ("mbs", "round_length", "deferred_w", "recompute", "copies", "shared_on", "tp", "cp", "offload")
OTHER_CHOICES = ("copies", "shared_on", "tp", "cp", "offload")
NUM_ALTERNATIVES = 4


class Table(NamedTuple):
    """Rows for people and for JSON."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


class WhatIf(NamedTuple):
    """The allocation under another condition; None where there is none, or (`timed_out`) none was found in time."""

    condition: str
    allocation: Allocation | None
    timed_out: bool = False


@dataclass(frozen=True, eq=False)
class Explanation:
    """A plan's reasons.

    Args:
        allocation: the programme's optimum; `others`: the next best splits.
        what_ifs: the same programme under other conditions.
        unequal: the optimum with different numbers of attention and expert groups, None where there is none.
        nic_sets: the optimum with NIC sets, None where no candidate's nodes can hold both kinds of ranks.
        refinement: the search from the programme's seeds; None if it was not asked for.
        source: what the refinement's times are: simulated or measured.
    """

    spec: CaseSpec
    allocation: Allocation
    others: tuple[Allocation, ...]
    what_ifs: tuple[WhatIf, ...]
    unequal: Allocation | None
    nic_sets: Allocation | None
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

    def sentences(self) -> list[str]:
        """In words, what was decided first; each begins with what says so."""
        chosen = self.allocation
        said = [f"Plan: {split_in_words(self.layout, self.spec.cluster.num_gpus)}", self._origin()]
        said += [f"Programme: {sentence}" for sentence in self._programme()]
        if self.refinement is not None:
            said.append(f"Refinement: {refined_in_words(self.refinement, self.seed, chosen, self.source)}")
        said += [f"What if: {what_if_in_words(*each, chosen)}" for each in self.what_ifs]
        if self.unequal is not None:
            said.append(f"What if: {unequal_in_words(self.unequal, chosen)}")
        if self.nic_sets is not None:
            said.append(f"What if: {sets_in_words(self.nic_sets, chosen)}")
        return said

    def _origin(self) -> str:
        """Whether the plan is the programme's split or what became of it."""
        if self.refinement is None:
            return "Plan: it is the programme's split; nothing was refined."
        if self.best is None:
            return f"Plan: it is the programme's split; of what was {self.source} near it, nothing fits in memory."
        changed = changed_in_words(self.allocation.layout, self.layout)
        return f"Plan: it is the programme's split, {f'refined in {changed}' if changed else 'as it is'}."

    def _programme(self) -> list[str]:
        chosen = self.allocation
        said = [programme_in_words(chosen), *binding_in_words(chosen)]
        if self.others:
            other = self.others[0]
            loss = 100 * (other.step_s / chosen.step_s - 1)
            ahead = "loses" if loss >= 0 else "gains, as the solver was stopped before it,"
            said.append(f"the next best split is {short(other)} and {ahead} {abs(loss):.1f} %.")
        return [*said, memory_in_words(chosen, self.best)]

    def tables(self) -> list[Table]:
        chosen = self.allocation
        found = [
            Table(
                "the programme's split and the plan",
                ["", "programme", f"plan, refined ({self.source})" if self.refinement else "plan"],
                self._side_by_side(),
            ),
            Table(
                "what a step keeps busy, by the programme",
                ["resource", "seconds", "of the step", "binding"],
                [
                    [name, busy, f"{100 * busy / chosen.step_s:.0f} %", "yes" if name in chosen.binding else "no"]
                    for name, busy in chosen.seconds.items()
                    if busy
                ],
            ),
            Table(
                "splits, by the programme",
                ["p", "M:N", "replicas", "GPUs", "recompute", "other choices", "step s", "loses", "bound by"],
                [_split_row(each, chosen) for each in (chosen, *self.others)],
            ),
            Table(
                "what would change the answer, by the programme",
                ["if", "p", "M:N", "replicas", "step s", "bound by"],
                [[each.condition, *_what_if_row(each)] for each in self.what_ifs],
            ),
        ]
        if self.refinement is not None:
            found.append(
                Table(
                    f"refinement ({self.source})",
                    ["move", "step s", "bound s", "GiB a GPU", "layout"],
                    [_try_row(each) for each in self.refinement.path],
                )
            )
        return found

    def _side_by_side(self) -> list[list[object]]:
        ways = (self.allocation.layout, self.layout)
        timed = (self.seed, self.best)
        fullest = [each.peak_memory_bytes / GIB if each and each.peak_memory_bytes else None for each in timed]
        rows: list[list[object]] = [
            ["groups p", *(layout.groups for layout in ways)],
            ["M:N", *(f"{layout.attention_ranks}:{layout.expert_ranks}" for layout in ways)],
            ["replicas", *(layout.replicas for layout in ways)],
            ["GPUs used", *((layout.replicas or 1) * replica_size(layout) for layout in ways)],
            *([field, *(getattr(layout, field) for layout in ways)] for field in SHOWN_FIELDS),
            ["step s, by the programme", self.allocation.step_s, None],
        ]
        if self.refinement is not None:
            rows.append([f"step s, {self.source}", *(each and each.step_time_s for each in timed)])
        if any(fullest):
            rows.append(["GiB of the fullest GPU, simulated", *fullest])
        return rows

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "layout": self.layout.model_dump(mode="json"),
            "programme_layout": self.allocation.layout.model_dump(mode="json"),
            "sentences": self.sentences(),
            "allocation": plain_allocation(self.allocation),
            "others": [plain_allocation(each) for each in self.others],
            "what_ifs": [
                {
                    "condition": w.condition,
                    "allocation": None if w.allocation is None else plain_allocation(w.allocation),
                    "timed_out": w.timed_out,
                }
                for w in self.what_ifs
            ],
            "unequal": None if self.unequal is None else plain_allocation(self.unequal),
            "nic_sets": None if self.nic_sets is None else plain_allocation(self.nic_sets),
            "refinement": None if self.refinement is None else plain_refinement(self.refinement, self.source),
        }


def explain(
    spec: CaseSpec,
    assumptions: Assumptions,
    *,
    choices: Choices | None = None,
    refinement: bool = True,
    evaluate: Evaluate | None = None,
    budget: int | None = DEFAULT_BUDGET,
    time_limit_s: float = DEFAULT_LIMIT_S,
    progress: Progress | None = None,
) -> Explanation:
    """Plans a spec and says why. Of a case, its layout is one more seed of the refinement.

    Args:
        evaluate: how the refinement times a step (for example by running it); simulation if not given.
        budget: most evaluations of the refinement.
        time_limit_s: of each programme.
    Raises:
        BadInput: a cluster too small for the model, with what is missing and what would fit.
    """
    chosen = choices or Choices()
    found = search(
        spec,
        assumptions,
        choices=chosen,
        refinement=refinement,
        evaluate=evaluate,
        budget=budget,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    return Explanation(
        spec,
        found.allocation,
        tuple(next_best(found.programme, found.allocation, NUM_ALTERNATIVES - 1, time_limit_s=time_limit_s)),
        tuple(_what_ifs(found.allocation, assumptions, time_limit_s)),
        found.unequal,
        _nic_sets(found.allocation, assumptions, time_limit_s),
        found.refinement,
        "simulated" if evaluate is None else "measured",
    )


def _what_ifs(chosen: Allocation, assumptions: Assumptions, time_limit_s: float) -> list[WhatIf]:
    """Twice and half the sequence length at the same number of tokens; twice and half the NICs' speed.

    With other lengths, sequences may be shared by other numbers of ranks; with other NICs, by as many or none.
    """
    found, spec = [], chosen.problem.spec
    for condition, changed in _conditions(spec):
        choices = chosen.problem.choices if changed.cluster == spec.cluster else like(chosen, (1, 1))
        try:
            found.append(WhatIf(condition, allocate(problem(changed, assumptions, choices), time_limit_s=time_limit_s)))
        except BadInput as error:
            found.append(WhatIf(condition, None, error.field == TIME_LIMIT))
    return found


def _conditions(spec: CaseSpec) -> list[tuple[str, CaseSpec]]:
    workload, cluster = spec.workload, spec.cluster
    found = []
    for length in (workload.seq_len * 2, workload.seq_len // 2):
        if length >= 2 and workload.global_batch_tokens % length == 0:
            changed = workload.model_copy(update={"seq_len": length})
            found.append((f"sequences have {length} tokens", spec.model_copy(update={"workload": changed})))
    if cluster.num_nodes > 1:
        for word, factor in (("twice", 2.0), ("half", 0.5)):
            other = cluster.model_copy(update={"nic_bytes_per_s": cluster.nic_bytes_per_s * factor})
            found.append((f"NICs are {word} as fast", spec.model_copy(update={"cluster": other})))
    return found


def _nic_sets(chosen: Allocation, assumptions: Assumptions, time_limit_s: float) -> Allocation | None:
    """With NIC sets, for sequences that are shared and state that lives where it does without."""
    spec = chosen.problem.spec
    if spec.cluster.num_nodes == 1:
        return None
    return best_of(spec, assumptions, replace(like(chosen), nics="sets"), time_limit_s)


def _split_row(each: Allocation, chosen: Allocation) -> list[object]:
    layout = each.layout
    loses = f"{100 * (each.step_s / chosen.step_s - 1):.1f} %"
    ratio = f"{layout.attention_ranks}:{layout.expert_ranks}"
    chosen_too = {name: getattr(layout, name) for name in OTHER_CHOICES}
    others = " ".join(f"{name}={value}" for name, value in chosen_too.items() if value not in (1, "none"))
    row: list[object] = [layout.groups, ratio, layout.replicas, each.num_gpus, layout.recompute, others]
    return [*row, each.step_s, loses, ", ".join(each.binding)]


def _what_if_row(what_if: WhatIf) -> list[object]:
    each = what_if.allocation
    if each is None:
        return [None, None, None, None, "no time" if what_if.timed_out else "nothing fits"]
    layout = each.layout
    ratio = f"{layout.attention_ranks}:{layout.expert_ranks}"
    return [layout.groups, ratio, layout.replicas, each.step_s, ", ".join(each.binding)]


def _try_row(each: Try) -> list[object]:
    peak = None if each.peak_memory_bytes is None else each.peak_memory_bytes / GIB
    return [each.change, each.step_time_s, each.bound_s, peak, str(each.layout)]
