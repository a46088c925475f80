"""One search for all systems: the fastest layout that fits in memory.

Every layout of the system's space gets two cheap lower bounds, on its step time and on its memory; what cannot fit is
rejected, and what cannot beat the best step time so far is never simulated. The rest is tried within a budget:
first the seeds of a system that has a planner of its own and the layouts with the lowest bounds, one of each bound
that fits (layouts that differ in order only share one; after one that does not fit, the next has to leave more room);
then those near a faster one that does not fit which need less memory, and those near the best one, in one choice and
then in two; then the rest by their bounds. Where nothing has fitted yet, those that need least memory come first. Where
the budget does not end the search, its answer is the optimum under the cost model.

A layout that is tried is planned, and simulated to the end only if it is near the best. Its longest chain of
operations (`bench.simulate.ahead`) says what its step takes at the least, at the start and at every operation on the
way. Once that is more than `SLOWER` times the best step so far, and more than the second best, the simulation is left:
the layout can neither win nor come second. Whether it fits is then known only where it is sure not to
(`bench.simulate.least_peak_bytes`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, ne
from typing import Literal, NamedTuple

from bench.assumptions import Assumptions
from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.limits import Limits
from bench.predict import Prediction, does_not_fit, predict, quick_step
from bench.system import KnowsConsequences, KnowsSeeds, get_system

DEFAULT_BUDGET = 64
MAX_DISTANCE = 2
LESS_ROOM = 0.85

SLOWER = 1.1
"""A layout is left once its step is sure to take so many times as long as the best, and longer than the second best."""

Status = Literal["ok", "infeasible", "slower", "refused", "bound", "budget"]


@dataclass(frozen=True)
class Candidate:
    """What became of one layout.

    status: ok (simulated, fits), infeasible (does not fit in memory), slower (planned, and simulated until it was sure
    to be slower than the best two and `SLOWER` times the best; whether it fits is not known), refused (bad input),
    bound (its bound is above the winner's step time), budget (not tried for want of budget).
    """

    layout: Layout
    status: Status
    bound_s: float | None = None
    step_time_s: float | None = None
    peak_memory_bytes: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class TuneResult:
    """The winner, None where nothing fits; every candidate, winner first, then by step time, then the rest."""

    spec: CaseSpec
    best: Prediction | None
    candidates: tuple[Candidate, ...]

    @property
    def runner_up(self) -> Candidate | None:
        fits = [candidate for candidate in self.candidates if candidate.status == "ok"]
        return fits[1] if len(fits) > 1 else None

    @property
    def complete(self) -> bool:
        """Whether no layout was left out for want of budget: then the winner is the best of the space."""
        return all(candidate.status != "budget" for candidate in self.candidates)

    @property
    def closest(self) -> Candidate | None:
        """The layout that needs least memory among those that do not fit."""
        too_big = [c for c in self.candidates if c.peak_memory_bytes is not None and c.status == "infeasible"]
        return min(too_big, key=lambda c: c.peak_memory_bytes or 0.0, default=None)

    def counts(self) -> dict[str, int]:
        """Number of candidates by status."""
        found: dict[str, int] = {}
        for candidate in self.candidates:
            found[candidate.status] = found.get(candidate.status, 0) + 1
        return found


def tune(
    spec: CaseSpec,
    assumptions: Assumptions,
    *,
    fixed: Sequence[str] = (),
    budget: int | None = DEFAULT_BUDGET,
    progress: Callable[[int, int], None] | None = None,
) -> TuneResult:
    """The best layout of the system's space for `spec`.

    Args:
        fixed: ``key=value`` layout fields that are not to be chosen.
        budget: most layouts that are planned and simulated, to the end or not; None for no limit.
        progress: called with (layouts tried, layouts left to consider).
    """
    system = get_system(spec.system)
    seeds = list(system.seeds(spec, assumptions)) if isinstance(system, KnowsSeeds) else []
    open_layouts, done = screen(spec, assumptions, fixed, seeds)
    search = _Search(open_layouts, budget, {with_fixed(spec, fixed, seed) for seed in seeds})
    while (layout := search.next()) is not None:
        found = _try(layout, assumptions, search.limit_s)
        done.append(found)
        search.learn(found)
        if progress is not None:
            progress(search.num_tried, len(search.left))
    for layout in search.left:
        beaten = layout.bound_s >= search.best_s
        done.append(Candidate(layout.case.layout, "bound" if beaten else "budget", layout.bound_s))
    best = None if search.best is None else predict(spec.with_layout(search.best), assumptions)
    done.sort(key=lambda c: (c.status != "ok", c.step_time_s or 0.0, c.bound_s or 0.0))
    return TuneResult(spec, best, tuple(done))


class _Open(NamedTuple):
    """A layout that may win."""

    bound_s: float
    least_bytes: float
    case: Case
    choices: tuple[object, ...]


class _Search:
    """Which layout to simulate next. `left` is in the order of the time bounds."""

    def __init__(self, layouts: list[_Open], budget: int | None, seeds: Set[Layout]) -> None:
        self.left = sorted(layouts, key=lambda layout: layout.bound_s)
        self.budget = budget
        self._seeds = [layout for layout in self.left if layout.case.layout in seeds] if seeds else []
        self.num_tried = 0
        self.best: Layout | None = None
        self.best_s = self.second_s = float("inf")
        self._bounds_seen: set[float] = set()
        self._last: _Open | None = None
        self._tempting: tuple[float, _Open] | None = None  # step time of the fastest that does not fit, and it
        self._room = 1.0  # share of the memory that a layout's lower bound may take to be explored

    @property
    def limit_s(self) -> float:
        """A layout whose step takes longer is of no interest: it is neither near the best nor the second best."""
        return max(self.second_s, SLOWER * self.best_s)

    def next(self) -> "_Open | None":
        """None once nothing is left that may win, or the budget is spent."""
        if self.budget is not None and self.num_tried >= self.budget:
            return None
        hopeful = self.left[: bisect_left(self.left, self.best_s, key=lambda layout: layout.bound_s)]
        if not hopeful:
            return None
        chosen = self._explore(hopeful) or self._slimmer(hopeful, self.best_s)
        if chosen is None:
            chosen = _near(hopeful, self.best) if self.best else min(hopeful, key=lambda layout: layout.least_bytes)
        self.num_tried += 1
        self._last = chosen
        self.left.remove(chosen)
        if chosen in self._seeds:
            self._seeds.remove(chosen)
        return chosen

    def learn(self, found: Candidate) -> None:
        """What did not fit says how far the lower bounds on memory are off: the next ones explored need more room."""
        step_s = found.step_time_s
        if found.status == "ok" and step_s is not None:
            if step_s < self.best_s:
                self.best, self.best_s, self.second_s = found.layout, step_s, self.best_s
            self.second_s = min(self.second_s, step_s) if found.layout != self.best else self.second_s
        # One that was left for its time is taken to fit unless it is sure not to.
        may_fit = found.status in ("ok", "slower")
        self._room = 1.0 if may_fit else self._room * LESS_ROOM
        if self._last is None:
            return
        if may_fit:
            self._bounds_seen.add(self._last.bound_s)
        elif step_s is not None and (self._tempting is None or step_s < self._tempting[0]):
            self._tempting = step_s, self._last

    def _slimmer(self, hopeful: list[_Open], limit: float) -> _Open | None:
        """Near a layout that is faster than the best but does not fit, the next that needs less memory."""
        if self._tempting is None or self._tempting[0] >= limit:
            return None
        step_time_s, fat = self._tempting
        near = [
            layout
            for layout in hopeful
            if layout.least_bytes < fat.least_bytes and _distance(layout.choices, fat.choices) <= MAX_DISTANCE
        ]
        if not near:
            self._tempting = None
            return None
        slimmer = min(near, key=lambda layout: (layout.bound_s, layout.least_bytes))
        self._tempting = step_time_s, slimmer
        return slimmer

    def _explore(self, hopeful: list[_Open]) -> _Open | None:
        """A seed, then the lowest bound that is new, for the first half of the budget."""
        if self.budget is not None and self.num_tried >= self.budget // 2:
            return None
        room_bytes = self._room * hopeful[0].case.cluster.gpu.memory_bytes
        for layout in self._seeds:
            if layout.bound_s <= hopeful[-1].bound_s and layout.least_bytes <= room_bytes:
                return layout
        new = (layout for layout in hopeful if layout.bound_s not in self._bounds_seen)
        return next((layout for layout in new if layout.least_bytes <= room_bytes), None)


def _near(hopeful: list[_Open], best: Layout) -> _Open:
    """The nearest to the best, of those at most two choices away and of equals the lowest bound; else the lowest."""
    choices = _choices(best)
    nearest = min(hopeful, key=lambda layout: _distance(layout.choices, choices))
    return nearest if _distance(nearest.choices, choices) <= MAX_DISTANCE else hopeful[0]


_choices = attrgetter(*(key for key in Layout.model_fields if key != "replicas"))
"""What a layout chooses; the number of replicas follows from the rest."""


def _distance(one: tuple[object, ...], other: tuple[object, ...]) -> int:
    """Choices in which two layouts differ."""
    return sum(map(ne, one, other))


def _try(layout: _Open, assumptions: Assumptions, limit_s: float) -> Candidate:
    """Simulates a layout as far as needed to see whether it is faster than `limit_s`, and notes what came out."""
    case = layout.case
    try:
        found = quick_step(case, assumptions, limit_s)
    except BadInput as error:
        if error.fault:
            raise
        return Candidate(case.layout, "refused", reason=str(error))
    peak, step_s = found.peak_memory_bytes, found.step_time_s
    if peak > case.cluster.gpu.memory_bytes:
        return Candidate(case.layout, "infeasible", found.bound_s, step_s, peak, does_not_fit(case, peak))
    if step_s is None:
        return Candidate(case.layout, "slower", found.bound_s)
    return Candidate(case.layout, "ok", found.bound_s, step_s, peak)


def screen(
    spec: CaseSpec, assumptions: Assumptions, fixed: Sequence[str] = (), seeds: Sequence[Layout] = ()
) -> tuple[list[_Open], list[Candidate]]:
    """Layouts that may win, and the candidates that cannot be or cannot fit."""
    limits = Limits(spec, assumptions)
    open_layouts: list[_Open] = []
    done: list[Candidate] = []
    for layout in _layouts(spec, fixed, seeds):
        case = spec.with_layout(layout)
        try:
            bound, least = limits.of(case)
        except BadInput as error:
            if error.fault:
                raise
            done.append(Candidate(layout, "refused", reason=str(error)))
            continue
        if bound is None:
            done.append(Candidate(layout, "infeasible", None, None, least, does_not_fit(case, least)))
        else:
            open_layouts.append(_Open(bound, least, case, _choices(layout)))
    return open_layouts, done


def with_fixed(spec: CaseSpec, fixed: Sequence[str], layout: Layout) -> Layout:
    """The layout with ``key=value`` fields put in, and what follows from them for its system."""
    if not fixed:
        return layout
    choice, system = Layout.from_pairs(fixed, layout), get_system(spec.system)
    if isinstance(system, KnowsConsequences):
        return system.completed(spec, choice, {pair.partition("=")[0] for pair in fixed})
    return choice


def _layouts(spec: CaseSpec, fixed: Sequence[str], seeds: Sequence[Layout]) -> Iterator[Layout]:
    """The system's seeds and its space with the fixed fields put in, each layout once."""
    seen: set[Layout] = set()
    for layout in chain(seeds, get_system(spec.system).space(spec)):
        choice = with_fixed(spec, fixed, layout)
        if choice not in seen:
            seen.add(choice)
            yield choice
