"""Schedules in files: a Python file with one class that is a system, or the text of a plan.

A schedule file stands wherever a system's name does; its path is the name of the system in cases and trials. A Python
file is executed, with all rights of the user, which a warning says before it happens; a text is only read. Faults of
either name the file's line: of a text the line of the action, of a Python file the line that made the action.
"""

from functools import lru_cache
from pathlib import Path

from bench.case import Case
from bench.check import PlanError
from bench.errors import BadInput
from bench.loading.python_file import PythonFile
from bench.loading.source import ExecutesFile, Source
from bench.loading.written import WrittenPlan
from bench.system import System, get_system

__all__ = ["ExecutesFile", "PythonFile", "WrittenPlan", "is_schedule_file", "load", "located"]

ENDINGS = (".py", ".txt")
MAX_BYTES = 1 << 28


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
    text = path.read_text(encoding="utf-8-sig")
    return WrittenPlan(name, text) if path.suffix == ".txt" else PythonFile(Source(name, path, text))


def located(error: PlanError, case: Case) -> PlanError:
    """A fault of a case's plan: where its system is a schedule file, with the file's lines."""
    system = get_system(case.system)
    return system.located(error, case) if isinstance(system, PythonFile | WrittenPlan) else error
