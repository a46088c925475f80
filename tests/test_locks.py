"""Locks: processes told apart, and heartbeats."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace as changed
from pathlib import Path

from launching import finished_process

from experiments.launch.locks import Heartbeats, Process, started_at


def test_a_process_is_told_from_a_later_one_with_its_id() -> None:
    own = Process.current()
    assert own.runs_here()
    assert not changed(own, started="earlier").runs_here()
    assert not finished_process().runs_here()
    assert started_at(os.getpid()) == own.started


def test_a_dead_child_that_nobody_has_waited_for_does_not_run() -> None:
    with subprocess.Popen(["true"]) as child:
        process = Process.of(child.pid)
        end = time.monotonic() + 30
        while process.runs_here() and time.monotonic() < end:
            time.sleep(0.01)
        assert not process.runs_here()


def test_processes_elsewhere_live_as_long_as_they_beat(tmp_path: Path) -> None:
    beats = Heartbeats(tmp_path)
    elsewhere = Process("another-host", 1, "x")
    assert not beats.alive(elsewhere)
    (tmp_path / elsewhere.name).touch()
    assert beats.alive(elsewhere)
    os.utime(tmp_path / elsewhere.name, (0, 0))
    assert not beats.alive(elsewhere)
