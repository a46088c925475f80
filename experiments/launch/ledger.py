"""What is claimed and what is done: small files beside the trials, each made whole by one atomic link.

``launch/claims/KEY.GENERATION`` says who runs a task. The highest generation holds; whoever wants to take over makes
the next one, which only one can. Nothing is ever removed or changed, so no lock can be lost. ``launch/done/KEY`` is
made by whoever finishes first; a second result is discarded there.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BadInput
from bench.results import Store
from bench.trial import Trial
from experiments.launch.locks import Heartbeats, Process


@dataclass(frozen=True)
class Claim:
    """A task in somebody's hands.

    generation: counts claims of the task. attempt: counts starts of it that came to nothing, and this one.
    owner: the sweep that claimed it. job: name of the job's folder, "" where the owner runs it itself; element: its
    place in the job's array.
    """

    key: str
    generation: int
    attempt: int
    owner: Process
    job: str = ""
    element: int = 0

    def to_text(self) -> str:
        return json.dumps({**self.__dict__, "owner": self.owner.fields()}, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Claim":
        """Raises ValueError for what is no claim."""
        fields = json.loads(text)
        try:
            return cls(**{**fields, "owner": Process.parse(fields["owner"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"no claim: {error}") from None


class Ledger:
    """Claims and ends of tasks in a results folder. Raises BadInput where it cannot be written."""

    def __init__(self, results: Path) -> None:
        self.results = results.absolute()
        self.root = self.results / "launch"
        self.jobs, self.sweeps = self.root / "jobs", self.root / "sweeps"
        self._claims, self._done = self.root / "claims", self.root / "done"
        self.beats = Heartbeats(self.root / "beats")
        self.store = Store(self.results)

    def make(self) -> None:
        try:
            for folder in (self.jobs, self.sweeps, self._claims, self._done):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self._claims / f".{Process.current().name}"
            link_new(probe, "")  # a file system without hard links cannot keep claims
            probe.unlink()
        except OSError as error:
            allowed = f"a directory that can be written, with hard links ({error.strerror})"
            raise BadInput("results", str(self.results), allowed) from None

    def claims(self, keys: Iterable[str]) -> dict[str, Claim]:
        """The claim that holds, for each of `keys` that ever was claimed."""
        newest: dict[str, int] = {}
        with os.scandir(self._claims) as entries:
            for entry in entries:
                key, _, number = entry.name.partition(".")
                if key and number.isdigit():
                    newest[key] = max(newest.get(key, 0), int(number))
        return {key: self._read(key, newest[key]) for key in keys if key in newest}

    def history(self, key: str) -> list[Claim]:
        """All claims of a task, oldest first."""
        numbers = sorted(path.name.partition(".")[2] for path in self._claims.glob(f"{key}.*"))
        return [self._read(key, int(number)) for number in numbers if number.isdigit()]

    def _read(self, key: str, generation: int) -> Claim:
        try:
            return Claim.parse(self._claim_path(key, generation).read_text())
        except ValueError:  # after a power failure it may be there and empty: of whoever it was, nothing is known
            return Claim(key, generation, 1, Process("", 0, ""))

    def _claim_path(self, key: str, generation: int) -> Path:
        return self._claims / f"{key}.{generation:04d}"

    def claim(self, claim: Claim) -> bool:
        """Takes a task; False where somebody else has made that generation."""
        return link_new(self._claim_path(claim.key, claim.generation), claim.to_text())

    def holds(self, key: str, generation: int) -> bool:
        """Whether nobody has taken over, and the task is not done."""
        ends = (self._claim_path(key, generation + 1), self._done / key, self._closed_path(key, generation))
        return not any(path.exists() for path in ends)

    def done(self) -> set[str]:
        """Keys of the tasks that have their final record."""
        with os.scandir(self._done) as entries:
            return {entry.name for entry in entries if entry.name[0] != "." and "." not in entry.name}

    def commit(self, key: str, trial: Trial) -> bool:
        """Keeps the final record of a task; False where it has one. Survives being killed at any point."""
        marked = mark(trial, key)
        # A simulation that the power takes away comes again; see `recover` for what it leaves.
        if not link_new(self._done / key, marked.to_text(), durable=trial.source == "measured"):
            return False
        self._keep(key, marked)
        return True

    def _keep(self, key: str, trial: Trial) -> None:
        """Makes the record a trial of the results, and lets the end of the task name it."""
        name = self.store.write(trial).stem if trial.samples or trial.telemetry_samples else self._link(key, trial)
        replace(self._done / key, f"{name}\n")

    def _link(self, key: str, trial: Trial) -> str:
        """A second name for the file that is on disk already, which is much faster than writing another."""
        name = trial.name
        for number in range(2, 10_000):
            path = self.results / f"{name}.json"
            try:
                os.link(self._done / key, path)
                break
            except FileExistsError:
                if os.path.samefile(self._done / key, path) or _says_the_same(path, trial):
                    break
                name = f"{trial.name}-{number}"  # such as an earlier failure of the same simulation
        return name

    def recover(self) -> None:
        """Finishes commits that were cut short, and forgets ends whose trial is gone or was never written to disk."""
        for key in self.done():
            try:
                name = self._settled(key)
            except BadInput:
                continue  # of another version of the code
            if not name or not _is_whole(self.results / f"{name}.json"):
                self.reopen(key)

    def _settled(self, key: str) -> str:
        """Name of the trial of a task that is done, "" of one that is not.

        Whoever reads an end first makes sure that its trial is there.
        """
        try:
            text = (self._done / key).read_text(errors="replace")  # a damaged one names no trial, and is forgotten
        except FileNotFoundError:
            return ""
        if text.startswith("{"):
            self._keep(key, Trial.parse(text))
            text = (self._done / key).read_text()
        name = text.strip()
        return name if name.isprintable() else "damaged"

    def trial(self, key: str) -> Trial | None:
        """The final record of a task, without series; None where there is none that this version of the code reads."""
        try:
            return Trial.parse((self.results / f"{self._settled(key)}.json").read_bytes())
        except (FileNotFoundError, BadInput):
            return None

    def name_of_record(self, key: str) -> str:
        """File name, without ending, of the final record, which begins with the case's id; "" where there is none."""
        try:
            return self._settled(key)
        except BadInput:
            return ""

    def reopen(self, key: str) -> None:
        """Lets a finished task run again, as if for the first time; its record stays in the results."""
        claim = self.claims([key]).get(key)
        closed = self._closed_path(key, claim.generation if claim else 0)
        with contextlib.suppress(FileNotFoundError):
            (self._done / key).rename(closed)

    def closed(self, claim: Claim) -> bool:
        """Whether a claim belongs to what was finished before the task was opened again."""
        return self._closed_path(claim.key, claim.generation).exists()

    def _closed_path(self, key: str, generation: int) -> Path:
        return self._done / f"{key}.{generation:04d}"


def _is_whole(path: Path) -> bool:
    """Whether a file is there and was written: after a power failure it may be there and empty."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _says_the_same(path: Path, trial: Trial) -> bool:
    """Whether a file holds the trial, made at whatever time and place."""
    try:
        kept = Trial.parse(path.read_bytes())
    except BadInput:
        return False
    told = {"case_id", "source", "status", "metrics", "samples", "code_digest"}
    return kept.model_dump(include=told) == trial.model_dump(include=told)


def mark(trial: Trial, key: str) -> Trial:
    """The trial with the key of its task in its provenance."""
    return trial.model_copy(update={"provenance": {**trial.provenance, "task": key}})


def link_new(path: Path, text: str, durable: bool = False) -> bool:
    """Makes a file whole; False where one of that name exists, which stays as it is."""
    temporary = _temporary(path, text, durable)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True


def replace(path: Path, text: str) -> None:
    """Writes a file whole, in place of one that may exist."""
    os.replace(_temporary(path, text, False), path)


def _temporary(path: Path, text: str, durable: bool) -> str:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except OSError as error:  # a full disk names no file
        os.unlink(name)
        raise OSError(error.errno, error.strerror, str(path)) from None
    os.chmod(name, 0o644)
    return name


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects, one a line; a last line that is cut short is left out."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
