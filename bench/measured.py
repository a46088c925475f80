"""Measured trials: a training run on this machine as a record, also where it failed."""

import math
from collections.abc import Callable
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal, NamedTuple

from bench import provenance
from bench.case import Case
from bench.trial import Status, Trial, command_for

if TYPE_CHECKING:
    from bench.execute.pool import RankError, RankPool
    from bench.execute.train import StepRecord
    from bench.timeline import Timeline

Device = Literal["cpu", "cuda"]

WARM_UP_STEPS = 1
"""Steps left out of the median of tokens/s: buffers and connections are made in the first. All are in the samples."""


class Measured(NamedTuple):
    """A trial, and the timeline of its last step where it was asked for and came."""

    trial: Trial
    timeline: "Timeline | None"


def measure(
    case: Case,
    *,
    steps: int,
    device: Device = "cpu",
    data: str = "text",
    pool: "RankPool | None" = None,
    on_step: "Callable[[StepRecord], None] | None" = None,
    keep_timeline: bool = False,
) -> Measured:
    """Trains and gives the trial. What goes wrong on a rank is a trial too, with the steps that were done.

    Raises BadInput where the case cannot be executed on this machine.
    """
    from bench.execute.pool import RankError
    from bench.execute.train import train

    done: list[StepRecord] = []

    def keep(record: "StepRecord") -> None:
        done.append(record)
        if on_step is not None:
            on_step(record)

    status: Status = "ok"
    message, timeline = "", None
    metrics: dict[str, float | None] = {}
    try:
        result = train(
            case,
            steps=steps,
            device=device,
            data=data,
            pool=pool,
            on_step=keep,
            timeline_step=-1 if keep_timeline else None,
        )
        timeline = result.timeline
        metrics["clock_error_s"] = result.clock_error_s
    except RankError as error:
        status, message = _status_of(error), str(error)
    broken = [r.step for r in done if not (math.isfinite(r.loss) and math.isfinite(r.grad_norm))]
    if broken and status == "ok":
        status, message = "diverged", f"loss or gradient norm is not finite from step {broken[0]} on"
    extra = ("--ranks", str(case.cluster.num_gpus), "--device", device, "--steps", str(steps), "--data", data)
    trial = Trial.make(
        case=case,
        source="measured",
        status=status,
        message=message,
        metrics=metrics | _metrics(case, done),
        samples={
            "loss": [r.loss for r in done],
            "grad_norm": [r.grad_norm for r in done],
            "tokens_per_s": [r.tokens_per_s for r in done],
            "load_imbalance": [r.load_imbalance for r in done],
        },
        command=command_for("run", case, extra),
        provenance=provenance.collect(),
    )
    return Measured(trial, timeline)


def _status_of(error: "RankError") -> Status:
    if error.cause == "hung":
        return "hang"
    # A step names the operation that failed in an error of its own; what it failed of is in the text.
    return "oom" if "OutOfMemoryError" in f"{error.cause} {error}" else "error"


def _metrics(case: Case, done: "list[StepRecord]") -> dict[str, float | None]:
    """Median speed after the warm-up, mean imbalance, last loss; nothing where no step was done."""
    if not done:
        return {}
    rate = median(r.tokens_per_s for r in (done[WARM_UP_STEPS:] or done))
    return {
        "step_time_s": case.workload.global_batch_tokens / rate,
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / case.cluster.num_gpus,
        "load_imbalance": fmean(r.load_imbalance for r in done),
        "last_loss": done[-1].loss,
    }
