"""Nothing outlives what started it: workers of a sweep their parent, ranks of a local job their controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from launching import ROOT, RUN, launch, ranks_of, started, wait_until

from experiments.launch import sweeps
from experiments.launch.ledger import Ledger

PATIENCE_S = 240.0  # for states that come; how soon says nothing here
SWEEP = """
import sys
from pathlib import Path
from bench.evaluate import CostModel
from bench.results import Store
from experiments import fig7
from experiments._sweep import sweep

store = Store(Path(sys.argv[1]))
specs = fig7.specs()[: int(sys.argv[2])]
sweep(specs, CostModel.named(None), store, lambda *said: print(*said, flush=True), budget=1, num_workers=2)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_workers_end_with_the_sweep_that_started_them(tmp_path: Path, how: signal.Signals) -> None:
    words = [sys.executable, "-c", SWEEP, str(tmp_path), "16"]
    sweep = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert sweep.stdout is not None
        while not sweep.stdout.readline().startswith("1 16 "):  # workers have begun
            assert sweep.poll() is None
        workers = psutil.Process(sweep.pid).children(recursive=True)
        assert len([one for one in workers if "spawn_main" in " ".join(one.cmdline())]) == 2
    finally:
        sweep.send_signal(how)
        sweep.wait()
    wait_until(lambda: not any(_runs(one) for one in workers), PATIENCE_S)


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank looks for its controller once it has begun")
@pytest.mark.parametrize("moment", ["there", "training"])
def test_ranks_end_with_the_controller_of_their_job(tmp_path: Path, moment: str) -> None:
    pytest.importorskip("megatron.core")
    watcher = launch(tmp_path, *RUN, "100000", cases=1, TINY_RANKS="2")
    try:
        wait_until(lambda: started(tmp_path) if moment == "training" else len(ranks_of(tmp_path)) == 3, PATIENCE_S)
        watcher.kill()  # it would start the job again
        found = ranks_of(tmp_path)
        (controller,) = [one for one in found if "experiments.launch.controller" in one.cmdline()]
        assert len(found) == 3
        os.kill(controller.pid, signal.SIGKILL)
        wait_until(lambda: not any(_runs(one) for one in found), PATIENCE_S)
    finally:
        watcher.kill()
        watcher.communicate()
        sweeps.withdraw(Ledger(tmp_path), None)
