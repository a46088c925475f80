"""Training runs: a case on real ranks, or the reference in one process, for some steps.

All systems start from the same weights and see the same sequences in every step, so with the same seed they follow the
same losses, as far as rounding lets them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from bench.action import Kind, view
from bench.assumptions import get_assumptions
from bench.case import Case
from bench.execute.checkpoint import Saving, load
from bench.execute.clock import Clock, align_clocks
from bench.execute.job import Job
from bench.execute.loop import Loop, loop_of
from bench.execute.optimizer import clip_scale, square_sum
from bench.execute.pool import RankPool, Ranks
from bench.execute.rank import rank_device, report
from bench.execute.record import StepResult, merge_timeline
from bench.execute.reference import ReferenceModel
from bench.execute.shards import whole_shards
from bench.execute.sync import OptimizerSettings
from bench.execute.trainer import NativeStep, open_trainer, sent_bytes
from bench.predict import costs_of
from bench.program import Op
from bench.telemetry import RankTelemetry, Session
from bench.telemetry.session import gpu_of_rank
from bench.timeline import Timeline

REFERENCE = "reference"


@dataclass(frozen=True)
class StepRecord:
    """One step as the outside sees it.

    Attributes:
        step: from 0, counted from the run's first start also where it goes on from a checkpoint.
        loss: of the global batch, before the update.
        grad_norm: of all gradients, before clipping.
        tokens_per_s: tokens of the global batch over the step's seconds on rank 0, update included.
        load_imbalance: (token, expert) pairs on the fullest rank over the mean of the ranks that hold the layer's
            experts, averaged over the layers; 1 where one rank holds them all.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    load_imbalance: float


@dataclass(frozen=True)
class TrainResult:
    """A run; lists have one entry a step that was done, see `StepRecord`.

    Attributes:
        timeline: of the step asked for; None where none was, and for the reference, which runs no program.
        clock_error_s: bound of the clocks' error between ranks.
        peak_memory_bytes: most that torch's allocator had given out in a step, on the fullest GPU; 0 on CPUs.
    """

    case_id: str
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    load_imbalance: tuple[float, ...]
    timeline: Timeline | None
    clock_error_s: float
    peak_memory_bytes: int = 0


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
) -> TrainResult:
    """Trains a case's system; `reference` is plain torch on one rank.

    Args:
        steps: of the whole run, those before a checkpoint included.
        device: of the ranks, where no pool is given.
        transport: see `bench.transports`; ``auto`` is the pool's own.
        pool: ranks to run on, as many as the case needs or more; made for this call where not given.
        on_step: called after every step.
        data: ``text``, real bytes, for which the model's vocabulary must be 256 or more; or ``synthetic``.
        serial: runs the plan without overlap, see `bench.serial`.
        weights: where they are drawn, see `Job`; the reference draws them on the host.
        timeline_step: step whose timeline is kept; negative numbers count from the end. A system's own code has none.
        telemetry_hz: samples a second on every rank; none where not given.
        on_telemetry: called with each rank's telemetry when the steps have ended, also by an error on that rank.
        trainer: see `bench.system.TRAINERS`; what the system takes unless told where not given.
        settings: those of the checkpoint, or the defaults, where not given.
        saving: where and when to save checkpoints; nowhere where not given.
        resume: a checkpoint to go on from, or a folder with some; see `bench.execute.manifest`. Any system and layout
            of the same model, workload and corpus may have saved it.
        on_saved: called with every checkpoint that is whole.
    Raises:
        BadInput: the case cannot be executed on these ranks, or cannot go on from this checkpoint.
        RankError: something went wrong on a rank.
    """
    carrier = None if pool is None else pool.carrier_of(transport)
    job = Job.of(case, data, weights, carrier, trainer, serial=serial)
    loop = loop_of(job, steps, timeline_step, settings, telemetry_hz, saving, resume)
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

    with _ranks(job, 1 if case.system == REFERENCE else job.world_size, pool, device, transport) as ranks:
        if case.system == REFERENCE:
            alone = ranks.run(_train_reference, job, loop, world_size=1, on_report=collect)
            _tell(alone, on_telemetry)
            return _result(case, records, None, 0.0, 0)
        outcomes = ranks.run(_train_on_rank, job, loop, world_size=job.world_size, on_report=collect)
    _tell([outcome.telemetry for outcome in outcomes], on_telemetry)
    error = outcomes[0].clock.error_s
    traces = [outcome.traced for outcome in outcomes if outcome.traced is not None]
    timeline = _counted(job, merge_timeline(job.program, traces, clock_error_s=error)) if traces else None
    return _result(case, records, timeline, error, max(outcome.peak_bytes for outcome in outcomes))


def executed_timeline(
    case: Case,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    transport: str = "auto",
    pool: Ranks | None = None,
    warmup_steps: int = 2,
    data: str = "text",
) -> Timeline:
    """One executed step of the case's plan, after some to warm up; of `reference` its plan, too, on one rank."""
    job = Job.of(case, data)
    with _ranks(job, job.world_size, pool, device, transport) as ranks:
        loop = Loop(steps=warmup_steps + 1, settings=OptimizerSettings(), traced=warmup_steps)
        outcomes = ranks.run(_train_on_rank, job, loop, world_size=job.world_size)
    traces = [outcome.traced for outcome in outcomes]
    return _counted(job, merge_timeline(job.program, traces, clock_error_s=outcomes[0].clock.error_s))


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


def _result(case: Case, records: list[StepRecord], timeline: Timeline | None, error_s: float, peak: int) -> TrainResult:
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
        clock_error_s=error_s,
        peak_memory_bytes=peak,
    )


@dataclass(frozen=True)
class _RankOutcome:
    clock: Clock
    traced: StepResult | None
    telemetry: RankTelemetry | None = None
    peak_bytes: int = 0


@contextlib.contextmanager
def _telemetry(hz: float | None, offset_s: float = 0.0) -> Iterator[Session | None]:
    """Telemetry of this rank while the block runs; it is reported where the block ends by an error."""
    if hz is None:
        yield None
        return
    gpu = gpu_of_rank(rank_device().type)
    session = Session(dist.get_rank(), gpu, hz, offset_s=offset_s, num_ranks=dist.get_world_size())
    try:
        with session:
            yield session
    except BaseException:
        report(session.result)
        raise


def release_memory() -> None:
    """Gives back what the last function's objects held: the next case on these ranks may need all of the GPU."""
    gc.collect()
    if rank_device().type == "cuda":
        torch.cuda.empty_cache()


def _train_on_rank(job: Job, loop: Loop) -> _RankOutcome:
    try:
        return _train_steps(job, loop)
    finally:
        release_memory()


def _train_steps(job: Job, loop: Loop) -> _RankOutcome:
    trainer = open_trainer(job, loop.settings)
    if loop.saved is not None:
        load(loop.saved, trainer.held_shards())
        trainer.after_loading(loop.first)
    clock = align_clocks()
    kept: StepResult | None = None
    peak = 0
    with _telemetry(loop.telemetry_hz, clock.offset_s) as session:
        for step in loop.numbers:
            start = time.perf_counter()
            result = trainer.step(step)
            grad_norm = trainer.grad_norm()  # waits for the device
            end = time.perf_counter()
            if session is not None:
                session.step(step - loop.first, start, end, sent_bytes(job, result))
            loss, imbalance = _sum_over_ranks(job, result)
            if trainer.rank == 0:
                report(StepRecord(step, loss, grad_norm, job.tokens_per_step / (end - start), imbalance))
            peak = max(peak, result.peak_bytes)
            if step == loop.traced and isinstance(result, StepResult):
                kept = dataclasses.replace(result, base_s=result.base_s + clock.offset_s)
            loop.save_if_due(job, step, trainer.saved_shards, session)
    return _RankOutcome(clock, kept, None if session is None else session.result, peak)


def _sum_over_ranks(job: Job, result: StepResult | NativeStep) -> tuple[float, float]:
    """Loss and load imbalance of a step, from what every rank knows of it."""
    model = job.case.model
    sums = torch.zeros(1 + model.num_layers * job.world_size, dtype=torch.float64)
    sums[0] = result.loss
    pairs = sums[1:].view(model.num_layers, job.world_size)
    for layer, per_expert in result.load.items():
        pairs[layer, result.rank] = sum(per_expert[: _experts_per_rank(job, layer)])
    dist.all_reduce(sums)
    by_layer = pairs[model.num_dense_layers :].numpy()
    return sums[0].item(), float(np.mean([_imbalance(job, layer, row) for layer, row in enumerate(by_layer)]))


def _imbalance(job: Job, moe_layer: int, pairs: np.ndarray) -> float:
    placement = job.program.plan.placement
    homes = placement.homes(Kind.EXPERT, moe_layer + job.case.model.num_dense_layers)
    ranks = [rank for name in homes for rank in placement.by_name[name].ranks]
    held = pairs[np.isin(np.arange(len(pairs)) % placement.size, ranks)]
    return float(held.max() / held.mean())


def _experts_per_rank(job: Job, layer: int) -> int:
    placement = job.program.plan.placement
    return job.case.model.num_experts // placement.by_name[placement.home(Kind.EXPERT, layer)].size


def _train_reference(job: Job, loop: Loop) -> RankTelemetry | None:
    workload, settings = job.case.workload, loop.settings
    reference = ReferenceModel(job.case.model, workload.seed, dtype=job.dtype, device=rank_device())
    optimizer = settings.adamw(reference.parameters.values())
    state = whole_shards(reference.parameters, optimizer)
    if loop.saved is not None:
        load(loop.saved, state)
        optimizer.restore(loop.first)
    corpus, forced = job.corpus(), job.forced_ids()
    with _telemetry(loop.telemetry_hz) as session:
        for step in loop.numbers:
            start = time.perf_counter()
            sequences = job.sequences(corpus, step, range(job.batch.num_sequences))
            loss, grads, _ = reference.loss_and_gradients(
                sequences, replay_ids=forced, sequences_per_chunk=job.case.layout.mbs
            )
            for name, parameter in reference.parameters.items():
                parameter.main_grad = grads[name]  # type: ignore[attr-defined]
            norm = square_sum(list(grads.values()), reference.device).sqrt()
            optimizer.lr = settings.lr_at(step)
            optimizer.step(clip_scale(norm, settings.max_norm))
            grad_norm = norm.item()
            end = time.perf_counter()
            if session is not None:
                session.step(step - loop.first, start, end)
            report(StepRecord(step, loss, grad_norm, job.tokens_per_step / (end - start), 1.0))
            loop.save_if_due(job, step, lambda: state, session)
    return None if session is None else session.result
