"""Profiler traces: numbers by hand, files that are broken in every way, ranks against each other."""

from __future__ import annotations

import contextlib
import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.kineto import Analysis, analyze_traces, read_table, trace_files
from bench.kineto.document import Document
from bench.kineto.intervals import both, covered, inside, shares, union
from bench.kineto.report import as_json, tables
from bench.kineto.times import Busy
from tests.kineto_trace import BY_HAND, cpu, document, launch, work, write

US = 1e-6
TABLE = read_table()
GEMM, NCCL = "nvjet_tst_128x128", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def arrays(pairs: list[tuple[int, int]]) -> tuple[Any, Any]:
    start = np.array([a for a, _ in pairs], dtype=np.int64)
    return start, start + np.array([length for _, length in pairs], dtype=np.int64)


def points(pairs: list[tuple[int, int]]) -> set[int]:
    """Unit cells that are covered: the union counted one by one."""
    return {cell for start, length in pairs for cell in range(start, start + length)}


def gpu_of(analysis: Analysis) -> Any:
    ((gpu,),) = (rank.gpus for rank in analysis.ranks)
    return gpu


def in_us(time: Busy) -> tuple[float, ...]:
    """busy, compute, communication, overlapped, exposed, idle."""
    seconds = (time.busy_s, time.compute_s, time.communication_s, time.overlapped_s, time.exposed_s, time.idle_s)
    return tuple(round(value / US, 6) for value in seconds)


# Intervals


@given(intervals)
def test_union_covers_the_same_points_with_the_fewest_intervals(pairs: list[tuple[int, int]]) -> None:
    start, end = union(*arrays(pairs))
    cells = points(pairs)
    assert points(list(zip(start.tolist(), (end - start).tolist(), strict=True))) == cells
    assert covered(*arrays(pairs)) == len(cells)
    assert all(a < b for a, b in zip(start, end, strict=True)) and all(a < b for a, b in pairwise(end.tolist()))
    assert len(start) == sum(cell - 1 not in cells for cell in cells)
    assert inside(np.arange(60), *arrays(pairs)).tolist() == [cell in cells for cell in range(60)]


@given(intervals, intervals, st.integers(1, 9))
def test_what_unions_share_is_counted_cell_by_cell(
    one: list[tuple[int, int]], other: list[tuple[int, int]], width: int
) -> None:
    assert both(union(*arrays(one)), union(*arrays(other))) == len(points(one) & points(other))
    edges = np.arange(0, 64 + width, width, dtype=np.float64)
    expected = [len(points(one) & set(range(int(a), int(a) + width))) / width for a in edges[:-1]]
    assert shares(*arrays(one), edges) == pytest.approx(expected)


# Numbers by hand


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "gzipped-without-the-suffix.json"])
def test_numbers_by_hand(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, BY_HAND)
    if name.startswith("gzipped"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    gpu = gpu_of(analyze_traces([path]))
    assert gpu.name == "NVIDIA H800"
    assert gpu.time.span_s == pytest.approx(230 * US)
    assert in_us(gpu.time) == (210, 150, 90, 40, 50, 20)
    streams = {stream.stream: (stream.num_operations, *in_us(stream.time)) for stream in gpu.streams}
    assert streams == {
        7: (3, 150, 140, 0, 0, 0, 80),
        9: (1, 20, 20, 0, 0, 0, 210),
        20: (2, 90, 0, 90, 40, 50, 140),
    }
    classes = {time.name: (time.kind, round(time.busy_s / US, 6)) for time in gpu.classes}
    assert classes == {
        "gemm": ("compute", 100),
        "all_reduce": ("communication", 60),
        "attention": ("compute", 40),
        "dispatch": ("communication", 30),
        "elementwise": ("compute", 20),
        "host_copy": ("host", 10),
    }
    exposed = {time.name: time.exposed_s for time in gpu.classes}
    assert exposed["all_reduce"] == pytest.approx(20 * US)
    assert exposed["dispatch"] == pytest.approx(30 * US)
    assert exposed["gemm"] is exposed["host_copy"] is None
    assert gpu.unknown == ()


def test_a_kernel_that_computes_and_communicates_is_both_and_overlapped(tmp_path: Path) -> None:
    fused = "void cutlass::Kernel2<bytedance::flux::GemmV2AGKernel_Kernel<X> >(x)"
    gpu = gpu_of(analyze_traces([write(tmp_path / "t.json", [work(fused, 0, 10), work(NCCL, 10, 14, 8)])]))
    assert in_us(gpu.time) == (14, 10, 14, 10, 4, 0)


def test_kernels_of_one_class_that_run_at_once_count_once_in_the_union_and_twice_in_the_sum(tmp_path: Path) -> None:
    gpu = gpu_of(analyze_traces([write(tmp_path / "t.json", [work(GEMM, 0, 10), work(GEMM, 4, 12, 8)])]))
    assert [(t.name, t.num_operations) for t in gpu.classes] == [("gemm", 2)]
    assert (gpu.classes[0].sum_s, gpu.classes[0].busy_s) == pytest.approx((18 * US, 12 * US))


def test_gpus_of_one_file_are_kept_apart(tmp_path: Path) -> None:
    events = [
        work(GEMM, 0, 10),
        work(NCCL, 5, 15, 8),
        work(GEMM, 100, 130, device=1),
        work(NCCL, 120, 140, 8, device=1),
    ]
    (rank,) = analyze_traces([write(tmp_path / "t.json", events)]).ranks
    assert [(gpu.device, *in_us(gpu.time)) for gpu in rank.gpus] == [
        (0, 15, 10, 10, 5, 5, 0),
        (1, 40, 30, 20, 10, 10, 0),
    ]


@pytest.mark.parametrize("origin", [0, 1740461679470692, 4203669603187.439])
def test_nanoseconds_survive_large_times(tmp_path: Path, origin: float) -> None:
    exact = isinstance(origin, int)
    ends = [0, 7, 12] if exact and origin else [0.001, 7.005, 12.003]
    events = [work(GEMM, origin + ends[0], origin + ends[1]), work(NCCL, origin + ends[1], origin + ends[2], 8)]
    for event, length in zip(events, np.diff(ends).tolist(), strict=True):
        event["dur"] = length
    gpu = gpu_of(analyze_traces([write(tmp_path / "t.json", events)]))
    assert gpu.time.compute_s == pytest.approx((ends[1] - ends[0]) * US, abs=1e-12)
    assert gpu.time.span_s == pytest.approx((ends[2] - ends[0]) * US, abs=2e-9)


def test_the_profilers_collective_name_decides_for_kernels_that_serve_many(tmp_path: Path) -> None:
    generic = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    names = ["all_to_allv", "_allgather_base", "reduce_scatter_tensor_coalesced", "send", "something new", None]
    events = [
        work(
            generic if name != "something new" else "my_kernel",
            10 * i,
            10 * i + i + 1,
            20,
            **({"Collective name": name} if name else {}),
        )
        for i, name in enumerate(names)
    ]
    gpu = gpu_of(analyze_traces([write(tmp_path / "t.json", events)]))
    times = {time.name: round(time.busy_s / US, 6) for time in gpu.classes}
    assert times == {
        "all_to_all": 1,
        "all_gather": 2,
        "reduce_scatter": 3,
        "send_recv": 4 + 6,
        "other_communication": 5,
    }


# Kernels nobody knows


def test_unknown_kernels_are_listed_by_time_and_warned_of(tmp_path: Path) -> None:
    events = [work(NCCL, 0, 1, 20)]
    events += [work(f"mystery_{i}<T>(int, float)", 20 * i, 21 * i) for i in range(1, 14)]
    events += [work("mystery_1<T>(double)", 500, 520)]
    analysis = analyze_traces([write(tmp_path / "t.json", events)])
    unknown = gpu_of(analysis).unknown
    assert [(kernel.name, kernel.num_operations) for kernel in unknown[:2]] == [
        ("mystery_1<T>", 2),
        ("mystery_13<T>", 1),
    ]
    assert len(unknown) == 10 and unknown[0].sum_s == pytest.approx(21 * US)
    assert "no known class" in analysis.warnings[0]
    assert in_us(gpu_of(analysis).time)[1] == sum(range(1, 14)) + 20  # they count as compute


def test_a_multi_rank_trace_without_communication_is_an_error_until_its_kernels_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [work(GEMM, 0, 5), work("my_dispatch_v7(int)", 3, 9, 20)], 0, 64)
    with pytest.raises(BadInput, match=r"64 ranks took part and none was.*--kernels.*my_dispatch_v7"):
        analyze_traces([path])
    extra = tmp_path / "mine.toml"
    extra.write_text(
        '[classes.dispatch]\nnames = ["my_dispatch"]\n[classes.magic]\nkind = "compute"\nnames = ["nvjet"]\n'
    )
    gpu = gpu_of(analyze_traces([path], read_table(extra)))
    assert {time.name: time.kind for time in gpu.classes} == {"dispatch": "communication", "magic": "compute"}
    assert in_us(gpu.time) == (9, 5, 6, 2, 4, 0)


def test_a_single_rank_may_have_no_communication(tmp_path: Path) -> None:
    for world_size in (None, 1):
        path = write(tmp_path / "t.json", [work(GEMM, 0, 5)], None if world_size is None else 0, world_size)
        assert gpu_of(analyze_traces([path])).time.communication_s == 0


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('[classes.mine]\nnames = ["x"]', "kernels.classes.mine.kind"),
        ('[classes.gemm]\nkind = "fast"', "kernels.classes.gemm.kind"),
        ('[classes.gemm]\nnames = ["("]', "kernels.classes.gemm"),
        ('[classes.gemm]\nregex = ["x"]', "kernels.classes.gemm.regex"),
        ('[collectives]\nbaking = ["x"]', "kernels.collectives"),
        ('[phases]\nsideways = ["x"]', "kernels.phases"),
        ("[classes", "kernels file mine.toml"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_table(path)
    assert caught.value.field == field


# Broken files


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


# Phases


def phases_of(tmp_path: Path, events: list[dict[str, Any]]) -> dict[str, float]:
    gpu = gpu_of(analyze_traces([write(tmp_path / "t.json", events)]))
    return {phase.phase: round((phase.compute_s + phase.communication_s) / US, 6) for phase in gpu.phases}


def test_the_innermost_annotation_around_the_launch_tells_the_phase(tmp_path: Path) -> None:
    events = [
        cpu("user_annotation", "ProfilerStep#3", 0, 1000),
        cpu("user_annotation", "forward", 0, 100),
        cpu("user_annotation", "mlp wgrad", 40, 60),
        cpu("user_annotation", "forward and backward", 70, 80),
        cpu("user_annotation", "Optimizer.step#AdamW.step", 200, 300),
    ]
    for i, (at, length) in enumerate([(10, 1), (50, 2), (60, 4), (75, 8), (250, 16), (500, 32)]):
        events += [launch(at, i), work(GEMM, 1000 + 100 * i, 1000 + 100 * i + length, correlation=i)]
    expected = {"forward": 1 + 4 + 8, "weight_gradient": 2, "optimizer": 16, "unknown": 32}
    assert phases_of(tmp_path, events) == expected
    assert analyze_traces([tmp_path / "t.json"]).ranks[0].num_steps == 1


@pytest.mark.parametrize(("third", "phase"), [("mlp(W)", "input_gradient"), ("mlp(V)", "backward")])
def test_a_letter_b_is_the_input_gradient_where_weight_gradients_are_apart(
    tmp_path: Path, third: str, phase: str
) -> None:
    events = [cpu("user_annotation", name, 10 * i, 10 * i + 9) for i, name in enumerate(["attn(F)", "mlp(B)", third])]
    for i in range(3):
        events += [launch(10 * i + 1, i), work(GEMM, 100 * i, 100 * i + 1 + i, correlation=i)]
    last = "weight_gradient" if third == "mlp(W)" else "unknown"
    assert phases_of(tmp_path, events) == {"forward": 1, phase: 2, last: 3}


def test_autograd_tells_forward_backward_and_recompute(tmp_path: Path) -> None:
    engine = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
    events = [
        cpu("cpu_op", "aten::mm", 0, 10, 100, **{"Sequence number": 7, "Fwd thread id": 0}),
        cpu("cpu_op", "aten::empty", 20, 30, 100),
        cpu("cpu_op", engine, 100, 200, 200, **{"Sequence number": 7, "Fwd thread id": 1}),
        cpu("cpu_op", "aten::mm", 110, 120, 200, **{"Sequence number": 9, "Fwd thread id": 0}),
    ]
    for i, (at, thread) in enumerate([(5, 100), (25, 100), (115, 200), (150, 200)]):
        events += [launch(at, i, thread), work(GEMM, 1000 + 10 * i, 1001 + 11 * i, correlation=i)]
    assert phases_of(tmp_path, events) == {"forward": 1, "unknown": 2, "recompute": 3, "backward": 4}


def test_another_threads_annotation_refines_backward_but_does_not_overrule_it(tmp_path: Path) -> None:
    engine = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        cpu("cpu_op", engine, 0, 100, 200),
        cpu("user_annotation", "forward", 0, 40, 100),
        cpu("user_annotation", "mlp dgrad", 50, 90, 100),
        cpu("user_annotation", "mlp wgrad", 70, 90, 101),
    ]
    for i, at in enumerate([20, 60, 80]):  # overruled by autograd; refined; two threads disagree
        events += [launch(at, i, 200), work(GEMM, 1000 + 10 * i, 1001 + 11 * i, correlation=i)]
    assert phases_of(tmp_path, events) == {"backward": 1 + 3, "input_gradient": 2}


def test_a_range_on_the_gpus_stream_tells_where_there_is_no_launch(tmp_path: Path) -> None:
    events = [
        work("## backward ##", 0, 50, cat="gpu_user_annotation"),
        work(GEMM, 10, 13),
        work(GEMM, 20, 21, 8),
        work(GEMM, 60, 65),
    ]
    assert phases_of(tmp_path, events) == {"backward": 3, "unknown": 1 + 5}


# Several ranks


def two_ranks(tmp_path: Path, **header: Any) -> list[Path]:
    """Rank 1 comes 30 us late to the first all-reduce, and has less to dispatch."""
    group = {"Collective name": "allreduce", "Process Group Name": "dp"}
    events = [
        [work(GEMM, 0, 10), work(NCCL, 10, 50, 20, **group), work(NCCL, 60, 70, 20, **group)],
        [work(GEMM, 1, 41), work(NCCL, 41, 51, 20, **group), work(NCCL, 60, 74, 20, **group)],
    ]
    for some, end in zip(events, (100, 92), strict=True):
        some.append(work("void deep_ep::internode::dispatch<T>(int4*)", 80, end, 20))
    events[0].append(work("void deep_ep::internode::combine<T>(int4*)", 101, 103, 20))
    # Given in reverse: the numbers are by rank, not by order.
    return [write(tmp_path / f"r{rank}.json", events[rank], rank, 2, **header) for rank in (1, 0)]


def test_skew_and_waiting_of_two_ranks(tmp_path: Path) -> None:
    analysis = analyze_traces(two_ranks(tmp_path, baseTimeNanoseconds=1_700_000_000_000_000_000))
    assert [rank.rank for rank in analysis.ranks] == [0, 1]
    assert analysis.skew is not None and analysis.skew.start_spread_s == pytest.approx(1 * US)
    spreads = {spread.measure: spread for spread in analysis.skew.spreads}
    assert spreads["compute_s"].largest == (1, 0)
    compute = spreads["compute_s"]
    assert (compute.min_s, compute.median_s, compute.max_s) == pytest.approx((10 * US, 25 * US, 40 * US))
    waiting = {entry.class_: entry for entry in analysis.skew.waiting}
    reduced = waiting["all_reduce"]  # 40 and 10, 10 and 14: the shortest are 10 and 10
    assert (reduced.num_matched, reduced.num_unmatched) == (2, 0)
    assert [value for _, _, value in reduced.moving_s] == pytest.approx([20 * US, 20 * US])
    assert reduced.waiting_s == ((0, 0, pytest.approx(30 * US)), (1, 0, pytest.approx(4 * US)))
    assert waiting["dispatch"].waiting_s == ((0, 0, pytest.approx(8 * US)), (1, 0, 0.0))
    assert (waiting["combine"].num_matched, waiting["combine"].num_unmatched) == (0, 1)


def test_one_file_a_rank(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", BY_HAND, 3, 4)
    with pytest.raises(BadInput, match=r"a\.json is of rank 3 as well"):
        analyze_traces([path, write(tmp_path / "b.json", BY_HAND, 3, 4)])
    named = write(tmp_path / "rank-5.pt.trace.json", BY_HAND)
    unnamed = write(tmp_path / "c.json", BY_HAND)
    analysis = analyze_traces([named, unnamed])
    assert [rank.rank for rank in analysis.ranks] == [1, 5]
    assert analysis.warnings == ("c.json does not say its rank; taken as 1, by its position",)
    assert [file.name for file in trace_files(tmp_path)] == ["a.json", "b.json", "c.json", "rank-5.pt.trace.json"]


def test_each_rank_of_several_must_communicate(tmp_path: Path) -> None:
    silent = write(tmp_path / "rank1.json", [work(GEMM, 0, 5)])
    with pytest.raises(BadInput, match=r"rank1\.json.*2 ranks took part"):
        analyze_traces([write(tmp_path / "rank0.json", BY_HAND), silent])


# What is printed and drawn


def test_report_has_every_number_in_json_and_in_tables(tmp_path: Path) -> None:
    analysis = analyze_traces(two_ranks(tmp_path))
    content = json.loads(json.dumps(as_json(analysis)))
    assert content["ranks"][0]["gpus"][0]["time"]["span_s"] == pytest.approx(103 * US)
    assert content["skew"]["waiting"][0]["class"] == "dispatch"
    titles = [table.title for table in tables(analysis)]
    assert titles[0].startswith("rank 0 of 2, GPU 0 NVIDIA H800")
    assert titles[-1].startswith("waiting inside collectives")
    assert all(len(row) == len(table.columns) for table in tables(analysis) for row in table.rows)


def test_columns_of_the_picture_add_up_to_the_numbers(tmp_path: Path) -> None:
    gpu = gpu_of(analyze_traces([write(tmp_path / "t.json", BY_HAND)]))
    width = gpu.time.span_s / len(gpu.by_use["exposed"])
    drawn = {use: column.sum() * width for use, column in gpu.by_use.items()}
    assert drawn == pytest.approx({"compute": 110 * US, "overlapped": 40 * US, "exposed": 50 * US})
    assert gpu.by_class[20, "dispatch"].sum() * width == pytest.approx(30 * US)


@pytest.mark.parametrize("num_ranks", [1, 2, 6])
def test_the_picture_has_a_row_for_every_stream_or_gpu(tmp_path: Path, num_ranks: int) -> None:
    from paper_figs.trace_analysis import draw

    paths = [write(tmp_path / f"rank{i}.json", BY_HAND, i, num_ranks) for i in range(num_ranks)]
    figure = draw(analyze_traces(paths))
    labels = [[tick.get_text() for tick in ax.get_yticklabels()] for ax in figure.axes]
    streams = ["all streams", "stream 7", "stream 9", "stream 20"]
    rows = [streams] * num_ranks if num_ranks < 5 else [[f"rank {i}.0" for i in range(num_ranks)]]
    assert [some for some in labels if some and some[0] in (streams[0], "rank 0.0")] == rows
    figure.canvas.draw()
