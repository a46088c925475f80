"""One rank that trains: its worker, its gradient sums and its data, put together for a job."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bench.execute.job import Job
from bench.execute.rank import rank_device
from bench.execute.record import NativeTrace
from bench.execute.runtime import Sequences, StepResult, Worker
from bench.execute.shards import Shard, after_loading, held_shards, saved_shards
from bench.execute.staged import warm_up
from bench.execute.sync import GradientSync, OptimizerSettings
from bench.execute.transport import DEFAULT_TIMEOUT_S, open_transport
from bench.program import Op
from bench.system import RunsAsItself, get_system


@dataclass(frozen=True)
class NativeStep:
    """What a rank reports of a step of a system's own code; see `bench.execute.record.StepResult`.

    Attributes:
        trace: its operations with their times, where they were asked for.
    """

    rank: int
    loss: float
    load: dict[int, list[int]]
    expert_ids: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    peak_bytes: int = 0
    trace: NativeTrace | None = None


class Trainer(Protocol):
    """One rank that trains. Made on all ranks of the default process group together; all of them step together.

    Attributes:
        rank: within the plan, which is that of the process unless the system orders its ranks otherwise.
    """

    rank: int

    def step(self, number: int, *, keep_expert_ids: bool = False, traced: bool = False) -> StepResult | NativeStep:
        """One optimizer step on the global batch of that number; with `traced`, the times of its operations."""
        ...

    def grad_norm(self) -> float:
        """Of all gradients of the last step, before clipping; waits for the device."""
        ...

    def first_sequence(self, microbatch: int) -> int:
        """Number, within the global batch, of the first of this rank's sequences of a micro-batch."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(global name, parameter, gradient buffer) of everything on this rank."""
        ...

    def held_shards(self) -> list[Shard]:
        """Of weights and optimizer state, what this rank keeps up to date; see `bench.execute.shards`."""
        ...

    def saved_shards(self) -> list[Shard]:
        """What this rank writes."""
        ...

    def after_loading(self, num_steps: int) -> None:
        """Makes the parameters of this rank of what was loaded."""
        ...


def open_trainer(
    job: Job, settings: OptimizerSettings, *, timeout_s: float = DEFAULT_TIMEOUT_S, **options: Any
) -> Trainer:
    """What trains the job on this rank: the plan's `RankTrainer`, or the system's own; `options` as of the former.

    A system's own code has no limit to a step but the pool's.
    """
    if job.trainer == "plan":
        return RankTrainer(job, settings, timeout_s=timeout_s, **options)
    system = get_system(job.case.system)
    assert isinstance(system, RunsAsItself)
    module, name = system.native.split(":")
    made: Trainer = getattr(importlib.import_module(module), name)(job, settings, **options)
    return made


def sent_bytes(job: Job, result: StepResult | NativeStep) -> float:
    """Bytes that a rank's messages took over links in a step; 0 of a system's own code, which does not count them."""
    if isinstance(result, NativeStep):
        return 0.0
    return float(result.bytes[job.program.op[result.ops] == Op.SEND].sum())


class RankTrainer:
    """Made on all ranks of the default process group together; `step` runs on all of them together.

    Args:
        on_summed: called between SYNC and UPDATE, with whole sums in every gradient buffer.
        norm_jitter: see `init.initial_value`.
        timeout_s: how long a step may take.
    """

    def __init__(
        self,
        job: Job,
        settings: OptimizerSettings,
        *,
        on_summed: Callable[[], None] | None = None,
        norm_jitter: float = 0.0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.job, self._on_summed = job, on_summed
        self._corpus = job.corpus()
        self.rank, device = dist.get_rank(), rank_device()
        self.worker = Worker(
            job.program,
            job.batch,
            self.rank,
            seq_len=job.case.workload.seq_len,
            device=device,
            dtype=job.dtype,
            seed=job.case.workload.seed,
            transport=open_transport(device, timeout_s, carrier=job.carrier),
            hooks=self,
            # The same in every step, and slower to draw than to train on.
            routing=cache(job.expert_ids) if job.forces_routing else None,
            timeout_s=timeout_s,
            norm_jitter=norm_jitter,
            drawn_on=job.weights,
            offload=job.case.layout.offloads_activations,
        )
        if self.worker.transport.occupies_gpu:
            warm_up(self.worker, self._sequences(0))
        self.gradients = GradientSync(
            list(self.worker.parts.values()),
            job.program.plan.placement,
            self.rank,
            job.batch.num_replicas,
            settings,
            device=device,
            shard_state=job.case.layout.shard_state,
            offload=job.case.layout.offloads_state,
        )

    def step(self, number: int, *, keep_expert_ids: bool = False, traced: bool = True) -> StepResult:
        """One optimizer step on the global batch of that number; its operations' times are always known."""
        return self.worker.run_step(number, self._sequences(number), keep_expert_ids=keep_expert_ids)

    def _sequences(self, number: int) -> Sequences:
        def sequences(microbatch: int) -> Tensor:
            first = self.worker.home.first_sequence(microbatch)
            return self.job.sequences(self._corpus, number, range(first, first + self.job.batch.mbs))

        return sequences

    def grad_norm(self) -> float:
        """See `Trainer`."""
        return self.gradients.norm.item()

    def first_sequence(self, microbatch: int) -> int:
        """See `Trainer`."""
        return self.worker.home.first_sequence(microbatch)

    def held_shards(self) -> list[Shard]:
        """See `Trainer`."""
        return held_shards(self.worker.parts.values(), self.gradients)

    def saved_shards(self) -> list[Shard]:
        """See `Trainer`."""
        return saved_shards(self.worker.parts.values(), self.gradients)

    def after_loading(self, num_steps: int) -> None:
        """See `Trainer`."""
        after_loading(self.gradients, num_steps)

    def named_parameters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(global name, parameter, gradient buffer) of everything on this rank."""
        return self.worker.named_parameters()

    def sync(self, worker: Worker) -> None:
        """Hook of the action SYNC."""
        self.gradients.sync()
        if self._on_summed is not None:
            for flat in self.gradients.flats:
                flat.gather_gradients()
            self._on_summed()

    @torch.no_grad()
    def update(self, worker: Worker) -> None:
        """Hook of the action UPDATE."""
        self.gradients.update(worker.step_number)
