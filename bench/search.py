"""Which layout a search looks at next, see `bench.tune`."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from operator import attrgetter, ne
from typing import NamedTuple

from bench.case import Case, CaseSpec, Layout
from bench.system import KnowsMoves, System

MAX_DISTANCE = 2
LESS_ROOM = 0.85

CLOSE = 1.05
"""A layout whose step takes at most so many times as long as the best is tried once more in the best one's order."""

SLOWER = CLOSE
"""A layout is left once its step is sure to take so many times as long as the best, and longer than the second best."""

NUM_CLOSE = 6
"""From so many of them, which differ in more than their order, steps are taken as from the best."""

NUM_PROMISING = 3
"""So are they from so many of those with the lowest bounds: in another order they may be close."""


class Open(NamedTuple):
    """A layout that may win: least seconds of its step, seconds of its busiest resource, least bytes, and what it
    chooses beside the order of its work."""

    bound_s: float
    busy_s: float
    least_bytes: float
    case: Case
    choices: tuple[object, ...]


Screened = Callable[[Iterable[Layout]], Iterator[Open]]
"""Those of some layouts that may win and were not met before."""


def choices_of(system: System) -> Callable[[Layout], tuple[object, ...]]:
    """What a layout of a system chooses; the number of replicas follows from the rest."""
    order = system.stepped if isinstance(system, KnowsMoves) else ()
    return attrgetter(*(key for key in Layout.model_fields if key not in ("replicas", *order)))


class Search:
    """`left` is in the order of the time bounds."""

    def __init__(
        self,
        spec: CaseSpec,
        system: System,
        layouts: Iterable[Open],
        budget: int | None,
        seeds: Set[Layout] = frozenset(),
        screened: Screened = lambda _: iter(()),
    ) -> None:
        self.left = sorted(layouts, key=lambda layout: layout.bound_s)
        self.budget = budget
        self.num_tried = 0
        self.best: Layout | None = None
        self.best_s = self.second_s = float("inf")
        self._seeds = [layout for layout in self.left if layout.case.layout in seeds] if seeds else []
        self._busy_seen: set[float] = set()
        self._last: Open | None = None
        self._stepped = False  # whether that was a step from the best
        self._tempting: tuple[float, Open] | None = None  # step time of the fastest that does not fit, and it
        self._room = 1.0  # share of the memory that a layout's lower bound may take to be explored
        self._steps = _Steps(spec, system, screened)

    @property
    def limit_s(self) -> float:
        """A layout whose step takes longer is of no interest: it is neither near the best nor the second best."""
        return max(self.second_s, SLOWER * self.best_s)

    def next(self) -> Open | None:
        """None once nothing is left that may win, or the budget is spent."""
        if self.budget is not None and self.num_tried >= self.budget:
            return None
        hopeful = self.left[: bisect_left(self.left, self.best_s, key=lambda layout: layout.bound_s)]
        chosen = self._steps.leaner(self.best_s) or self._explore(hopeful)
        self._stepped = False
        if chosen is None and self.best is not None:
            chosen = self._steps.next(self.best, self.best_s)
            self._stepped = chosen is not None
        chosen = chosen or self._slimmer(hopeful, self.best_s)
        if chosen is None and self.best is not None:
            chosen = self._near(hopeful, self.best)
        if chosen is None and hopeful:
            chosen = hopeful[0] if self.best else min(hopeful, key=lambda layout: layout.least_bytes)
        if chosen is None:
            return None
        self.num_tried += 1
        self._last = chosen
        for layouts in (self.left, self._seeds):
            if chosen in layouts:
                layouts.remove(chosen)
        return chosen

    def learn(self, fits: bool | None, step_s: float | None) -> None:
        """What came of the layout that was chosen last.

        What did not fit says how far the lower bounds on memory are off: the next ones explored need more room.

        Args:
            fits: None where it was left before its end.
            step_s: None where it was left, or was refused.
        """
        last = self._last
        assert last is not None
        if fits and step_s is not None:
            if step_s < self.best_s:
                self.best, self.best_s, self.second_s = last.case.layout, step_s, self.best_s
            else:
                self.second_s = min(self.second_s, step_s)
            self._steps.fitted(last, step_s)
        # One that was left for its time is taken to fit unless it is sure not to.
        may_fit = fits is not False
        self._room = 1.0 if may_fit else self._room * LESS_ROOM
        if may_fit:
            self._busy_seen.add(last.busy_s)
            self._steps.may_fit(last)
        elif step_s is not None and step_s < self.best_s:
            self._steps.too_big(last)
            if not self._stepped and (self._tempting is None or step_s < self._tempting[0]):
                self._tempting = step_s, last

    def _slimmer(self, hopeful: list[Open], limit: float) -> Open | None:
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

    def _explore(self, hopeful: list[Open]) -> Open | None:
        """A seed, then the lowest bound of new work, for the first half of the budget."""
        if not hopeful or (self.budget is not None and self.num_tried >= self.budget // 2):
            return None
        room_bytes = self._room * hopeful[0].case.cluster.gpu.memory_bytes
        for layout in self._seeds:
            if layout.bound_s <= hopeful[-1].bound_s and layout.least_bytes <= room_bytes:
                return layout
        new = (layout for layout in hopeful if layout.busy_s not in self._busy_seen)
        return next((layout for layout in new if layout.least_bytes <= room_bytes), None)

    def _near(self, hopeful: list[Open], best: Layout) -> Open | None:
        """The nearest to the best of those at most two choices away, of equals the lowest bound; in its order first."""
        choices = self._steps.choices(best)
        far = [_distance(layout.choices, choices) for layout in hopeful]
        near = sorted((i for i in range(len(far)) if far[i] <= MAX_DISTANCE), key=far.__getitem__)
        alike = self._steps.in_order_of(best, (hopeful[i] for i in near), self.best_s)
        return alike or (hopeful[near[0]] if near else None)


class _Steps:
    """From layouts that were tried to such as the space has not, for a system that knows moves; else none."""

    def __init__(self, spec: CaseSpec, system: System, screened: Screened) -> None:
        self.choices = choices_of(system)
        self._spec = spec
        self._system = system if isinstance(system, KnowsMoves) else None
        self._screened = screened
        self._from_best = False
        self._from: Layout | None = None
        self._ahead: Iterator[Layout] = iter(())
        self._fat: list[Layout] = []
        self._fitted: list[tuple[float, Open]] = []
        self._may_fit: dict[tuple[object, ...], Open] = {}  # by choices
        self._ordered: set[tuple[Layout, Layout]] = set()
        self._num_taken: Counter[tuple[object, ...]] = Counter()  # steps from layouts of some choices
        self._left_behind: set[tuple[Layout, bool]] = set()  # no step from them is left, of their work alone or of all

    def fitted(self, layout: Open, step_s: float) -> None:
        self._fitted.append((step_s, layout))

    def may_fit(self, layout: Open) -> None:
        """It fits, or was left before that was known."""
        self._may_fit.setdefault(layout.choices, layout)

    def too_big(self, layout: Open) -> None:
        """It is faster than the best, and does not fit."""
        self._fat.append(layout.case.layout)

    def next(self, best: Layout, best_s: float) -> Open | None:
        """From the best and from others that are nearly as fast by turns."""
        self._from_best = not self._from_best
        first, second = (self._beside, self._once_more) if self._from_best else (self._once_more, self._beside)
        return first(best, best_s) or second(best, best_s)

    def _beside(self, best: Layout, best_s: float) -> Open | None:
        """One step away from the best."""
        if self._system is None:
            return None
        if best != self._from:
            self._from, self._ahead = best, iter(self._system.moves(self._spec, best))
        return self._first(self._ahead, best_s)

    def leaner(self, best_s: float) -> Open | None:
        """What does not fit, in an order that holds less."""
        while self._system is not None and self._fat:
            found = self._system.leaner(self._fat.pop())
            first = self._first([] if found is None else [found], best_s)
            if first is not None:
                return first
        return None

    def _once_more(self, best: Layout, best_s: float) -> Open | None:
        """A layout that is nearly as fast as the best, in the order of the best; then steps from such, and from those
        that promise most."""
        if self._system is None:
            return None
        close = sorted((each for each in self._fitted if each[0] <= CLOSE * best_s), key=lambda each: each[0])
        found = self.in_order_of(best, (layout for _, layout in close), best_s)
        # Of the orders of one work the fastest alone: the others may be as fast.
        works: dict[tuple[object, ...], Open] = {}
        for _, layout in close:
            works.setdefault(layout.choices, layout)
        promising = sorted(self._may_fit.values(), key=lambda layout: layout.bound_s)[:NUM_PROMISING]
        kept = list(works.values())[:NUM_CLOSE]
        kept += [layout for layout in promising if layout.choices not in works]
        return found or self._from_each(kept, best_s, same_work=True) or self._from_each(kept, best_s, same_work=False)

    def _from_each(self, layouts: Iterable[Open], best_s: float, *, same_work: bool) -> Open | None:
        """A step from one of some layouts in turn, the lowest bound first, as it promises most; with `same_work`, one
        that changes the order of its work alone."""
        for layout in sorted(layouts, key=lambda layout: (self._num_taken[layout.choices], layout.bound_s)):
            own = layout.case.layout
            if self._system is not None and (own, same_work) not in self._left_behind:
                steps: Iterable[Layout] = self._system.moves(self._spec, own)
                if same_work:
                    steps = (step for step in steps if self.choices(step) == layout.choices)
                found = self._first(steps, best_s)
                if found is not None:
                    self._num_taken[layout.choices] += 1
                    return found
                self._left_behind.add((own, same_work))
        return None

    def in_order_of(self, best: Layout, layouts: Iterable[Open], best_s: float) -> Open | None:
        """The first of some layouts that was not tried in the order of the best, in that order."""
        if self._system is None:
            return None
        for layout in layouts:
            own = layout.case.layout
            if (own, best) not in self._ordered:
                self._ordered.add((own, best))
                found = self._first([self._system.in_order_of(own, best)], best_s)
                if found is not None:
                    return found
        return None

    def _first(self, layouts: Iterable[Layout], best_s: float) -> Open | None:
        """The first that may be faster and was not tried."""
        return next((layout for layout in self._screened(layouts) if layout.bound_s < best_s), None)


def _distance(one: tuple[object, ...], other: tuple[object, ...]) -> int:
    """Choices in which two layouts differ."""
    return sum(map(ne, one, other))
