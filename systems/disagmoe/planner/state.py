"""What a rank of each side holds from the first action to the last, and its optimizer step, for any M and R."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout
from bench.cost import Costs
from bench.memory import state_bytes
from bench.state import State
from systems.disagmoe.placement import place
from systems.disagmoe.planner.tokens import Option
from systems.disagmoe.shift import Homes

Floats = NDArray[np.float64]


def held_state(
    spec: CaseSpec, option: Option, depths: tuple[int, int], homes: Homes, assumptions: Assumptions
) -> "HeldState":
    """Of p and p_F groups; how a layer is computed and dispatched makes no difference to it."""
    alike = replace(option, recompute="none", copies="rank")
    bare = spec if spec.system == "any" else spec.model_copy(update={"system": "any"})
    return _held_state(bare, alike, depths, homes, assumptions)


@lru_cache(maxsize=4096)
def _held_state(
    spec: CaseSpec, option: Option, depths: tuple[int, int], homes: Homes, assumptions: Assumptions
) -> "HeldState":
    return HeldState(spec, option, depths, homes, assumptions)


class HeldState:
    """Attention's optimizer state is sharded over M R ranks (M R / tp of what tp divides), an expert's over R."""

    def __init__(
        self, spec: CaseSpec, option: Option, depths: tuple[int, int], homes: Homes, assumptions: Assumptions
    ) -> None:
        layout = Layout.make(
            groups=depths[0],
            expert_groups=None if depths[0] == depths[1] else depths[1],
            expert_ranks=option.expert_ranks,
            head_group=homes.head_group,
            shift_at=homes.shift_at,
            shared_on=option.shared_on,
            attention_ranks=option.tp * option.cp,
            tp=option.tp,
            cp=option.cp,
            offload=option.offload,
        )
        case, placement = spec.with_layout(layout), place(spec.model, layout)
        self.recipe = Costs(case, placement, assumptions=assumptions).recipe
        self.state = State(case, placement, 1, assumptions, self.recipe)
        self.shared = (option.tp > 1) + (option.cp > 1)
        self.offloads = case.layout.offloads_state
        # Of every group of a kind, alike ones once: parameters, ranks that hold them here, and every how-many-th does.
        self.groups: dict[str, set[tuple[tuple[int, int, int], ...]]] = {"A": set(), "F": set()}
        for group in placement.groups:
            parts = self.state.shared(group.name)
            self.groups[group.name[0]].add(tuple((each.num_params, each.num_peers, each.step) for each in parts))
        self.known: dict[tuple[str, str, int], float] = {}

    def static_bytes(self, name: str, numbers: Iterable[int]) -> Floats:
        """[numbers] of M R (attention groups, A) or R (expert groups, F): bytes of the fullest rank of the kind."""
        return self._each("bytes", self._static_bytes, name, numbers)

    def update_s(self, name: str, numbers: Iterable[int]) -> Floats:
        """[numbers] of the same: seconds of the longest optimizer step on a kind of group, A or F."""
        return self._each("update", self._update_s, name, numbers)

    def _each(self, what: str, value: Callable[[str, int], float], name: str, numbers: Iterable[int]) -> Floats:
        found = []
        for ranks in numbers:
            key = (what, name, ranks)
            if key not in self.known:
                self.known[key] = value(name, ranks)
            found.append(self.known[key])
        return np.array(found)

    def _parts(self, name: str, ranks: int) -> Iterator[list[tuple[int, int]]]:
        """Of every group of a kind: pairs of parameters and of ranks that hold the same."""
        for parts in self.groups[name]:
            # With M = tp cp and R = 1 an expert group's own parameters have one holder, shared experts N.
            yield [(params, peers * ranks if name == "F" else ranks // step) for params, peers, step in parts]

    def _static_bytes(self, name: str, ranks: int) -> float:
        most = 0.0
        for parts in self._parts(name, ranks):
            communicators = 1 + sum(peers > 1 for _, peers in parts) + (self.shared if name == "A" else 0)
            held = self.state.reserve_bytes(communicators)
            for params, peers in parts:
                if self.offloads:
                    held += params * (self.recipe.weight_bytes + self.recipe.grad_bytes)
                else:
                    held += state_bytes(params, self.recipe, shards=peers)
            most = max(most, held)
        return most

    def _update_s(self, name: str, ranks: int) -> float:
        groups = self._parts(name, ranks)
        return max(self.state.update_of(sum(params / peers for params, peers in parts)) for parts in groups)
