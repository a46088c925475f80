"""Sweeps without Slurm: claims, ends, packing, verdicts, site files, and whole sweeps on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as changed
from pathlib import Path

import psutil
import pytest
from cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.case import CaseSpec
from bench.errors import BadInput
from bench.results import Store
from bench.trial import Trial
from experiments.launch import choose, site, slurm_state, sweeps
from experiments.launch.kept import adopt
from experiments.launch.ledger import Claim, Ledger, link_new
from experiments.launch.locks import Heartbeats, Process, started_at
from experiments.launch.outcome import Event
from experiments.launch.pack import SIMULATION, Shape, minutes, packs, shape_of
from experiments.launch.preview import require_possible, runs
from experiments.launch.slurm_state import ClusterFacts, Partition, Queue, Seen, SlurmError, ask
from experiments.launch.submission import JobFolder, Start, prepare, record_of, script_text
from experiments.launch.verdict import Judge
from experiments.launch.watch import Plan, Sweep
from experiments.launch.work import Settings, Task

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "slurm" / "tiny.py"
SITE = site.Site()


def task(seed: int = 0, repeat: int = 0, backend: str = "simulate", **layout: int) -> Task:
    case = make_case("ep", **layout)
    case = case.model_copy(update={"workload": case.workload.model_copy(update={"seed": seed})})
    return Task(case, Settings(backend=backend), repeat)  # type: ignore[arg-type]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "results")
    made.make()
    return made


def finished_process() -> Process:
    """A process of this host that has come and gone."""
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process.of(child.pid)
        child.kill()
    return process


# --- locks ---


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


# --- ledger ---


def test_one_of_many_gets_a_claim(ledger: Ledger) -> None:
    claims = [Claim("k", 1, 1, Process.current(), job=str(number)) for number in range(32)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(ledger.claim, claims))
    assert won.count(True) == 1
    assert ledger.claims(["k", "other"]) == {"k": claims[won.index(True)]}


def test_a_later_claim_ends_an_earlier_one(ledger: Ledger) -> None:
    for generation in (1, 2):
        assert ledger.claim(Claim("k", generation, 1, Process.current()))
    assert not ledger.holds("k", 1) and ledger.holds("k", 2)
    assert [claim.generation for claim in ledger.history("k")] == [1, 2]


def test_a_task_has_one_record(ledger: Ledger) -> None:
    one = task()
    with ThreadPoolExecutor(8) as pool:
        trials = [one.failed("error", f"attempt {number}") for number in range(8)]
        won = list(pool.map(lambda trial: ledger.commit(one.key, trial), trials))
    assert won.count(True) == 1
    kept = ledger.trial(one.key)
    assert kept is not None and kept.message == trials[won.index(True)].message
    assert len(list(ledger.results.glob("*.json"))) == 1
    assert not ledger.holds(one.key, 1)


def test_a_commit_that_was_cut_short_is_finished(ledger: Ledger) -> None:
    one = task()
    trial = one.run()
    link_new(ledger.root / "done" / one.key, trial.to_text())
    assert not list(ledger.results.glob("*.json"))
    ledger.recover()
    assert Trial.parse(next(ledger.results.glob("*.json")).read_bytes()) == trial
    assert ledger.trial(one.key) == trial


def test_a_record_that_was_removed_is_made_again(ledger: Ledger) -> None:
    one = task()
    ledger.commit(one.key, one.run())
    next(ledger.results.glob("*.json")).unlink()
    ledger.recover()
    assert ledger.done() == set()


def test_results_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="a directory that can be written"):
        Ledger(tmp_path / "file").make()


# --- tasks ---


def test_a_task_survives_being_written_down() -> None:
    for one in (task(3), task(repeat=2, backend="run"), Task(task().spec, Settings(overrides=("a=1",), budget=4))):
        assert Task.parse(one.to_text()) == one


def test_keys_tell_what_results_depend_on() -> None:
    base = task(backend="run")
    other_steps = changed(base, settings=changed(base.settings, steps=21))
    assert len({base.key, task().key, task(1, backend="run").key, task(0, 1, "run").key, other_steps.key}) == 5


def test_simulated_results_of_others_are_taken_over(ledger: Ledger) -> None:
    one = task()
    Store(ledger.results).write(one.run())
    adopt(ledger, [one, task(1)], retry_failed=False)
    assert ledger.done() == {one.key}


def test_failed_tasks_are_run_again_only_if_asked(ledger: Ledger) -> None:
    one = task()
    ledger.commit(one.key, one.failed("timeout", "too slow"))
    adopt(ledger, [one], retry_failed=False)
    assert ledger.done() == {one.key}
    adopt(ledger, [one], retry_failed=True)
    assert ledger.done() == set()
    assert len(list(ledger.results.glob("*.json"))) == 1


def test_a_task_that_is_opened_again_starts_afresh(ledger: Ledger) -> None:
    one = task()
    events(job_of(ledger, one, attempt=3), one)
    judge = Judge(ledger, 3, confirm_s=0)
    claim = ledger.claims([one.key])[one.key]
    assert judge.decide(claim, queue_of("TIMEOUT")).what == "final"
    ledger.commit(one.key, one.failed("timeout", "too slow"))
    adopt(ledger, [one], retry_failed=True)
    verdict = judge.decide(claim, queue_of("TIMEOUT"))
    assert (verdict.what, verdict.attempt) == ("again", 1)


def test_a_success_does_not_hide_behind_an_earlier_failure(ledger: Ledger) -> None:
    one = task()
    ledger.commit(one.key, one.failed("error", "bad luck"))
    adopt(ledger, [one], retry_failed=True)
    assert ledger.commit(one.key, one.run())
    kept = ledger.trial(one.key)
    assert kept is not None and kept.status == "ok"
    assert len(list(ledger.results.glob("*.json"))) == 2
    adopt(ledger, [one], retry_failed=False)
    assert ledger.trial(one.key) == kept


# --- choosing and packing ---


def test_only_chooses_by_fields() -> None:
    specs: list[CaseSpec] = [task(seed).spec for seed in range(4)]
    assert choose.only(specs, ["seed=1,seed=3", "model=tiny"]) == [specs[1], specs[3]]
    for words, line in {
        "colour=red": "only: 'colour' is not valid; allowed: model, system",
        "seed": "field=value",
        "model=huge": "only.model: 'huge' is not valid; allowed: tiny",
    }.items():
        with pytest.raises(BadInput, match=line):
            choose.only(specs, [words])


@pytest.mark.parametrize(("name", "line"), [("nothing", "experiment"), ("absent.py", "can be read")])
def test_unknown_experiments_are_refused(name: str, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        choose.specs_of(name, quick=False)


def test_an_experiment_file_that_fails_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1 / 0")
    with pytest.raises(BadInput, match="ZeroDivisionError"):
        choose.specs_of(str(tmp_path / "mine.py"), quick=False)


def test_simulations_are_not_repeated() -> None:
    with pytest.raises(BadInput, match="comes out the same"):
        choose.tasks_of([task().spec], Settings(), 2)


@given(num_tasks=st.integers(1, 40), jobs=st.integers(1, 50))
@settings(max_examples=20)
def test_every_simulated_task_is_in_one_pack(num_tasks: int, jobs: int) -> None:
    tasks = [task(seed) for seed in range(num_tasks)]
    dealt = packs(tasks, SIMULATION, site.Site(jobs=jobs), pack=False)
    assert sorted(one.spec.workload.seed for pack in dealt for one in pack) == list(range(num_tasks))
    assert len(dealt) == min(num_tasks, jobs)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_runs_are_jobs_or_share_one_in_rounds() -> None:
    tasks = [task(seed, repeat, "run") for seed in range(2) for repeat in range(3)]
    shape = shape_of(tasks[0], SITE)
    assert [len(pack) for pack in packs(tasks, shape, SITE, pack=False)] == [1] * 6
    (together,) = packs(tasks, shape, SITE, pack=True)
    assert [one.repeat for one in together] == [0, 0, 1, 1, 2, 2]
    assert minutes(together, shape, SITE) == 6 * SITE.minutes
    assert minutes(together, SIMULATION, SITE) == SITE.minutes


def test_shapes_follow_the_case_and_the_site() -> None:
    wide = task(backend="run", ep=4, replicas=2)
    assert shape_of(wide, SITE) == Shape(1, 8, 8, "cuda")
    assert shape_of(wide, site.Site(gpus_per_node=2)) == Shape(4, 2, 8, "cuda")
    assert shape_of(wide, site.Site(gpus_per_node=3)) == Shape(3, 3, 8, "cuda")
    assert shape_of(task(), SITE) == SIMULATION
    with pytest.raises(BadInput, match="max_nodes: 1 is not valid; allowed: at least the 4 nodes"):
        shape_of(wide, site.Site(gpus_per_node=2, max_nodes=1))


def test_previews_count_gpu_hours_and_memory() -> None:
    (run,) = runs([task(backend="run", ep=4, replicas=2)], site.Site(time="02:00:00"))
    assert (run.nodes, run.ranks, run.minutes, run.gpu_hours) == (1, 8, 120, 16.0)
    assert run.memory_bytes is not None and 0 < run.memory_bytes < 2**30


def test_what_slurm_could_never_start_is_refused() -> None:
    small = Partition("small", is_default=True, is_up=True, num_nodes=2, max_minutes=20)
    facts = ClusterFacts({"small": small}, 1001, False)
    wide = task(backend="run", ep=4, replicas=2)
    require_possible([wide], site.Site(time="20"), facts, False)
    for settings_, line in (
        (site.Site(partition="huge", time="20"), "partition: 'huge' is not valid; allowed: small"),
        (site.Site(time="21"), "time: 21 is not valid; allowed: at most the 20 minutes"),
        (site.Site(gpus_per_node=2, time="1"), "nodes: 4 is not valid; allowed: at most the 2 nodes"),
    ):
        with pytest.raises(BadInput, match=line):
            require_possible([wide], settings_, facts, False)


# --- site files ---


def test_the_template_explains_every_setting_and_its_values_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    site.write_template(path)
    assert site.load(path, {}) == site.Site()
    lines = path.read_text().splitlines()
    settings_ = [line.removeprefix("# ") for line in lines if "=" in line or line == "# [sbatch]"]
    path.write_text("\n".join(line for line in settings_ if not line.startswith("and an option")))
    filled = site.load(path, {})
    assert set(site.Site.model_fields) == filled.model_fields_set
    with pytest.raises(BadInput, match="does not exist yet"):
        site.write_template(path)


def test_options_win_over_the_file_and_switch_it_off(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('partition = "gpu"\naccount = "mine"\ntime = "01:00:00"\n')
    loaded = site.load(path, {"partition": "other", "account": "none", "time": None})
    assert (loaded.partition, loaded.account, loaded.minutes) == ("other", None, 60)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('partitoin = "a"', "did you mean 'partition'"),
        ('executor = "pbs"', "site.executor: 'pbs'"),
        ('time = "soon"', "time: 'soon'"),
        ("jobs = 0", "site.jobs: 0"),
        ("jobs =", "TOML"),
    ],
)
def test_wrong_site_files_are_refused_in_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(BadInput, match=line) as refused:
        site.load(tmp_path / "site.toml", {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"), [("30", 30), ("00:30:00", 30), ("1:01", 2), ("1-02:03:04", 1564), ("00:00:01", 1)]
)
def test_time_limits_are_read_as_slurm_does(text: str, expected: int) -> None:
    assert site.minutes_of("time", text) == expected
    assert site.minutes_of("time", site.clock(expected)) == expected


# --- Slurm's words ---


def test_commands_end_in_bounded_time() -> None:
    with pytest.raises(SlurmError, match="no answer for"):
        ask(["sleep", "60"], timeout_s=0.1)
    with pytest.raises(SlurmError, match="exit code 3"):
        ask(["sh", "-c", "exit 3"])
    with pytest.raises(SlurmError, match=r"^no such thing$"):
        ask(["sh", "-c", "echo 'sbatch: error: no such thing' >&2; exit 1"])
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


# --- verdicts ---


def job_of(ledger: Ledger, *tasks: Task, attempt: int = 1) -> JobFolder:
    """A job that Slurm has taken, with one element."""
    wanted = [[Start(one, 1, attempt) for one in tasks]]
    record = prepare(ledger, "moebench-x-1", wanted, SIMULATION, 30, site.Site(executor="slurm"))
    assert record is not None
    folder = JobFolder(ledger.jobs / record.name)
    (folder.path / "submitted").write_text("7\n")
    return folder


def events(folder: JobFolder, *started: Task) -> None:
    lines = [{"event": "job-start"}, *({"event": "case-start", "key": one.key} for one in started)]
    folder.events_path(0).write_text("".join(json.dumps(line) + "\n" for line in lines))


def queue_of(state: str, reason: str = "") -> Queue:
    return Queue(True, {("moebench-x-1", 0): Seen("7_0", state, reason)})


@pytest.mark.parametrize(
    ("state", "reason", "attempt", "expected"),
    [
        ("RUNNING", "", 1, ("wait", "")),
        ("PENDING", "Resources", 1, ("wait", "")),
        ("PENDING", "BeginTime", 3, ("wait", "")),
        ("COMPLETING", "", 1, ("wait", "")),
        ("PENDING", "PartitionTimeLimit", 1, ("final", "Slurm will never start it: PartitionTimeLimit")),
        ("CANCELLED", "", 1, ("final", "the job was cancelled while it ran")),
        ("NODE_FAIL", "", 1, ("again", "the job lost its node")),
        ("PREEMPTED", "", 2, ("again", "the job was preempted")),
        ("TIMEOUT", "", 2, ("again", "the job reached its time limit")),
        ("TIMEOUT", "", 3, ("final", "the job reached its time limit; 3 of 3 attempts")),
        ("OUT_OF_MEMORY", "", 3, ("final", "the job ran out of host memory; 3 of 3 attempts")),
        ("PENDING", "launch failed requeued held", 1, ("again", "the job could not be started by Slurm")),
    ],
)
def test_states_lead_to_verdicts(
    ledger: Ledger, state: str, reason: str, attempt: int, expected: tuple[str, str]
) -> None:
    one = task()
    events(job_of(ledger, one, attempt=attempt), one)
    claim = ledger.claims([one.key])[one.key]
    verdict = Judge(ledger, 3, confirm_s=0).decide(claim, queue_of(state, reason))
    assert (verdict.what, verdict.message) == expected
    if verdict.what == "again":
        assert verdict.attempt == attempt + 1
    statuses = {"TIMEOUT": "timeout", "OUT_OF_MEMORY": "oom"}
    assert verdict.status == (statuses.get(state, "error") if verdict.what == "final" else "error")


def test_an_end_counts_once_it_was_seen_for_a_while(ledger: Ledger) -> None:
    one = task()
    events(job_of(ledger, one), one)
    claim = ledger.claims([one.key])[one.key]
    judge = Judge(ledger, 3, confirm_s=0.05)
    assert judge.decide(claim, queue_of("NODE_FAIL")).what == "wait"
    time.sleep(0.06)
    assert judge.decide(claim, queue_of("PENDING")).what == "wait"  # Slurm has queued it again
    assert judge.decide(claim, queue_of("NODE_FAIL")).what == "wait"
    time.sleep(0.06)
    assert judge.decide(claim, queue_of("NODE_FAIL")).what == "again"


def test_only_the_task_that_ran_is_blamed(ledger: Ledger) -> None:
    ran, waited = task(0), task(1)
    events(job_of(ledger, ran, waited, attempt=3), ran)
    claims, judge = ledger.claims([ran.key, waited.key]), Judge(ledger, 3, confirm_s=0)
    assert judge.decide(claims[ran.key], queue_of("FAILED")).what == "final"
    verdict = judge.decide(claims[waited.key], queue_of("FAILED"))
    assert (verdict.what, verdict.attempt) == ("again", 3)


def test_an_exception_of_a_rank_is_final(ledger: Ledger) -> None:
    one = task()
    folder = job_of(ledger, one)
    events(folder, one)
    notes = [
        {"key": one.key, "time": 2.0, "status": "error", "message": "peer gone", "rank": 0},
        {"key": one.key, "time": 1.0, "status": "oom", "message": "too big", "rank": 3},
    ]
    for note in notes:
        (folder.path / f"failed.0.{note['rank']}").write_text(json.dumps(note) + "\n")
    verdict = Judge(ledger, 3, confirm_s=0).decide(ledger.claims([one.key])[one.key], queue_of("FAILED"))
    assert (verdict.what, verdict.status, verdict.message) == ("final", "oom", "rank 3: too big")


def test_a_job_that_slurm_forgot_is_lost_when_it_stops_beating(ledger: Ledger) -> None:
    one = task()
    folder = job_of(ledger, one)
    events(folder, one)
    claim, judge = ledger.claims([one.key])[one.key], Judge(ledger, 3, confirm_s=0)
    assert judge.decide(claim, Queue(False)).what == "wait"
    assert judge.decide(claim, Queue(True)).what == "wait"
    os.utime(folder.events_path(0), (0, 0))
    assert judge.decide(claim, Queue(False)).what == "wait"
    assert judge.decide(claim, Queue(True)).message == "the job vanished"
    (folder.path / "ended.0").write_text("137\n")
    assert "(signal 9)" in judge.decide(claim, Queue(True)).message


def test_a_job_that_was_never_handed_over_is_made_again_once_its_maker_is_dead(ledger: Ledger) -> None:
    one = task()
    folder = job_of(ledger, one)
    (folder.path / "submitted").unlink()
    claim, judge = ledger.claims([one.key])[one.key], Judge(ledger, 3, confirm_s=0)
    assert judge.decide(claim, Queue(True)).what == "wait"
    orphan = changed(claim, owner=finished_process())
    assert judge.decide(orphan, Queue(False)).what == "wait"
    assert judge.decide(orphan, queue_of("PENDING")).what == "wait"
    verdict = judge.decide(orphan, Queue(True))
    assert (verdict.what, verdict.attempt) == ("again", 1)


# --- sweeps on this machine ---


def plan_of(tasks: list[Task], **fields: object) -> Plan:
    return Plan("x-simulate", "x", tasks, site.Site.make(**fields))


def sweep_of(ledger: Ledger, tasks: list[Task], **fields: object) -> tuple[Sweep, list[Event]]:
    news: list[Event] = []
    return Sweep(plan_of(tasks, **fields), ledger, news.append), news


def one_record_each(ledger: Ledger, tasks: list[Task]) -> list[Trial]:
    trials = [Trial.parse(path.read_bytes()) for path in ledger.results.glob("*.json")]
    assert sorted(trial.provenance["task"] for trial in trials) == sorted(one.key for one in tasks)
    return trials


def test_a_sweep_runs_what_is_missing_and_nothing_twice(ledger: Ledger) -> None:
    tasks = [task(seed) for seed in range(5)]
    sweep, news = sweep_of(ledger, tasks[:3])
    assert sweep.run().statuses == {"ok": 3}
    assert [(event.done, event.total) for event in news] == [(1, 3), (2, 3), (3, 3)]
    again, news = sweep_of(ledger, tasks)
    outcome = again.run()
    assert (outcome.statuses, outcome.new, len(news)) == ({"ok": 5}, 2, 2)
    one_record_each(ledger, tasks)


def test_what_goes_wrong_is_a_record_and_the_others_go_on(ledger: Ledger) -> None:
    wrong = Task(make_case("ep", ep=3), Settings())
    tasks = [wrong, task()]
    sweep, _ = sweep_of(ledger, tasks)
    outcome = sweep.run()
    assert outcome.statuses == {"ok": 1, "error": 1}
    ((failed, trial),) = outcome.failed
    assert failed == wrong and "BadInput" in trial.message


def test_debugging_lets_errors_through(ledger: Ledger) -> None:
    sweep, _ = sweep_of(ledger, [Task(make_case("ep", ep=3), Settings())], executor="debug")
    with pytest.raises(BadInput):
        sweep.run()


def test_work_of_a_dead_process_is_taken_over_and_not_for_ever(ledger: Ledger) -> None:
    tasks = [task(0), task(1)]
    ledger.claim(Claim(tasks[0].key, 1, 1, finished_process()))
    ledger.claim(Claim(tasks[1].key, 1, 3, finished_process()))
    sweep, _ = sweep_of(ledger, tasks)
    outcome = sweep.run()
    assert outcome.statuses == {"ok": 1, "error": 1}
    assert outcome.failed[0][1].message == "the process that ran it died; 3 of 3 attempts"


def launch(results: Path, *options: str, cases: int = 4, **env: str) -> subprocess.Popen[str]:
    # A shell that runs the tests in its background has its children ignore Ctrl-C.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom bench.cli import main; main()"
    )
    words = [sys.executable, "-c", program, "sweep", str(TINY), "--results", str(results)]
    return subprocess.Popen(
        [*words, *options],
        cwd=ROOT,
        env={**os.environ, "TINY_CASES": str(cases), "XDG_CONFIG_HOME": str(results / "none"), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_work_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    both = [launch(tmp_path, "--json", cases=40) for _ in range(2)]
    done = tmp_path / "launch" / "done"
    end = time.monotonic() + 100
    while not (done.exists() and any(done.iterdir())) and time.monotonic() < end:
        time.sleep(0.01)
    both[0].kill()
    both[0].wait()
    out, err = both[1].communicate(timeout=200)
    assert both[1].returncode == 0, err
    assert json.loads(out)["statuses"] == {"ok": 40}
    trials = [Trial.parse(path.read_bytes()) for path in tmp_path.glob("*.json")]
    assert len({trial.provenance["task"] for trial in trials}) == len(trials) == 40


@pytest.mark.slow
def test_the_local_executor_runs_packs_in_processes_of_their_own(tmp_path: Path) -> None:
    out, err = launch(tmp_path, "--executor", "local", "--jobs", "2", "--json", cases=6).communicate(timeout=200)
    assert json.loads(out)["statuses"] == {"ok": 6}, err
    ledger = Ledger(tmp_path)
    (job,) = ledger.jobs.iterdir()
    folder = JobFolder(job)
    end = time.monotonic() + 60  # records come before the processes that made them have ended
    while None in (ended := [folder.ended(element) for element in (0, 1)]) and time.monotonic() < end:
        time.sleep(0.05)
    assert ended == [0, 0]
    standing = sweeps.standing(ledger, None)
    assert (standing.name, standing.done, standing.total) == ("tiny-simulate", 6, 6)
    case_id = next(iter(sweeps.read(ledger, None)[1].values())).spec.id  # type: ignore[attr-defined]
    ((label, found, element),) = sweeps.logs_of(ledger, case_id[:8])
    assert label.startswith("ep tiny") and found.path == job and found.logs(element)


RUN = ("--executor", "local", "--backend", "run", "--steps")


def wait_until(true: Callable[[], object], patience_s: float = 120.0) -> None:
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def ranks_of(results: Path) -> list[psutil.Process]:
    """Processes of the jobs of a results folder, their controllers among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if any(str(results / "launch" / "jobs") in word for word in words):
                found.append(process)
    return found


def started(results: Path) -> bool:
    return any("case-start" in path.read_text() for path in results.glob("launch/jobs/*/events.0"))


@pytest.mark.slow
def test_ctrl_c_leaves_jobs_running_and_the_same_command_watches_again(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    first = launch(tmp_path, *RUN, "30", cases=1)
    wait_until(lambda: started(tmp_path))
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130 and "jobs go on" in err and err.count("\n") == 1
    assert ranks_of(tmp_path)
    out, err = launch(tmp_path, *RUN, "30", "--json", cases=1).communicate(timeout=200)
    assert json.loads(out)["statuses"] == {"ok": 1}, err
    assert [path.name.split(".")[1] for path in (tmp_path / "launch" / "claims").iterdir()] == ["0001"]
    wait_until(lambda: not ranks_of(tmp_path))


@pytest.mark.slow
def test_a_killed_local_rank_is_replaced_and_a_cancelled_sweep_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    process = launch(tmp_path, *RUN, "100000", cases=1, TINY_RANKS="2")
    wait_until(lambda: started(tmp_path))
    rank = next(one for one in ranks_of(tmp_path) if "experiments.launch.job" in one.cmdline())
    rank.kill()
    wait_until(lambda: len(list(tmp_path.glob("launch/jobs/*/submitted"))) == 2)
    ledger = Ledger(tmp_path)
    assert sweeps.withdraw(ledger, None) == ("tiny-run", 1)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1 and "the sweep was cancelled" in err
    assert "the job failed (signal 9); attempt 2 of 3" in out
    wait_until(lambda: not ranks_of(tmp_path))
    assert not list(tmp_path.glob("*.json"))


def test_bad_input_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    wrong = tmp_path / "site.toml"
    wrong.write_text("colour = 1\n")
    for options, line in {
        ("--executor", "slurm", "--only", "model=x"): "",
        ("--executor", "pbs"): "site.executor: 'pbs'",
        ("--backend", "guess"): "backend: 'guess' is not valid; allowed: simulate, run",
        ("--repeats", "0"): "repeats: 0",
        ("--only", "model=x"): "only.model: 'x'",
        ("--site", str(wrong)): "site.colour",
        ("--pack",): "pack: True",
    }.items():
        process = launch(tmp_path / "r", *options)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 2 and out == ""
        assert line in err and err.count("\n") == 1 and err.startswith("moebench: ")
    assert not (tmp_path / "r").exists()
