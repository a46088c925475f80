"""Sweeps that train: what cannot be executed is said first, what this machine lacks is named; a figure end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.models import get_model
from bench.results import Store, read_trials
from experiments import fig7, scaling
from experiments.launch import choose
from experiments.launch.kept import adopt
from experiments.launch.layouts import fixed_for, with_layouts
from experiments.launch.ledger import Ledger
from experiments.launch.pack import require_machine
from experiments.launch.site import Site
from experiments.launch.work import Settings, Task


def on(cluster: str, layout: Layout | None = None, model: str = "tiny", system: str = "ep") -> CaseSpec:
    work = Workload(seq_len=16, global_batch_tokens=1024, dtype="fp32")
    spec = CaseSpec(model=get_model(model), cluster=get_cluster(cluster), workload=work, system=system)
    return spec if layout is None else spec.with_layout(layout)


def nothing(*_: object) -> None:
    pass


def test_what_this_machine_lacks_is_named_before_layouts_are_searched_for() -> None:
    for specs, line in (
        (fig7.specs(), "executor: 'local' is not valid; allowed: slurm, for the 16 nodes of 8 h800 of megatron"),
        ([on("b200x8gpu")], "8 GPUs here for ep tiny b200x8gpu, not "),
    ):
        with pytest.raises(BadInput, match=line):
            require_machine(specs, Site(executor="local"), "; smaller")
    with pytest.raises(BadInput, match="smaller"):
        require_machine(fig7.specs(), Site(executor="inprocess"), "; smaller")
    require_machine(fig7.specs(), Site(executor="slurm"), "")
    require_machine(fig7.quick_runs(), Site(executor="local"), "")
    require_machine([on("h800x2", Layout(replicas=1, ep=2))], Site(executor="local"), "")


def test_quick_runs_are_those_of_the_experiment_that_has_them() -> None:
    assert choose.specs_of("fig7", True, "run") == fig7.quick_runs()
    assert choose.specs_of("fig7", True) == fig7.specs(quick=True)
    assert choose.specs_of("scaling", True, "run") == scaling.specs(quick=True)
    assert {spec.system for spec in fig7.quick_runs()} == set(fig7.SYSTEMS)


def test_a_layout_that_is_searched_for_can_be_executed(ledger: Ledger) -> None:
    """Over nodes the simulator would choose one row a node, for which there is no code."""
    spec = on("h800x1")
    assert fixed_for(on("h800x2", model="deepseek-moe-16b")) == ("copies=rank",)
    assert fixed_for(spec) == ()
    one = Task(spec, Settings(budget=1, fixed=("copies=rank", "pp=1")))
    trial = one.run()
    assert isinstance(trial.case, Case) and trial.case.layout.copies == "rank"
    assert trial.search["fixed"] == ["copies=rank", "pp=1"]
    assert Task.parse(one.to_text()) == one
    assert one.key != Task(spec, Settings(budget=1)).key
    Store(ledger.results).write(trial)
    adopt(ledger, [one, Task(spec, Settings(budget=1))], retry_failed=False)
    assert ledger.done() == {one.key}


def test_what_cannot_be_executed_is_left_out_with_the_reason(ledger: Ledger) -> None:
    pytest.importorskip("megatron.core")
    runs = on("cpu", Layout(replicas=1, ep=2))
    per_node = on("h800x2", Layout(replicas=2, ep=8, copies="node"))
    comet, sinks = on("h800x2", system="comet"), on("h800x2", model="gpt-oss-120b")
    chosen = with_layouts([comet, runs, sinks, per_node], ledger, nothing)
    assert chosen.cases == [runs]
    reasons = dict(chosen.refused)
    assert reasons[comet] == "comet is modelled only"
    assert "to execute" in reasons[sinks]
    assert reasons[per_node] == "one row a node is only modelled"
    with pytest.raises(BadInput, match=r"at least one that can be executed \(comet is modelled only\)"):
        with_layouts([comet], ledger, nothing)


@pytest.mark.slow
def test_figure_7_is_measured_end_to_end_on_processes_of_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    words = [sys.executable, "-m", "bench.cli", "sweep", "fig7", "--executor", "local", "--backend", "run", "--quick"]
    words += ["--pack", "--steps", "1", "--results", str(tmp_path / "r"), "--out", str(tmp_path / "out")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "left out: comet tiny cpu2 (2 cases): comet is modelled only" in done.stderr
    trials = [trial for _, trial in read_trials([tmp_path / "r"]) if trial.source == "measured"]
    assert len(trials) == 2 * (len(fig7.SYSTEMS) - 1)
    assert {trial.status for trial in trials} == {"ok"}
    assert {trial.provenance["task"] for trial in trials} == {
        json.loads(line)["key"] for line in (tmp_path / "r/launch/sweeps/fig7-run").read_text().splitlines()[1:]
    }
    table = (tmp_path / "out" / "fig7-run-quick.csv").read_text()
    assert "measured" in table and "simulated" not in table
    assert (tmp_path / "out" / "fig7-run-quick.png").stat().st_size
