"""What a checkpoint says of itself, and whether a folder holds a whole one that a run can go on from. No torch.

DIR/latest                  the name of the last whole checkpoint
DIR/step-00000040/          the training state after 40 steps
    checkpoint.json         this manifest, written last: case, data, optimizer, files and their sizes
    .metadata  *.distcp     torch.distributed.checkpoint's own
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.case import Case
from bench.errors import BadInput
from bench.models import Model

MANIFEST, LATEST, METADATA = "checkpoint.json", "latest", ".metadata"


class Manifest(BaseModel):
    """What was trained, how far, and which files hold it.

    Attributes:
        step: steps done, and so the number of the next one: with the case it says which sequences follow.
        steps: that the run was to do. save_every: steps between checkpoints; None where it was only the last one.
        case: model, workload, system and layout that saved it. data: corpus, see `bench.execute.data.open_corpus`.
        corpus: provenance of the corpus, which differs where its content does.
        optimizer: the fields of `OptimizerSettings`.
        files: name -> bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    save_every: Annotated[int, Field(ge=1)] | None
    case: Case
    data: str
    corpus: dict[str, Any]
    optimizer: dict[str, Any]
    files: dict[str, int]

    def to_text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"


class Saved(NamedTuple):
    """A whole checkpoint on disk."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def require_same_run(self, case: Case, corpus: dict[str, Any]) -> None:
        """Raises BadInput where a run of `case` cannot go on from here: another model, other sequences or dtype.

        System, layout and cluster may be others, and so may the path of a corpus with the same content.
        """
        ours, model = self.manifest.case, case.model
        if _content(ours.model) != _content(model):
            raise self._refused(f"a checkpoint of {model.name}; this one is of {_difference(ours.model, model)}")
        for field in type(case.workload).model_fields:
            value, wanted = getattr(ours.workload, field), getattr(case.workload, field)
            if value != wanted:
                raise self._refused(f"a checkpoint with {field} {wanted}; this one has {value}")
        for field, value in corpus.items():
            if self.manifest.corpus.get(field) != value:
                there = self.manifest.corpus.get(field)
                raise self._refused(f"a checkpoint whose corpus has {field} {value}; this one's has {there}")

    def _refused(self, allowed: str) -> BadInput:
        return BadInput("resume", str(self.folder), allowed)


def step_name(step: int) -> str:
    """Name of the folder of a checkpoint after so many steps."""
    return f"step-{step:08d}"


def find_saved(folder: Path) -> Saved:
    """The checkpoint of a folder: the one that its marker names, or the folder itself where it is one.

    Raises:
        BadInput: there is none, or a file of it is missing, cut or not a manifest.
    """
    if (folder / MANIFEST).exists():
        return _read(folder)
    if not folder.is_dir():
        raise BadInput("resume", str(folder), "a folder with checkpoints; there is no such folder")
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise BadInput("resume", str(folder), f"a folder with checkpoints; it has no file {LATEST!r}") from None
    try:
        return _read(folder / name)
    except BadInput as error:
        others = [saved.folder.name for saved in whole_ones(folder)]
        also = f"; whole is {folder / others[-1]}" if others else ""
        raise BadInput(error.field, error.value, error.allowed + also) from None


def whole_ones(folder: Path) -> Iterator[Saved]:
    """Every whole checkpoint in a folder, the oldest first."""
    for path in sorted(folder.glob("step-*")):
        try:
            yield _read(path)
        except BadInput:
            continue


def _read(folder: Path) -> Saved:
    """Raises BadInput."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError:
        raise BadInput("resume", str(folder), f"a whole checkpoint; it has no file {MANIFEST}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise BadInput("resume", str(path), f"a manifest of format 1 ({where}: {first['msg']})") from None
    for name, size in manifest.files.items():
        found = _size(folder / name)
        if found != size:
            said = f"{name} is missing" if found is None else f"{name} has {found} bytes of {size}"
            raise BadInput("resume", str(folder), f"a whole checkpoint; {said}")
    return Saved(folder, manifest)


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _content(model: Model) -> dict[str, Any]:
    return model.model_dump(exclude={"name"})


def _difference(there: Model, here: Model) -> str:
    """The other model's name, with the first field in which it differs."""
    fields = type(there).model_fields
    field = next(name for name in fields if name != "name" and getattr(there, name) != getattr(here, name))
    return f"{there.name}, with {field} {getattr(there, field)} instead of {getattr(here, field)}"


def settings_json(settings: Any) -> dict[str, Any]:
    """The fields of `OptimizerSettings` as JSON has them."""
    fields: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
    return fields
