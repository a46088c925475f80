"""What a sweep costs a case, record and provenance included, and how soon its first result is on the screen.

``make bench`` times a thousand cases; elsewhere a few run once.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from cases import make_case
from launching import launch

from experiments.launch.ledger import Ledger
from experiments.launch.site import Site
from experiments.launch.watch import Plan, Sweep
from experiments.launch.work import Settings, Task


def tasks(number: int) -> list[Task]:
    case = make_case("ep")
    seeds = (case.workload.model_copy(update={"seed": seed}) for seed in range(number))
    return [Task(case.model_copy(update={"workload": workload}), Settings()) for workload in seeds]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inprocess", "local"])
def test_cost_of_a_simulated_case(benchmark: Any, executor: str, tmp_path: Path) -> None:
    number = 1000 if benchmark.enabled else 10
    site = Site(executor=executor, jobs=2)
    first = tasks(1)
    first[0].run()  # compiles the simulator, once a machine
    spent: list[float] = []

    def run() -> dict[str, int]:
        ledger = Ledger(tmp_path)
        ledger.make()
        begun = time.process_time()
        outcome = Sweep(Plan("speed", "speed", tasks(number), site), ledger, lambda event: None).run()
        spent.append(time.process_time() - begun)
        return dict(outcome.statuses)

    assert benchmark.pedantic(run, rounds=1) == {"ok": number}
    if benchmark.enabled:
        benchmark.extra_info["ms_per_case"] = 1e3 * benchmark.stats.stats.mean / number
        benchmark.extra_info["processor_ms_per_case_here"] = 1e3 * spent[0] / number


@pytest.mark.slow
def test_time_to_the_first_result_on_the_screen(benchmark: Any, tmp_path: Path) -> None:
    """From the start of the command; what is compiled once a machine is compiled."""
    tasks(1)[0].run()
    begun: list[subprocess.Popen[str]] = []

    def first_result() -> str:
        process = launch(tmp_path / str(len(begun)), cases=24)
        begun.append(process)
        assert process.stdout is not None
        return next(line for line in process.stdout if " ok " in line)

    try:
        line = benchmark.pedantic(first_result, rounds=5 if benchmark.enabled else 1)
    finally:
        for process in begun:
            process.communicate(timeout=100)
    assert line.startswith("[1/24] ok")
    if benchmark.enabled:
        benchmark.extra_info["first_result_s"] = benchmark.stats.stats.median
