"""A directory of trials: one immutable JSON file a trial, written whole or not at all, never overwritten."""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import Case, CaseSpec
from bench.errors import BadInput
from bench.trial import FINISHED, Trial, content_id

if TYPE_CHECKING:
    from pandas import DataFrame

PUBLISHED = Path(__file__).resolve().parent.parent / "results" / "published"
"""Trials that come with the code."""

LOCAL = Path("results") / "local"
"""Where trials of this machine go, below the current directory."""


class ResultsWarning(UserWarning):
    """Files that lie among trials and are none."""


class Store:
    """Trials in one directory, and those of `also` for reading. The directory is made by the first write."""

    def __init__(self, directory: Path, also: Iterable[Path] = ()) -> None:
        self.directory = directory
        self.places = [directory, *also]
        self._known: list[Trial] | None = None

    def write(self, trial: Trial) -> Path:
        """Keeps `trial` and returns its file. An existing file of that name stays as it is.

        Raises BadInput where the directory cannot be written.
        """
        path = self.directory / f"{trial.name}.json"
        try:
            write_once(path, trial.to_text())
        except OSError as error:
            raise BadInput(
                "results", str(self.directory), f"a directory that can be written ({error.strerror})"
            ) from None
        if self._known is not None:
            self._known.append(trial)
        return path

    def trials(self) -> list[Trial]:
        """Every trial, oldest first; what is no trial is named in one warning."""
        if self._known is None:
            self._known = [trial for _, trial in read_trials(self.places)]
        return sorted(self._known, key=lambda trial: trial.created)

    def find(self, spec: CaseSpec, matches: Callable[[Trial], bool]) -> Trial | None:
        """The newest finished trial of `spec` (of a case: with its layout too) that `matches`."""
        wanted = content_id(spec)
        for trial in reversed(self.trials()):
            same = wanted == (trial.case_id if isinstance(spec, Case) else content_id(trial.spec))
            if same and trial.status in FINISHED and matches(trial):
                return trial
        return None


def write_once(path: Path, text: str) -> None:
    """Writes a file whole or not at all; one that exists is left alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
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


def read_trials(places: Iterable[Path]) -> Iterator[tuple[Path, Trial]]:
    """Trials in files and directories, by file name, each once; files that are none are named in one warning."""
    foreign: list[str] = []
    seen: set[str] = set()
    for path in _files(places):
        if path.name in seen:
            continue
        seen.add(path.name)
        try:
            trial = Trial.parse(path.read_bytes())
        except (OSError, BadInput) as error:
            reason = error.allowed if isinstance(error, BadInput) else (error.strerror or "unreadable")
            foreign.append(f"{path} ({reason[:80]})")
            continue
        yield path, trial
    if foreign:
        warnings.warn(f"not trials, left out: {', '.join(foreign)}", ResultsWarning, stacklevel=2)


def _files(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        if place.is_dir():
            yield from sorted(path for path in place.rglob("*.json") if not path.name.startswith("."))
        elif place.exists():
            yield place


def load(paths: Iterable[Path | str]) -> "DataFrame":
    """Trials in files and directories as a table, one row a trial; see `frame` for its columns."""
    return frame(trial for _, trial in read_trials(Path(path) for path in paths))


def frame(trials: Iterable[Trial]) -> "DataFrame":
    """Trials as a table, one row a trial.

    Columns: case_id, source, status, message, system, model, cluster, num_gpus, seq_len, global_batch_tokens, dtype,
    routing, seed, layout (text), assumptions, code_digest, created, command, and one for each metric, whose name
    carries its unit.
    """
    import pandas as pd

    return pd.DataFrame([_row(trial) for trial in trials])


def _row(trial: Trial) -> dict[str, Any]:
    case = trial.case
    return {
        "case_id": trial.case_id,
        "source": trial.source,
        "status": trial.status,
        "message": trial.message,
        "system": case.system,
        "model": case.model.name,
        "cluster": case.cluster.name,
        "num_gpus": case.cluster.num_gpus,
        **{name: getattr(case.workload, name) for name in type(case.workload).model_fields},
        "layout": trial.layout,
        "assumptions": trial.assumptions,
        "code_digest": trial.code_digest,
        "created": trial.created,
        "command": trial.command,
        **trial.metrics,
    }
