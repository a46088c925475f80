"""Loops that are interpreted or compiled: both give the same, and small steps do without the compiler."""

import subprocess
import sys

import numpy as np
import pytest
from cases import cases, make_case
from hypothesis import given, settings

from bench.assumptions import get_assumptions
from bench.case import Case
from bench.predict import Prediction, predict
from bench.simulate import loops
from bench.simulate.loops import Loop

FEW, ALL = 0, 1 << 62
LAYOUTS = {
    "ep": {"ep": 4},
    "dualpipe-v": {"ep": 2, "pp": 2, "vpp": 2},
    "disagmoe": {"attention_ranks": 2, "expert_ranks": 2},
}


def predicted(case: Case, most_interpreted: int) -> Prediction:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "WORTH_COMPILING", most_interpreted)
        return predict(case, get_assumptions("h200-measured"))


def require_same(case: Case) -> None:
    interpreted, compiled = predicted(case, ALL), predicted(case, FEW)
    for column in ("rank", "op", "code", "ready_s", "start_s", "end_s", "bytes", "flops", "alloc_bytes"):
        assert np.array_equal(getattr(interpreted.timeline, column), getattr(compiled.timeline, column)), column
    assert interpreted.peak_memory_bytes == compiled.peak_memory_bytes
    assert interpreted.memory_parts == compiled.memory_parts


@settings(max_examples=30)
@given(cases())
def test_interpreted_and_compiled_give_the_same_step(case: Case) -> None:
    require_same(case)


@pytest.mark.parametrize("routing", ["zipf:1.2", "hot-rank"])
@pytest.mark.parametrize("system", LAYOUTS)
def test_they_give_the_same_where_ranks_differ(system: str, routing: str) -> None:
    case = make_case(system, **LAYOUTS[system])
    require_same(case.model_copy(update={"workload": case.workload.model_copy(update={"routing": routing})}))


def test_a_loop_is_compiled_once_there_was_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(add)
    loop.__dict__["compiled"] = lambda *_: "compiled"
    monkeypatch.setattr(Loop, "interpreted", 0)
    monkeypatch.setattr(loops, "WORTH_COMPILING", 10)
    assert [loop(4, 1, 2), loop(6, 1, 2), loop(1, 1, 2), loop(1, 1, 2)] == [3, 3, "compiled", "compiled"]


def add(one: int, other: int) -> int:
    return one + other


def test_a_small_step_is_simulated_without_the_compiler() -> None:
    script = (
        "import sys; from bench.cli.application import app; app(sys.argv[1:], standalone_mode=False); "
        "assert 'numpy' in sys.modules and 'numba' not in sys.modules and 'scipy' not in sys.modules"
    )
    words = ["simulate", "ep", "--model", "tiny", "--cluster", "h800x1", "--seq-len", "64", "--layout", "ep=2"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
