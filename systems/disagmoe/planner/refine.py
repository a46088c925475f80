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
from bench.timing import Evaluate, StepTime, simulated
from systems.disagmoe.orders import FIELDS, deferrals, in_whole_rounds, num_microbatches, num_weight_gradients, rounds
from systems.disagmoe.placement import place
from systems.disagmoe.planner.neighbours import leaner, neighbours

DEFAULT_BUDGET = 64
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
        first: number in `path` of the best seed, or of a seed's neighbour where no seed fits (not `from_seed`).
    """

    path: tuple[Try, ...]
    tried: tuple[Try, ...]
    complete: bool
    first: int = 0
    from_seed: bool = True

    @property
    def best(self) -> Try | None:
        return self.path[-1] if self.path else None

    @property
    def start(self) -> Try | None:
        """Where the walk began."""
        return self.path[self.first] if self.path else None

    @property
    def num_evaluated(self) -> int:
        return sum(each.step_time_s is not None for each in self.tried)


def refine(
    spec: CaseSpec,
    seeds: Sequence[Layout] | Mapping[Layout, str],
    assumptions: Assumptions,
    *,
    evaluate: Evaluate | None = None,
    simulate: Evaluate | None = None,
    budget: int | None = DEFAULT_BUDGET,
    within: Callable[[Layout], bool] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Refinement:
    """Walks downhill from the best of `seeds`.

    Args:
        seeds: layouts, or layouts with what each is, which the path then says.
        assumptions: of the bounds that put neighbours in order, and of the simulation.
        evaluate: how a step is timed; simulation if not given. Only a simulated step is spared by its bound, and one
            that is timed has to be faster by more than both times are uncertain.
        simulate: how a step is simulated, such as one that remembers; `bench.timing.simulated` if not given.
        budget: most evaluations; None for no limit.
        within: says which neighbours may be looked at; all if not given.
        progress: called with (evaluations done, budget, what is looked at) before each and, with its time, after.
    Raises BadInput where no seed is given.
    """
    if not seeds:
        raise BadInput("seeds", list(seeds), "at least one layout")
    walk = _Walk(spec, assumptions, evaluate, simulate, budget, within or (lambda _: True), progress)
    named = dict(seeds) if isinstance(seeds, Mapping) else dict.fromkeys(seeds, "")
    for seed, what in named.items():
        walk.visit(in_whole_rounds(spec, seed), f"seed: {what}" if what else "seed")
    first, from_seed = max(0, len(walk.path) - 1), bool(walk.path)
    if not walk.path:
        # No seed fits: the nearest that does is a start too.
        for layout, change in _each_neighbour(spec, seeds):
            if walk.within(layout) and walk.visit(layout, change):
                break
    moved = True
    while moved and walk.path and not walk.spent:
        moved = any(walk.visit(layout, change) for layout, change in walk.nearby())
    return Refinement(tuple(walk.path), tuple(walk.tried), not walk.spent, first, from_seed)


class _Walk:
    """The search's state: where it stands, what it has seen, what it may still spend."""

    def __init__(
        self,
        spec: CaseSpec,
        assumptions: Assumptions,
        evaluate: Evaluate | None,
        simulate: Evaluate | None,
        budget: int | None,
        within: Callable[[Layout], bool],
        progress: Callable[[int, int, str], None] | None,
    ) -> None:
        self.spec = spec
        self.assumptions = assumptions
        self.evaluate = evaluate or simulate or simulated(assumptions)
        self.bounded = evaluate is None
        self.budget = budget
        self.within = within
        self.progress = progress or (lambda _done, _budget, _what: None)
        self.path: list[Try] = []
        self.tried: list[Try] = []
        self.screened: dict[Layout, Try] = {}
        self.seen: dict[Layout, Try] = {}
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
        open_.sort(key=lambda p: (p[1] in self.failed, not same_work(p[0].layout, here), p[0].bound_s or 0.0))
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
        """Looks at a layout; True where it is better than all before, and the walk has moved there.

        What is not faster but leaves more room is looked at with all weight gradients put off as well. What is fast
        enough and does not fit is looked at in lighter orders instead: the fastest of them counts.
        """
        found = None if layout in self.seen else self.look(layout, change)
        if found is not None and found.status == "infeasible" and self.screen(layout).status == "infeasible":
            near = leaner(self.spec, layout) if self.path else None
            return near is not None and self.within(near[0]) and self.visit(near[0], _merged(change, **near[1]))
        if found is not None and self._leaves_room(found):
            all_of = num_weight_gradients(self.spec, layout)
            found = self.look(layout.model_copy(update={"deferred_w": all_of}), _merged(change, deferred_w=all_of))
        if found is not None and self._too_heavy(found):
            found = self._lightened(found)
        if found is None or found.status != "ok" or not _faster_or_first(found, self.path):
            self.failed.add(change)
            return False
        self.path.append(found)
        return True

    def _leaves_room(self, found: Try) -> bool:
        """Whether another way to work holds less than the best and is no faster, as too little may be put off."""
        if found.status != "ok" or not self.path or _faster(found, self.path[-1]):
            return False
        here, room = self.path[-1], (self.path[-1].peak_memory_bytes or 0.0) - (found.peak_memory_bytes or 0.0)
        all_of = num_weight_gradients(self.spec, found.layout)
        return room > 0 and not same_work(found.layout, here.layout) and found.layout.deferred_w < all_of

    def _too_heavy(self, found: Try) -> bool:
        """Whether it is fast enough and does not fit, but would in some order as far as its least bytes say."""
        would = found.status == "infeasible" and self.screen(found.layout).status == "ok"
        return would and _faster_or_first(found, self.path)

    def look(self, layout: Layout, change: str) -> Try | None:
        """Times a layout and notes it, or says what is known of it; None where the budget is spent."""
        if layout in self.seen:
            return replace(self.seen[layout], change=change)
        best_s = self.path[-1].step_time_s if self.path else None
        screened = replace(self.screen(layout), change=change)
        if self.bounded and screened.status == "ok" and best_s is not None and (screened.bound_s or 0.0) >= best_s:
            screened = replace(screened, status="bound")
        if screened.status != "ok":
            return self._note(screened)
        if self.budget is not None and self.evaluations >= self.budget:
            self.spent = True
            return None
        self.progress(self.evaluations, self.budget or 0, change)
        self.evaluations += 1
        try:
            found = _tried(layout, change, screened.bound_s, self.evaluate(self.spec.with_layout(layout)))
        except BadInput as error:
            found = Try(layout, change, "refused", reason=str(error))
        self._note(found)
        took = found.status if found.step_time_s is None else f"{found.step_time_s:.4g} s a step"
        self.progress(self.evaluations, self.budget or 0, f"{change}: {took}")
        return found

    def _lightened(self, heavy: Try) -> Try | None:
        """The fastest that fits of a layout that does not: with less put off in the same rounds, and in shorter ones.

        What is put off is bisected for the most that fits; rounds are halved until they do.
        """
        layout, fits = heavy.layout, []
        smaller = [n for n in deferrals(layout.groups, layout.deferred_w) if n < layout.deferred_w]
        while smaller:
            middle = len(smaller) // 2
            found = self._look_lighter(heavy, deferred_w=smaller[middle])
            if found is not None and found.status == "ok":
                fits.append(found)
                smaller = smaller[middle + 1 :]
            else:
                smaller = smaller[:middle]
        length = layout.round_length // 2
        while length:
            found = self._look_lighter(heavy, round_length=length)
            if found is not None and found.status == "ok":
                fits.append(found)
                break
            length //= 2
        return min(fits, key=lambda each: each.step_time_s or math.inf, default=None)

    def _look_lighter(self, heavy: Try, **order: int) -> Try | None:
        return self.look(heavy.layout.model_copy(update=order), _merged(heavy.change, **order))

    def _note(self, found: Try) -> Try:
        self.seen[found.layout] = found
        self.tried.append(found)
        return found


def same_work(one: Layout, other: Layout) -> bool:
    """Whether two layouts differ in the order of work alone."""
    return all(getattr(one, name) == getattr(other, name) for name in Layout.model_fields if name not in FIELDS)


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


def _faster_or_first(one: Try, path: Sequence[Try]) -> bool:
    return not path or _faster(one, path[-1])


def _merged(change: str, **order: int) -> str:
    """A change in words with more changes, each field once: what comes last holds."""
    words = [word for word in change.split(" ") if word.partition("=")[0] not in order]
    return " ".join([*words, *(f"{name}={value}" for name, value in order.items())])


def _each_neighbour(spec: CaseSpec, seeds: Iterable[Layout]) -> Iterator[tuple[Layout, str]]:
    for seed in seeds:
        lengths = rounds(seed.groups, num_microbatches(spec, seed))
        shorter = [n for n in lengths[::-1] if n < seed.round_length]
        yield from ((seed.model_copy(update={"round_length": n}), f"round_length={n}") for n in shorter)
    for seed in seeds:
        yield from neighbours(spec, seed)
