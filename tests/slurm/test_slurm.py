"""Sweeps on a real Slurm: that they work, and that every kind of failure leaves one record of every case."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from harness import HELD, RUN, Cluster, Sweep, wait_until
from launching import held_in_an_action

from bench.execute.flight import Phase
from experiments.launch.slurm_state import FIRST_ANSWER_S
from experiments.launch.submission import JobFolder

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


def test_simulated_cases_go_out_as_arrays_and_only_once(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", "--jobs", "6", cases=24)
    said = sweep.run()
    assert re.search(r"submitted job \d+: 24 runs in 6 elements", said)
    sweep.require_complete()
    scripts = list((tmp_path / "r").glob("launch/jobs/*/*_submission.sh"))
    assert len(scripts) == 1
    assert "--kill-on-bad-exit=1" in scripts[0].read_text()
    assert "24 runs, 0 new: 24 ok" in sweep.run()
    assert list((tmp_path / "r").glob("launch/jobs/*/*_submission.sh")) == scripts


def test_arrays_stay_below_the_largest_one(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", "--jobs", "103", cases=104)
    sweep.begin()
    wait_until(lambda: len(list((tmp_path / "r").glob("launch/jobs/*/*_submission.sh"))) == 2)
    arrays = [
        int(re.search(r"--array=0-(\d+)", path.read_text())[1])  # type: ignore[index]
        for path in (tmp_path / "r").glob("launch/jobs/*/*_submission.sh")
    ]
    assert sorted(arrays) == [2, 99]
    sweep.kill()


def test_two_systems_train_over_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(
        cluster, tmp_path / "r", *RUN, "--steps", "10", "--jobs", "1", cases=1, ranks=4, systems="ep,disagmoe"
    )
    sweep.run()
    sweep.require_complete()
    losses = [trial.samples["loss"] for (trial,) in sweep.records().values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(losses[0]) == 10 and losses[0][-1] < losses[0][0]
    script = next((tmp_path / "r").glob("launch/jobs/*/*_submission.sh")).read_text()
    assert "--nodes=2" in script and "--ntasks-per-node=2" in script


def test_repeats_share_an_allocation_in_rounds(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", *RUN, "--steps", "2", "--repeats", "2", "--pack", cases=2)
    sweep.run()
    assert sum(map(len, sweep.records().values())) == 4
    starts = [event["key"] for event in sweep.events("case-start")]
    repeats = [sweep.records()[str(key)][0].provenance["repeat"] for key in starts]
    assert repeats == [0, 0, 1, 1]
    assert len(sweep.events("job-start")) == 1


def test_a_cancelled_job_is_final(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", *HELD, cases=2).begin()
    with cluster.held(2):
        cluster.command("scancel", str(sweep.events("job-start")[0]["job"]))
    said = sweep.end(1)
    assert "cancelled while it ran" in said
    sweep.require_complete(ok=1, error=1)
    shown = sweep.ask("status")
    assert "cancelled while it ran" in shown and "_submission.sh" in shown and "_log.err" in shown
    (failed,) = json.loads(sweep.ask("status", "--json"))["failures"]
    (job,) = json.loads(sweep.ask("logs", failed["case_id"], "--json"))["jobs"]
    assert Path(job["script"]).is_file() and "CANCELLED" in Path(job["logs"][0]).read_text()


def test_a_killed_rank_ends_the_run_which_is_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", *RUN, "--steps", "10", cases=1, ranks=4).begin()
    with cluster.held(4):
        _rank(cluster, 3).send_signal(signal.SIGKILL)
    assert "the job failed (signal" in sweep.end()
    sweep.require_complete()
    assert len(sweep.events("job-start")) == 2


def test_the_record_of_a_killed_rank_has_the_last_actions_of_all(cluster: Cluster, tmp_path: Path) -> None:
    cluster.site(max_attempts=1)
    sweep = Sweep(cluster, tmp_path / "r", *RUN, "--steps", "1000000", cases=1, ranks=4).begin()
    wait_until(lambda: len(sweep.ranks_in(Phase.STEP)) == 4)  # on two nodes
    (job,) = (tmp_path / "r").glob("launch/jobs/*")
    last = _rank(cluster, 3)
    held = held_in_an_action(JobFolder(job), 3, last)
    last.send_signal(signal.SIGKILL)
    said = sweep.end(1)
    sweep.require_complete(died=1)
    ((trial,),) = sweep.records().values()
    assert [line.partition(":")[0] for line in trial.last_actions] == [f"rank {rank}" for rank in range(4)]
    assert all(re.match(r"rank \d: in step \d+: compute (in|after) ", line) for line in trial.last_actions)
    assert trial.last_actions[3].rpartition(" for ")[0] == held[3].rpartition(" for ")[0]
    assert all(f"  {line[:100]}" in said for line in trial.last_actions)
    assert "  rank 3: " in sweep.ask("status") and "  rank 3: " in sweep.ask("logs", trial.case_id)


def _rank(cluster: Cluster, rank: int) -> psutil.Process:
    (found,) = [process for process in cluster.ranks() if process.environ()["SLURM_PROCID"] == str(rank)]
    return found


def test_a_preempted_run_is_run_again(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", *HELD, cases=1).begin()
    with cluster.held():
        hog = cluster.command("sbatch", "-p", "high", "-N4", "--exclusive", "-o/dev/null", "--wrap", "sleep 600")
        wait_until(lambda: not cluster.job_processes())
    cluster.command("scancel", hog.split()[-1])
    sweep.end()
    sweep.require_complete()
    assert len(sweep.events("case-start")) == 2


def test_a_run_survives_its_node(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", *HELD, cases=1).begin()
    node = ""
    try:
        with cluster.held():
            node = str(sweep.events("job-start")[0]["host"])
            cluster.command("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
            wait_until(lambda: not cluster.job_processes())
        sweep.end()
    finally:  # it may have come back by itself
        words = ["scontrol", "update", f"nodename={node}", "state=resume"]
        subprocess.run(words, env=cluster.env, capture_output=True, check=False)
    sweep.require_complete()
    assert len(sweep.events("case-start")) == 2


def test_a_refused_submission_is_made_again(cluster: Cluster, tmp_path: Path) -> None:
    try:
        cluster.command("scontrol", "update", "partition=main", "state=inactive")
        sweep = Sweep(cluster, tmp_path / "r", cases=4).begin()
        wait_until(lambda: any((tmp_path / "r").glob("launch/jobs/*/dropped")))
    finally:
        cluster.command("scontrol", "update", "partition=main", "state=up")
    assert "Slurm refused a job" in sweep.end()
    sweep.require_complete()


def test_what_slurm_refuses_for_good_is_said_and_can_be_run_later(cluster: Cluster, tmp_path: Path) -> None:
    cluster.site(poll_s=0.2, constraint="no-such-feature")
    refused = Sweep(cluster, tmp_path / "r", cases=2)
    assert "2 runs have no result: Slurm refused: " in refused.run(1)
    assert refused.records() == {}
    cluster.site()
    sweep = Sweep(cluster, tmp_path / "r", cases=2)
    sweep.run()
    sweep.require_complete()


def test_a_controller_may_stop_and_start(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", *HELD, cases=2).begin()
    with cluster.held(2):
        standing = json.loads(sweep.ask("status", "--json"))
        assert (standing["counts"], standing["trouble"], len(standing["running"])) == ({"running": 2}, "", 2)
        cluster.stop_controller()
        assert "ep tiny" in sweep.ask("status") and json.loads(sweep.ask("status", "--json"))["trouble"]
    sweep.wait_for("case-end")
    cluster.start_controller()
    sweep.end()
    sweep.require_complete()


def test_job_ids_may_start_again(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", *HELD, cases=2).begin()
    with cluster.held(2):
        cluster.stop_controller()
        cluster.start_controller(forget=True)
    other = Sweep(cluster, tmp_path / "other", cases=2)
    other.run()
    other.require_complete()
    sweep.end()
    sweep.require_complete()


@pytest.mark.parametrize("moment", ["claimed", "submitted", "running"])
def test_a_killed_sweep_goes_on_where_it_stopped(cluster: Cluster, tmp_path: Path, moment: str) -> None:
    sweep = Sweep(cluster, tmp_path / "r", *RUN, "--steps", "40", cases=2).begin()
    jobs = tmp_path / "r" / "launch"
    wanted = {"claimed": "claims/*", "submitted": "jobs/*/submitted", "running": "jobs/*/events.*"}[moment]
    wait_until(lambda: any(jobs.glob(wanted)))
    sweep.kill()
    again = Sweep(cluster, tmp_path / "r", *RUN, "--steps", "40", cases=2)
    again.run()
    again.require_complete()


def test_two_sweeps_at_once_share_the_work(cluster: Cluster, tmp_path: Path) -> None:
    first = Sweep(cluster, tmp_path / "r", "--jobs", "4", cases=24).begin()
    second = Sweep(cluster, tmp_path / "r", "--jobs", "4", cases=24).begin()
    assert "24 ok" in first.end() and "24 ok" in second.end()
    first.require_complete()
    keys = [event["key"] for event in first.events("case-start")]
    assert len(keys) == len(set(keys)) == 24


def test_a_job_that_can_never_start_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    hog = cluster.command("sbatch", "-p", "short", "-N2", "--exclusive", "-o/dev/null", "--wrap", "sleep 600")
    try:
        sweep = Sweep(cluster, tmp_path / "r", "--partition", "short", "--time", "00:05:00", cases=2).begin()
        wait_until(lambda: any((tmp_path / "r").glob("launch/jobs/*/submitted")))
        cluster.command("scontrol", "update", "partition=short", "MaxTime=1")
        said = sweep.end(1)
        assert "Slurm will never start it: PartitionTimeLimit" in said
        sweep.require_complete(error=2)
        wait_until(lambda: len(cluster.command("squeue", "-h").splitlines()) == 1)
    finally:
        cluster.command("scontrol", "update", "partition=short", "MaxTime=10")
        cluster.command("scancel", hog.split()[-1])


def test_bad_input_is_refused_before_anything_is_submitted(cluster: Cluster, tmp_path: Path) -> None:
    refusals = {
        ("--partition", "nowhere"): "--partition: 'nowhere' is not valid; allowed: main, high, short",
        ("--partition", "short", "--time", "11"): "--time: '00:11:00' is not valid; allowed: at most 00:10:00 a job",
        (*RUN, "--partition", "short", "--gpus-per-node", "1"): "nodes: 4 is not valid; allowed: at most the 2 nodes",
        (*RUN, "--max-nodes", "1"): "--max-nodes: 1 is not valid; allowed: at least the 2 nodes",
        ("--time", "soon"): "--time: 'soon' is not valid",
    }
    for options, line in refusals.items():
        sweep = Sweep(cluster, tmp_path / "r", *options, cases=1, ranks=4)
        said = sweep.run(2)
        assert line in said and said.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_a_slurm_that_does_not_answer_is_refused_soon(cluster: Cluster, tmp_path: Path) -> None:
    controller = psutil.Process(int((cluster.root / "slurmctld.pid").read_text()))
    controller.suspend()  # it takes connections and says nothing
    try:
        said = Sweep(cluster, tmp_path / "r", cases=1).run(2)
    finally:
        controller.resume()
    why = f"scontrol: no answer for {FIRST_ANSWER_S:g} s"
    assert said == f"moebench: --executor: 'slurm' is not valid; allowed: a Slurm that answers ({why})\n"
    assert not (tmp_path / "r").exists()


def test_a_dry_run_shows_the_script_and_submits_nothing(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--partition", "short", "--time", "00:05:00", "--jobs", "3", "--dry-run")
    said = Sweep(cluster, tmp_path / "r", *options, cases=6).run()
    script = ("--partition=short", "--time=5", "--array=0-2%3", "--nodes=1", "--kill-on-bad-exit=1", "launch.job")
    for words in ("ep tiny cpu2x2 4x16 seed 5", "00:05:00", "6 runs, at most 0.0 GPU-hours", *script):
        assert words in said
    assert not (tmp_path / "r").exists() and not cluster.command("squeue", "-h")


def test_cancel_stops_sweep_and_jobs(cluster: Cluster, tmp_path: Path) -> None:
    sweep = Sweep(cluster, tmp_path / "r", *HELD, cases=2).begin()
    with cluster.held(2):
        assert sweep.ask("cancel") == "tiny-run: cancelled 1 jobs\n"
    assert "2 runs have no result: the sweep was cancelled" in sweep.end(1)
    wait_until(lambda: not cluster.job_processes())
    assert sweep.records() == {}
    again = Sweep(cluster, tmp_path / "r", *HELD, cases=2)
    again.run()
    again.require_complete()
