"""A Python file's code: executed, its errors said in one line that names the file's, its output kept off stdout."""

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from bench.action import Action, BadPlan
from bench.errors import BadInput
from bench.system import require_name, require_system


class ExecutesFile(UserWarning):
    """A Python file is about to be executed."""


class Source:
    """A Python file and the one system in it. Raises BadInput where it has none."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name = name
        self.path = path
        warnings.warn(f"{name} is Python and will now be executed", ExecutesFile, stacklevel=6)
        module = ModuleType(f"schedule_file_{path.stem}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # dataclasses look their module up
        with self.blamed():
            exec(compile(text, str(path), "exec"), module.__dict__)
            self.system = self._only_class(module)()
            require_system(name, self.system)
            require_name(f"{name}: name", self.system.name)

    def _only_class(self, module: ModuleType) -> Callable[[], Any]:
        found = [
            thing
            for thing in dict.fromkeys(thing for thing in vars(module).values() if isinstance(thing, type))
            if thing.__module__ == module.__name__ and not thing.__name__.startswith("_")
        ]
        chosen = [thing for thing in found if callable(getattr(thing, "plan", None))]
        if len(chosen) != 1:
            names = [thing.__name__ for thing in chosen or found]
            raise BadInput(self.name, names, "exactly one class with a method plan(case); others begin with _")
        return chosen[0]

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """The file's code runs inside: what it prints goes to stderr, for stdout is for results.

        Its errors become a fault in one line that names the file's; input that it refuses passes.
        """
        try:
            with redirect_stdout(sys.stderr):
                yield
        except BadInput as error:
            if isinstance(error, BadPlan) and not error.actions:
                self.refuse(error.value, error.allowed, self._last_line(error), error.field)
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SyntaxError) and error.filename == str(self.path):
                self.refuse((error.text or "").strip(), error.msg, error.lineno)
            allowed = "code that raises BadInput for what it refuses, and nothing else"
            self.refuse(traceback.format_exception_only(error)[-1].strip(), allowed, self._last_line(error))

    def _last_line(self, error: BaseException) -> int | None:
        """The file's line that was running last."""
        frames = traceback.extract_tb(error.__traceback__)
        return next((frame.lineno for frame in reversed(frames) if frame.filename == str(self.path)), None)

    def refuse(self, value: object, allowed: str, line: int | None = None, field: str = "") -> NoReturn:
        """Raises BadInput for a fault of the file."""
        where = self.name if line is None else f"{self.name}, line {line}"
        error = BadInput(f"{where}: {field}" if field else where, value, allowed)
        error.fault = True
        raise error from None

    def lines_of(self, actions: tuple[Action, ...], again: Callable[[], object]) -> list[int]:
        """Lines of the file that make the actions, found by making the plan `again`, each creation noted."""
        made: list[tuple[Action, int]] = []
        make, filename = Action.__new__, str(self.path)

        def noting(cls: type[Action], *args: Any, **fields: Any) -> Action:
            action = make(cls, *args, **fields)
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != filename:
                frame = frame.f_back
            if frame is not None and action in actions:
                made.append((action, frame.f_lineno))
            return action

        Action.__new__ = noting  # type: ignore[method-assign,assignment]
        try:
            with suppress(BadInput), self.blamed():
                again()
        finally:
            Action.__new__ = make  # type: ignore[method-assign]
        return [line for action in actions for which, line in made if which == action]
