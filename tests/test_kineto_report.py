"""Ranks of a profiled job against each other, and what is printed and drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench.cli.application import OneLineErrors
from bench.cli.trace_analyze import register
from bench.errors import BadInput
from bench.kineto import analyze_traces, trace_files
from bench.kineto.report import as_json, tables
from tests.kineto_trace import BY_HAND, GEMM, NCCL, US, gpu_of, work, write


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
    rows = [streams] * num_ranks if num_ranks < 5 else [[f"rank {i}" for i in range(num_ranks)]]
    assert [some for some in labels if some and some[0] in (streams[0], "rank 0")] == rows
    figure.canvas.draw()


@pytest.fixture
def call() -> Callable[..., Any]:
    app = typer.Typer(cls=OneLineErrors)
    register(app)
    app.callback()(lambda: None)  # keeps the one verb a verb
    return lambda *words: CliRunner().invoke(app, ["analyze", *map(str, words)])


def test_the_verb_prints_tables_or_one_json_object_and_draws(tmp_path: Path, call: Callable[..., Any]) -> None:
    paths = two_ranks(tmp_path)
    shown = call(*paths)
    assert shown.exit_code == 0 and "waiting inside collectives" in shown.stdout
    drawn = call(tmp_path, "--json", "--out", tmp_path / "out" / "picture.png")
    content = json.loads(drawn.stdout)
    assert drawn.exit_code == 0 and content["kind"] == "trace-analysis" and len(content["ranks"]) == 2
    assert [Path(file).name for file in content["files"]] == ["picture.pdf", "picture.png"]
    assert all(Path(file).stat().st_size > 1000 for file in content["files"])


def test_the_verb_takes_kernel_names_and_refuses_in_one_line(tmp_path: Path, call: Callable[..., Any]) -> None:
    path = write(tmp_path / "t.json", [work(GEMM, 0, 5), work("my_dispatch_v7(int)", 3, 9, 20)], 0, 64)
    refused = call(path, "--json")
    assert refused.exit_code == 2 and refused.stdout == ""
    assert refused.stderr.startswith("moebench: trace: 't.json' is not valid") and refused.stderr.count("\n") == 1
    names = tmp_path / "mine.toml"
    names.write_text('[classes.dispatch]\nnames = ["my_dispatch"]\n')
    assert call(path, "--kernels", names).exit_code == 0
    assert call(path, "--kernels", names, "--out", tmp_path / "picture.jpg").exit_code == 2
    assert "no known class" in call(write(tmp_path / "u.json", [work("mystery", 0, 5)])).stderr
