"""What measured experiments share: runs of rounds that follow one another, as one row of a table."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.case import Case
from bench.clusters import CLUSTERS, GPUS, Cluster
from bench.devices import gpu_facts
from bench.errors import BadInput
from bench.flops import step_flops
from bench.metrics import mfu
from bench.predict import Prediction
from bench.results import read_trials
from bench.trial import Trial
from experiments import Request


def num_gpus() -> int:
    """GPUs that torch sees here; none where there is no torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def known_gpu() -> str:
    """The name in the catalogue of this host's first GPU. Raises BadInput where NVML reads none, or an unknown one."""
    facts = gpu_facts()
    names = facts.get("gpus", [])
    if not names:
        raise BadInput("device", facts.get("absent", "no GPU"), "a GPU that NVML reads")
    known = next((gpu for gpu in GPUS if gpu in names[0].lower().split()), None)
    if known is None:
        raise BadInput("device", names[0], f"a GPU that is known: {', '.join(GPUS)}")
    return known


def pair_of_processes() -> Cluster:
    """Two processes of this machine: to see that it works, and no result."""
    return Cluster.from_fields({**CLUSTERS["cpu"].model_dump(), "gpus_per_node": 2, "nics_per_node": 2})


def published_in(folder: Path) -> list[Trial]:
    """The trials of a folder; none where it is not there."""
    return [trial for _, trial in read_trials([folder])] if folder.exists() else []


def measured_or_published(
    request: Request, folder: Path, measure: Callable[[Literal["cpu", "cuda"]], Iterable[Trial]]
) -> list[Trial]:
    """What `measure` gives on the device; the published trials where none was asked for and there is no GPU."""
    device = request.device or ("cuda" if num_gpus() else None)
    if device is None:
        published = published_in(folder)
        if not published:
            raise BadInput("device", "no GPU", "cpu (--device cpu), or a host with a GPU")
        return published
    if device == "cuda" and not num_gpus():
        raise BadInput("device", "cuda", "cpu: there is no GPU")
    return list(measure(device))  # type: ignore[arg-type]


def interleaved(request: Request, labels: Sequence[str], rounds: int) -> Iterator[int]:
    """Places of cells, all of a round before the next one, so that what drifts meets all alike; says what runs."""
    for number in range(rounds):
        for place, label in enumerate(labels):
            request.progress(number * len(labels) + place, rounds * len(labels), f"round {number + 1}, {label}")
            yield place


def row_of(
    rounds: Sequence[Trial], gpus: int, how: dict[str, Any], where: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Medians over the steady steps of all rounds of one case, and the range of the rounds' own.

    Args:
        rounds: trials that ended well, at least one.
        gpus: ranks by which throughput and FLOPs are divided.
        how, where: what else tells the row from others; they stand behind the system and behind the cluster.
    """
    case = rounds[0].case
    assert isinstance(case, Case)
    steps = [trial.samples["step_time_s"][trial.steady["first_step"] :] for trial in rounds]
    step_s = median(value for some in steps for value in some)
    of_rounds = [median(some) for some in steps]
    work = case.workload
    flops = step_flops(case.model, work.seq_len, work.global_batch_tokens)
    return {
        "model": case.model.name,
        "system": case.system,
        **how,
        "layout": str(case.layout),
        "cluster": case.cluster.name,
        **(where or {}),
        "seq_len": work.seq_len,
        "global_batch_tokens": work.global_batch_tokens,
        "source": "measured",
        "rounds": len(rounds),
        "steps": sum(map(len, steps)),
        "step_time_s": step_s,
        "step_time_low_s": min(of_rounds),
        "step_time_high_s": max(of_rounds),
        "tokens_per_s_per_gpu": work.global_batch_tokens / step_s / gpus,
        "mfu": mfu(flops, step_s, gpus, case.cluster.gpu.peak_flops(work.dtype)),
    }


def median_of(rounds: Sequence[Trial], metric: str) -> float | None:
    """Median of a metric over the rounds that have it; None where none has."""
    values = [value for trial in rounds if (value := trial.metrics.get(metric)) is not None]
    return median(values) if values else None


def tensor_bytes(found: Prediction) -> float:
    """Bytes of the fullest rank that torch's allocator counts: what a layout reserves besides is not of tensors."""
    return found.peak_memory_bytes - found.memory_parts.get("reserve", 0.0)
