"""Checkpoints by torch.distributed.checkpoint, free of layouts: what one system saves, any other loads.

Every rank writes the boxes of global tensors that it alone has (`bench.execute.shards`), into a folder that is renamed
when it is whole and on disk; then the marker is moved. A run that is killed at any time leaves the last whole
checkpoint and its marker. Loading reads tensors alone: nothing in a checkpoint is executed.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bench.errors import BadInput
from bench.execute.manifest import LATEST, MANIFEST, METADATA, Manifest, Saved, step_name
from bench.execute.shards import Shard, global_shapes

NUM_KEPT = 2  # checkpoints in a folder; older ones go when the marker is on a newer one


@dataclass(frozen=True)
class Saving:
    """Where and how often a run saves; always after its last step.

    Attributes:
        every: steps between checkpoints; None for the last step only.
    """

    folder: Path
    every: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise BadInput("save_every", self.every, "at least 1")

    def is_due(self, num_done: int, steps: int) -> bool:
        """After `num_done` of `steps` steps."""
        return num_done == steps or (self.every is not None and num_done % self.every == 0)


def save(folder: Path, shards: Sequence[Shard], manifest: Manifest) -> Path:
    """Writes a checkpoint; called by all ranks of the default process group together.

    Args:
        shards: this rank's. manifest: without `files`, which are filled in.
    Returns:
        the folder of the checkpoint, which is whole and on disk.
    """
    whole = folder / step_name(manifest.step)
    partial = folder / f".{whole.name}.partial"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*.partial"):
            shutil.rmtree(left)
    dist.barrier()
    writer = dcp.FileSystemWriter(partial, sync_files=True)
    dcp.save({}, storage_writer=writer, planner=_SavePlanner(shards))
    if dist.get_rank() == 0:
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        _write(partial / MANIFEST, manifest.model_copy(update={"files": files}).to_text())
        if whole.exists():  # of a run that was killed before the marker was moved
            shutil.rmtree(whole)
        partial.rename(whole)
        _sync(folder)
        _write(folder / f".{LATEST}.new", whole.name + "\n")
        (folder / f".{LATEST}.new").rename(folder / LATEST)
        _sync(folder)
        for old in sorted(path for path in folder.glob("step-*") if path.name <= whole.name)[:-NUM_KEPT]:
            shutil.rmtree(old)
    dist.barrier()
    return whole


def load(saved: Saved, shards: Sequence[Shard]) -> None:
    """Fills the tensors of `shards` from a checkpoint; called by all ranks together."""
    dcp.load({}, storage_reader=_Reader(saved.folder), planner=_LoadPlanner(shards))


def require_loadable(saved: Saved) -> None:
    """Raises BadInput where a checkpoint's tensors are not those of its own model."""
    metadata = _Reader(saved.folder).read_metadata().state_dict_metadata
    for name, shape in global_shapes(saved.manifest.case.model).items():
        if name not in metadata:
            raise BadInput("resume", str(saved.folder), f"a whole checkpoint; it has no tensor {name}")
        found = tuple(getattr(metadata[name], "size", ()))
        if found != shape:
            raise BadInput("resume", str(saved.folder), f"a tensor {name} of shape {shape}; it has {found}")


def require_free(folder: Path, saved: Saved | None) -> None:
    """Raises BadInput where a folder has checkpoints, and their last one is not what the run goes on from."""
    marker = folder / LATEST
    if not marker.exists():
        return
    if saved is None or saved.folder.resolve() != (folder / marker.read_text(encoding="utf-8").strip()).resolve():
        raise BadInput("save", str(folder), "a folder without checkpoints, or that of which the last one is resumed")


class _SavePlanner(DefaultSavePlanner):
    """Plans boxes in place of a state dict."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = {MetadataIndex(one.name, one.offsets): one.tensor for one in shards}
        self._shapes = {one.name: torch.Size(one.shape) for one in shards}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(index, tensor) for index, tensor in self._tensors.items()])
        return self.plan

    def _item(self, index: MetadataIndex, tensor: Tensor) -> WriteItem:
        assert index.offset is not None
        chunk = ChunkStorageMetadata(index.offset, tensor.size())
        properties = TensorProperties(dtype=tensor.dtype)
        return WriteItem(index, WriteItemType.SHARD, None, TensorWriteData(chunk, properties, self._shapes[index.fqn]))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index].detach()


class _LoadPlanner(LoadPlanner):
    """Reads whatever overlaps this rank's boxes."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._tensors = {MetadataIndex(one.name, one.offsets): one.tensor for one in shards}
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        by_name: dict[str, list[ChunkStorageMetadata]] = {}
        for index, tensor in self._tensors.items():
            assert index.offset is not None
            by_name.setdefault(index.fqn, []).append(ChunkStorageMetadata(index.offset, tensor.size()))
        items: list[ReadItem] = []
        for name, chunks in by_name.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._tensors[read_item.dest_index].detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The tensor that was filled is the training state's own."""


class _Reader(dcp.FileSystemReader):
    """torch reads tensors with ``weights_only``, but metadata with pickle: here with a list of what may be in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError) as error:
                raise BadInput("resume", str(self.path), f"a checkpoint whose metadata can be read ({error})") from None
        if not isinstance(metadata, Metadata):
            raise BadInput("resume", str(self.path), f"a checkpoint's metadata, not {type(metadata).__name__}")
        return metadata


_METADATA_HOLDS = {
    "torch": ("Size", "float32", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),  # Python 3.13
}


def _member(kind: object, name: str) -> Enum:
    """A member of an enumeration, as the first releases of Python 3.11 write one: ``getattr(kind, name)``."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"it takes {name} from {kind!r}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        if global_name in _METADATA_HOLDS.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Renames and new names in a folder are on disk when it is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
