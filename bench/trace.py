"""Chrome / Perfetto trace JSON of a `Timeline`: a process a rank, a thread a queue, an arrow a message.

The format is the Trace Event Format ("X" complete events, "s"/"f" flow events, "M" metadata), which chrome://tracing
and https://ui.perfetto.dev open. Times are microseconds from the start of the step, in steps of a nanosecond.
"""

import gzip
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import numpy as np
from numpy.typing import NDArray

from bench.action import END_OF_STEP, Kind, unpack, view
from bench.errors import BadInput
from bench.placement import Placement
from bench.program import Op
from bench.timeline import Timeline

Event = dict[str, Any]
Flows = Literal["gating", "all", "none"]
Indices = NDArray[np.int64]

# Names of chrome://tracing's own palette; Perfetto colours by the event's name instead.
_COLOURS = {
    Kind.EMBED: ("thread_state_runnable", "thread_state_running", "olive"),
    Kind.ATTENTION: ("rail_load", "thread_state_iowait", "rail_animation"),
    Kind.EXPERT: ("rail_response", "bad", "terrible"),
    Kind.JOIN: ("thread_state_runnable", "thread_state_running", "olive"),
    Kind.HEAD: ("thread_state_runnable", "thread_state_running", "olive"),
    Kind.DISPATCH: ("light_memory_dump", "detailed_memory_dump", "detailed_memory_dump"),
    Kind.COMBINE: ("yellow", "cq_build_attempt_runnig", "yellow"),
    Kind.RESIDUAL: ("generic_work", "grey", "grey"),
    Kind.HOP: ("generic_work", "grey", "grey"),
    Kind.SYNC: ("black", "black", "black"),
    Kind.UPDATE: ("black", "black", "black"),
}
_CHUNK = 1 << 14
EXPORTER = "moebench"
"""Tells files of ours from those of a profiler."""


def to_chrome(timeline: Timeline, *, title: str, placement: Placement, flows: Flows = "gating") -> Event:
    """The trace as one JSON object; for large timelines use `write_chrome`, which streams.

    Args:
        placement: groups of one replica; rank r of the timeline is rank r mod placement.size of its replica.
        flows: arrows from sends to receives. "gating" draws one arrow into each receive, from the send that ended
            last; "all" one for each pair of ranks; "none" none. A residual or hop goes from rank i to rank i.
    Raises BadInput where the timeline has a group that the placement does not know, or `flows` is another word.
    """
    trace = _Trace(timeline, title, placement, flows)
    events = list(trace.events())
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": trace.about()}


def write_chrome(
    path: Path | str, timeline: Timeline, *, title: str, placement: Placement, flows: Flows = "gating"
) -> None:
    """Writes what `to_chrome` gives, event by event; compressed where `path` ends in ``.gz``. Whole or not at all."""
    trace = _Trace(timeline, title, placement, flows)
    encode = json.JSONEncoder(separators=(",", ":")).encode
    with _whole(Path(path)) as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in trace.events():
            out.write(separator + encode(event))
            separator = ",\n"
        out.write(f'\n],"otherData":{encode(trace.about())}}}\n')


@contextmanager
def _whole(path: Path) -> Iterator[TextIO]:
    """A text file that takes its name only once it is complete."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as raw:
            if path.suffix == ".gz":
                # No name and no date in the header: the same timeline gives the same bytes.
                with (
                    gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as packed,
                    io.TextIOWrapper(packed, encoding="ascii") as out,
                ):
                    yield out
            else:
                with io.TextIOWrapper(raw, encoding="ascii") as out:
                    yield out
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class _Trace:
    """One timeline on its way out."""

    def __init__(self, timeline: Timeline, title: str, placement: Placement, flows: Flows) -> None:
        if flows not in get_args(Flows):
            raise BadInput("flows", flows, ", ".join(get_args(Flows)))
        for group, _ in timeline.queues:
            if group not in placement.by_name:
                raise BadInput("timeline.queues", group, f"groups of the placement: {', '.join(placement.by_name)}")
        self.timeline, self.title, self.placement, self.flows = timeline, title, placement, flows
        # Whole nanoseconds, so that rounding cannot make neighbours overlap.
        self.start = np.rint(timeline.start_s * 1e9).astype(np.int64)
        self.end = np.rint(timeline.end_s * 1e9).astype(np.int64)
        self.ready = np.rint(timeline.ready_s * 1e9).astype(np.int64)
        if np.any(self.end < self.start):
            worst = int(np.argmin(self.end - self.start))
            raise BadInput(f"timeline.end_s[{worst}]", float(timeline.end_s[worst]), "start_s or later")
        self.thread, self.threads = _threads(timeline, self.start, self.end)
        self.num_flows = self.num_flows_left_out = 0

    def about(self) -> Event:
        """What the reader has to know beside the events; complete once all events are out."""
        return {
            "exporter": EXPORTER,
            "title": self.title,
            "source": self.timeline.source,
            "clock_error_us": self.timeline.clock_error_s * 1e6,
            "step_time_us": self.timeline.step_time_s * 1e6,
            "gpus_per_timed_rank": self.timeline.stands_for,
            "flows": self.flows,
            "num_flows": self.num_flows,
            "num_flows_left_out": self.num_flows_left_out,
        }

    def events(self) -> Iterator[Event]:
        yield from self._names()
        yield from self._operations()
        if self.flows != "none":
            yield from self._flows()

    def _names(self) -> Iterator[Event]:
        groups = {rank: group for rank, group, _, _ in self.threads}
        for rank, name in sorted(groups.items()):
            group = self.placement.by_name[name]
            within = rank % self.placement.size - group.first
            replica = f", replica {rank // self.placement.size}" if rank >= self.placement.size else ""
            yield _metadata(rank, "process_name", name=f"rank {rank} ({name}.{within}{replica})")
            stands_for = f", stands for {self.timeline.stands_for} GPUs" if self.timeline.stands_for > 1 else ""
            yield _metadata(rank, "process_labels", labels=f"{self.timeline.source}{stands_for}: {self.title}")
            yield _metadata(rank, "process_sort_index", sort_index=rank)
        for tid, (rank, _, stream, lane) in enumerate(self.threads, 1):
            name = f"{stream} ({lane + 1})" if lane else stream
            yield _metadata(rank, "thread_name", tid, name=name)
            yield _metadata(rank, "thread_sort_index", tid, sort_index=tid)

    def _operations(self) -> Iterator[Event]:
        timeline = self.timeline
        known: dict[int, tuple[str, str, str]] = {}
        for first in range(0, len(timeline), _CHUNK):
            some = slice(first, first + _CHUNK)
            rows = zip(
                *(column[some].tolist() for column in (timeline.rank, self.thread, timeline.op, timeline.code)),
                *(column[some].tolist() for column in (self.ready, self.start, self.end)),
                *(column[some].tolist() for column in (timeline.bytes, timeline.flops)),
                strict=True,
            )
            for rank, thread, op, code, ready, start, end, size, flops in rows:
                if code not in known:
                    known[code] = _look(code)
                name, category, colour = known[code]
                args: Event = {"op": Op(op).name.lower(), "waited_us": max(start - ready, 0) / 1000}
                if size:
                    args["bytes"] = size
                if flops:
                    args["flops"] = flops
                yield {
                    "ph": "X",
                    "pid": rank + 1,
                    "tid": thread + 1,
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "name": name,
                    "cat": category,
                    "cname": colour,
                    "args": args,
                }

    def _flows(self) -> Iterator[Event]:
        """Arrows from the start of a send to the end of its receive.

        A viewer binds an arrow's end to the slice around it, so an end without duration cannot have one, nor one that
        ends before it starts (clock error); these are counted in `num_flows_left_out`.
        """
        timeline, rank = self.timeline, self.timeline.rank.astype(np.int64)
        sends, key_of_send, receives, key_of_receive = self._message_keys()
        order = np.lexsort((timeline.end_s[sends], key_of_send))
        sends, key_of_send = sends[order], key_of_send[order]
        first = np.searchsorted(key_of_send, key_of_receive, side="left")
        last = np.searchsorted(key_of_send, key_of_receive, side="right")
        if self.flows == "gating":
            first = np.maximum(first, last - 1)
        for some in range(0, len(receives), _CHUNK):
            count = (last - first)[some : some + _CHUNK]
            target = np.repeat(receives[some : some + _CHUNK], count)
            within = np.arange(len(target)) - np.repeat(np.cumsum(count) - count, count)
            source = sends[np.repeat(first[some : some + _CHUNK], count) + within]
            left, arrived = self.start[source], self.end[target] - 1
            fits = (self.end[source] > left) & (arrived >= self.start[target]) & (arrived >= left)
            self.num_flows_left_out += int(np.count_nonzero(~fits))
            source, target = source[fits], target[fits]
            columns = (rank[source], self.thread[source], left[fits], rank[target], self.thread[target], arrived[fits])
            for from_pid, from_tid, start, to_pid, to_tid, end in zip(*(c.tolist() for c in columns), strict=True):
                self.num_flows += 1
                arrow = {"name": "message", "cat": "message", "id": self.num_flows}
                yield {"ph": "s", "pid": from_pid + 1, "tid": from_tid + 1, "ts": start / 1000, **arrow}
                yield {"ph": "f", "bp": "e", "pid": to_pid + 1, "tid": to_tid + 1, "ts": end / 1000, **arrow}

    def _message_keys(self) -> tuple[Indices, Indices, Indices, Indices]:
        """Sends and receives (operation numbers) with a number each that the two ends of a message share."""
        timeline, placement = self.timeline, self.placement
        group_of_queue = np.array([placement.index[group] for group, _ in timeline.queues], dtype=np.int64)
        first_rank = np.array([group.first for group in placement.groups], dtype=np.int64)
        ends = np.flatnonzero((timeline.op == Op.SEND) | (timeline.op == Op.RECV))
        replica, rank = np.divmod(timeline.rank[ends].astype(np.int64), placement.size)
        within = rank - first_rank[group_of_queue[timeline.queue[ends]]]
        straight = np.isin(unpack(timeline.code[ends]).kind, [int(Kind.RESIDUAL), int(Kind.HOP)])
        _, message = np.unique(timeline.code[ends], return_inverse=True)
        key = (message * (replica.max(initial=0) + 1) + replica) * (placement.size + 1)
        key += np.where(straight, within + 1, 0)
        sent = timeline.op[ends] == Op.SEND
        return ends[sent], key[sent], ends[~sent], key[~sent]


def _metadata(rank: int, what: str, tid: int = 0, **args: str | int) -> Event:
    return {"ph": "M", "pid": rank + 1, "tid": tid, "ts": 0, "name": what, "args": args}


def _look(code: int) -> tuple[str, str, str]:
    """Name, category and colour of an action."""
    action = view(code)
    category = action.word if action.kind in END_OF_STEP else f"{action.word},{action.pass_.name}"
    return str(action), category, _COLOURS[action.kind][action.pass_]


def _threads(timeline: Timeline, start: Indices, end: Indices) -> tuple[Indices, list[tuple[int, str, str, int]]]:
    """Thread of each operation, and threads as (rank, group, stream, lane), sorted.

    Slices of a thread must not overlap; a queue in which they do (receives posted together) gets more lanes.
    """
    num_queues = len(timeline.queues)
    row = timeline.rank.astype(np.int64) * num_queues + timeline.queue
    order = np.lexsort((end, start, row))
    edges = np.flatnonzero(np.diff(row[order], prepend=-1))
    lane = np.zeros(len(timeline), dtype=np.int64)
    for some in np.split(order, edges[1:]) if len(order) else []:
        if np.any(start[some][1:] < np.maximum.accumulate(end[some])[:-1]):
            lane[some] = _lanes(start[some].tolist(), end[some].tolist())
    width = int(lane.max(initial=0)) + 1
    keys, thread = np.unique(row * width + lane, return_inverse=True)
    threads = []
    for key in keys.tolist():
        rank, queue = divmod(key // width, num_queues)
        threads.append((rank, *timeline.queues[queue], key % width))
    return thread, threads


def _lanes(start: list[int], end: list[int]) -> list[int]:
    """The lowest free lane for each of a row's operations, which are sorted by start."""
    free: list[int] = []
    chosen = []
    for begins, ends in zip(start, end, strict=True):
        lane = next((i for i, busy_until in enumerate(free) if busy_until <= begins), len(free))
        if lane == len(free):
            free.append(ends)
        free[lane] = ends
        chosen.append(lane)
    return chosen
