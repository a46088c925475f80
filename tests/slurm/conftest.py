"""A real Slurm on this host for the tests of this folder, which run where they are asked for: ``pytest -m slurm``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Cluster, emptied, running_slurm


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


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """A Slurm without accounting."""
    yield from emptied(slurm)
