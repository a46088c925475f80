"""Functions that the ranks of a pool run: one step of a program, without the end of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.case import Batch, Case, batch_of
from bench.check import check
from bench.execute.data import SyntheticCorpus, read_microbatch, sequence_index
from bench.execute.pool import rank_device
from bench.execute.reference import LossAndGradients, ReferenceModel
from bench.execute.runtime import StepResult, Worker
from bench.execute.transport import open_transport
from bench.lower import lower
from bench.program import Program
from bench.system import plan_of

SEED, JITTER = 3, 0.1


@dataclass(frozen=True)
class Run:
    """A case's program; `forced` experts [sequences, S, k] by layer, if any."""

    case: Case
    program: Program
    batch: Batch
    forced: dict[int, Tensor] | None = None
    steps: int = 1
    timeout_s: float = 30.0

    @classmethod
    def of(cls, case: Case, **options: object) -> Run:
        plan = plan_of(case)
        program = lower(plan, case.model)
        check(program)
        return cls(case, program, batch_of(case, plan.placement), **options)  # type: ignore[arg-type]

    @property
    def world_size(self) -> int:
        return self.batch.num_replicas * self.program.plan.placement.size

    @property
    def corpus(self) -> SyntheticCorpus:
        return SyntheticCorpus(self.case.model.vocab_size, self.case.workload.seq_len, SEED)

    @property
    def dealt(self) -> dict[str, int]:
        return self.batch.model_dump()

    def worker(self, rank: int) -> Worker:
        """Called by all ranks together."""
        forced = self.forced

        def routing(layer: int, sequences: range) -> Tensor:
            assert forced is not None
            return forced[layer][sequences.start : sequences.stop]

        return Worker(
            self.program,
            self.batch,
            rank,
            seq_len=self.case.workload.seq_len,
            device=rank_device(),
            dtype=torch.float32,
            seed=SEED,
            transport=open_transport(rank_device(), self.timeout_s),
            routing=None if forced is None else routing,
            timeout_s=self.timeout_s,
            norm_jitter=JITTER,
        )

    def sequences(self, worker: Worker, step: int, microbatch: int) -> Tensor:
        home = worker.home
        tokens = read_microbatch(self.corpus, step, home.replica, microbatch, home.index, **self.dealt)
        return torch.from_numpy(tokens)

    def reference(self) -> LossAndGradients:
        first = sequence_index(0, 0, 0, 0, 0, **self.dealt)
        corpus = self.corpus
        batch = torch.stack([torch.from_numpy(corpus.sequence(first + i)) for i in range(self.batch.num_sequences)])
        model = ReferenceModel(self.case.model, SEED, norm_jitter=JITTER)
        return model.loss_and_gradients(batch, replay_ids=self.forced, collect_ids=True)


def step_on_rank(run: Run) -> tuple[StepResult, dict[str, Tensor]]:
    """The report of the last step, and this rank's share of the gradients of all steps by global name."""
    import torch.distributed as dist

    worker = run.worker(dist.get_rank())
    for step in range(run.steps):
        result = worker.run_step(step, lambda m: run.sequences(worker, 0, m), keep_expert_ids=True)
    return result, {name: grad.cpu() for name, _, grad in worker.named_parameters()}
