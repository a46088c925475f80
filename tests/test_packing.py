"""From an experiment to jobs: choosing, packing, what they ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import SITE, task

from bench.case import CaseSpec
from bench.clusters import get_cluster
from bench.errors import BadInput
from experiments.launch import choose, site
from experiments.launch.pack import SIMULATION, Shape, minutes, packs, shape_of
from experiments.launch.preview import require_nodes, require_possible, runs
from experiments.launch.slurm_state import ClusterFacts, Partition
from experiments.launch.work import Settings


def test_only_chooses_by_fields() -> None:
    specs: list[CaseSpec] = [task(seed).spec for seed in range(4)]
    assert choose.only(specs, ["seed=1,seed=3", "model=tiny"]) == [specs[1], specs[3]]
    for words, line in {
        "colour=red": "only: 'colour' is not valid; allowed: model, system",
        "seed": "field=value",
        "model=huge": "only: 'model=huge' is not valid; allowed: model=tiny",
        "model=tiny,": "only: '' is not valid; allowed: field=value[,field=value ...]",
    }.items():
        with pytest.raises(BadInput, match=re.escape(line)):
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
    assert minutes([tasks[0]] * 60, SIMULATION, SITE) == 3 * SITE.minutes


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
    assert run.memory_bytes is not None and 0 < run.memory_bytes < 8 * 2**30


def test_what_slurm_could_never_start_is_refused() -> None:
    small = Partition("small", is_default=True, is_up=True, num_nodes=2, max_minutes=20)
    facts = ClusterFacts({"small": small}, 1001, False)
    wide = task(backend="run", ep=4, replicas=2)
    require_possible([wide], site.Site(time="20"), facts, False)
    work = wide.spec.workload
    large, fits = (
        CaseSpec(model=wide.spec.model, cluster=get_cluster(name), workload=work, system="ep")
        for name in ("h800x16", "h800x2")
    )
    require_nodes([fits, wide.spec], site.Site(), facts)
    with pytest.raises(BadInput, match="nodes: 16 is not valid; allowed: at most the 2 nodes of partition small"):
        require_nodes([fits, large], site.Site(), facts)
    for settings_, line in (
        (site.Site(partition="huge", time="20"), "partition: 'huge' is not valid; allowed: small"),
        (site.Site(time="21"), "time: '00:21:00' is not valid; allowed: at most 00:20:00 a job"),
        (site.Site(gpus_per_node=2, time="1"), "nodes: 4 is not valid; allowed: at most the 2 nodes"),
    ):
        with pytest.raises(BadInput, match=line):
            require_possible([wide], settings_, facts, False)
