"""How ranks differ: who is slow, who waits for whom."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bench.kineto.analyze import Labelled
from bench.kineto.intervals import Ints
from bench.kineto.times import GpuTime, RankTime, Skew, Spread, Waiting

MEASURES = ("span_s", "compute_s", "communication_s", "exposed_s", "idle_s")
# In these every rank's kernel ends when the slowest has come; a send and its receive share no kernel.
MATCHED = ("dispatch", "combine", "notify", "all_to_all", "all_reduce", "all_gather", "reduce_scatter")
Member = tuple[int, int]
Durations = dict[tuple[str, str], Ints]


def durations(labelled: Labelled, device: int) -> Durations:
    """Durations in ns of the collectives on one GPU in order of start, by class and process group ("" for unnamed)."""
    trace, work = labelled.trace, labelled.trace.work
    here = np.array(trace.streams, dtype=np.int64)[work.lane, 0] == device
    found: Durations = {}
    for class_ in MATCHED:
        some = here & (labelled.class_ == labelled.classes.index(class_))
        for group in np.unique(work.process_group[some]).tolist():
            mine = some & (work.process_group == group)
            found[class_, trace.names[group] if group >= 0 else ""] = (work.end_ns - work.start_ns)[mine]
    return found


def skew_of(ranks: Sequence[RankTime], collectives: dict[Member, Durations], *, one_clock: bool) -> Skew | None:
    """How all GPUs of all ranks differ; None where there is one GPU.

    Args:
        collectives: `durations` of every (rank, device).
        one_clock: whether the traces' times may be compared.
    """
    gpus = {(rank.rank, gpu.device): gpu for rank in ranks for gpu in rank.gpus}
    if len(gpus) < 2:
        return None
    starts = [gpu.start_ns for gpu in gpus.values()]
    return Skew(
        spreads=tuple(_spread(measure, gpus) for measure in MEASURES),
        waiting=tuple(found for class_ in MATCHED if (found := _waiting(class_, collectives)) is not None),
        start_spread_s=(max(starts) - min(starts)) / 1e9 if one_clock else None,
    )


def _spread(measure: str, gpus: dict[Member, GpuTime]) -> Spread:
    values = {member: float(getattr(gpu.time, measure)) for member, gpu in gpus.items()}
    largest = max(values, key=lambda member: (values[member], (-member[0], -member[1])))
    column = np.array(list(values.values()))
    return Spread(measure, float(column.min()), float(np.median(column)), float(column.max()), largest)


def _waiting(class_: str, collectives: dict[Member, Durations]) -> Waiting | None:
    groups: dict[str, dict[Member, Ints]] = defaultdict(dict)
    for member, found in collectives.items():
        for (kind, group), column in found.items():
            if kind == class_:
                groups[group][member] = column
    moving: dict[Member, int] = defaultdict(int)
    waiting: dict[Member, int] = defaultdict(int)
    num_matched = num_unmatched = 0
    for taking_part in groups.values():
        if len(taking_part) < 2 or len({len(column) for column in taking_part.values()}) > 1:
            num_unmatched += sum(len(column) for column in taking_part.values())
            continue
        shortest = np.min(list(taking_part.values()), axis=0)
        num_matched += len(shortest)
        for member, column in taking_part.items():
            moving[member] += int(shortest.sum())
            waiting[member] += int((column - shortest).sum())
    if not groups:
        return None
    return Waiting(class_, num_matched, num_unmatched, _listed(moving), _listed(waiting))


def _listed(values: dict[Member, int]) -> tuple[tuple[int, int, float], ...]:
    return tuple((rank, device, ns / 1e9) for (rank, device), ns in sorted(values.items()))
