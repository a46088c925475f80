"""One search for all systems: the fastest layout that fits in memory.

Every layout of the system's space gets two cheap lower bounds, on its step time and on its memory; what cannot fit is
rejected, and what cannot beat the best step time so far is never simulated. The rest is tried within a budget:
first the seeds of a system that has a planner of its own and the layouts with the lowest bounds, one of each work that
fits (what keeps its busiest resource as long is taken for the same work in another order; after one that does not fit,
the next has to leave more room).
With half the budget spent, or none of them left, a system that knows moves (`bench.system.KnowsMoves`) goes step by
step from its best layout and, by turns, from others that are nearly as fast, also to such as the space does not list;
what is faster and does not fit is tried in an order that holds less. Then come those near a faster one that does not
fit which need less memory, and those near the best one, in one choice and then in two; then the rest by their bounds.
Where nothing has fitted yet, those that need least memory come first. Where the budget does not end the search, its
answer is the optimum of the space under the cost model, or better.

A layout that is tried is planned, and simulated to the end only if it is near the best. Its longest chain of
operations (`bench.simulate.ahead`) says what its step takes at the least, at the start and at every operation on the
way. Once that is more than `SLOWER` times the best step so far, and more than the second best, the simulation is left:
the layout can neither win nor come second. Whether it fits is then known only where it is sure not to
(`bench.simulate.least_peak_bytes`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout
from bench.errors import BadInput
from bench.limits import Limits
from bench.predict import Prediction, does_not_fit, predict, quick_step
from bench.search import Open, Search, choices_of
from bench.system import KnowsConsequences, KnowsSeeds, get_system

DEFAULT_BUDGET = 64

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
    screen = _Screen(spec, assumptions, fixed)
    open_layouts = list(screen.of(chain(seeds, system.space(spec))))
    done = screen.done
    search = Search(
        spec, system, open_layouts, budget, {with_fixed(spec, fixed, seed) for seed in seeds}, screen.of_moves
    )
    while (layout := search.next()) is not None:
        found = _try(layout, assumptions, search.limit_s)
        screen.tried(found)
        search.learn(*_learnt(found))
        if progress is not None:
            progress(search.num_tried, len(search.left))
    for layout in screen.left():
        beaten = layout.bound_s >= search.best_s
        done.append(Candidate(layout.case.layout, "bound" if beaten else "budget", layout.bound_s))
    best = None if search.best is None else predict(spec.with_layout(search.best), assumptions)
    done.sort(key=lambda c: (c.status != "ok", c.step_time_s or 0.0, c.bound_s or 0.0))
    return TuneResult(spec, best, tuple(done))


def _learnt(found: Candidate) -> tuple[bool | None, float | None]:
    """Whether a layout fits, None where that is not known, and its step."""
    return {"ok": True, "slower": None}.get(found.status, False), found.step_time_s


def _try(layout: Open, assumptions: Assumptions, limit_s: float) -> Candidate:
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


class _Screen:
    """Which layouts may win, each looked at once; `done` has what cannot be, cannot fit, or was tried."""

    def __init__(self, spec: CaseSpec, assumptions: Assumptions, fixed: Sequence[str] = ()) -> None:
        self.spec, self.fixed = spec, fixed
        self.done: list[Candidate] = []
        self._limits = Limits(spec, assumptions)
        self._choices = choices_of(self._limits.system)
        self._left: dict[Layout, Open] = {}
        self._seen: set[Layout] = set()

    def of(self, layouts: Iterable[Layout]) -> Iterator[Open]:
        """Those that may win and were not met before, with the fixed fields put in."""
        for layout in layouts:
            choice = with_fixed(self.spec, self.fixed, layout)
            if choice not in self._seen:
                self._seen.add(choice)
                found = self._of(choice)
                if isinstance(found, Open):
                    self._left[choice] = found
                    yield found
                else:
                    self.done.append(found)

    def of_moves(self, layouts: Iterable[Layout]) -> Iterator[Open]:
        """Those that may win and were not tried before. What is not possible is no candidate."""
        for layout in layouts:
            choice = with_fixed(self.spec, self.fixed, layout)
            if choice not in self._seen:
                found = self._of(choice)
                if isinstance(found, Open):
                    self._seen.add(choice)
                    self._left[choice] = found
                elif found.status != "refused":
                    self._seen.add(choice)
                    self.done.append(found)
            if choice in self._left:
                yield self._left[choice]

    def tried(self, found: Candidate) -> None:
        del self._left[found.layout]
        self.done.append(found)

    def left(self) -> list[Open]:
        """What was met and not tried."""
        return list(self._left.values())

    def _of(self, layout: Layout) -> "Open | Candidate":
        case = self.spec.with_layout(layout)
        try:
            limit = self._limits.of(case)
        except BadInput as error:
            if error.fault:
                raise
            return Candidate(layout, "refused", reason=str(error))
        if limit.step_s is None or limit.busy_s is None:
            return Candidate(layout, "infeasible", None, None, limit.bytes, does_not_fit(case, limit.bytes))
        return Open(limit.step_s, limit.busy_s, limit.bytes, case, self._choices(layout))


def screen(spec: CaseSpec, assumptions: Assumptions) -> tuple[list[Open], list[Candidate]]:
    """Layouts of the space that may win, and the candidates that cannot be or cannot fit."""
    screened = _Screen(spec, assumptions)
    return list(screened.of(get_system(spec.system).space(spec))), screened.done


def with_fixed(spec: CaseSpec, fixed: Sequence[str], layout: Layout) -> Layout:
    """The layout with ``key=value`` fields put in, and what follows from them for its system."""
    if not fixed:
        return layout
    choice, system = Layout.from_pairs(fixed, layout), get_system(spec.system)
    if isinstance(system, KnowsConsequences):
        return system.completed(spec, choice, {pair.partition("=")[0] for pair in fixed})
    return choice
