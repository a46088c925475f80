"""What a sweep would do, and whether it can: every run with what it asks for, checked before anything is submitted."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.case import Case, CaseSpec
from bench.errors import BadInput, unknown
from experiments.launch.layouts import peak_bytes
from experiments.launch.ledger import Ledger
from experiments.launch.pack import SIMULATION, minutes, packs, shape_of
from experiments.launch.site import Site, clock
from experiments.launch.slurm_state import ClusterFacts, Partition
from experiments.launch.submission import new_name, record_of, script_text
from experiments.launch.work import Task

SIMULATION_BYTES = 2 * 2**30
"""Host memory that one simulating process is expected to stay below."""


class Run(NamedTuple):
    """One task. memory_bytes: of the fullest GPU, simulated; of the host, for a simulation. gpu_hours: at most."""

    task: Task
    nodes: int
    ranks: int
    memory_bytes: float | None
    minutes: int
    gpu_hours: float


def runs(tasks: Sequence[Task], site: Site) -> list[Run]:
    """What each task asks for. Raises BadInput for one that cannot be."""
    found = []
    memory: dict[CaseSpec, float | None] = {}
    for task in tasks:
        shape, case = shape_of(task, site), task.spec
        if case not in memory and isinstance(case, Case) and shape != SIMULATION:
            memory[case] = peak_bytes(case, task.settings)
        held = memory.get(case, float(SIMULATION_BYTES))
        hours = shape.num_gpus * site.minutes / 60
        found.append(Run(task, shape.nodes, shape.num_ranks, held, site.minutes, hours))
    return found


def require_nodes(specs: Sequence[CaseSpec], site: Site, facts: ClusterFacts) -> None:
    """Raises BadInput where the partition has too few nodes for a spec; looked at before layouts are searched for."""
    partition = _partition(site, facts)
    for spec in specs:
        cluster = spec.cluster
        nodes = -(-cluster.num_gpus // (site.gpus_per_node or cluster.gpus_per_node))
        if not isinstance(spec, Case) and nodes > partition.num_nodes:
            raise BadInput("nodes", nodes, f"at most the {partition.num_nodes} nodes of partition {partition.name}")


def _partition(site: Site, facts: ClusterFacts) -> Partition:
    name = site.partition
    if name is not None and name not in facts.partitions:
        raise unknown("partition", name, facts.partitions)
    default = next((one for one in facts.partitions.values() if one.is_default), None)
    partition = default if name is None else facts.partitions[name]
    if partition is None:
        raise BadInput("partition", None, f"one of {', '.join(facts.partitions)} (there is no default)")
    return partition


def require_possible(tasks: Sequence[Task], site: Site, facts: ClusterFacts, pack: bool) -> None:
    """Raises BadInput where Slurm could never start a job: unknown partition, too many nodes, too long."""
    partition = _partition(site, facts)
    for shape in sorted({shape_of(task, site) for task in tasks}):
        if shape.nodes > partition.num_nodes:
            allowed = f"at most the {partition.num_nodes} nodes of partition {partition.name}"
            raise BadInput("nodes", shape.nodes, allowed)
        same = [task for task in tasks if shape_of(task, site) == shape]
        longest = max(minutes(dealt, shape, site) for dealt in packs(same, shape, site, pack))
        if partition.max_minutes is not None and longest > partition.max_minutes:
            allowed = f"at most {clock(partition.max_minutes)} a job, the limit of partition {partition.name}"
            raise BadInput("time", clock(longest), allowed)


def scripts(experiment: str, tasks: Sequence[Task], ledger: Ledger, site: Site, pack: bool) -> list[str]:
    """The sbatch scripts that would go out, one a shape and time limit."""
    found = []
    for shape in sorted({shape_of(task, site) for task in tasks}):
        same = [task for task in tasks if shape_of(task, site) == shape]
        by_limit: dict[int, int] = {}
        for dealt in packs(same, shape, site, pack):
            limit = minutes(dealt, shape, site)
            by_limit[limit] = by_limit.get(limit, 0) + 1
        for limit, number in by_limit.items():
            name = new_name(experiment)
            folder: Path = ledger.jobs / name
            found.append(script_text(folder, record_of(ledger, name, shape, limit, site, number), site))
    return found
