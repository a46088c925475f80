"""The steps of a training run on one rank: of a system, or of the reference."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from bench.action import Kind
from bench.execute.checkpoint import load
from bench.execute.clock import Clock, align_clocks
from bench.execute.flight import Phase
from bench.execute.job import Job
from bench.execute.loop import Loop
from bench.execute.optimizer import clip_scale, square_sum
from bench.execute.rank import flight, rank_device, report
from bench.execute.record import NativeTrace, StepResult
from bench.execute.reference import ReferenceModel
from bench.execute.shards import whole_shards
from bench.execute.trainer import NativeStep, open_trainer, sent_bytes
from bench.telemetry import RankTelemetry, Session
from bench.telemetry.session import gpu_of_rank


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
        routing: int64 [layers with experts, experts], tokens that chose each; None where it is not kept.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    load_imbalance: float
    routing: np.ndarray | None = None


@dataclass(frozen=True)
class RankOutcome:
    """What a rank brings home. traced: the step that was asked for, on rank 0's clock."""

    clock: Clock
    traced: StepResult | NativeTrace | None
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


def train_on_rank(job: Job, loop: Loop) -> RankOutcome:
    """The steps of a loop on one rank of a system, on all of its ranks together; every step is reported."""
    try:
        return _train_steps(job, loop)
    finally:
        release_memory()


def _train_steps(job: Job, loop: Loop) -> RankOutcome:
    flight().phase(Phase.STARTING)
    trainer = open_trainer(job, loop.settings, timeout_s=loop.timeout_s)
    if loop.saved is not None:
        flight().phase(Phase.LOADING)
        load(loop.saved, trainer.held_shards())
        trainer.after_loading(loop.first)
    clock = align_clocks()
    kept: StepResult | NativeTrace | None = None
    peak = 0
    with _telemetry(loop.telemetry_hz, clock.offset_s) as session:
        for step in loop.numbers:
            flight().phase(Phase.STEP, step)
            start = time.perf_counter()
            result = trainer.step(step, traced=step == loop.traced)
            grad_norm = trainer.grad_norm()  # waits for the device
            end = time.perf_counter()
            if session is not None:
                session.step(step - loop.first, start, end, sent_bytes(job, result))
            loss, imbalance = _sum_over_ranks(job, result)
            routing = _routing(job, result) if loop.keep_routing else None
            flight().phase(Phase.DONE, step)
            if trainer.rank == 0:
                report(StepRecord(step, loss, grad_norm, job.tokens_per_step / (end - start), imbalance, routing))
            peak = max(peak, result.peak_bytes)
            found = result if isinstance(result, StepResult) else result.trace
            if step == loop.traced and found is not None:
                kept = dataclasses.replace(found, base_s=found.base_s + clock.offset_s)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                break
            loop.save_if_due(job, step, trainer.saved_shards, session)
    return RankOutcome(clock, kept, None if session is None else session.result, peak)


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


def _routing(job: Job, result: StepResult | NativeStep) -> np.ndarray:
    """Tokens that chose each expert in a step, from what every rank knows: [layers with experts, experts]."""
    model, placement = job.case.model, job.program.plan.placement
    counts = torch.zeros(model.num_layers, model.num_experts, dtype=torch.int64)
    local = result.rank % placement.size
    for layer, per_expert in result.load.items():
        num = _experts_per_rank(job, layer)
        homes = (placement.by_name[name] for name in placement.homes(Kind.EXPERT, layer))
        group = next(home for home in homes if local in home.ranks)
        first = (local - group.first) * num
        counts[layer, first : first + num] = torch.tensor(per_expert[:num])
    dist.all_reduce(counts)
    return counts[model.num_dense_layers :].numpy()


def _imbalance(job: Job, moe_layer: int, pairs: np.ndarray) -> float:
    placement = job.program.plan.placement
    homes = placement.homes(Kind.EXPERT, moe_layer + job.case.model.num_dense_layers)
    ranks = [rank for name in homes for rank in placement.by_name[name].ranks]
    held = pairs[np.isin(np.arange(len(pairs)) % placement.size, ranks)]
    return float(held.max() / held.mean())


def _experts_per_rank(job: Job, layer: int) -> int:
    placement = job.program.plan.placement
    return job.case.model.num_experts // placement.by_name[placement.home(Kind.EXPERT, layer)].size


def train_reference(job: Job, loop: Loop) -> RankOutcome:
    """The same of the reference, on one rank."""
    flight().phase(Phase.STARTING)
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
            flight().phase(Phase.STEP, step)
            start = time.perf_counter()
            sequences = job.sequences(corpus, step, range(job.batch.num_sequences))
            loss, grads, ids = reference.loss_and_gradients(
                sequences,
                replay_ids=forced,
                collect_ids=loop.keep_routing,
                sequences_per_chunk=job.case.layout.mbs,
            )
            counts = [torch.bincount(ids[layer].flatten(), minlength=job.case.model.num_experts) for layer in ids]
            for name, parameter in reference.parameters.items():
                parameter.main_grad = grads[name]  # type: ignore[attr-defined]
            norm = square_sum(list(grads.values()), reference.device).sqrt()
            optimizer.lr = settings.lr_at(step)
            optimizer.step(clip_scale(norm, settings.max_norm))
            grad_norm = norm.item()
            end = time.perf_counter()
            if session is not None:
                session.step(step - loop.first, start, end)
            routing = torch.stack(counts).cpu().numpy() if counts else None
            report(StepRecord(step, loss, grad_norm, job.tokens_per_step / (end - start), 1.0, routing))
            flight().phase(Phase.DONE, step)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                break
            loop.save_if_due(job, step, lambda: state, session)
    return RankOutcome(Clock(0.0, 0.0), None, None if session is None else session.result)
