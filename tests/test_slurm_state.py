"""Slurm's commands, words and scripts."""

from __future__ import annotations

import pytest

from bench.errors import BadInput
from experiments.launch import site, slurm_state
from experiments.launch.ledger import Ledger
from experiments.launch.pack import Shape
from experiments.launch.slurm_state import Seen, SlurmError, ask
from experiments.launch.submission import record_of, script_text


def test_commands_end_in_bounded_time() -> None:
    with pytest.raises(SlurmError, match="no answer for"):
        ask(["sleep", "60"], timeout_s=0.1)
    with pytest.raises(SlurmError, match="exit code 3"):
        ask(["sh", "-c", "exit 3"])
    with pytest.raises(SlurmError, match=r"^no such thing$"):
        ask(["sh", "-c", "echo 'sbatch: error: no such thing' >&2; exit 1"])
    advised = """printf "sbatch: unrecognized option '--x'\nTry 'sbatch --help' for more\n" >&2; exit 1"""
    with pytest.raises(SlurmError, match=r"^unrecognized option '--x'$"):
        ask(["sh", "-c", advised])
    with pytest.raises(SlurmError, match="No such file"):
        ask(["no-such-command-anywhere"])


def test_queues_are_read_by_name_and_element() -> None:
    text = "12_3|a|RUNNING|None|node1\n12_4|a|PENDING|Resources|\n13|b|CANCELLED by 0|None|\n14|c|RUNNING|None|x\n"
    found = slurm_state._read(text, {"a", "b"})
    assert found == {
        ("a", 3): Seen("12_3", "RUNNING", "node1"),
        ("a", 4): Seen("12_4", "PENDING", "Resources"),
        ("b", 0): Seen("13", "CANCELLED", ""),
    }
    assert [seen.is_over for seen in found.values()] == [False, False, True]


def test_a_machine_without_slurm_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadInput, match="there is no sbatch here"):
        slurm_state.cluster_facts()


def test_scripts_can_be_written_where_there_is_no_slurm(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    chosen = site.Site(
        executor="slurm", partition="gpu", setup=("module load x",), sbatch={"reservation": "r"}, cpus_per_task=4
    )
    record = record_of(ledger, "moebench-x-1", Shape(2, 8, 16, "cuda"), 30, chosen, 5)
    text = script_text(ledger.jobs / "moebench-x-1", record, chosen)
    for line in (
        "#SBATCH --array=0-4%5",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=gpu",
        "#SBATCH --reservation=r",
        "#SBATCH --requeue",
        "#SBATCH --job-name=moebench-x-1",
        "module load x",
    ):
        assert line in text.splitlines()
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    assert "--kill-on-bad-exit=1" in srun and "--cpus-per-task=4" in srun and "-m experiments.launch.job" in srun
