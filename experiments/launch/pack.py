"""How tasks are put into jobs: what one asks for, which share an allocation, and in which order."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from bench.case import Case, CaseSpec, batch_of
from bench.devices import gpu_facts
from bench.errors import BadInput
from bench.system import get_system
from experiments.launch.site import Site
from experiments.launch.work import Task, device_of

SIMULATED_PER_JOB = 25
"""Simulated cases of one Slurm job, where the number of jobs is not given."""


@dataclass(frozen=True, order=True)
class Shape:
    """What a task asks for.

    num_ranks: ranks that work, at most nodes x ranks_per_node. device: cpu or cuda; none for a simulation.
    """

    nodes: int
    ranks_per_node: int
    num_ranks: int
    device: str

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.ranks_per_node if self.device == "cuda" else 0


SIMULATION = Shape(1, 1, 1, "none")


def shape_of(task: Task, site: Site) -> Shape:
    """Raises BadInput where the site allows fewer nodes than a case needs."""
    if task.settings.backend == "simulate":
        return SIMULATION
    case = task.spec
    assert isinstance(case, Case), "a run has a layout"
    placement = get_system(case.system).placement(case)
    num_ranks = batch_of(case, placement).num_replicas * placement.size
    ranks_per_node = min(site.gpus_per_node or case.cluster.gpus_per_node, num_ranks)
    nodes = -(-num_ranks // ranks_per_node)
    if site.max_nodes is not None and nodes > site.max_nodes:
        raise BadInput("max_nodes", site.max_nodes, f"at least the {nodes} nodes that {task.label} needs")
    return Shape(nodes, ranks_per_node, num_ranks, device_of(case))


def require_machine(specs: Sequence[CaseSpec], site: Site, smaller: str) -> None:
    """Raises BadInput where a run needs more than this machine has; looked at before layouts are searched for.

    A case may use less than its cluster: `require_here` sees what its layout needs.

    smaller: what to say of a smaller form of the experiment, "" where there is none.
    """
    if site.executor == "slurm":
        return
    present = gpu_facts()
    gpus = present.get("gpus", [])
    for spec in specs:
        cluster = spec.cluster
        what = f"{spec.system} {spec.model.name} {cluster.name}"
        if isinstance(spec, Case):
            continue
        if cluster.num_nodes > 1:
            needs = f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} {cluster.gpu.name}"
            raise BadInput("executor", site.executor, f"slurm, for the {needs} of {what}{smaller}")
        if cluster.gpu.name != "cpu" and len(gpus) < cluster.num_gpus:
            here = ", ".join(gpus) or present.get("absent", "none")
            raise BadInput("executor", site.executor, f"{cluster.num_gpus} GPUs here for {what}, not {here}{smaller}")


def require_here(tasks: Sequence[Task], site: Site) -> None:
    """Raises BadInput where a case needs more than the executor has."""
    for task in tasks:
        shape = shape_of(task, site)
        if site.executor != "slurm" and shape.nodes > 1:
            raise BadInput("executor", site.executor, f"slurm, for the {shape.nodes} nodes of {task.label}")
        if site.executor == "local" and shape.num_gpus and (site.jobs or 1) > 1:
            raise BadInput("jobs", site.jobs, "1 where runs take the GPUs of this machine")


def packs(tasks: Sequence[Task], shape: Shape, site: Site, pack: bool) -> list[list[Task]]:
    """Tasks of one shape as lists, one a job element; their order is the order in which they run.

    Simulated tasks are dealt over `site.jobs` jobs. Of runs, each is a job of its own; with `pack` they share one and
    go in rounds, all first repeats before all second ones, so that drift hits all alike.
    """
    if shape == SIMULATION:
        num_jobs = min(len(tasks), site.jobs or _default_jobs(len(tasks), site))
        return [list(tasks[first::num_jobs]) for first in range(num_jobs)]
    if pack:
        return [sorted(tasks, key=lambda task: task.repeat)]
    return [[task] for task in tasks]


def _default_jobs(num_tasks: int, site: Site) -> int:
    return -(-num_tasks // SIMULATED_PER_JOB) if site.executor == "slurm" else os.cpu_count() or 1


def minutes(pack: Sequence[Task], shape: Shape, site: Site) -> int:
    """Time limit of a job: that of one run times the runs; of simulated cases `SIMULATED_PER_JOB` share one."""
    return site.minutes * (-(-len(pack) // SIMULATED_PER_JOB) if shape == SIMULATION else len(pack))
