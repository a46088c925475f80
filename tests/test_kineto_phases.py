"""Which phase of the step a kernel of a profiler trace belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.kineto import analyze_traces
from tests.kineto_trace import GEMM, US, cpu, gpu_of, launch, work, write


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
