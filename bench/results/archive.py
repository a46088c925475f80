"""Trials taken elsewhere: as one archive with everything, or as a table; and taken in again."""

import io
import os
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bench.errors import BadInput
from bench.results.files import Foreign
from bench.results.store import Store, read_trials
from bench.trial import Trial

MAX_MEMBER_BYTES = 1 << 30
FORMATS = (".csv", ".parquet", ".jsonl")


class Imported(NamedTuple):
    """How many trials were taken in, and how many were there already."""

    new: int
    known: int


def archive(trials: Iterable[tuple[Path, Trial]], out: Path) -> int:
    """Writes a gzipped tar file with the records of `trials` and the series beside them; the number of trials.

    The file appears whole or not at all. Raises BadInput where it exists or cannot be written.
    """
    count = 0
    with _new_file(out) as temporary, tarfile.open(temporary, "w:gz", compresslevel=6) as tar:
        for path, trial in trials:
            count += 1
            text = path.read_bytes()
            for one in Trial.parse(text).series.values():
                _add(tar, one.file, (path.parent / one.file).read_bytes(), trial)
            _add(tar, path.name, text, trial)
    return count


def _add(tar: tarfile.TarFile, name: str, content: bytes, trial: Trial) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(content), int(trial.created.timestamp())
    tar.addfile(info, io.BytesIO(content))


class _new_file:  # noqa: N801 - a context manager
    """A path to write to; at the end, without an error, it is the file's name."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def __enter__(self) -> Path:
        if self.out.exists():
            raise BadInput("file", str(self.out), "a file that does not exist yet")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.out.parent, prefix=".", suffix=".tmp")
        except OSError as error:
            raise BadInput("file", str(self.out), f"a file that can be written ({error.strerror})") from None
        os.close(handle)
        self.temporary = Path(name)
        return self.temporary

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                os.chmod(self.temporary, 0o644)
                os.link(self.temporary, self.out)
        except FileExistsError:
            raise BadInput("file", str(self.out), "a file that does not exist yet") from None
        finally:
            self.temporary.unlink()
        if isinstance(error, OSError):
            raise BadInput("file", str(self.out), f"a file that can be written ({error.strerror})") from None


def take_in(source: Path, store: Store) -> Imported:
    """Keeps every trial of an archive, a folder or a record's file in `store`.

    Trials are read and checked before they are kept; what is none is named in one warning. Raises BadInput where there
    is nothing of that name, or no whole archive.
    """
    if not source.exists():
        raise BadInput("source", str(source), "an archive, a folder of trials or a record")
    if source.is_dir() or source.suffix == ".json":
        return _keep(read_trials([source]), store)
    with tempfile.TemporaryDirectory(prefix="moebench-import-") as folder:
        _unpack(source, Path(folder))
        return _keep(read_trials([Path(folder)]), store)


def _keep(trials: Iterable[tuple[Path, Trial]], store: Store) -> Imported:
    new = known = 0
    for _, trial in trials:
        there = (store.directory / f"{trial.name}.json").exists()
        store.write(trial)
        new, known = new + (not there), known + there
    return Imported(new, known)


def _unpack(source: Path, folder: Path) -> None:
    """Members with plain names of files only, whatever else an archive may hold."""
    foreign = Foreign()
    try:
        with tarfile.open(source, "r:*") as tar:
            for member in tar:
                plain = Path(member.name).name == member.name and not member.name.startswith(".")
                content = tar.extractfile(member) if member.isreg() and plain else None
                if content is None or member.size > MAX_MEMBER_BYTES or not member.name.endswith((".json", ".parquet")):
                    foreign.add(Path(member.name), BadInput("member", member.name, "a record or a series"))
                    continue
                (folder / member.name).write_bytes(content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BadInput(
            "source", str(source), f"a whole archive that `moebench results archive` wrote ({error})"
        ) from None
    foreign.warn()


def export(trials: Iterable[Trial], out: Path) -> int:
    """Writes a table (.csv, .parquet), or a record with its series a line (.jsonl); the number of trials.

    The file appears whole or not at all. Raises BadInput for another ending, and where it exists or cannot be written.
    """
    from bench.results.table import frame

    if out.suffix not in FORMATS:
        raise BadInput("file", str(out), f"a name that ends in {', '.join(FORMATS)}")
    kept = list(trials)
    with _new_file(out) as temporary:
        if out.suffix == ".jsonl":
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(" ".join(trial.to_text().split("\n")).rstrip() + "\n" for trial in kept)
        elif out.suffix == ".csv":
            frame(kept).to_csv(temporary, index=False)
        else:
            frame(kept).to_parquet(temporary, index=False)
    return len(kept)
