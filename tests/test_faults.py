"""Real faults in real runs: each ends the run soon, with a status of its own, the last actions of every rank, a trial
on disk, and no process left.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import make_case
from test_checkpoint import case_for, in_group
from test_cli import call_json
from test_pool import wait_until_gone

from bench.errors import BadInput
from bench.execute.faults import cause_of
from bench.execute.manifest import LATEST, MANIFEST, find_saved
from bench.execute.pool import RankPool
from bench.measured import measure
from bench.models import get_model
from bench.results import Store, read_trial, read_trials
from bench.trial import Trial

torch = pytest.importorskip("torch")

from bench.execute.checkpoint import Saving  # noqa: E402
from bench.execute.train import StepRecord, train  # noqa: E402

STEPS = 100_000  # more than anybody waits for


def broken_run(
    folder: Path,
    fault: Callable[[RankPool], None],
    timeout_s: float = 200.0,
    name: str = "ep",
    **options: object,
) -> tuple[Trial, float]:
    """A run in which `fault` strikes after the second step: the trial as it is on disk, and the seconds until then."""
    with RankPool(4) as pool:
        struck: list[float] = []
        pids: list[int] = []

        def strike(record: StepRecord) -> None:
            if record.step == 1:
                pids.extend(pool.pids)
                fault(pool)
                struck.append(time.monotonic())

        trial = measure(case_for(name), steps=STEPS, pool=pool, on_step=strike, timeout_s=timeout_s, **options).trial  # type: ignore[arg-type]
        seconds = time.monotonic() - struck[0]
        wait_until_gone(pids)
        kept = read_trial(Store(folder).write(trial))
        assert kept.status == trial.status
        assert len(kept.samples["loss"]) >= 2
        return kept, seconds


def assert_every_rank_said(trial: Trial, num_ranks: int = 4) -> None:
    assert [line.partition(":")[0] for line in trial.last_actions] == [f"rank {rank}" for rank in range(num_ranks)]


MEGATRON = "megatron sharded"  # by its own code, which knows nothing of our limits


@pytest.mark.parametrize("name", ["ep", MEGATRON])
def test_a_rank_that_is_killed(name: str, tmp_path: Path) -> None:
    trial, seconds = broken_run(tmp_path, lambda pool: os.kill(pool.pids[2], signal.SIGKILL), name=name)
    assert trial.status == "died"
    assert "rank 2 (process " in trial.message
    assert "signal SIGKILL" in trial.message
    assert_every_rank_said(trial)
    assert seconds < 100  # long before the time limit


@pytest.mark.parametrize("name", ["ep", MEGATRON])
def test_a_rank_that_is_stopped(name: str, tmp_path: Path) -> None:
    """SIGSTOP: its process is there, and answers nothing, not even the signal that asks where it is."""
    trial, seconds = broken_run(tmp_path, lambda pool: os.kill(pool.pids[1], signal.SIGSTOP), timeout_s=10, name=name)
    assert trial.status == "hang"
    assert "the process of rank 1 is stopped" in trial.message
    assert_every_rank_said(trial)
    doing = "compute in " if name == "ep" else ""
    assert any(" in step " in line and doing in line for line in trial.last_actions)
    assert seconds < 100


def test_a_rank_that_runs_out_of_memory(tmp_path: Path) -> None:
    """Its address space ends a little above what it has, and the model needs more."""
    model = get_model("tiny").model_copy(update={"vocab_size": 1 << 20})
    case = make_case("ep", model, ep=2)
    with RankPool(2) as pool:
        pids = pool.run(os.getpid)
        size = int(Path(f"/proc/{pids[1]}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pids[1], resource.RLIMIT_AS, (size + (64 << 20), size + (64 << 20)))
        trial = measure(case, steps=1, pool=pool, data="synthetic").trial
        wait_until_gone(pids)
    kept = read_trial(Store(tmp_path).write(trial))
    assert kept.status == "oom", kept.message
    assert "rank 1 failed" in kept.message
    assert_every_rank_said(kept, 2)
    assert "rank 1: setting up" in kept.last_actions[1]


def test_a_rank_that_raises(tmp_path: Path) -> None:
    """The folder of the checkpoints becomes a file."""
    folder = tmp_path / "saved"

    def spoil(pool: RankPool) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("")

    trial, seconds = broken_run(tmp_path / "trials", spoil, saving=Saving(folder, 5))
    assert trial.status == "error"
    assert "FileExistsError" in trial.message or "NotADirectoryError" in trial.message
    assert_every_rank_said(trial)
    assert "saving after step" in " ".join(trial.last_actions)
    assert seconds < 30


@pytest.mark.parametrize(("system", "num_ranks"), [("ep", 4), (MEGATRON, 4), ("reference", 1)])
def test_a_loss_that_is_not_a_number(system: str, num_ranks: int, tmp_path: Path) -> None:
    """A learning rate beyond all reason, in a checkpoint that the run goes on from."""
    folder = tmp_path / "saved"
    train(case_for("reference"), steps=1, saving=Saving(folder))
    manifest = json.loads((folder / "step-00000001" / MANIFEST).read_text())
    manifest["optimizer"]["lr"] = 1e30
    (folder / "step-00000001" / MANIFEST).write_text(json.dumps(manifest))
    with RankPool(num_ranks) as pool:
        trial = measure(case_for(system), steps=STEPS, pool=pool, resume=folder, saving=Saving(folder, 1)).trial
    assert trial.status == "diverged"
    last = int(trial.metrics["first_step"] or 0) + len(trial.samples["loss"]) - 1
    assert trial.message == f"loss or gradient norm is not finite from step {last} on"
    assert_every_rank_said(trial, num_ranks)
    assert all(f"after step {last + 1}" in line for line in trial.last_actions)
    assert find_saved(folder).step == last  # what is broken is not saved


def test_causes_are_found_behind_other_errors() -> None:
    def raised(error: BaseException, of: BaseException) -> BaseException:
        try:
            try:
                raise of
            except BaseException as inner:
                raise error from inner
        except BaseException as outer:
            return outer

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert cause_of(caught.value) == "oom"
    assert cause_of(raised(RuntimeError("step 3"), caught.value)) == "oom"
    assert cause_of(raised(ValueError("x"), TimeoutError("no end"))) == "hung"
    assert cause_of(raised(ValueError("x"), KeyError("y"))) == "ValueError"


def test_a_limit_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match="timeout"):
        train(case_for("reference"), steps=1, timeout_s=0)


@pytest.mark.slow
def test_from_the_command_line_a_hang_ends_in_time_and_the_run_goes_on(tmp_path: Path) -> None:
    """One rank of a run is stopped; after the limit nothing is left of it but its trial and its checkpoints."""
    folder, trials = tmp_path / "saved", tmp_path / "trials"
    words = ["ep", "--model", "tiny", "--ranks", "2", "--seq-len", "16", "--results", str(trials)]
    words += ["--steps", str(STEPS), "--save", str(folder), "--save-every", "1", "--timeout", "5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.cli", "run", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until = time.monotonic() + 120
    while not (folder / LATEST).exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    group = in_group(process.pid)
    ranks = [pid for pid in group if parent_of(parent_of(pid)) == process.pid]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGSTOP)
    _, said = process.communicate(timeout=150)
    assert process.returncode == 1
    wait_until_gone(group)
    lines = said.splitlines()
    assert lines[0].startswith("moebench: hang: no answer for 5 s from rank ")
    assert "the process of rank 1 is stopped" in lines
    assert lines[-1] == f"go on from the last checkpoint with: moebench run --resume {folder}"
    assert {line.partition(":")[0] for line in lines[-3:-1]} == {"rank 0", "rank 1"}
    (kept,) = [trial for _, trial in read_trials([trials])]
    assert (kept.status, len(kept.last_actions)) == ("hang", 2)
    step = find_saved(folder).step
    assert call_json("run", "--resume", str(folder), "--steps", str(step + 1), "--results", str(trials))["losses"]
    assert find_saved(folder).step == step + 1


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
