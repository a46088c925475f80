"""What verbs print: one JSON object, or tables for people."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.errors import BadInput

GIB = 2**30


def print_json(content: Mapping[str, Any]) -> None:
    """One JSON object on stdout. What JSON has no number for (nan, infinity) becomes null."""
    sys.stdout.write(json.dumps(_plain(content), allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout; columns after the first are right-aligned where all of them are numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = [[shown(cell) for cell in row] for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for i, column in enumerate(columns):
        numbers = bool(lines) and all(line[i][:1].isdigit() or line[i][:1] in "-" for line in lines)
        table.add_column(column, justify="right" if numbers and i else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    # A pipe has no width: let lines be as long as they are, so that they can be searched.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)


def print_facts(title: str, facts: Mapping[str, object]) -> None:
    """Names and values, one a line."""
    width = max(len(name) for name in facts)
    lines = [title, *(f"  {name:<{width}}  {shown(value)}" for name, value in facts.items())]
    sys.stdout.write("\n".join(lines) + "\n")


def shown(value: object) -> str:
    """A value for people: four significant digits, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10**4 else str(value)
    return str(value)


@contextmanager
def working(title: str, lines: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr while the block runs, where stderr is a terminal; else nothing, or lines if asked for.

    Gives the function that moves it: (number done, number of all, what).
    """
    if not sys.stderr.isatty():
        yield partial(_line, title) if lines else lambda _done, _total, _what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # A plan may take minutes in which nothing is counted: what turns and the time that passes say that it goes on.
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{title}: {what}")

        yield advance


def _line(title: str, done: int, total: int, what: str) -> None:
    count = f" {done} of {total}:" if total else ""
    sys.stderr.write(f"{title}:{count} {what}\n")
    sys.stderr.flush()


def require_new_file(field: str, path: Path) -> None:
    """Raises BadInput where `path` exists, or its folder cannot be written in; makes nothing."""
    if path.exists():
        raise BadInput(field, str(path), "a file that is not there yet")
    if not path.absolute().parent.is_dir():
        raise BadInput(field, str(path), "a file in a folder that is there")
    require_folder(field, path.absolute().parent)


def require_folder(field: str, folder: Path) -> None:
    """Raises BadInput where `folder` cannot be a directory to write in; makes nothing."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise BadInput(field, str(folder), f"a directory; {nearest} is a file")
    if not os.access(nearest, os.W_OK):
        raise BadInput(field, str(folder), f"a directory that can be written; {nearest} cannot")
