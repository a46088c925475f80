"""The time limit of a run. Slurm counts it in minutes, so the sweep begins with the first test of the folder."""

from __future__ import annotations

import pytest
from harness import Sweep

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


def test_a_run_that_times_out_is_tried_again_and_then_given_up(overrunning: Sweep) -> None:
    assert "reached its time limit" in overrunning.end(1)
    overrunning.require_complete(timeout=1)
    assert len(overrunning.events("case-start")) == 2
