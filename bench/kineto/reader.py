"""What a trace of one process says that bears on its GPUs, as columns."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput
from bench.kineto.document import BLOCK_BYTES, WHOLE, Document, Event
from bench.trace import EXPORTER

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Categories as Kineto has named them over the years.
_WORK = {"kernel": 0, "gpu_memcpy": 0, "gpu_memset": 0, "Kernel": 0, "Memcpy": 0, "Memset": 0}
_LAUNCH = {"cuda_runtime": 1, "cuda_driver": 1, "Runtime": 1, "hip_runtime": 1}
_OTHER = {"user_annotation": 2, "gpu_user_annotation": 3, "cpu_op": 4, "Operator": 4}
_CATEGORIES = _WORK | _LAUNCH | _OTHER
_IS_WORK, _IS_LAUNCH, _IS_ANNOTATION, _IS_GPU_ANNOTATION, _IS_OPERATOR = range(5)
FORWARD_OP, BACKWARD_OP = 1, 2
_ENGINE = "autograd::engine::evaluate_function"
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Columns:
    """Columns of one length, one entry an event.

    lane: index into `RankTrace.streams` or `RankTrace.threads`. name: index into `RankTrace.names`; -1 where it does
    not matter. start_ns, end_ns: from `RankTrace.origin_us`. correlation: what a launch shares with the work that it
    launched, -1 for none. The other columns are there for GPU work (`collective`, `process_group`: index into `names`
    or -1) and for operators (`role`: FORWARD_OP or BACKWARD_OP).
    """

    lane: Ints
    name: Ints
    start_ns: Ints
    end_ns: Ints
    correlation: Ints
    collective: Ints
    process_group: Ints
    role: Ints

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True)
class RankTrace:
    """One file.

    work: kernels, copies and memsets; lane is a stream. launches: runtime and driver calls with a correlation.
    annotations: `record_function` ranges of the CPU; gpu_annotations: the same as Kineto projects them on streams.
    operators: CPU operators of the forward pass (they have a sequence number) and of the autograd engine.
    streams: (device, stream) numbers. threads: (pid, tid). device_names: by device number.
    origin_us: the trace's own time of 0 ns. base_ns: what the header says to add to the trace's times, or None.
    """

    path: Path
    rank: int
    rank_is_known: bool
    world_size: int | None
    num_events: int
    names: list[str]
    streams: list[tuple[int, int]]
    threads: list[tuple[str, str]]
    device_names: Mapping[int, str]
    origin_us: float
    base_ns: int | None
    work: Columns
    launches: Columns
    annotations: Columns
    gpu_annotations: Columns
    operators: Columns


def read_trace(path: Path | str, position: int = 0, block_bytes: int = BLOCK_BYTES) -> RankTrace:
    """Reads one file, gzipped or not, in blocks.

    Args:
        position: the rank to assume where neither the trace nor the file's name says it.
    Raises BadInput where the file is not a whole trace, an event of the GPU has no time, or there is none.
    """
    document = Document(path, block_bytes)
    events = _Events(document.path)
    for block in document.blocks():
        events.add(block)
    if not events.columns[_IS_WORK].num:
        _require_profiled(document)
        raise BadInput(
            "trace",
            document.path.name,
            f"a trace with GPU work (profile with ProfilerActivity.CUDA): of its {events.num:,} events none is a "
            "kernel, a copy or a memset",
        )
    return _finished(document, events, position)


def _require_profiled(document: Document) -> None:
    """Raises BadInput for an export of ours, whose operations are those of a plan and no kernels."""
    about = document.header.get("otherData")
    if isinstance(about, dict) and about.get("exporter") == EXPORTER:
        own = f"this is moebench's own export of a {about.get('source')} timeline, see `moebench explain`"
        raise BadInput("trace", document.path.name, f"a profiler's trace, with GPU kernels; {own}")


@dataclass
class _Growing:
    """Columns under construction: blocks as arrays."""

    parts: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    num: int = 0

    def add(self, rows: list[tuple[Any, ...]], path: Path) -> None:
        if not rows:
            return
        lane, name, ts, dur, correlation, *rest = zip(*rows, strict=True)
        try:
            times = (np.array(ts, dtype=np.float64), np.array(dur, dtype=np.float64))
            ids = tuple(np.array(column, dtype=np.int32) for column in (lane, name, *rest))
            links = np.array(correlation, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            raise BadInput("trace", path.name, f"{WHOLE}; an event's time or correlation is no number") from None
        if not all(np.isfinite(column).all() for column in times):
            raise BadInput("trace", path.name, f"{WHOLE}; an event has a time that is not finite")
        self.parts.append((*times, links, *ids))
        self.num += len(rows)


class _Ids(dict[Any, int]):
    """Numbers things in the order in which they are first seen."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Events:
    """Collects what is wanted of a file's events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num = 0
        self.names, self.streams, self.threads = _Ids(), _Ids(), _Ids()
        self.columns = [_Growing() for _ in range(5)]

    def add(self, block: list[Event]) -> None:
        self.num += len(block)
        rows: list[list[tuple[Any, ...]]] = [[] for _ in self.columns]
        add_work, add_launch, add_annotation, add_gpu_annotation, add_operator = (some.append for some in rows)
        names, streams, threads = self.names, self.streams, self.threads
        for event in block:
            kind = _CATEGORIES.get(event.cat, -1) if event.ph == "X" and isinstance(event.cat, str) else -1
            if kind < 0:
                continue
            args = event.args
            if kind == _IS_OPERATOR:
                role = _role(event)
                if role:
                    add_operator((threads[event.pid, event.tid], -1, event.ts, event.dur, -1, role))
            elif kind == _IS_LAUNCH:
                if args is not None and args.correlation is not None:
                    add_launch((threads[event.pid, event.tid], -1, event.ts, event.dur, args.correlation))
            elif kind == _IS_WORK:
                link, collective, group = -1, -1, -1
                if args is not None:
                    link = -1 if args.correlation is None else args.correlation
                    if args.collective:
                        collective = names[str(args.collective)]
                        group = names[str(args.process_group)]
                stream = streams[self._stream(event)]
                add_work((stream, names[str(event.name)], event.ts, event.dur, link, collective, group))
            elif kind == _IS_ANNOTATION:
                add_annotation((threads[event.pid, event.tid], names[str(event.name)], event.ts, event.dur, -1))
            else:
                add_gpu_annotation((streams[self._stream(event)], names[str(event.name)], event.ts, event.dur, -1))
        for growing, some in zip(self.columns, rows, strict=True):
            growing.add(some, self.path)

    def _stream(self, event: Event) -> tuple[int, int]:
        """(device, stream): from the details, else from where the event is drawn."""
        args = event.args
        device = event.pid if args is None or args.device is None else args.device
        stream = event.tid if args is None or args.stream is None else args.stream
        try:
            return int(device), int(stream)
        except (TypeError, ValueError):
            what = f"{event.name!r} is on no numbered GPU and stream"
            raise BadInput("trace", self.path.name, f"{WHOLE}; {what}") from None


def _role(event: Event) -> int:
    """Backward: run by the autograd engine. Forward: has a sequence number to find its backward by."""
    args = event.args
    if isinstance(event.name, str) and event.name.startswith(_ENGINE):
        return BACKWARD_OP
    if args is None or args.sequence is None:
        return 0
    return BACKWARD_OP if args.forward_thread else FORWARD_OP


def _finished(document: Document, events: _Events, position: int) -> RankTrace:
    growing = events.columns
    origin = min(float(part[0].min()) for some in growing for part in some.parts)
    columns = [_columns(some, origin) for some in growing]
    header = document.header
    distributed = header.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    rank = _number(distributed.get("rank"))
    if rank is None and (found := _RANK_IN_NAME.search(document.path.name)):
        rank = int(found.group(1))
    devices = header.get("deviceProperties")
    return RankTrace(
        path=document.path,
        rank=position if rank is None else rank,
        rank_is_known=rank is not None,
        world_size=_number(distributed.get("world_size")),
        num_events=events.num,
        names=list(events.names),
        streams=list(events.streams),
        threads=[(str(pid), str(tid)) for pid, tid in events.threads],
        device_names=_device_names(devices if isinstance(devices, list) else []),
        origin_us=origin,
        base_ns=_number(header.get("baseTimeNanoseconds")),
        work=columns[_IS_WORK],
        launches=columns[_IS_LAUNCH],
        annotations=columns[_IS_ANNOTATION],
        gpu_annotations=columns[_IS_GPU_ANNOTATION],
        operators=columns[_IS_OPERATOR],
    )


def _columns(growing: _Growing, origin_us: float) -> Columns:
    """Whole nanoseconds from the origin; events sorted by start."""
    joined = [np.concatenate(some) for some in zip(*growing.parts, strict=True)]
    growing.parts.clear()
    none = np.empty(0, dtype=np.int64)
    if not joined:
        return Columns(*(none,) * 8)
    ts, dur, links, lane, name, *rest = joined
    start = np.rint((ts - origin_us) * 1000).astype(np.int64)
    end = start + np.rint(np.maximum(dur, 0.0) * 1000).astype(np.int64)
    order = np.argsort(start, kind="stable")
    extra = [column[order] for column in rest]
    collective, group = (extra[0], extra[1]) if len(extra) == 2 else (none, none)
    role = extra[0] if len(extra) == 1 else none
    return Columns(lane[order], name[order], start[order], end[order], links[order], collective, group, role)


def _device_names(devices: Iterable[Any]) -> dict[int, str]:
    named = {}
    for device in devices:
        if isinstance(device, dict) and (number := _number(device.get("id"))) is not None:
            named[number] = str(device.get("name", "GPU"))
    return named


def _number(value: Any) -> int | None:
    """An integer, also where a profiler wrote it as text."""
    try:
        return int(value) if isinstance(value, int | str) else None
    except ValueError:
        return None
