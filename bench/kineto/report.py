"""An `Analysis` as one JSON object and as tables for people."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from bench.kineto.times import Analysis, Busy, GpuTime, RankTime, Skew


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]


NUM_DETAILED = 4
_BUSY = ("span ms", "busy ms", "compute ms", "communication ms", "overlapped ms", "exposed ms", "idle ms")


def as_json(analysis: Analysis) -> dict[str, Any]:
    """All numbers by the names of `bench.kineto.times`, in seconds; what pictures need is left out."""
    content = asdict(analysis)
    for rank in content["ranks"]:
        for gpu in rank["gpus"]:
            del gpu["by_class"], gpu["by_use"]
    if content["skew"] is not None:
        for entry in content["skew"]["waiting"]:
            entry["class"] = entry.pop("class_")
    return {"kind": "trace-analysis", **content}


def tables(analysis: Analysis) -> list[Table]:
    """Tables in the order in which they are read; times in milliseconds.

    Of more than `NUM_DETAILED` GPUs each has a row, and details are given for the one with most exposed communication.
    """
    pairs = [(rank, gpu) for rank in analysis.ranks for gpu in rank.gpus]
    found: list[Table] = []
    if len(pairs) > NUM_DETAILED:
        rows: list[tuple[object, ...]] = [
            (rank.rank, gpu.device, sum(s.num_operations for s in gpu.streams), *_busy(gpu.time)) for rank, gpu in pairs
        ]
        found.append(Table(f"{len(pairs)} GPUs", ("rank", "GPU", "operations", *_BUSY), rows))
        pairs = [max(pairs, key=lambda pair: pair[1].time.exposed_s)]
    return [*found, *(table for pair in pairs for table in _gpu_tables(*pair)), *_skew_tables(analysis.skew)]


def _gpu_tables(rank: RankTime, gpu: GpuTime) -> Iterator[Table]:
    of = f" of {rank.world_size}" if rank.world_size else ""
    steps = f", {rank.num_steps} profiler steps" if rank.num_steps else ""
    name = f" {gpu.name}" if gpu.name else ""
    title = f"rank {rank.rank}{of}, GPU {gpu.device}{name} ({rank.file}: {rank.num_events:,} events{steps})"
    yield Table(title, ("stream", "operations", *_BUSY), _busy_rows(gpu))
    yield Table(
        "time by class",
        ("class", "kind", "operations", "sum ms", "union ms", "exposed ms"),
        [(c.name, c.kind, c.num_operations, _ms(c.sum_s), _ms(c.busy_s), _ms(c.exposed_s)) for c in gpu.classes],
    )
    if [phase.phase for phase in gpu.phases] != ["unknown"]:
        yield Table(
            "time by phase",
            ("phase", "operations", "compute ms", "communication ms", "exposed ms"),
            [
                (p.phase, p.num_operations, _ms(p.compute_s), _ms(p.communication_s), _ms(p.exposed_s))
                for p in gpu.phases
            ],
        )
    if gpu.unknown:
        yield Table(
            "busiest kernels of no known class (counted as compute)",
            ("name", "operations", "sum ms"),
            [(u.name, u.num_operations, _ms(u.sum_s)) for u in gpu.unknown],
        )


def _busy_rows(gpu: GpuTime) -> list[tuple[object, ...]]:
    operations = sum(stream.num_operations for stream in gpu.streams)
    rows: list[tuple[object, ...]] = [(s.stream, s.num_operations, *_busy(s.time)) for s in gpu.streams]
    return [*rows, ("all", operations, *_busy(gpu.time))]


def _busy(time: Busy) -> tuple[float | None, ...]:
    return tuple(
        _ms(value)
        for value in (
            time.span_s,
            time.busy_s,
            time.compute_s,
            time.communication_s,
            time.overlapped_s,
            time.exposed_s,
            time.idle_s,
        )
    )


def _skew_tables(skew: Skew | None) -> Iterator[Table]:
    if skew is None:
        return
    starts = skew.start_spread_s
    yield Table(
        "over all GPUs" + ("" if starts is None else f" (first work within {starts * 1000:.4g} ms, by the clocks)"),
        ("measure", "least ms", "median ms", "most ms", "most on"),
        [
            (s.measure.removesuffix("_s"), _ms(s.min_s), _ms(s.median_s), _ms(s.max_s), f"rank {rank} GPU {device}")
            for s in skew.spreads
            for rank, device in [s.largest]
        ],
    )
    rows: list[tuple[object, ...]] = []
    for entry in skew.waiting:
        most = max(entry.waiting_s, key=lambda item: item[2], default=None)
        least = min(entry.waiting_s, key=lambda item: item[2], default=None)
        moving = max((value for _, _, value in entry.moving_s), default=None)
        rows.append(
            (
                entry.class_,
                entry.num_matched,
                entry.num_unmatched,
                _ms(moving),
                None if least is None else f"{_ms(least[2]):.4g} (rank {least[0]})",
                None if most is None else f"{_ms(most[2]):.4g} (rank {most[0]})",
            )
        )
    if rows:
        columns = ("collective", "matched", "not matched", "moving ms", "least waiting ms", "most waiting ms")
        yield Table("waiting inside collectives: a rank's time beyond the shortest of its group", columns, rows)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
