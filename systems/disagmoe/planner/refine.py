"""Refinement: from a seed, move to a neighbour that is faster until none is; the whole path is kept.

The programme knows rates, not order: how rounds, deferred weight gradients and memory over time work out is for a
simulated (or measured) step to say. A neighbour differs in one choice, or moves GPUs between two of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bench.assumptions import Assumptions
from bench.bound import placement_bound_s
from bench.case import CaseSpec, Layout, batch_of
from bench.errors import BadInput
from bench.limits import least_bytes
from bench.predict import costs_of, does_not_fit
from bench.system import divisors, worthwhile_offloads, worthwhile_shares
from bench.timing import Evaluate, StepTime, simulated
from systems.disagmoe.placement import expert_depth, place, replica_size
from systems.disagmoe.shift import shift_of, spreads

DEFAULT_BUDGET = 32
MORE_THAN_NOTHING = 1e-3
"""A neighbour has to be faster by this share to be worth a move."""

Status = Literal["ok", "infeasible", "refused", "bound"]


@dataclass(frozen=True)
class Try:
    """One layout on the way. `change` says what differs from the layout it was reached from.

    status: ok, infeasible (does not fit in memory), refused (bad input), bound (cannot be faster than the best).
    low_s, high_s, trial: as in `bench.timing.StepTime`.
    """

    layout: Layout
    change: str
    status: Status
    step_time_s: float | None = None
    bound_s: float | None = None
    peak_memory_bytes: float | None = None
    reason: str = ""
    low_s: float | None = None
    high_s: float | None = None
    trial: str | None = None


@dataclass(frozen=True)
class Refinement:
    """What the search found.

    Args:
        path: the layouts it stood on, the best seed first, the result last; empty where nothing fits.
        tried: every layout that was looked at, in order.
        complete: whether no neighbour is better; False where the budget ended the search.
    """

    path: tuple[Try, ...]
    tried: tuple[Try, ...]
    complete: bool

    @property
    def best(self) -> Try | None:
        return self.path[-1] if self.path else None

    @property
    def num_evaluated(self) -> int:
        return sum(each.step_time_s is not None for each in self.tried)


def refine(
    spec: CaseSpec,
    seeds: Sequence[Layout],
    assumptions: Assumptions,
    *,
    evaluate: Evaluate | None = None,
    budget: int | None = DEFAULT_BUDGET,
    within: Callable[[Layout], bool] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Refinement:
    """Walks downhill from the best of `seeds`.

    Args:
        assumptions: of the bounds that put neighbours in order, and of the evaluation if none is given.
        evaluate: how a step is timed; simulation if not given. Only a simulated step is spared by its bound, and one
            that is timed has to be faster by more than both times are uncertain.
        budget: most evaluations; None for no limit.
        within: says which neighbours may be looked at; all if not given.
        progress: called with (evaluations done, budget, what was looked at).
    Raises BadInput where no seed is given.
    """
    if not seeds:
        raise BadInput("seeds", list(seeds), "at least one layout")
    walk = _Walk(spec, assumptions, evaluate, budget, within or (lambda _: True), progress)
    for layout in dict.fromkeys(seeds):
        walk.visit(layout, "seed")
    if not walk.path:
        # No seed fits: the nearest that does is a start too.
        for layout, change in _each_neighbour(spec, seeds):
            if walk.within(layout) and walk.visit(layout, change):
                break
    moved = True
    while moved and walk.path and not walk.spent:
        moved = any(walk.visit(layout, change) for layout, change in walk.nearby())
    return Refinement(tuple(walk.path), tuple(walk.tried), not walk.spent)


class _Walk:
    """The search's state: where it stands, what it has seen, what it may still spend."""

    def __init__(
        self,
        spec: CaseSpec,
        assumptions: Assumptions,
        evaluate: Evaluate | None,
        budget: int | None,
        within: Callable[[Layout], bool],
        progress: Callable[[int, int, str], None] | None,
    ) -> None:
        self.spec = spec
        self.assumptions = assumptions
        self.evaluate = evaluate or simulated(assumptions)
        self.bounded = evaluate is None
        self.budget = budget
        self.within = within
        self.progress = progress
        self.path: list[Try] = []
        self.tried: list[Try] = []
        self.screened: dict[Layout, Try] = {}
        self.seen: set[Layout] = set()
        self.failed: set[str] = set()
        self.evaluations = 0
        self.spent = False

    def nearby(self) -> list[tuple[Layout, str]]:
        """Neighbours of where the walk stands that may be faster, likeliest first."""
        here = self.path[-1].layout
        near = ((layout, change) for layout, change in neighbours(self.spec, here) if self.within(layout))
        found = [(layout, change) for layout, change in near if layout not in self.seen]
        open_ = [(self.screen(layout), change) for layout, change in found]
        # Order first: a split is left when it is as fast as it gets. What failed from an earlier layout comes last.
        open_.sort(key=lambda p: (p[1] in self.failed, not _same_work(p[0].layout, here), p[0].bound_s or 0.0))
        return [(screened.layout, change) for screened, change in open_]

    def screen(self, layout: Layout) -> Try:
        """The two cheap lower bounds, on time and on memory."""
        if layout not in self.screened:
            self.screened[layout] = self._screen(layout)
        return self.screened[layout]

    def _screen(self, layout: Layout) -> Try:
        case = self.spec.with_layout(layout)
        try:
            placement = place(self.spec.model, layout)
            costs = costs_of(case, placement, self.assumptions)
            bound_s = placement_bound_s(placement, costs, batch_of(case, placement).num_microbatches)
            least = least_bytes(case, placement, costs)
        except BadInput as error:
            return Try(layout, "", "refused", reason=str(error))
        if least > case.cluster.gpu.memory_bytes:
            return Try(layout, "", "infeasible", None, bound_s, least, does_not_fit(case, least))
        return Try(layout, "", "ok", None, bound_s)

    def visit(self, layout: Layout, change: str) -> bool:
        """Looks at a layout; True where it is better than all before, and the walk has moved there."""
        if layout in self.seen or self.spent:
            return False
        best_s = self.path[-1].step_time_s if self.path else None
        screened = replace(self.screen(layout), change=change)
        if self.bounded and screened.status == "ok" and best_s is not None and (screened.bound_s or 0.0) >= best_s:
            screened = replace(screened, status="bound")
        if screened.status != "ok":
            self._note(screened)
            return False
        if self.budget is not None and self.evaluations >= self.budget:
            self.spent = True
            return False
        self.evaluations += 1
        try:
            found = _tried(layout, change, screened.bound_s, self.evaluate(self.spec.with_layout(layout)))
        except BadInput as error:
            found = Try(layout, change, "refused", reason=str(error))
        self._note(found)
        if self.progress is not None:
            self.progress(self.evaluations, self.budget or 0, change)
        if (
            found.status == "infeasible"
            and layout.round_length > 1
            and (found.step_time_s or 0.0) < (best_s or math.inf)
        ):
            # Fast enough, but too much in flight.
            shorter = layout.model_copy(update={"round_length": layout.round_length // 2})
            return self.visit(shorter, f"{change}, round_length={shorter.round_length}")
        if found.status != "ok" or (self.path and not _faster(found, self.path[-1])):
            self.failed.add(change)
            return False
        self.path.append(found)
        return True

    def _note(self, found: Try) -> None:
        self.seen.add(found.layout)
        self.tried.append(found)


def _same_work(one: Layout, other: Layout) -> bool:
    """Whether two layouts differ in the order of work alone."""
    order = ("round_length", "deferred_w", "lookahead")
    return all(getattr(one, name) == getattr(other, name) for name in Layout.model_fields if name not in order)


def _tried(layout: Layout, change: str, bound_s: float | None, found: StepTime) -> Try:
    bound_s = bound_s if found.bound_s is None else found.bound_s
    return Try(
        layout=layout,
        change=change,
        status=found.status,
        step_time_s=found.step_time_s,
        bound_s=bound_s,
        peak_memory_bytes=found.peak_memory_bytes,
        reason=found.reason,
        low_s=found.low_s,
        high_s=found.high_s,
        trial=found.trial,
    )


def _faster(one: Try, other: Try) -> bool:
    """By more than nothing, and by more than the two times are uncertain."""
    worth = (one.step_time_s or 0.0) < (other.step_time_s or 0.0) * (1 - MORE_THAN_NOTHING)
    return worth and (one.high_s or 0.0) < (other.low_s or math.inf)


def _each_neighbour(spec: CaseSpec, seeds: Iterable[Layout]) -> Iterator[tuple[Layout, str]]:
    for seed in seeds:
        shorter = [n for n in _rounds(seed.groups)[::-1] if n < seed.round_length]
        yield from ((seed.model_copy(update={"round_length": n}), f"round_length={n}") for n in shorter)
    for seed in seeds:
        yield from neighbours(spec, seed)


def neighbours(spec: CaseSpec, layout: Layout) -> Iterator[tuple[Layout, str]]:
    """Layouts one move away that tile the batch and the cluster, each with the move in words."""
    seen = {layout}
    for change in _moves(spec, layout):
        near = _tiled(spec, layout.model_copy(update=change), layout)
        if near is not None and near not in seen:
            seen.add(near)
            yield near, " ".join(f"{key}={value}" for key, value in change.items())


def _moves(spec: CaseSpec, layout: Layout) -> Iterator[Mapping[str, object]]:
    m, n, p = layout.attention_ranks, layout.expert_ranks, layout.groups
    for length in _beside(_rounds(p), layout.round_length):
        yield {"round_length": length}
    for deferred in _beside(sorted({0, p, 2 * p, 4 * p}), layout.deferred_w):
        yield {"deferred_w": deferred}
    for recompute in ("none", "full", "redispatch"):
        yield {"recompute": recompute}
    for offload in worthwhile_offloads(spec, 1):
        yield {"offload": offload}
    for tp, cp in worthwhile_shares(spec, m, layout.replicas or 1, 2 * p):
        yield {"tp": tp, "cp": cp}
    for copies in ("rank", "node"):
        yield {"copies": copies}
    if spec.model.num_shared_experts:
        yield from ({"shared_on": side} for side in ("attention", "expert"))
    for mbs in (layout.mbs * 2, layout.mbs // 2):
        yield {"mbs": mbs}
    yield {"mbs": layout.mbs * 2, "attention_ranks": m // 2}
    yield {"mbs": layout.mbs // 2, "attention_ranks": m * 2}
    for chunk in (layout.layers_per_chunk * 2, layout.layers_per_chunk // 2):
        yield {"layers_per_chunk": chunk, **_homes(spec, p, chunk)}
    lanes, expert = divisors(spec.workload.num_sequences), divisors(spec.model.num_experts)
    data = [layout.sequence_ranks * each for each in lanes]
    for more in _beside(data, m):
        yield {"attention_ranks": more}
    for more in _beside(expert, n):
        yield {"expert_ranks": more}
    for groups in (p - 1, p + 1, p * 2, p // 2):
        yield {"groups": groups, **_homes(spec, groups, layout.layers_per_chunk)}
    for depth in (expert_depth(layout) - 1, expert_depth(layout) + 1):
        yield {"expert_groups": None if depth == p else depth}
    for factor in (2, 0.5, 4, 0.25, 8, 0.125):
        both = {"attention_ranks": int(m * factor), "expert_ranks": int(n * factor)}
        yield both
        groups = int(p / factor)
        yield {**both, "groups": groups, **_homes(spec, groups, layout.layers_per_chunk)}


def _homes(spec: CaseSpec, groups: int, chunk: int) -> dict[str, int | None]:
    """Of head and layers on other groups."""
    head: dict[str, int | None] = {"head_group": None}
    shift = {"shift_at": shift_of(spec.model, spec.workload.seq_len, groups, chunk)}
    return head | shift if spreads(spec.model) else head


def _beside(values: Sequence[int], value: int) -> Iterator[int]:
    """The next smaller and the next larger value."""
    yield from [v for v in values if v < value][-1:]
    yield from [v for v in values if v > value][:1]


def _rounds(groups: int) -> list[int]:
    """Lengths worth trying: a pipeline is about full at 4 p."""
    return sorted({1, *(n for n in (2, groups // 2, groups, 2 * groups, 4 * groups, 8 * groups) if n >= 1)})


def _tiled(spec: CaseSpec, layout: Layout, before: Layout) -> Layout | None:
    """The layout with as many replicas as fit and divide the batch, and rounds in proportion; None if there is none."""
    numbers = (layout.attention_ranks, layout.expert_ranks, layout.groups, layout.mbs, layout.layers_per_chunk)
    if min(numbers) < 1 or spec.model.num_experts % layout.expert_ranks:
        return None
    if expert_depth(layout) < 1 or layout.expert_groups == layout.groups:
        return None
    if max(layout.groups, expert_depth(layout)) * layout.layers_per_chunk > spec.model.num_layers:
        return None
    fit = spec.cluster.num_gpus // replica_size(layout)
    shared = layout.sequence_ranks
    lanes, left = divmod(spec.workload.num_sequences * shared, layout.attention_ranks * layout.mbs)
    if left or layout.attention_ranks % shared or not fit or not lanes:
        return None
    update: dict[str, object] = {"replicas": max(r for r in divisors(lanes) if r <= fit)}
    if layout.groups != before.groups:
        per_group = before.round_length / before.groups
        update["round_length"] = max(1, round(per_group * layout.groups))
        update["deferred_w"] = before.deferred_w // before.groups * layout.groups
    return layout.model_copy(update=update)
