"""A case made ready for execution: its checked program, its batches, its expert choices. Pickled to every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bench.action import Kind
from bench.case import Batch, Case, batch_of
from bench.check import check
from bench.errors import BadInput, unknown
from bench.execute.data import Corpus, open_corpus
from bench.execute.pool import Ranks
from bench.execute.support import require_executable, require_replayable, require_supported
from bench.lower import lower
from bench.program import Program
from bench.routing import Routing
from bench.serial import serialised
from bench.system import plan_of, trainer_of
from bench.transports import Carrier

WEIGHTS = ("host", "device")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """What ranks need to know to execute a case.

    Attributes:
        data: name of the corpus, see `open_corpus`.
        weights: where they are drawn, ``host`` or ``device``; see `init.initialise`.
        carrier: what carries payload; the pool's where not given.
        trainer: what trains, see `bench.system.TRAINERS`.
        serial: whether `program` is the plan without overlap, see `bench.serial`.
    """

    case: Case
    program: Program
    batch: Batch
    data: str = "text"
    weights: str = "host"
    carrier: Carrier | None = None
    trainer: str = "plan"
    serial: bool = False

    @classmethod
    def of(
        cls,
        case: Case,
        data: str = "text",
        weights: str = "host",
        carrier: Carrier | None = None,
        trainer: str | None = "plan",
        *,
        serial: bool = False,
    ) -> Job:
        """Plans, lowers and checks. Raises BadInput where the case cannot be executed.

        Args:
            trainer: None for what the system takes unless told.
        """
        require_supported(case.model)
        require_replayable(case.workload)
        require_executable(case.layout)
        plan = plan_of(case)
        if plan.obstacles:
            raise BadInput("system", case.system, f"one that can be executed; its plan is {', '.join(plan.obstacles)}")
        if weights not in WEIGHTS:
            raise unknown("weights", weights, WEIGHTS)
        by = trainer_of(case, trainer)
        if serial and by != "plan":
            raise BadInput("serial", serial, f"False with trainer {by}, whose order is its own")
        if serial:
            plan = serialised(plan, case.model)
        batch = batch_of(case, plan.placement)
        job = cls(case, lower(plan, case.model), batch, data, weights, carrier, by, serial)
        check(job.program)
        job.corpus()  # refuses a model whose vocabulary is too small for the text
        return job

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.batch.num_replicas * self.program.plan.placement.size

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.case.workload.dtype]

    @property
    def tokens_per_step(self) -> int:
        return self.batch.num_sequences * self.case.workload.seq_len

    def corpus(self) -> Corpus:
        workload = self.case.workload
        return open_corpus(
            self.data, vocab_size=self.case.model.vocab_size, seq_len=workload.seq_len, seed=workload.seed
        )

    def sequences(self, corpus: Corpus, step: int, numbers: range) -> Tensor:
        """int64 [len(numbers), S + 1]: sequences of a step by their numbers within the global batch."""
        first = step * self.batch.num_sequences
        return torch.from_numpy(np.stack([corpus.sequence(first + number) for number in numbers]))

    def expert_ids(self, layer: int, numbers: range) -> Tensor:
        """int64 [len(numbers), S, k]: forced choices of the sequences with these numbers, the same in every step."""
        ids = [self.routing.expert_ids(layer, number, self.case.workload.seq_len) for number in numbers]
        return torch.from_numpy(np.stack([one for one in ids if one is not None]))

    @property
    def forces_routing(self) -> bool:
        """Whether the workload says which experts tokens choose; otherwise the routers do."""
        return self.routing.name != "learned"

    def forced_ids(self) -> dict[int, Tensor] | None:
        """Layer -> int64 [B, S, k] of the global batch, or None where the routers choose."""
        if not self.forces_routing:
            return None
        layers = range(self.case.model.num_dense_layers, self.case.model.num_layers)
        return {layer: self.expert_ids(layer, range(self.batch.num_sequences)) for layer in layers}

    @cached_property
    def routing(self) -> Routing:
        """The distribution of expert choices; what "rank" means in it are the system's own expert ranks."""
        placement = self.program.plan.placement
        home = placement.home(Kind.EXPERT, self.case.model.num_dense_layers)
        return Routing.of(self.case.workload, self.case.model, placement.by_name[home].size)

    def require_ranks(self, pool: Ranks, needed: int | None = None) -> None:
        """Raises BadInput where the pool has fewer ranks than are needed; the job's world where not given."""
        needed = self.world_size if needed is None else needed
        if needed > pool.world_size:
            raise BadInput("ranks", pool.world_size, f"at least {needed}, for {self.case.layout}")
        carrier = self.carrier or pool.carrier
        if self.trainer == "native" and carrier.name not in ("gloo", "nccl"):
            allowed = "auto, with a GPU for every rank: the system's own code sends by itself"
            raise BadInput("transport", carrier.name, allowed)
