"""Chrome traces: every operation once, threads without overlap, arrows from sends to their receives."""

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import PLACEMENT, TWO_STAGES, Row, hops, one_layer, repeated, timeline

from bench.action import view
from bench.errors import BadInput
from bench.program import Op
from bench.timeline import Timeline
from bench.trace import Event, to_chrome, write_chrome

STREAMS = (("A0", "compute"), ("A0", "send"), ("A0", "recv/combine:F/F0"), ("F0", "compute"))


def events(trace: Event, phase: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def names(trace: Event, what: str) -> dict[tuple[int, int], str]:
    found = [event for event in events(trace, "M") if event["name"] == what]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in found}


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Operations at any time, also overlapping within a queue, and of any length down to a nanosecond's fraction."""
    seconds = st.floats(0, 1e-3, allow_subnormal=False)
    rows: list[Row] = []
    for m in range(draw(st.integers(0, 12))):
        group, stream = draw(st.sampled_from(STREAMS))
        rank = 2 if group == "F0" else draw(st.integers(0, 1))
        op = Op.COMPUTE if stream == "compute" else Op.SEND if stream == "send" else Op.RECV
        word = "attn" if op is Op.COMPUTE else "combine"
        start, length = draw(seconds), draw(seconds)
        rows.append((rank, group, stream, op, f"{word}:F0.{m}", start, start + length))
    return timeline(rows)


@given(timelines())
def test_every_operation_is_one_event_and_no_thread_overlaps(given_timeline: Timeline) -> None:
    trace = json.loads(json.dumps(to_chrome(given_timeline, title="t", placement=PLACEMENT)))
    operations = events(trace, "X")
    written = Counter((e["pid"] - 1, e["name"]) for e in operations)
    assert written == Counter(
        (int(rank), str(view(int(code)))) for rank, code in zip(given_timeline.rank, given_timeline.code, strict=True)
    )
    by_thread: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in operations:
        assert event["dur"] >= 0
        assert event["ts"] >= 0
        by_thread[event["pid"], event["tid"]].append(event)
    assert by_thread.keys() == names(trace, "thread_name").keys()
    for thread in by_thread.values():
        for before, after in pairwise(sorted(thread, key=lambda e: (e["ts"], e["dur"]))):
            assert round(1000 * (before["ts"] + before["dur"])) <= round(1000 * after["ts"])


def test_times_are_microseconds_and_fields_are_named() -> None:
    trace = to_chrome(one_layer(), title="t", placement=PLACEMENT)
    attention = next(e for e in events(trace, "X") if e["name"] == "attn:F0.1" and e["pid"] == 1)
    assert (attention["ts"], attention["dur"], attention["cat"]) == (1000.0, 750.0, "attn,F")
    assert attention["args"] == {"op": "compute", "waited_us": 500.0, "flops": 1e9}
    send = next(e for e in events(trace, "X") if e["args"]["op"] == "send")
    assert send["args"]["bytes"] == 1e6
    # Kinds differ in colour.
    assert len({e["cname"] for e in events(trace, "X")}) >= 4


def test_ranks_and_queues_are_named() -> None:
    trace = to_chrome(one_layer(), title="t", placement=PLACEMENT)
    assert names(trace, "process_name") == {
        (1, 0): "rank 0 (A0.0)",
        (2, 0): "rank 1 (A0.1)",
        (3, 0): "rank 2 (F0.0)",
    }
    threads = names(trace, "thread_name")
    assert Counter(name for (pid, _), name in threads.items() if pid == 3) == Counter(
        ["recv/dispatch:F/A0", "compute", "send"]
    )
    two = to_chrome(hops(num_replicas=2), title="t", placement=TWO_STAGES)
    assert names(two, "process_name")[8, 0] == "rank 7 (S1.1, replica 1)"


def test_metadata_says_what_the_trace_is() -> None:
    about = to_chrome(one_layer("measured"), title="a step", placement=PLACEMENT)["otherData"]
    assert (about["title"], about["source"]) == ("a step", "measured")
    assert about["clock_error_us"] == pytest.approx(5.0)
    assert about["step_time_us"] == pytest.approx(4500.0)
    simulated = to_chrome(one_layer(), title="a step", placement=PLACEMENT)
    labels = {e["args"]["labels"] for e in events(simulated, "M") if e["name"] == "process_labels"}
    assert labels == {"simulated: a step"}
    folded = to_chrome(replace(one_layer(), stands_for=8), title="a step", placement=PLACEMENT)
    assert folded["otherData"]["gpus_per_timed_rank"] == 8
    labels = {e["args"]["labels"] for e in events(folded, "M") if e["name"] == "process_labels"}
    assert labels == {"simulated, stands for 8 GPUs: a step"}


def arrows(trace: Event) -> list[tuple[str, int, int]]:
    """(action, from rank, to rank) of every arrow, each end inside the slice of its own thread."""
    starts = {e["id"]: e for e in events(trace, "s")}
    finishes = {e["id"]: e for e in events(trace, "f")}
    assert starts.keys() == finishes.keys()
    assert len(starts) == len(events(trace, "s")) == trace["otherData"]["num_flows"]

    def around(end: Event) -> Event:
        (found,) = (
            e
            for e in events(trace, "X")
            if (e["pid"], e["tid"]) == (end["pid"], end["tid"]) and e["ts"] <= end["ts"] < e["ts"] + e["dur"]
        )
        return found

    found = []
    for number, start in starts.items():
        finish = finishes[number]
        assert finish["bp"] == "e"
        assert start["ts"] <= finish["ts"]
        sent, received = around(start), around(finish)
        assert (sent["args"]["op"], received["args"]["op"]) == ("send", "recv")
        assert sent["name"] == received["name"]
        found.append((sent["name"], start["pid"] - 1, finish["pid"] - 1))
    return sorted(found)


def test_all_flows_join_every_pair_of_ranks() -> None:
    trace = to_chrome(one_layer(), title="t", placement=PLACEMENT, flows="all")
    expected = [(f"combine:F0.{m}", 2, rank) for m in range(2) for rank in (0, 1)]
    expected += [(f"dispatch:F0.{m}", rank, 2) for m in range(2) for rank in (0, 1)]
    assert arrows(trace) == sorted(expected)


def test_gating_flows_come_from_the_send_that_ended_last() -> None:
    trace = to_chrome(one_layer(), title="t", placement=PLACEMENT)
    assert [arrow for arrow in arrows(trace) if arrow[0].startswith("dispatch")] == [
        ("dispatch:F0.0", 1, 2),
        ("dispatch:F0.1", 1, 2),
    ]
    assert len(arrows(trace)) == 6  # one for each receive


def test_no_flows() -> None:
    trace = to_chrome(one_layer(), title="t", placement=PLACEMENT, flows="none")
    assert arrows(trace) == []


@pytest.mark.parametrize("flows", ["all", "gating"])
def test_hops_go_to_the_same_numbered_rank_of_the_same_replica(flows: str) -> None:
    trace = to_chrome(hops(num_replicas=2), title="t", placement=TWO_STAGES, flows=flows)  # type: ignore[arg-type]
    assert arrows(trace) == [("hop:F1.0", rank, rank + 2) for rank in (0, 1, 4, 5)]


def test_flows_that_no_viewer_could_draw_are_counted() -> None:
    rows: list[Row] = [
        (0, "A0", "send", Op.SEND, "dispatch:F0.0", 1, 2),
        (2, "F0", "recv/dispatch:F/A0", Op.RECV, "dispatch:F0.0", 2, 2),  # no duration
        (0, "A0", "send", Op.SEND, "dispatch:F0.1", 3, 4),
        (2, "F0", "recv/dispatch:F/A0", Op.RECV, "dispatch:F0.1", 2, 2.5),  # clocks disagree
        (0, "A0", "send", Op.SEND, "dispatch:F0.2", 4, 5),
        (2, "F0", "recv/dispatch:F/A0", Op.RECV, "dispatch:F0.2", 4, 5),
    ]
    trace = to_chrome(timeline(rows, source="measured"), title="t", placement=PLACEMENT)
    assert arrows(trace) == [("dispatch:F0.2", 0, 2)]
    assert trace["otherData"]["num_flows_left_out"] == 2


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_file_holds_the_same_trace_and_the_same_bytes(tmp_path: Path, name: str) -> None:
    paths = [tmp_path / "a" / name, tmp_path / "b" / name]
    for path in paths:
        path.parent.mkdir()
        write_chrome(path, one_layer(), title="t", placement=PLACEMENT, flows="all")
        assert [p.name for p in path.parent.iterdir()] == [name]
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    text = gzip.decompress(first) if name.endswith(".gz") else first
    assert json.loads(text) == to_chrome(one_layer(), title="t", placement=PLACEMENT, flows="all")


def test_a_long_timeline_is_written_whole(tmp_path: Path) -> None:
    count = 50_000
    write_chrome(tmp_path / "long.json", repeated(count), title="t", placement=PLACEMENT)
    trace = json.loads((tmp_path / "long.json").read_text())
    assert [e["name"] for e in events(trace, "X")] == [f"attn:F0.{m}" for m in range(count)]


def test_an_empty_timeline_is_a_trace() -> None:
    trace = to_chrome(timeline([]), title="t", placement=PLACEMENT)
    assert trace["traceEvents"] == []
    assert trace["otherData"]["step_time_us"] == 0


def test_bad_input_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="groups of the placement: S0, S1"):
        write_chrome(tmp_path / "x.json", one_layer(), title="t", placement=TWO_STAGES)
    with pytest.raises(BadInput, match="gating, all, none"):
        to_chrome(one_layer(), title="t", placement=PLACEMENT, flows="some")  # type: ignore[arg-type]
    backwards = timeline([(0, "A0", "compute", Op.COMPUTE, "attn:F0.0", 2, 1)])
    with pytest.raises(BadInput, match=r"end_s\[0\]"):
        write_chrome(tmp_path / "x.json", backwards, title="t", placement=PLACEMENT)
    assert list(tmp_path.iterdir()) == []
