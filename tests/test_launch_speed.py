"""What a sweep costs a case, record and provenance included, and how soon its first result is on the screen.

``make bench`` times a thousand cases; elsewhere a few run once.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cases import make_case
from launching import launch

from bench.simulate.loops import always_compile
from experiments.launch.ledger import Ledger
from experiments.launch.site import Site
from experiments.launch.watch import Plan, Sweep
from experiments.launch.work import Settings, Task


def tasks(number: int) -> list[Task]:
    case = make_case("ep")
    seeds = (case.workload.model_copy(update={"seed": seed}) for seed in range(number))
    return [Task(case.model_copy(update={"workload": workload}), Settings()) for workload in seeds]


def compiled_once() -> None:
    """Compiles the simulator, which is kept on this machine."""
    always_compile()
    tasks(1)[0].run()


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "allowed_ms"), [("inprocess", 20), ("local", 50)])
def test_cost_of_a_simulated_case(
    benchmark: Any, capsys: pytest.CaptureFixture[str], executor: str, allowed_ms: int, tmp_path: Path
) -> None:
    number = 1000 if benchmark.enabled else 10
    site = Site(executor=executor, jobs=2)
    compiled_once()
    spent: list[float] = []

    def run() -> dict[str, int]:
        ledger = Ledger(tmp_path)
        ledger.make()
        begun = processor_s()
        outcome = Sweep(Plan("speed", "speed", tasks(number), site), ledger, lambda event: None).run()
        wait_for_controllers(ledger)
        spent.append(processor_s() - begun)
        return dict(outcome.statuses)

    assert benchmark.pedantic(run, rounds=1) == {"ok": number}
    if benchmark.enabled:
        found = {"ms": 1e3 * benchmark.stats.stats.mean / number, "processor_ms": 1e3 * spent[0] / number}
        benchmark.extra_info.update(found, allowed_ms=allowed_ms)
        with capsys.disabled():
            print(
                f"\n{number} simulated cases, {executor}: {found['ms']:.1f} ms each, {found['processor_ms']:.1f} ms of "
                f"processor time (to be at most {allowed_ms})"
            )


def processor_s() -> float:
    """Of this process and of those that it has waited for, and they for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def wait_for_controllers(ledger: Ledger) -> None:
    """Local jobs go on for a moment after their last record, and count once they were waited for."""
    for path in ledger.jobs.glob("*/submitted"):
        for controller in json.loads(path.read_text()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(controller["pid"], 0)


@pytest.mark.slow
def test_time_to_the_first_result_on_the_screen(
    benchmark: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From the start of the command; what is compiled once a machine is compiled, Python's own bytecode included."""
    compiled_once()
    begun: list[subprocess.Popen[str]] = []

    def first_result() -> str:
        process = launch(tmp_path / str(len(begun)), cases=24, PYTHONDONTWRITEBYTECODE="")
        begun.append(process)
        assert process.stdout is not None
        return next(line for line in process.stdout if " ok " in line)

    def wait_for_the_last() -> None:
        if begun:
            begun[-1].communicate(timeout=100)

    try:
        if benchmark.enabled:
            first_result()
        line = benchmark.pedantic(first_result, setup=wait_for_the_last, rounds=5 if benchmark.enabled else 1)
    finally:
        wait_for_the_last()
    assert line.startswith("[1/24] ok")
    if benchmark.enabled:
        found = benchmark.stats.stats
        with capsys.disabled():
            print(f"\nfirst result on the screen: {found.median:.2f} s, at best {found.min:.2f} s (to be at most 1)")
