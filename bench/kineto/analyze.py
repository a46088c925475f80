"""From a rank's columns to its numbers; `bench.kineto.times` says what they mean."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput
from bench.kineto.classes import PHASES, UNKNOWN, KernelTable, Kind, without_arguments
from bench.kineto.intervals import Floats, Ints, both, covered, length, shares, union
from bench.kineto.phases import Codes, phases_of_work
from bench.kineto.reader import RankTrace
from bench.kineto.times import Busy, ClassTime, GpuTime, PhaseTime, RankTime, Shares, StreamTime, UnknownKernel

NUM_LISTED = 10
_COMPUTES, _COMMUNICATES = ("compute", "both"), ("communication", "both")
NUM_COLUMNS = 1200  # of a picture
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Labelled:
    """A trace's work with, entry by entry, its class (index into `classes`) and phase (index into `PHASES`)."""

    trace: RankTrace
    classes: tuple[str, ...]
    kinds: Mapping[str, Kind]
    class_: Ints
    phase: Codes
    computes: Mask
    communicates: Mask


def label(trace: RankTrace, table: KernelTable) -> Labelled:
    """Classes and phases of all work of a trace. Every different name is looked up once."""
    work, classes = trace.work, tuple(table.kinds)
    index = {name: i for i, name in enumerate(classes)}
    width = len(trace.names) + 1
    pairs, place = np.unique(work.name.astype(np.int64) * width + work.collective + 1, return_inverse=True)
    found = np.empty(len(pairs), dtype=np.int64)
    for i, pair in enumerate(pairs.tolist()):
        name, collective = divmod(pair, width)
        found[i] = index[table.classify(trace.names[name], trace.names[collective - 1] if collective else None)]
    class_ = found[place]
    return Labelled(
        trace=trace,
        classes=classes,
        kinds=table.kinds,
        class_=class_,
        phase=phases_of_work(trace, table),
        computes=np.array([table.kinds[name] in _COMPUTES for name in classes])[class_],
        communicates=np.array([table.kinds[name] in _COMMUNICATES for name in classes])[class_],
    )


def require_communication(labelled: Labelled, num_files: int) -> None:
    """Raises BadInput where several ranks took part and no communication was recognised: a zero would be wrong."""
    trace = labelled.trace
    world_size = max(trace.world_size or 1, num_files)
    if world_size < 2 or np.any(labelled.communicates):
        return
    busiest = _unknown(labelled, np.ones(len(trace.work), dtype=bool))
    names = ", ".join(repr(kernel.name[:80]) for kernel in busiest[:3])
    raise BadInput(
        "trace",
        trace.path.name,
        f"a trace in which communication is recognised: {world_size} ranks took part and none was; name its kernels in "
        f"a file for --kernels (busiest unknown kernels: {names or 'none'})",
    )


def rank_time(labelled: Labelled) -> RankTime:
    """All numbers of a rank, GPU by GPU."""
    trace = labelled.trace
    device = np.array(trace.streams, dtype=np.int64)[trace.work.lane, 0]
    is_step = np.array([name.startswith("ProfilerStep") for name in trace.names], dtype=bool)
    return RankTime(
        file=trace.path.name,
        rank=trace.rank,
        world_size=trace.world_size,
        num_events=trace.num_events,
        num_steps=int(is_step[trace.annotations.name].sum()) if len(trace.annotations) else 0,
        gpus=tuple(_gpu(labelled, device == number, int(number)) for number in np.unique(device)),
    )


def _gpu(labelled: Labelled, here: Mask, device: int) -> GpuTime:
    trace, work = labelled.trace, labelled.trace.work
    computing = union(*_times(labelled, here & labelled.computes))
    first, last = int(work.start_ns[here].min()), int(work.end_ns[here].max())
    lanes = sorted(np.unique(work.lane[here]).tolist(), key=lambda lane: trace.streams[lane][1])
    edges = np.linspace(first, max(last, first + 1), NUM_COLUMNS + 1)
    streams = []
    for lane in lanes:
        some = here & (work.lane == lane)
        time = _busy(labelled, some, computing, last - first)
        streams.append(StreamTime(trace.streams[lane][1], int(some.sum()), time))
    return GpuTime(
        device=device,
        name=trace.device_names.get(device),
        start_ns=round(trace.origin_us * 1000) + first + (trace.base_ns or 0),
        time=_busy(labelled, here, computing, last - first),
        streams=tuple(streams),
        classes=_classes(labelled, here, computing),
        phases=_phases(labelled, here, computing),
        unknown=_unknown(labelled, here),
        by_class=_by_class(labelled, lanes, edges),
        by_use=_by_use(labelled, here, edges),
    )


def _times(labelled: Labelled, some: Mask) -> tuple[Ints, Ints]:
    work = labelled.trace.work
    return work.start_ns[some], work.end_ns[some]


def _s(ns: int) -> float:
    return ns / 1e9


def _busy(labelled: Labelled, some: Mask, computing: tuple[Ints, Ints], span: int) -> Busy:
    """`some` is a GPU's or a stream's work; `computing` the union of what computes on the GPU."""
    moving = union(*_times(labelled, some & labelled.communicates))
    communication, overlapped = length(*moving), both(moving, computing)
    busy = covered(*_times(labelled, some))
    return Busy(
        span_s=_s(span),
        busy_s=_s(busy),
        compute_s=_s(covered(*_times(labelled, some & labelled.computes))),
        communication_s=_s(communication),
        overlapped_s=_s(overlapped),
        exposed_s=_s(communication - overlapped),
        idle_s=_s(span - busy),
    )


def _classes(labelled: Labelled, here: Mask, computing: tuple[Ints, Ints]) -> tuple[ClassTime, ...]:
    """By time, longest first."""
    times = []
    for number in np.unique(labelled.class_[here]).tolist():
        some = here & (labelled.class_ == number)
        name = labelled.classes[number]
        kind = labelled.kinds[name]
        merged = union(*_times(labelled, some))
        times.append(
            ClassTime(
                name=name,
                kind=kind,
                num_operations=int(some.sum()),
                sum_s=_s(length(*_times(labelled, some))),
                busy_s=_s(length(*merged)),
                exposed_s=_s(length(*merged) - both(merged, computing)) if kind in _COMMUNICATES else None,
            )
        )
    return tuple(sorted(times, key=lambda time: (-time.busy_s, time.name)))


def _phases(labelled: Labelled, here: Mask, computing: tuple[Ints, Ints]) -> tuple[PhaseTime, ...]:
    times = []
    for code, phase in enumerate(PHASES):
        some = here & (labelled.phase == code)
        if not some.any():
            continue
        moving = union(*_times(labelled, some & labelled.communicates))
        times.append(
            PhaseTime(
                phase=phase,
                num_operations=int(some.sum()),
                compute_s=_s(covered(*_times(labelled, some & labelled.computes))),
                communication_s=_s(length(*moving)),
                exposed_s=_s(length(*moving) - both(moving, computing)),
            )
        )
    return tuple(times)


def _unknown(labelled: Labelled, here: Mask) -> tuple[UnknownKernel, ...]:
    """The busiest kernels that no pattern fits; those that differ in their arguments alone are one."""
    trace, work = labelled.trace, labelled.trace.work
    some = here & (labelled.class_ == labelled.classes.index(UNKNOWN))
    duration = (work.end_ns - work.start_ns)[some]
    names, place, counts = np.unique(work.name[some], return_inverse=True, return_counts=True)
    sums = np.bincount(place, duration, minlength=len(names))
    found: dict[str, tuple[int, float]] = {}
    for i, count, total in zip(names.tolist(), counts.tolist(), sums.tolist(), strict=True):
        name = without_arguments(trace.names[i])
        before = found.get(name, (0, 0.0))
        found[name] = (before[0] + count, before[1] + total)
    busiest = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))[:NUM_LISTED]
    return tuple(UnknownKernel(name, count, _s(round(total))) for name, (count, total) in busiest)


def _by_class(labelled: Labelled, lanes: list[int], edges: Floats) -> dict[tuple[int, str], Shares]:
    trace, found = labelled.trace, {}
    for lane in lanes:
        on_lane = trace.work.lane == lane
        for number in np.unique(labelled.class_[on_lane]).tolist():
            some = on_lane & (labelled.class_ == number)
            found[trace.streams[lane][1], labelled.classes[number]] = shares(*_times(labelled, some), edges)
    return found


def _by_use(labelled: Labelled, here: Mask, edges: Floats) -> dict[str, Shares]:
    computes, moves, either = (
        shares(*_times(labelled, here & some), edges)
        for some in (labelled.computes, labelled.communicates, labelled.computes | labelled.communicates)
    )
    return {"compute": either - moves, "overlapped": computes + moves - either, "exposed": either - computes}
