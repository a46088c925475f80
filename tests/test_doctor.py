"""The doctor: what it says of this machine is what this machine does."""

from __future__ import annotations

import importlib.util
import os
import shutil
from itertools import product
from pathlib import Path

import pytest
import typer

from bench.cli import doctor as verb
from bench.doctor import ABILITIES, Check, Report, examine
from bench.doctor.host import infiniband


def test_every_need_is_a_check_and_the_codes_cannot_be_confused(tmp_path: Path) -> None:
    report = examine(tmp_path, quick=True)
    assert {need for ability in ABILITIES for need in ability.needs} <= set(report.checks)
    assert all(name == check.name for name, check in report.checks.items())
    assert all(check.found for check in report.checks.values())
    codes = [sum(chosen) for chosen in product(*((0, ability.bit) for ability in ABILITIES))]
    assert len(set(codes)) == 2 ** len(ABILITIES)
    assert not {1, 2, 130} & set(codes)
    assert max(codes) < 128


def test_the_code_is_the_sum_of_what_will_not_work() -> None:
    names = {need for ability in ABILITIES for need in ability.needs}
    fine = {name: Check(name, "ok", "x") for name in names}
    assert Report(fine).exit_code == 0
    assert Report({**fine, "nccl": Check("nccl", "broken", "x")}).exit_code == 32
    assert Report({**fine, "torch": Check("torch", "absent", "x")}).exit_code == 48
    assert Report({**fine, "results folder": Check("results folder", "broken", "x")}).exit_code == 120


def test_what_was_not_tried_is_not_said_to_work(tmp_path: Path) -> None:
    quick, whole = ABILITIES[0], examine(tmp_path)
    report = examine(tmp_path, quick=True)
    assert report.checks["simulator"].state == "not tried"
    assert (report.works(quick), report.untried(quick), report.missing(quick)) == (None, ["simulator"], [])
    assert (whole.works(quick), whole.untried(quick)) == (True, [])
    assert "not tried" not in {check.state for check in whole.checks.values()}
    assert Report({**report.checks, "python": Check("python", "broken", "x")}).works(quick) is False


def test_what_is_said_of_this_machine_is_so(tmp_path: Path) -> None:
    report = examine(tmp_path / "new" / "results")
    states = {name: check.state for name, check in report.checks.items()}
    assert states["simulator"] == states["results folder"] == states["clocks"] == "ok"
    has_torch = importlib.util.find_spec("torch") is not None
    assert states["torch"] == states["ranks"] == ("ok" if has_torch else "absent")
    assert (states["slurm"] == "absent") == (shutil.which("sbatch") is None)
    assert (states["infiniband"] == "absent") == (not list(Path("/sys/class").glob("infiniband/*/ports/*")))
    if not Path("/dev/nvidiactl").exists():
        assert states["gpus"] == states["nccl"] == states["nvml"] == "absent"
        assert report.exit_code & 32
    assert all(check.advice for check in report.checks.values() if check.state == "broken")
    assert not (tmp_path / "new").exists()


def test_ports_are_counted_by_their_state(tmp_path: Path) -> None:
    for port, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        folder = tmp_path / port / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
    assert infiniband(tmp_path) == Check("infiniband", "ok", "2 ports", "not active: mlx5_1/1")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert examine(tmp_path, quick=True).checks["results folder"].state == "broken"


def test_the_verb_exits_with_the_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = examine(tmp_path, quick=True).exit_code
    try:
        verb.doctor(quick=True, results=tmp_path)
        code = 0
    except typer.Exit as end:
        code = end.exit_code
    assert code == expected
    assert "what will work" in capsys.readouterr().out
