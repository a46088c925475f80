"""A system from a Python file: what its methods return is looked at, and its faults name the file's line."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from bench.action import BadAction
from bench.assumptions import Assumptions
from bench.case import Case, CaseSpec, Layout, batch_of
from bench.check import PlanError, check
from bench.errors import BadInput
from bench.loading.faults import raise_fault, require_of_case, require_placement, with_lines
from bench.loading.source import Source
from bench.lower import lower
from bench.placement import Placement
from bench.plan import Plan
from bench.system import TRAINERS, KnowsDefaults, KnowsInFlight, KnowsMoves, KnowsSeeds, RunsAsItself

T = TypeVar("T")


class PythonFile:
    """A system from a Python file. Its plans are checked as they are made; what it knows besides, it has as well."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._inner = inner = source.system
        with source.blamed():
            self.name = inner.name
            self.summary = str(inner.summary)
            self.fields = frozenset(inner.fields)
            self.traits = tuple(getattr(inner, "traits", ()))
            if isinstance(inner, KnowsInFlight):
                self.in_flight = self._in_flight
            if isinstance(inner, KnowsSeeds):
                self.seeds = self._seeds
            if isinstance(inner, KnowsMoves):
                self.stepped = tuple(inner.stepped)
                self.moves, self.leaner, self.in_order_of = self._moves, self._leaner, self._in_order_of
            if isinstance(inner, KnowsDefaults):
                self.defaults = dict(inner.defaults)
                Layout.make(**self.defaults)
            if isinstance(inner, RunsAsItself):
                self.trainers, self.native = tuple(inner.trainers), str(inner.native)
                self.require_native = self._require_native
                if not self.trainers or not set(self.trainers) <= set(TRAINERS) or self.native.count(":") != 1:
                    told = (self.trainers, self.native)
                    raise BadInput(f"{source.name}: trainers, native", told, f"of {TRAINERS}, and 'module:class'")

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        yield from self._layouts("space", lambda: self._inner.space(spec))

    def placement(self, case: Case) -> Placement:
        placement = self._of_kind(Placement, "placement", lambda: self._inner.placement(case))
        try:
            require_placement(self.source.name, placement, case.model)
        except BadInput as error:
            raise_fault(error)
        return placement

    def plan(self, case: Case) -> Plan:
        placement = self.placement(case)
        num_microbatches = batch_of(case, placement).num_microbatches
        try:
            plan = self._of_kind(Plan, "plan", lambda: self._inner.plan(case))
        except BadAction as error:
            raise_fault(self._located(error, case))
        try:
            require_of_case(self.source.name, plan, case, placement, num_microbatches)
            check(lower(plan, case.model))
        except PlanError as error:
            raise_fault(self.located(error, case))
        except BadInput as error:
            raise_fault(error)
        return plan

    def located(self, error: PlanError, case: Case) -> PlanError:
        """The same fault, with the lines that made its actions."""
        return self._located(error, case)

    def _located(self, error: PlanError | BadAction, case: Case) -> PlanError:
        lines = self.source.lines_of(error.actions, lambda: self._inner.plan(case))
        return with_lines(error, self.source.name, lines)

    def _in_flight(self, case: Case) -> Mapping[str, float]:
        with self.source.blamed():
            found = {str(group): float(number) for group, number in self._inner.in_flight(case).items()}
        for group, number in found.items():
            if not 0 <= number < float("inf"):
                self.source.refuse(number, "a number of micro-batches, 0 or more", field=f"in_flight: {group}")
        return found

    def _seeds(self, spec: CaseSpec, assumptions: Assumptions) -> list[Layout]:
        return list(self._layouts("seeds", lambda: self._inner.seeds(spec, assumptions)))

    def _moves(self, spec: CaseSpec, layout: Layout) -> Iterator[Layout]:
        return self._layouts("moves", lambda: self._inner.moves(spec, layout))

    def _leaner(self, layout: Layout) -> Layout | None:
        found = list(self._layouts("leaner", lambda: filter(None, [self._inner.leaner(layout)])))
        return found[0] if found else None

    def _in_order_of(self, layout: Layout, other: Layout) -> Layout:
        return self._of_kind(Layout, "in_order_of", lambda: self._inner.in_order_of(layout, other))

    def _require_native(self, case: Case) -> None:
        with self.source.blamed():
            self._inner.require_native(case)

    def _layouts(self, method: str, make: Callable[[], Iterable[Any]]) -> Iterator[Layout]:
        """What a method offers, one at a time: its code runs inside `blamed`, nobody else's does."""
        end = object()
        with self.source.blamed():
            offered = iter(make())
        while True:
            with self.source.blamed():
                layout = next(offered, end)
            if layout is end:
                return
            if not isinstance(layout, Layout):
                self.source.refuse(layout, "a Layout", field=method)
            yield layout

    def _of_kind(self, kind: type[T], method: str, make: Callable[[], Any]) -> T:
        with self.source.blamed():
            made = make()
        if not isinstance(made, kind):
            self.source.refuse(type(made).__name__, f"a {kind.__name__}", field=method)
        return made
