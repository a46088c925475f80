"""What a rank of each side holds from the first action to the last, and its optimizer step, for any M, N and R."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout
from bench.cost import Costs
from bench.state import State
from bench.system import divisors
from systems.disagmoe.placement import place
from systems.disagmoe.planner.tokens import Option
from systems.disagmoe.shift import Homes

Floats = NDArray[np.float64]


def held_state(
    spec: CaseSpec, option: Option, depths: tuple[int, int], homes: Homes, assumptions: Assumptions
) -> "HeldState":
    """Of p and p_F groups; how a layer is computed and dispatched makes no difference to it, and N is given later."""
    alike = replace(option, recompute="none", copies="rank", expert_ranks=_few(spec))
    return _held_state(spec.model_copy(update={"system": "any"}), alike, depths, homes, assumptions)


def _few(spec: CaseSpec) -> int:
    """The fewest expert ranks that tell what is divided over them from what every one holds."""
    return next((n for n in divisors(spec.model.num_experts) if n > 1), 1)


@lru_cache(maxsize=4096)
def _held_state(
    spec: CaseSpec, option: Option, depths: tuple[int, int], homes: Homes, assumptions: Assumptions
) -> "HeldState":
    return HeldState(spec, option, depths, homes, assumptions)


class HeldState:
    """Attention's optimizer state is sharded over M R ranks (M R / tp of what tp divides), an expert's over R.

    All numbers are over candidates, of M, R and N.
    """

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
        self.experts = option.expert_ranks
        self.communicators = (option.tp > 1) + (option.cp > 1)
        self.offloads = case.layout.offloads_state
        # Of every group of a kind, alike ones once: parameters, and every how-many-th rank holds the same.
        self.groups: dict[str, set[tuple[tuple[int, int], ...]]] = {"A": set(), "F": set()}
        for group in placement.groups:
            parts = self.state.shared(group.name)
            self.groups[group.name[0]].add(tuple((each.num_params, each.step) for each in parts))

    def static_bytes(self, name: str, data: Floats, replicas: Floats, experts: Floats) -> Floats:
        """[candidates]: bytes of the fullest rank of a kind of group, A or F."""
        most = np.zeros(len(data))
        recipe = self.recipe
        sharded = recipe.main_weight_bytes + 2 * recipe.moment_bytes
        for parts in self._parts(name, data, replicas, experts):
            sums = sum(((peers > 1).astype(float) for _, peers in parts), np.zeros(len(data)))
            communicators = 1 + sums + (self.communicators if name == "A" else 0)
            held = self.state.reserve_bytes(0) + communicators * self.state.assumed.communicator_bytes
            for params, peers in parts:
                held = held + params * (recipe.weight_bytes + recipe.grad_bytes)
                if not self.offloads:
                    held = held + np.ceil(params * sharded / peers)
            most = np.maximum(most, held)
        return most

    def update_s(self, name: str, data: Floats, replicas: Floats, experts: Floats) -> Floats:
        """[candidates]: seconds of the longest optimizer step on a kind of group, A or F."""
        groups = self._parts(name, data, replicas, experts)
        updated = [sum((params / peers for params, peers in parts), np.zeros(len(data))) for parts in groups]
        return np.asarray(np.max(updated, axis=0) * self.state.update_of(1.0))

    def _parts(self, name: str, data: Floats, replicas: Floats, experts: Floats) -> list[list[tuple[Floats, Floats]]]:
        """Of every group of a kind: pairs of parameters of a rank and of ranks that hold the same."""
        found = []
        for parts in self.groups[name]:
            if name == "A":
                found.append([(np.full(len(data), float(params)), data * replicas // step) for params, step in parts])
                continue
            # What every one of a group's ranks holds is held by N of each replica.
            divided = [(params * self.experts / experts, replicas) for params, step in parts if step > 1]
            whole = [(np.full(len(data), float(params)), replicas * experts) for params, step in parts if step == 1]
            found.append(divided + whole)
        return found
