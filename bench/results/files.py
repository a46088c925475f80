"""Files that appear whole or not at all and never change; and the files among which trials are looked for."""

import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.errors import BadInput


class ResultsWarning(UserWarning):
    """Files that lie among trials and are none."""


def write_once(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all; one that exists is left alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        try:
            os.link(temporary, path)  # refuses to overwrite, and shows the name only once the content is there
        except FileExistsError:
            return
        _sync_folder(path.parent)
    finally:
        os.unlink(temporary)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_files(places: Iterable[Path]) -> Iterator[Path]:
    """Files given, and every JSON file below folders given, in the order of their paths; each name once.

    Hidden files and folders are not looked at.
    """
    seen: set[str] = set()
    for place in places:
        found = _below(place) if place.is_dir() else iter([place] if place.exists() else [])
        for path in found:
            if path.name not in seen:
                seen.add(path.name)
                yield path


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(parent)
        yield from (here / name for name in sorted(names) if name.endswith(".json") and not name.startswith("."))


class Foreign:
    """Collects files that are no whole trials, and names them in one warning."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, path: Path, error: OSError | BadInput) -> None:
        if isinstance(error, BadInput):
            newer = "newer version" in error.allowed
            reason = f"newer: schema_version {error.value}" if newer else error.allowed
        else:
            reason = error.strerror or "unreadable"
        self._lines.append(f"{path} ({reason[:80]})")

    def warn(self) -> None:
        """Says what was collected, if anything was."""
        if self._lines:
            warnings.warn(f"not trials, left out: {', '.join(self._lines)}", ResultsWarning, stacklevel=3)
