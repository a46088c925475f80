"""What the ranks of a pool run in tests: one step of a program, whole, disturbed or watched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.action import Kind, Pass
from bench.case import Batch, Case, batch_of
from bench.check import check
from bench.execute.data import SyntheticCorpus, read_microbatch
from bench.execute.pool import rank_device
from bench.execute.reference import LossAndGradients, ReferenceModel
from bench.execute.runtime import StepError, StepResult, Worker
from bench.execute.transport import open_transport
from bench.lower import lower
from bench.models import Model
from bench.plan import Plan
from bench.program import Op, Program
from bench.system import plan_of

SEED, JITTER = 3, 0.1


@dataclass(frozen=True)
class Run:
    """A checked program and its batch; `forced` experts int64 [sequences, S, k] by layer, if any."""

    program: Program
    batch: Batch
    seq_len: int
    forced: dict[int, Tensor] | None = None
    steps: int = 1
    timeout_s: float = 30.0

    @classmethod
    def of(cls, case: Case) -> Run:
        plan = plan_of(case)
        return cls.of_plan(plan, case.model, batch_of(case, plan.placement), case.workload.seq_len)

    @classmethod
    def of_plan(cls, plan: Plan, model: Model, batch: Batch, seq_len: int) -> Run:
        program = lower(plan, model)
        check(program)
        return cls(program, batch, seq_len)

    def with_(self, **changes: Any) -> Run:
        return replace(self, **changes)

    @property
    def world_size(self) -> int:
        return self.batch.num_replicas * self.program.plan.placement.size

    @property
    def corpus(self) -> SyntheticCorpus:
        return SyntheticCorpus(self.program.model.vocab_size, self.seq_len, SEED)

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
            seq_len=self.seq_len,
            device=rank_device(),
            dtype=torch.float32,
            seed=SEED,
            transport=open_transport(rank_device(), self.timeout_s),
            routing=None if forced is None else routing,
            timeout_s=self.timeout_s,
            norm_jitter=JITTER,
        )

    def sequences(self, worker: Worker, microbatch: int) -> Tensor:
        home = worker.home
        dealt = self.batch._asdict()
        return torch.from_numpy(read_microbatch(self.corpus, 0, home.replica, microbatch, home.index, **dealt))

    def reference(self) -> LossAndGradients:
        corpus = self.corpus
        batch = torch.stack([torch.from_numpy(corpus.sequence(i)) for i in range(self.batch.num_sequences)])
        model = ReferenceModel(self.program.model, SEED, norm_jitter=JITTER)
        return model.loss_and_gradients(batch, replay_ids=self.forced)


def run_step(worker: Worker, run: Run) -> StepResult:
    return worker.run_step(0, lambda m: run.sequences(worker, m), keep_expert_ids=True)


def step_on_rank(run: Run) -> tuple[StepResult, dict[str, Tensor]]:
    """The report of the last step, and this rank's share of the gradients of all steps by global name."""
    worker = run.worker(dist.get_rank())
    for _ in range(run.steps):
        result = run_step(worker, run)
    return result, {name: grad.cpu() for name, _, grad in worker.named_parameters()}


def step_that_waits_for_receives(run: Run) -> int:
    """A step in which layer 0's experts do not begin with a micro-batch before the next one's receive is posted.

    Returns:
        how often they waited. Raises where a receive is not posted while the computation before it runs.
    """
    worker = run.worker(dist.get_rank())
    expert = worker.parts.get((Kind.EXPERT, 0))
    if expert is None:
        run_step(worker, run)
        return 0
    program = run.program
    mine = program.plan.placement.index[worker.home.group.name]
    receives = [
        k
        for k in range(program.num_ops)
        if program.op[k] == Op.RECV and program.group[k] == mine and _is_first_dispatch(program, k)
    ]
    following = iter(receives[1:])
    waits = 0

    def wait(*_: object) -> None:
        nonlocal waits
        receive = next(following, None)
        if receive is not None:
            waits += 1
            _wait_until(lambda: worker.running is not None and receive in worker.running.posted)

    expert.register_forward_pre_hook(wait)
    run_step(worker, run)
    return waits


def _is_first_dispatch(program: Program, k: int) -> bool:
    action = program.action(k)
    return (action.kind, action.pass_, action.layer) == (Kind.DISPATCH, Pass.F, 0)


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "not posted while the computation before it runs"
        time.sleep(0.001)


def step_with_fault(run: Run, rank: int, part: tuple[Kind, int], fault: str) -> StepResult:
    """A step in which a part's forward on one rank raises or never ends."""
    worker = run.worker(dist.get_rank())
    if dist.get_rank() == rank:
        worker.parts[part].register_forward_pre_hook(_raise if fault == "raises" else _hang)
    return run_step(worker, run)


def error_of_step(run: Run, rank: int, part: tuple[Kind, int], fault: str) -> str:
    """The error that `step_with_fault` ends with on this rank."""
    try:
        step_with_fault(run, rank, part, fault)
    except StepError as error:
        return str(error)
    return ""


def _raise(module: nn.Module, inputs: object) -> None:
    raise ArithmeticError("made to fail")


def _hang(module: nn.Module, inputs: object) -> None:
    threading.Event().wait()
