"""Trials in folders: kept, read, found."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bench.case import Case, CaseSpec
from bench.errors import BadInput
from bench.results.files import Foreign, json_files, write_once
from bench.results.series import put_series, take_series
from bench.trial import FINISHED, Trial, content_id


class Store:
    """Trials in one directory, and those of `also` for reading. The directory is made by the first write."""

    def __init__(self, directory: Path, also: Iterable[Path] = ()) -> None:
        self.directory = directory
        self.places = [directory, *also]
        self._known: list[Trial] | None = None

    def write(self, trial: Trial) -> Path:
        """Keeps `trial` and returns its record's file. An existing file of that name stays as it is.

        The record comes last: a trial is there, with all its series, or it is not. Raises BadInput where the directory
        cannot be written; then the same call may be made again.
        """
        path = self.directory / f"{trial.name}.json"
        try:
            write_once(path, put_series(self.directory, trial).to_text())
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


def read_trial(path: Path) -> Trial:
    """The trial of a record's file, with its series. Raises BadInput, OSError."""
    return take_series(path.parent, Trial.parse(path.read_bytes()))


def read_trials(
    places: Iterable[Path], *, series: bool = True, wanted: Callable[[bytes], bool] | None = None
) -> Iterator[tuple[Path, Trial]]:
    """Trials in files and directories, by file name, each once; files that are none are named in one warning.

    Hidden files and folders are not looked at. Without `series` the records alone are read, which is faster. `wanted`
    may tell by the text of a record that it need not be parsed.
    """
    foreign = Foreign()
    for path in json_files(places):
        try:
            text = path.read_bytes()
            if wanted is not None and not wanted(text):
                continue
            trial = Trial.parse(text)
            if series:
                trial = take_series(path.parent, trial)
        except (OSError, BadInput) as error:
            foreign.add(path, error)
            continue
        yield path, trial
    foreign.warn()
