"""Profiler traces that are cut off, damaged or none at all, and how files are cut into blocks."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import PLACEMENT, one_layer

from bench.errors import BadInput
from bench.kineto import analyze_traces, read_table, trace_files
from bench.kineto.document import Document
from bench.kineto.reader import read_trace
from bench.kineto.report import as_json
from bench.trace import to_chrome
from tests.kineto_trace import BY_HAND, cpu, document, gpu_of, in_us, launch, write

TABLE = read_table()


def test_a_file_cut_at_any_byte_is_an_error_or_the_whole(tmp_path: Path) -> None:
    events = [*BY_HAND, cpu("user_annotation", 'odd "name" }, { [', 0, 9), launch(1, 5)]
    whole = json.dumps(document(events, 0, 2), indent=1).encode() + b"\n \n"
    path = tmp_path / "t.json"
    path.write_bytes(whole)
    expected = as_json(analyze_traces([path]))
    good, refusals = 0, set()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        try:
            found = as_json(analyze_traces([path], TABLE, block_bytes=256))
        except BadInput as error:
            refusals.add(str(error).split("; ")[2].partition(" near byte")[0])
        else:
            assert found == expected
            good += 1
    assert len(refusals) > 3 and all("\n" not in line for line in refusals)
    assert good == 3  # only the white space at the end may be missing


def test_a_gzip_file_cut_or_damaged_at_any_byte_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", BY_HAND)
    whole = path.read_bytes()
    expected = as_json(analyze_traces([path]))
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(BadInput, match=r"^trace: 't\.json\.gz'"):
            analyze_traces([path], TABLE)
    for at in range(10, len(whole), 7):  # behind the header, whose fields do not matter
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with contextlib.suppress(BadInput):
            assert as_json(analyze_traces([path], TABLE)) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "the file is empty"),
        (b" \n ", "the file is empty"),
        (b"hello", "not JSON"),
        (b"{}", "JSON without traceEvents"),
        (b'{"traceEvents": {}}', "not JSON"),
        (b'{"a": 1, "b": [1, 2]}', "JSON without traceEvents"),
        (b'{"traceEvents": [], "a": 1} {', "more text after the end"),
        (b'{"traceEvents": [5]}', "an event is 5"),
        (b'{"traceEvents": [{"ph": "X",}]}', "not JSON"),
        (b'{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "not JSON"),
        (b'{"traceEvents": [{"ph": "X"},]}', "not JSON"),
        (b'{"traceEvents": []}', "none is a kernel"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "dur": 1}]}', "not finite"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": "x", "dur": 1}]}',
            "no number",
        ),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": "a", "tid": 7, "ts": 1, "dur": 1}]}',
            "GPU and stream",
        ),
        (b'{"traceEvents": [' + b'{"args": ' + b"[" * 100_000, "nested too deeply"),
        (b"\x1f\x8b\x08\x00garbage-not-deflate", "gzip"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text)
    with pytest.raises(BadInput, match=says) as caught:
        analyze_traces([path])
    assert "\n" not in str(caught.value)


def test_missing_files_and_empty_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="readable file"):
        analyze_traces([tmp_path / "none.json"])
    with pytest.raises(BadInput, match="directory"):
        trace_files(tmp_path)
    with pytest.raises(BadInput, match="at least one"):
        analyze_traces([])


nasty = st.text(alphabet='{}[],:"\\ \n\taé漢0', max_size=12)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(nasty, st.dictionaries(nasty, st.one_of(nasty, st.lists(st.just({}), max_size=3)), max_size=3))),
    st.sampled_from([None, 0, 1, 4]),
    st.booleans(),
    st.integers(1, 200),
)
def test_blocks_give_the_events_that_json_gives(
    tmp_path_factory: pytest.TempPathFactory, entries: Any, indent: int | None, as_ascii: bool, block: int
) -> None:
    events = [{"ph": "X", "name": name, "ts": i, "args": args} for i, (name, args) in enumerate(entries)]
    content = {"before": [{"a": 1}, {"b": "},{"}], "traceEvents": events, "after": [{"c": 1}, {"d": 2}]}
    path = tmp_path_factory.mktemp("blocks") / "t.json"
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=as_ascii), encoding="utf-8")
    found = [event for some in Document(path, block).blocks() for event in some]
    assert [(event.name, event.ts) for event in found] == [(event["name"], event["ts"]) for event in events]


def test_nan_and_control_characters_as_profilers_write_them_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    details = '"pid":0,"tid":7,"dur":2,"args":{"occupancy":NaN,"stream":7}'
    kernels = [f'{{"ph":"X","cat":"kernel","name":"nvjet_\t{at}","ts":{at},{details}}}' for at in (0, 5)]
    path.write_text(f"[{','.join(kernels)}]")
    assert in_us(gpu_of(analyze_traces([path])).time) == (4, 4, 0, 0, 0, 3)


def test_our_own_export_is_told_from_a_profilers_trace(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(to_chrome(one_layer("measured"), title="a step", placement=PLACEMENT)))
    with pytest.raises(BadInput, match="moebench's own export of a measured timeline") as refused:
        read_trace(path)
    assert "\n" not in str(refused.value) and "ProfilerActivity" not in str(refused.value)
