"""The same on a Slurm with accounting, which remembers jobs that the controller has forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Cluster, Sweep, emptied, running_slurm, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def accounting() -> Iterator[Cluster]:
    """A Slurm beside the other, whose controller forgets ended jobs at once."""
    yield from running_slurm(ACCOUNTING="1", MINJOBAGE="2")


@pytest.fixture
def cluster(accounting: Cluster) -> Iterator[Cluster]:
    yield from emptied(accounting)


def test_a_sweep_with_accounting(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", "--jobs", "6", cases=24)
    sweep.run()
    sweep.require_complete()


def test_a_job_that_only_accounting_remembers(cluster: Cluster, tmp_path: Path) -> None:
    cluster.site(setup=["sleep 600"])
    sweep = Sweep(cluster, tmp_path / "r", "--jobs", "1", cases=2).begin()
    wait_until(lambda: "R" in cluster.command("squeue", "-h", "-o", "%t").split())
    sweep.kill()
    cluster.command("scancel", "--user", "root")
    wait_until(lambda: not cluster.command("squeue", "-h", "-t", "all"))
    cluster.site()
    again = Sweep(cluster, tmp_path / "r", "--jobs", "1", cases=2)
    assert "cancelled before it started" in again.run(1)
    again.require_complete(error=2)
    again.words.append("--retry-failed")
    again.run()
    assert [len(trials) for trials in again.records().values()] == [2, 2]
    assert {trials.status for both in again.records().values() for trials in both} == {"ok", "error"}
