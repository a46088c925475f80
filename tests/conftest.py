"""Fixtures that several test files use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from bench.execute.pool import RankPool
from experiments.launch.ledger import Ledger

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

NUM_RANKS = 8


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks on the CPU that all tests share; they start when a test first asks for them."""
    pytest.importorskip("torch")
    with RankPool(NUM_RANKS, timeout_s=240) as shared:
        yield shared


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Claims and ends in a results folder of their own."""
    made = Ledger(tmp_path / "results")
    made.make()
    return made
