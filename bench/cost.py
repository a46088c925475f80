"""What a case costs on a cluster: seconds, FLOPs, messages, bytes held. One `Costs` for every system alike.

One room a noun, each on the one before it: `bench.family` (what costs the same), `bench.transfers`, `bench.holding`,
`bench.computation`; here, what is of whole groups.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from bench.action import TRANSFERS
from bench.computation import ComputationCosts
from bench.memory import Recipe
from bench.state import State

_FP32, _MIXED = Recipe(weight_bytes=4, main_weight_bytes=0), Recipe()


@dataclass(frozen=True, eq=False)
class Costs(ComputationCosts):
    """Costs of a case's actions on a placement, and of the end of its step. Fields as in `bench.family.Family`."""

    def with_free_communication(self) -> Self:
        """The same costs, with transfers and gradient sums that take no time."""
        return replace(self, free_communication=True)

    def without_overheads(self) -> Self:
        """The same costs, without fixed costs of kernels and transfers and without SMs given to communication."""
        bare = self.assumed.without_overheads()
        return self if bare is self.assumptions else replace(self, assumptions=bare)

    @property
    def uniform(self) -> bool:
        """Whether all ranks of every group have equal costs, so that one rank may stand for several."""
        if not self.routes.even:
            return False
        return all(
            np.ptp(column) <= 1e-9 * abs(column.max())
            for likeness in self.tally.likenesses
            for transfer in self.actions_of(likeness)
            if transfer.kind in TRANSFERS
            for column in self.ports(transfer)
            if len(column)
        )

    @property
    def load_imbalance(self) -> float:
        """Assignments of the most loaded expert rank over the mean, in the layer where this is largest."""
        moe = [layer for layer, home in enumerate(self.placement.expert) if home is not None]
        return max(self.routes.imbalance(layer, self._load.num_expert_ranks(layer)) for layer in moe)

    def static_bytes(self, group: str) -> float:
        """Weights, gradients and optimizer state of a rank of the group, and what is reserved beside them."""
        return self._state.static_bytes(group)

    def static_parts(self, group: str) -> dict[str, float]:
        """`static_bytes` by what they are."""
        return self._state.static_parts(group)

    def sync_s(self, group: str) -> float:
        """Seconds of the gradient sums of a group, and of gathering weights whose update is sharded."""
        return 0.0 if self.free_communication else self._state.sync_s(group)

    def sync_bytes(self, group: str) -> float:
        """Bytes that each rank sends for `sync_s`."""
        return self._state.sync_bytes(group)

    def update_s(self, group: str) -> float:
        """Seconds of the optimizer step."""
        return self._state.update_s(group)

    @cached_property
    def recipe(self) -> Recipe:
        """Bytes a parameter takes; fp32 needs no main copy."""
        return _FP32 if self.case.workload.dtype == "fp32" else _MIXED

    @cached_property
    def _state(self) -> State:
        return State(self.case, self.placement, self.num_replicas, self.assumed, self.recipe)
