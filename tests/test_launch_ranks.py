"""Ranks of a job as the launcher runs them: one call after the other in one process."""

import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

SCRIPT = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from bench.execute.rank import when_over
from experiments.launch.ranks import JoinedRanks

folder = Path(sys.argv[1])
alone = SimpleNamespace(global_rank=0, local_rank=0, num_nodes=1, hostname="here", hostnames=["here"])
ranks = JoinedRanks(alone, folder / "meeting", 1, "cpu", lambda rank: folder / f"flight.{rank}")
left = []

def fails():
    when_over(lambda: left.append(f"failed among {dist.get_world_size()}"))
    raise RuntimeError("on purpose")

def works():
    when_over(lambda: left.append(f"worked among {dist.get_world_size()}"))
    return dist.get_rank()

try:
    ranks.run(fails)
except RuntimeError as error:
    print(error)
print(ranks.run(works), ranks.run(works), left)
"""


@pytest.mark.slow
def test_what_a_call_leaves_is_cleared_up_and_the_next_one_runs_also_after_a_failure(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    left = ["failed among 1", "worked among 1", "worked among 1"]
    assert done.stdout.splitlines() == ["on purpose", f"[0] [0] {left}"], done.stderr


LOSES = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from bench.execute.transport import lost_peer
from experiments.launch.ranks import JoinedRanks

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
here = SimpleNamespace(global_rank=rank, local_rank=rank, num_nodes=1, hostname="here", hostnames=["here"])
ranks = JoinedRanks(here, folder / "meeting", 2, "cpu", lambda rank: folder / f"flight.{rank}")

def sums():
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        print("ready", flush=True)
        sys.stdin.read()
    dist.all_reduce(torch.ones(1))

try:
    ranks.run(sums)
except Exception as error:
    print(lost_peer(error), lost_peer(RuntimeError("on purpose")))
"""


@pytest.mark.slow
def test_a_rank_tells_the_loss_of_another_from_an_error_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    both = [
        subprocess.Popen(
            [sys.executable, "-c", LOSES, str(tmp_path), str(rank)],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert both[1].stdout is not None
        assert both[1].stdout.readline() == "ready\n"
        both[1].kill()
        said, err = both[0].communicate(timeout=200)
    finally:
        for one in both:
            one.kill()
            one.communicate()
    assert said == "True False\n", err
