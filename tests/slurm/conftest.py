"""A real Slurm on this host for the tests of this folder, which run where they are asked for: ``pytest -m slurm``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import RUN, Cluster, Sweep, emptied, running_slurm


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: starts a Slurm on this host; needs root, slurm-wlm and munge")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slurm" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.skip(reason="asked for with -m slurm"))


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    yield from running_slurm()


@pytest.fixture(scope="session", autouse=True)
def overrunning(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep | None]:
    """A sweep on a Slurm of its own whose run takes longer than it may, under way from the beginning of the session."""
    if not any(item.path.name == "test_time_limit.py" for item in request.session.items):
        yield None
        return
    for cluster in running_slurm(NNODES="2"):
        # The processors are for the tests beside it.
        cluster.site(max_attempts=2, setup=["renice 19 $$ >/dev/null"])
        options = (*RUN, "--steps", "1000000", "--time", "00:01:00")
        yield Sweep(cluster, tmp_path_factory.mktemp("time-limit"), *options, cases=1).begin()


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """A Slurm without accounting."""
    yield from emptied(slurm)
