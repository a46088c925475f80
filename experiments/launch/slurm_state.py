"""What Slurm says: every command within bounded time, and one look at the queue for all jobs of a sweep.

Accounting may be off, and ids are used again after a cluster loses its state. So jobs are known by their unique names,
`squeue` is asked for ended jobs too, and `sacct` only for what `squeue` has forgotten.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.errors import BadInput

COMMAND_TIMEOUT_S = 30.0
FIRST_ANSWER_S = 10.0
"""By which Slurm has to say what it is before a sweep begins; during one, who does not answer is waited for."""
WAITING = frozenset("PENDING REQUEUED REQUEUE_HOLD SPECIAL_EXIT SUSPENDED CONFIGURING RESV_DEL_HOLD".split())
RUNNING = frozenset("RUNNING COMPLETING STAGE_OUT SIGNALING STOPPED RESIZING".split())

# Reasons of a waiting job that no passing of time clears.
NEVER = frozenset(
    "AccountNotAllowed AssociationJobLimit BadConstraints DeadLine DependencyNeverSatisfied InvalidAccount InvalidQOS "
    "PartitionConfig PartitionNodeLimit PartitionTimeLimit QOSNotAllowed QOSTimeLimit QOSMaxNodePerJobLimit "
    "QOSMaxGRESPerJob QOSMaxWallDurationPerJobLimit AssocMaxNodePerJobLimit AssocMaxWallDurationPerJobLimit "
    "MaxMemPerLimit".split()
)
HELD_BY_FAILURE = "launch failed requeued held"
"""Reason of a job that Slurm could not start and now keeps until somebody releases it."""


@dataclass(frozen=True)
class Seen:
    """One element of a job array, or a job that is none. reason: why it waits, or the nodes it has."""

    job_id: str
    state: str
    reason: str = ""

    @property
    def is_over(self) -> bool:
        return self.state not in WAITING and self.state not in RUNNING

    @property
    def starts_never(self) -> bool:
        return self.state == "PENDING" and self.reason.split(":")[0].strip() in NEVER


@dataclass
class Queue:
    """One look: what is known of each job by (name, element). answered: False where Slurm did not say."""

    answered: bool
    jobs: dict[tuple[str, int], Seen] = field(default_factory=dict)
    trouble: str = ""


class SlurmError(RuntimeError):
    """A Slurm command that failed; the message is its own, in one line."""


def ask(command: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """The output of a command. Raises SlurmError where it fails or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=plain_env())
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: no answer for {timeout_s:g} s") from None
    except OSError as error:
        raise SlurmError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise SlurmError(complaint(done.stderr) or f"{command[0]}: exit code {done.returncode}")
    return done.stdout


def plain_env() -> dict[str, str]:
    """The environment without what an enclosing job put there: a job may start a sweep of its own."""
    inside = ("SLURM_", "SBATCH_", "SRUN_", "SUBMITIT_")
    return {k: v for k, v in os.environ.items() if k in ("SLURM_CONF", "SLURM_CONF_SERVER") or not k.startswith(inside)}


def complaint(stderr: str) -> str:
    """The last thing that a Slurm command complains of, its advice apart."""
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith("Try ")]
    return re.sub(r"^\w+: ((error|fatal): )?", "", lines[-1].strip()) if lines else ""


def look(names: Iterable[str], accounting: bool) -> Queue:
    """Every element of the jobs of these names. Never raises."""
    wanted = set(names)
    if not wanted:
        return Queue(True)
    command = ["squeue", "-h", "-r", "-t", "all", "-u", str(os.getuid()), "-o", "%i|%j|%T|%r|%N"]
    try:
        queue = Queue(True, _read(ask(command), wanted))
    except SlurmError as error:
        return Queue(False, trouble=str(error))
    forgotten = wanted - {name for name, _ in queue.jobs}
    if accounting and forgotten:
        queue.jobs.update(_recall(forgotten))
    return queue


def _read(text: str, wanted: set[str]) -> dict[tuple[str, int], Seen]:
    found: dict[tuple[str, int], Seen] = {}
    for line in text.splitlines():
        job_id, name, state, reason, nodes = ([*line.split("|"), "", "", "", ""])[:5]
        if name in wanted:
            state = state.split()[0] if state else "UNKNOWN"
            found[name, element_of(job_id)] = Seen(job_id, state, reason if state in WAITING else nodes)
    return found


def _recall(names: set[str]) -> dict[tuple[str, int], Seen]:
    command = ["sacct", "-n", "-X", "-P", "-S", "now-30days", "--name", ",".join(sorted(names))]
    try:
        text = ask([*command, "-o", "JobID,JobName,State,Reason,NodeList"])
    except SlurmError:
        return {}
    return {place: seen for place, seen in _read(text, names).items() if seen.is_over}


def element_of(job_id: str) -> int:
    """The place in an array: 7 of ``123_7``; 0 of a job that is no array."""
    tail = job_id.partition("_")[2]
    return int(tail) if tail.isdigit() else 0


@dataclass(frozen=True)
class Partition:
    """What may be asked of a partition. max_minutes: None where unlimited."""

    name: str
    is_default: bool
    is_up: bool
    num_nodes: int
    max_minutes: int | None


@dataclass(frozen=True)
class ClusterFacts:
    """What a launcher has to know of a Slurm cluster."""

    partitions: dict[str, Partition]
    max_array_size: int
    accounting: bool


def cluster_facts() -> ClusterFacts:
    """Raises BadInput where there is no Slurm, or none that answers."""
    for command in ("sbatch", "squeue", "scontrol"):
        if shutil.which(command) is None:
            raise BadInput("executor", "slurm", f"a machine with Slurm; there is no {command} here")
    try:
        partitions = ask(["scontrol", "show", "partition", "-o"], FIRST_ANSWER_S)
        config = ask(["scontrol", "show", "config"], FIRST_ANSWER_S)
    except SlurmError as error:
        raise BadInput("executor", "slurm", f"a Slurm that answers ({error})") from None
    settings = dict(re.findall(r"^(\w+)\s*= (.*)$", config, re.MULTILINE))
    found = [_partition(line) for line in partitions.splitlines() if line.startswith("PartitionName=")]
    return ClusterFacts(
        partitions={partition.name: partition for partition in found},
        max_array_size=int(settings.get("MaxArraySize", "1001")),
        accounting="none" not in settings.get("AccountingStorageType", "none"),
    )


def _partition(line: str) -> Partition:
    from experiments.launch.site import minutes_of

    words = dict(word.partition("=")[::2] for word in line.split())
    longest = words.get("MaxTime", "UNLIMITED")
    most = words.get("MaxNodes", "UNLIMITED")
    num_nodes = int(words.get("TotalNodes", "0"))
    return Partition(
        name=words["PartitionName"],
        is_default=words.get("Default") == "YES",
        is_up=words.get("State") == "UP",
        num_nodes=num_nodes if most == "UNLIMITED" else min(num_nodes, int(most)),
        max_minutes=None if longest == "UNLIMITED" else minutes_of("MaxTime", longest),
    )


def cancel(names: Iterable[str]) -> None:
    """Cancels the jobs of these names. Raises SlurmError."""
    for name in names:
        ask(["scancel", "--user", str(os.getuid()), "--name", name])


def cancel_element(job_id: str) -> None:
    """Cancels one job or element of an array. Raises SlurmError."""
    ask(["scancel", job_id])
