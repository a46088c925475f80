"""A rank that runs a program: its parts, and one call a step.

    worker = Worker(program, batch, rank, seq_len=S, device=device, dtype=dtype, seed=0,
                    transport=open_transport(device), hooks=hooks)
    result = worker.run_step(step, lambda microbatch: sequences)

All ranks make their `Worker` together, and run their steps together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bench.case import Batch
from bench.errors import BadInput
from bench.execute.compute import Compute, ForcedRouting, Sequences
from bench.execute.home import Home, Part
from bench.execute.init import named_global
from bench.execute.record import StepResult
from bench.execute.step import Hooks, Step, StepError
from bench.execute.streams import Streams
from bench.execute.transport import DEFAULT_TIMEOUT_S, Transport, channels_of
from bench.execute.values import Values
from bench.program import Program

__all__ = ["ForcedRouting", "Hooks", "Sequences", "StepError", "StepResult", "Worker"]


class Worker:
    """One rank. Global rank = replica x replica size + rank within the replica.

    Args:
        batch: how the global batch is dealt; its micro-batches are the program's.
        seq_len: S, tokens of a sequence.
        transport: of this process, see `open_transport`.
        hooks: what SYNC and UPDATE do; nothing where not given.
        routing: experts to take instead of the router's choice, whose weights are the router's all the same.
        timeout_s: how long a step may take.
        norm_jitter, drawn_on: see `init.initialise`.
        offload: see `Home`.
    Raises BadInput for a plan that is only modelled, a batch that is not the program's, or a rank too large.

    Attributes:
        step_number: of the step in flight, or the last one.
        running: the step in flight.
    """

    def __init__(
        self,
        program: Program,
        batch: Batch,
        rank: int,
        *,
        seq_len: int,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        transport: Transport,
        hooks: Hooks | None = None,
        routing: ForcedRouting | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        norm_jitter: float = 0.0,
        drawn_on: str = "host",
        offload: bool = False,
    ) -> None:
        _require_executable(program, batch)
        self.program, self.batch, self.rank, self.device = program, batch, rank, device
        self.transport, self.hooks, self.routing, self.timeout_s = transport, hooks, routing, timeout_s
        self.home = Home(
            program,
            batch,
            rank,
            seq_len=seq_len,
            device=device,
            dtype=dtype,
            seed=seed,
            norm_jitter=norm_jitter,
            drawn_on=drawn_on,
            offload=offload,
        )
        self.streams = Streams(device, [s for group, s in program.queues if group == self.home.group.name])
        self.step_number = 0
        self.running: Step | None = None
        transport.open(channels_of(program, batch.num_replicas))

    @property
    def parts(self) -> dict[Part, nn.Module]:
        """The parts on this rank by (kind, layer); layer 0 for the embedding and the head."""
        return self.home.parts

    def named_parameters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(global name, parameter, gradient buffer) of everything on this rank; see `init.named_global`."""
        for part in self.parts.values():
            yield from named_global(part)

    def run_step(self, step: int, sequences: Sequences, *, keep_expert_ids: bool = False) -> StepResult:
        """One optimizer step.

        Args:
            step: number of the step, which the hooks find as `step_number`.
            sequences: micro-batch -> int64 [mbs, S + 1] on the CPU, this rank's; asked for where the embedding or the
                head is.
        Raises:
            StepError: an operation failed, here or on a rank that this one waited for; or the step took too long. The
                transport is broken afterwards, and so are the gradients.
        """
        self.step_number = step
        values = Values(self.streams)
        compute = Compute(self.home, values, self.streams, sequences, self.routing, keep_expert_ids)
        self.running = Step(self, self.home, compute, values, self.streams, self.transport, self.hooks)
        try:
            return self.running.run(self.timeout_s)
        finally:
            self.running = None
            for island in self.home.islands.values():
                island.discard()


def _require_executable(program: Program, batch: Batch) -> None:
    plan = program.plan
    if plan.obstacles:
        raise BadInput("plan.traits", ", ".join(plan.obstacles), "none of these, to be executed")
    if plan.copies not in ("expert", "rank"):
        raise BadInput("plan.copies", plan.copies, "expert or rank, to be executed")
    if (batch.num_microbatches, batch.num_ranks) != (plan.num_microbatches, plan.placement.data_ranks):
        allowed = f"{plan.num_microbatches} micro-batches on {plan.placement.data_ranks} ranks, as the plan"
        raise BadInput("batch", f"{batch.num_microbatches} micro-batches on {batch.num_ranks} ranks", allowed)
