"""Training runs: a case on real ranks, or the reference in one process, for some steps.

All systems start from the same weights and see the same sequences in every step, so with the same seed they follow the
same losses, as far as rounding lets them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from bench.action import view
from bench.assumptions import get_assumptions
from bench.case import Case
from bench.execute.checkpoint import Saving
from bench.execute.flight import last_actions
from bench.execute.job import Job
from bench.execute.loop import Loop, loop_of
from bench.execute.pool import RankError, RankPool, Ranks
from bench.execute.record import NativeTrace, StepResult, merge_timeline, native_timeline
from bench.execute.steps import RankOutcome, StepRecord, train_on_rank, train_reference
from bench.execute.sync import OptimizerSettings
from bench.predict import costs_of
from bench.program import Op
from bench.telemetry import RankTelemetry
from bench.timeline import Timeline

REFERENCE = "reference"


@dataclass(frozen=True)
class TrainResult:
    """A run; lists have one entry a step that was done, see `StepRecord`.

    Attributes:
        timeline: of the step asked for; None where none was, and for the reference, which runs no program.
        clock_error_s: bound of the clocks' error between ranks.
        peak_memory_bytes: most that torch's allocator had given out in a step, on the fullest GPU; 0 on CPUs.
        last_actions: of a run that ended before its last step, what every rank did last.
    """

    case_id: str
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    load_imbalance: tuple[float, ...]
    timeline: Timeline | None
    clock_error_s: float
    peak_memory_bytes: int = 0
    last_actions: tuple[str, ...] = ()


def train(
    case: Case,
    *,
    steps: int,
    device: Literal["cpu", "cuda"] = "cpu",
    transport: str = "auto",
    pool: Ranks | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    data: str = "text",
    weights: str = "host",
    serial: bool = False,
    settings: OptimizerSettings | None = None,
    timeline_step: int | None = None,
    telemetry_hz: float | None = None,
    on_telemetry: Callable[[RankTelemetry], None] | None = None,
    trainer: str | None = None,
    saving: Saving | None = None,
    resume: Path | None = None,
    on_saved: Callable[[Path], None] | None = None,
    timeout_s: float | None = None,
    keep_routing: bool = False,
) -> TrainResult:
    """Trains a case's system; `reference` is plain torch on one rank.

    A run ends with the first step whose loss or gradient norm is not finite.

    Args:
        steps: of the whole run, those before a checkpoint included.
        device: of the ranks, where no pool is given.
        transport: see `bench.transports`; ``auto`` is the pool's own.
        pool: ranks to run on, as many as the case needs or more; made for this call where not given.
        on_step: called after every step.
        data: ``text``, real bytes, for which the model's vocabulary must be 256 or more; or ``synthetic``.
        serial: runs the plan without overlap, see `bench.serial`.
        weights: where they are drawn, see `Job`; the reference draws them on the host.
        timeline_step: step whose timeline is kept; negative numbers count from the end.
        telemetry_hz: samples a second on every rank; none where not given.
        on_telemetry: called with each rank's telemetry when the steps have ended, also by an error on that rank.
        trainer: see `bench.system.TRAINERS`; what the system takes unless told where not given.
        settings: those of the checkpoint, or the defaults, where not given.
        saving: where and when to save checkpoints; nowhere where not given.
        resume: a checkpoint to go on from, or a folder with some; see `bench.execute.manifest`. Any system and layout
            of the same model, workload and corpus may have saved it.
        on_saved: called with every checkpoint that is whole.
        timeout_s: how long a step, or a checkpoint, may take; the pool's limit where not given.
        keep_routing: puts every step's routing in its record.
    Raises:
        BadInput: the case cannot be executed on these ranks, or cannot go on from this checkpoint.
        RankError: something went wrong on a rank; it has the last actions of all of them.
    """
    carrier = None if pool is None else pool.carrier_of(transport)
    job = Job.of(case, data, weights, carrier, trainer, serial=serial)
    loop = loop_of(job, steps, timeline_step, settings, telemetry_hz, saving, resume, timeout_s, keep_routing)
    records: list[StepRecord] = []

    def collect(_: int, record: StepRecord | RankTelemetry | Path) -> None:
        if isinstance(record, Path):
            if on_saved is not None:
                on_saved(record)
            return
        if isinstance(record, RankTelemetry):
            if on_telemetry is not None:
                on_telemetry(record)
            return
        records.append(record)
        if on_step is not None:
            on_step(record)

    alone = case.system == REFERENCE
    function, num_ranks = (train_reference, 1) if alone else (train_on_rank, job.world_size)
    with _ranks(job, num_ranks, pool, device, transport) as ranks:
        try:
            outcomes: list[RankOutcome] = ranks.run(
                function, job, loop, world_size=num_ranks, on_report=collect, timeout_s=timeout_s
            )
        except RankError as error:
            error.last_actions = last_actions(ranks.flights(num_ranks), None if alone else job.program)
            raise
        early = len(records) < len(loop.numbers)
        last = last_actions(ranks.flights(num_ranks), None if alone else job.program) if early else ()
    _tell([outcome.telemetry for outcome in outcomes], on_telemetry)
    timeline = _timeline(job, outcomes)
    return _result(case, records, timeline, outcomes, last)


def executed_timeline(
    case: Case,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    transport: str = "auto",
    pool: Ranks | None = None,
    warmup_steps: int = 2,
    data: str = "text",
    trainer: str | None = "plan",
) -> Timeline:
    """One executed step of a case, after some to warm up; of `reference` its plan, too, on one rank."""
    job = Job.of(case, data, trainer=trainer)
    with _ranks(job, job.world_size, pool, device, transport) as ranks:
        loop = Loop(steps=warmup_steps + 1, settings=OptimizerSettings(), traced=warmup_steps)
        outcomes = ranks.run(train_on_rank, job, loop, world_size=job.world_size)
    timeline = _timeline(job, outcomes)
    assert timeline is not None
    return timeline


def _timeline(job: Job, outcomes: Sequence[RankOutcome]) -> Timeline | None:
    """Of the step that was asked for."""
    clock_error_s = outcomes[0].clock.error_s
    of_plan = [one.traced for one in outcomes if isinstance(one.traced, StepResult)]
    native = [one.traced for one in outcomes if isinstance(one.traced, NativeTrace)]
    if of_plan:
        return _counted(job, merge_timeline(job.program, of_plan, clock_error_s=clock_error_s))
    return _counted(job, native_timeline(job.program, native, clock_error_s=clock_error_s)) if native else None


def _counted(job: Job, timeline: Timeline) -> Timeline:
    """With the model FLOPs of every operation, by the one count that simulated timelines have as well."""
    placement = job.program.plan.placement
    costs = costs_of(job.case, placement, get_assumptions())
    first = {group.name: group.first for group in placement.groups}
    flops = np.zeros(len(timeline))
    for k in np.flatnonzero(timeline.op == Op.COMPUTE):
        action, local = view(int(timeline.code[k])), int(timeline.rank[k]) % placement.size
        home = placement.home(action.kind, action.layer, action.microbatch)
        flops[k] = costs.flops(action._replace(microbatch=0, chunk=0))[local - first[home]]
    return dataclasses.replace(timeline, flops=flops)


def _tell(told: Sequence[RankTelemetry | None], on_telemetry: Callable[[RankTelemetry], None] | None) -> None:
    if on_telemetry is not None:
        for one in filter(None, told):
            on_telemetry(one)


@contextlib.contextmanager
def _ranks(
    job: Job, world_size: int, pool: Ranks | None, device: Literal["cpu", "cuda"], transport: str
) -> Iterator[Ranks]:
    if pool is not None:
        job.require_ranks(pool, world_size)
        yield pool
        return
    with RankPool(world_size, device, transport=transport) as made:
        yield made


def _result(
    case: Case,
    records: list[StepRecord],
    timeline: Timeline | None,
    outcomes: Sequence[RankOutcome],
    last: tuple[str, ...],
) -> TrainResult:
    columns = {
        name: tuple(getattr(record, name) for record in records)
        for name in ("grad_norm", "tokens_per_s", "load_imbalance")
    }
    return TrainResult(
        case_id=case.id,
        losses=tuple(record.loss for record in records),
        grad_norms=columns["grad_norm"],
        tokens_per_s=columns["tokens_per_s"],
        load_imbalance=columns["load_imbalance"],
        timeline=timeline,
        clock_error_s=outcomes[0].clock.error_s,
        peak_memory_bytes=max(outcome.peak_bytes for outcome in outcomes),
        last_actions=last,
    )
