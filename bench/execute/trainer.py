"""One rank that trains: its worker, its gradient sums and its data, put together for a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from bench.execute.job import Job
from bench.execute.rank import rank_device
from bench.execute.runtime import Sequences, StepResult, Worker
from bench.execute.staged import warm_up
from bench.execute.sync import GradientSync, OptimizerSettings
from bench.execute.transport import open_transport


class RankTrainer:
    """Made on all ranks of the default process group together; `step` runs on all of them together.

    Args:
        on_summed: called between SYNC and UPDATE, with whole sums in every gradient buffer.
        norm_jitter: see `init.initial_value`.
    """

    def __init__(
        self,
        job: Job,
        settings: OptimizerSettings,
        *,
        on_summed: Callable[[], None] | None = None,
        norm_jitter: float = 0.0,
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
            transport=open_transport(device, carrier=job.carrier),
            hooks=self,
            # The same in every step, and slower to draw than to train on.
            routing=cache(job.expert_ids) if job.forces_routing else None,
            norm_jitter=norm_jitter,
            drawn_on=job.weights,
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
        )

    def step(self, number: int, *, keep_expert_ids: bool = False) -> StepResult:
        """One optimizer step on the global batch of that number."""
        return self.worker.run_step(number, self._sequences(number), keep_expert_ids=keep_expert_ids)

    def _sequences(self, number: int) -> Sequences:
        def sequences(microbatch: int) -> Tensor:
            first = self.worker.home.first_sequence(microbatch)
            return self.job.sequences(self._corpus, number, range(first, first + self.job.batch.mbs))

        return sequences

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
