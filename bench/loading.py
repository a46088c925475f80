"""Schedules in files: a Python file with one class that is a system, or the text of a plan.

A schedule file stands wherever a system's name does; its path is the name of the system in cases and trials. A Python
file is executed, with all rights of the user, which a warning says before it happens; a text is only read. Faults of
either name the file's line: of a text the line of the action, of a Python file the line that made the action.
"""

import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from bench.action import Action
from bench.case import Case, CaseSpec, Layout, batch_of
from bench.check import PlanError, check
from bench.errors import BadInput
from bench.lower import lower
from bench.models import Model
from bench.placement import Placement
from bench.plan import Plan
from bench.system import KnowsInFlight, System, divisors, get_system

ENDINGS = (".py", ".txt")
MAX_BYTES = 1 << 28
MAX_LINES_NAMED = 4
FIXED_BY_TEXT = ("copies", "recompute", "chunks")
WRITTEN_FIELDS = frozenset({"mbs", "replicas", "shard_state", "comm_sms", *FIXED_BY_TEXT})

T = TypeVar("T")


class ExecutesFile(UserWarning):
    """A Python file is about to be executed."""


def is_schedule_file(name: str) -> bool:
    """Whether a system's name means a file."""
    return name.endswith(ENDINGS)


def load(name: str) -> System:
    """The system of a schedule file. Raises BadInput naming the file, and its line where there is one."""
    path = Path(name)
    try:
        state = path.stat()
        if state.st_size > MAX_BYTES:
            raise BadInput("schedule", name, f"a file of at most {MAX_BYTES >> 20} MiB")
        return _load(name, path.resolve(), state.st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput("schedule", name, f"a readable file ({reason})") from None


@lru_cache(maxsize=64)
def _load(name: str, path: Path, _changed_ns: int) -> System:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        return WrittenPlan(name, text)
    made = _Source(name, path).executed(text)
    return InFlightFile(made) if isinstance(made.system, KnowsInFlight) else PythonFile(made)


def located(error: PlanError, case: Case) -> PlanError:
    """A fault of a case's plan: where its system is a schedule file, with the file's lines."""
    system = get_system(case.system)
    return system.located(error, case) if isinstance(system, PythonFile | WrittenPlan) else error


# Python files


class _Source:
    """A Python file and the one system in it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.system: Any = None

    def executed(self, text: str) -> "_Source":
        """Executes the file and makes its system."""
        warnings.warn(f"{self.name} is Python and will now be executed", ExecutesFile, stacklevel=4)
        module = ModuleType(f"schedule_file_{self.path.stem}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module  # dataclasses look their module up
        with self.blamed():
            exec(compile(text, str(self.path), "exec"), module.__dict__)
        found = [
            thing
            for thing in vars(module).values()
            if isinstance(thing, type) and thing.__module__ == module.__name__ and not thing.__name__.startswith("_")
        ]
        chosen = [thing for thing in found if callable(getattr(thing, "plan", None))]
        if len(chosen) != 1:
            names = [thing.__name__ for thing in chosen or found]
            raise BadInput(self.name, names, "exactly one class with a method plan(case); others begin with _")
        with self.blamed():
            self.system = chosen[0]()
        missing = [word for word in SYSTEM_PARTS if not hasattr(self.system, word)]
        if missing or not isinstance(self.system, System):
            raise BadInput(
                f"{self.name}: class {chosen[0].__name__}", missing, f"{', '.join(SYSTEM_PARTS)}, all of them"
            )
        return self

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Errors of the file's code become one line that names the file's; refused input passes."""
        try:
            yield
        except BadInput:
            raise
        except SyntaxError as error:
            raise BadInput(f"{self.name}, line {error.lineno}", (error.text or "").strip(), error.msg) from None
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(self.path)]
            where = f"{self.name}, line {lines[-1]}" if lines else self.name
            said = f"{type(error).__name__}: {error}"
            raise BadInput(where, said, "code that raises BadInput for what it refuses, and nothing else") from None

    def lines_of(self, actions: tuple[Action, ...], again: Callable[[], object]) -> list[int]:
        """Lines of the file that make the actions, found by making the plan `again`, each creation noted."""
        made: dict[Action, list[int]] = {}
        make, filename = Action.__new__, str(self.path)

        def noting(cls: type[Action], *args: Any, **fields: Any) -> Action:
            action = make(cls, *args, **fields)
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != filename:
                frame = frame.f_back
            if frame is not None:
                made.setdefault(action, []).append(frame.f_lineno)
            return action

        Action.__new__ = noting  # type: ignore[method-assign,assignment]
        try:
            again()
        finally:
            Action.__new__ = make  # type: ignore[method-assign]
        return [line for action in actions for line in made.get(action, [])]


SYSTEM_PARTS = ("name", "summary", "fields", "space", "placement", "plan")


class PythonFile:
    """A system from a Python file, whose faults name the file's line. Its plans are checked as they are made.

    `fault` is the first fault of a plan that was found; a search, which skips layouts that are refused, would hide it.
    """

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.name = str(source.system.name)
        self.summary = str(source.system.summary)
        if isinstance(source.system.fields, str) or not isinstance(source.system.fields, Iterable):
            raise BadInput(f"{source.name}: fields", source.system.fields, "names of layout fields")
        self.fields = frozenset(source.system.fields)
        self.fault: BadInput | None = None
        unknown = sorted(self.fields - Layout.model_fields.keys())
        if unknown:
            raise BadInput(f"{source.name}: fields", unknown, f"of {', '.join(Layout.model_fields)}")

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        with self.source.blamed():
            for layout in self.source.system.space(spec):
                if not isinstance(layout, Layout):
                    raise BadInput(f"{self.source.name}: space", layout, "a Layout")
                yield layout

    def placement(self, case: Case) -> Placement:
        return self._of_kind(Placement, self.source.system.placement, case)

    def plan(self, case: Case) -> Plan:
        try:
            plan = self._of_kind(Plan, self.source.system.plan, case)
        except BadInput as error:
            if error.field.startswith(f"{self.source.name}, line"):
                self.fault = self.fault or error
            raise
        try:
            check(lower(plan, case.model))
        except PlanError as error:
            self.fault = self.fault or self.located(error, case)
            raise self.fault from None
        return plan

    def located(self, error: PlanError, case: Case) -> PlanError:
        """The same fault, with the lines that made its actions."""
        lines = self.source.lines_of(error.actions, lambda: self.source.system.plan(case))
        return _located(error, self.source.name, lines)

    def _of_kind(self, kind: type[T], method: Callable[[Case], Any], case: Case) -> T:
        with self.source.blamed():
            made = method(case)
        if not isinstance(made, kind):
            raise BadInput(f"{self.source.name}: {method.__name__}", type(made).__name__, f"a {kind.__name__}")
        return made


class InFlightFile(PythonFile):
    """One that knows what it keeps in flight."""

    def in_flight(self, case: Case) -> Mapping[str, float]:
        with self.source.blamed():
            found: Mapping[str, float] = self.source.system.in_flight(case)
        return found


def _located(error: PlanError, name: str, lines: list[int]) -> PlanError:
    """The same fault, with the lines of the file."""
    distinct = list(dict.fromkeys(lines))
    shown = ", ".join(map(str, distinct[:MAX_LINES_NAMED])) + (" ..." if len(distinct) > MAX_LINES_NAMED else "")
    where = f"{name}, line{'s' * (len(distinct) > 1)} {shown}" if distinct else name
    return PlanError(f"{where}: {error.field}", error.value, error.allowed, error.grid, error.actions)


# Plans as text


class WrittenPlan:
    """A plan given as text: its placement, order and number of micro-batches are fixed.

    What is left to choose is how many sequences make a micro-batch, and the number of replicas.
    """

    fields = WRITTEN_FIELDS

    def __init__(self, name: str, text: str) -> None:
        self.path = name
        self.text = text
        try:
            self.written = Plan.parse(text)
        except BadInput as error:
            line = error.field.removeprefix("plan text, ")
            raise BadInput(f"{name}, {line}" if line != error.field else name, error.value, error.allowed) from None
        self.name = self.written.system
        self.summary = f"the plan written in {name}"
        self.fault: BadInput | None = None
        self._checked = cache(self._check)

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        written, placement = self.written, self.written.placement
        self._require_layers(spec.model)
        fits = spec.cluster.num_gpus // placement.size
        found = False
        for replicas in sorted(divisors(spec.workload.num_sequences), reverse=True):
            per_replica, left = divmod(spec.workload.num_sequences, replicas * placement.data_ranks)
            mbs, uneven = divmod(per_replica, written.num_microbatches)
            if replicas <= fits and not left and not uneven and mbs:
                found = True
                fixed = {field: getattr(written, field) for field in FIXED_BY_TEXT}
                yield Layout.make(mbs=mbs, replicas=replicas, **fixed)
        if not found:
            per_round = written.num_microbatches * placement.data_ranks * spec.workload.seq_len
            raise BadInput(
                "workload.global_batch_tokens",
                spec.workload.global_batch_tokens,
                f"a multiple of {per_round} for {self.path}: replicas (at most {fits} of {placement.size} GPUs) x "
                f"{written.num_microbatches} micro-batches x {placement.data_ranks} data ranks x seq_len",
            )

    def placement(self, case: Case) -> Placement:
        self._require_layers(case.model)
        return self.written.placement

    def plan(self, case: Case) -> Plan:
        written = self.written
        for field in FIXED_BY_TEXT:
            if getattr(case.layout, field) != getattr(written, field):
                wanted = f"{getattr(written, field)}, as {self.path} says"
                raise BadInput(f"layout.{field}", getattr(case.layout, field), wanted)
        dealt = batch_of(case, self.placement(case))
        if dealt.num_microbatches != written.num_microbatches:
            raise BadInput(
                "workload.global_batch_tokens",
                case.workload.global_batch_tokens,
                f"{written.num_microbatches} micro-batches, as {self.path} says; this layout makes "
                f"{dealt.num_microbatches}",
            )
        self._checked(case.model)
        return written

    def _require_layers(self, model: Model) -> None:
        dense = [expert is None for expert in self.written.placement.expert]
        if dense != [model.is_dense(layer) for layer in range(model.num_layers)]:
            what = f"a model of {len(dense)} layers, {sum(dense)} of them dense, as in {self.path}"
            raise BadInput("model", model.name, what)

    def _check(self, model: Model) -> None:
        try:
            check(lower(self.written, model))
        except PlanError as error:
            self.fault = self.located(error)
            raise self.fault from None

    def located(self, error: PlanError, _case: Case | None = None) -> PlanError:
        """The same fault, with the lines where its actions stand."""
        return _located(error, self.path, self._lines_of(error.actions))

    def _lines_of(self, actions: tuple[Action, ...]) -> list[int]:
        words = [str(action) for action in actions]
        lines = [set(line.split("#")[0].split()) for line in self.text.splitlines()]
        return [number for word in words for number, line in enumerate(lines, 1) if word in line]
