"""What a sweep costs a case, record and provenance included (``make bench``; elsewhere a few cases, once)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import make_case

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

    def run() -> dict[str, int]:
        ledger = Ledger(tmp_path)
        ledger.make()
        return dict(Sweep(Plan("speed", "speed", tasks(number), site), ledger, lambda event: None).run().statuses)

    assert benchmark.pedantic(run, rounds=1) == {"ok": number}
    if benchmark.enabled:
        benchmark.extra_info["ms_per_case"] = 1e3 * benchmark.stats.stats.mean / number
