"""Where the time went in profiler traces: unions of intervals, and numbers by hand."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.kineto import analyze_traces, read_table
from bench.kineto.intervals import both, covered, inside, shares, union
from tests.kineto_trace import BY_HAND, GEMM, NCCL, US, gpu_of, in_us, work, write

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def arrays(pairs: list[tuple[int, int]]) -> tuple[Any, Any]:
    start = np.array([a for a, _ in pairs], dtype=np.int64)
    return start, start + np.array([length for _, length in pairs], dtype=np.int64)


def points(pairs: list[tuple[int, int]]) -> set[int]:
    """Unit cells that are covered: the union counted one by one."""
    return {cell for start, length in pairs for cell in range(start, start + length)}


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
