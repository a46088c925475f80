"""`disagmoe`: attention and experts on disjoint groups of GPUs, many-to-many exchange, the AF-Pipe schedule."""

from collections.abc import Iterator, Set
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.action import TRANSFERS, Codes, view
from bench.assumptions import Assumptions, get_assumptions
from bench.case import Case, CaseSpec, Layout, batch_of
from bench.errors import BadInput
from bench.placement import Placement
from bench.plan import RECOMPUTE, Plan
from bench.predict import costs_of
from bench.system import divisors, worthwhile_copies, worthwhile_offloads, worthwhile_shares
from systems.disagmoe.af_pipe import AFPipe, Duration
from systems.disagmoe.flow import flow_of, parts_of
from systems.disagmoe.placement import place
from systems.disagmoe.shift import shift_of, spreads

if TYPE_CHECKING:
    from systems.disagmoe.planner.explain import Explanation
    from systems.disagmoe.planner.phases_words import PhasesPlan

PLANNED_ON = "datasheet"
"""Assumptions that the order is made with, whatever a step is simulated with: a plan depends on its case alone."""

NUM_SEEDS = 4
"""Layouts of each kind that the planner gives the tuner to begin with."""

LEAST_USED = 0.75
"""Layouts that leave more than a quarter of the GPUs idle are not worth trying."""


class DisagMoE:
    """The paper's system: `groups` A-groups of M ranks and F-groups of N ranks, layers dealt in turn."""

    name = "disagmoe"
    summary = "attention and experts on disjoint GPU groups, M2N exchange, AF-Pipe rounds"
    fields = frozenset(
        {"mbs", "replicas", "attention_ranks", "expert_ranks", "groups", "expert_groups", "tp", "cp"}
        | {"layers_per_chunk", "round_length", "deferred_w", "lookahead", "head_group", "shift_at", "shared_on"}
        | {"copies", "recompute", "shard_state", "offload", "ranks_over_nodes"}
    )

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        shared = ("attention", "expert") if spec.model.num_shared_experts else ("attention",)
        for shape in self._shapes(spec):
            p = shape["groups"]
            held = worthwhile_offloads(spec, shape["mbs"])
            for recompute, shared_on, copies, offload in product(RECOMPUTE, shared, worthwhile_copies(spec), held):
                how = {"recompute": recompute, "copies": copies, "shared_on": shared_on, "offload": offload}
                # Rounds of 4p are long enough for the pipeline to be full when A, F and transfers balance.
                # Weight gradients that are put off fill bubbles and hold their inputs: as many as memory lets.
                for rounds, deferred in ((4, 8), (4, 0), (2, 4), (2, 0), (1, 0)):
                    order = {"round_length": rounds * p, "deferred_w": deferred * p}
                    yield Layout.make(**shape, **order, **how)

    def _shapes(self, spec: CaseSpec) -> Iterator[dict[str, Any]]:
        """M, N, p, replicas, shift, tp, cp and mbs that fill the cluster and divide the batch."""
        gpus, model, sequences = spec.cluster.num_gpus, spec.model, spec.workload.num_sequences
        for m, n in product(divisors(sequences * spec.cluster.gpus_per_node), divisors(model.num_experts)):
            for p in (p for p in divisors(gpus // (m + n)) if p <= min(8, model.num_layers)):
                replicas = gpus // (p * (m + n))
                if replicas * p * (m + n) < LEAST_USED * gpus:
                    continue
                shift_at = shift_of(model, spec.workload.seq_len, p)
                groups = {"attention_ranks": m, "expert_ranks": n, "groups": p, "replicas": replicas}
                for tp, cp in worthwhile_shares(spec, m, replicas, 2 * p):
                    # Sequences that are shared come one at a time.
                    for mbs in (1, 2) if tp * cp == 1 else (1,):
                        if sequences % (replicas * m // (tp * cp) * mbs) == 0:
                            yield groups | {"shift_at": shift_at, "tp": tp, "cp": cp, "mbs": mbs}

    def seeds(self, spec: CaseSpec, assumptions: Assumptions) -> list[Layout]:
        """What the planner's programme finds best: overall, and with other depths, splits and recomputation."""
        from systems.disagmoe.planner.allocation import allocate
        from systems.disagmoe.planner.alternatives import alternatives, by_groups
        from systems.disagmoe.planner.choices import Choices
        from systems.disagmoe.planner.problem import problem

        try:
            programme = problem(spec, assumptions, Choices())
            found = [allocate(programme), *by_groups(programme)[:NUM_SEEDS], *alternatives(programme, NUM_SEEDS)]
        except BadInput:  # nothing fits, or the batch cannot be dealt: the search will say so layout by layout
            return []
        return list(dict.fromkeys(each.layout for each in found))

    def completed(self, spec: CaseSpec, layout: Layout, fixed: Set[str]) -> Layout:
        """Whether windowed layers move on by one, and the head behind them, follows from groups and chunks.

        A chunk of several layers has both kinds: moving on would gain less than its gap in the pipeline costs.
        """
        if not spreads(spec.model) or not fixed & {"groups", "layers_per_chunk"}:
            return layout
        alone = layout.layers_per_chunk == 1
        shift_at = shift_of(spec.model, spec.workload.seq_len, layout.groups) if alone else None
        made = {"shift_at": shift_at, "head_group": None}
        return layout.model_copy(update={name: value for name, value in made.items() if name not in fixed})

    def placement(self, case: Case) -> Placement:
        return place(case.model, case.layout)

    def explain(self, spec: CaseSpec, assumptions: Assumptions, **options: Any) -> "Explanation":
        """The planner's layout and its reasons; options as in `systems.disagmoe.planner.explain.explain`."""
        from systems.disagmoe.planner.explain import explain

        return explain(spec, assumptions, **options)

    def explain_schedule(self, spec: CaseSpec, schedule: str, assumptions: Assumptions, **options: Any) -> "PhasesPlan":
        """A plan for every phase of a sequence-length schedule such as ``4096:2000,16384:500``.

        Options as in `systems.disagmoe.planner.phases.plan_phases`. Raises BadInput.
        """
        from systems.disagmoe.planner.phases import plan_phases
        from systems.disagmoe.planner.schedule import parse_schedule

        return plan_phases(spec, parse_schedule(schedule), assumptions, **options)

    def in_flight(self, case: Case) -> dict[str, float]:
        """Forwards go part by part in rounds: the last part's first comes after a round of all others."""
        placement = self.placement(case)
        rounds = min(case.layout.round_length, batch_of(case, placement).num_microbatches)
        return {name: ((num - 1) * rounds + 1) / num for name, num in _num_parts(placement).items()}

    def plan(self, case: Case) -> Plan:
        layout = case.layout
        placement = self.placement(case)
        num_microbatches = batch_of(case, placement).num_microbatches
        pipe = AFPipe(
            placement,
            flow_of(case.model, placement.outline, layout.recompute),
            num_microbatches,
            expected_durations(case, placement),
            min(layout.round_length, num_microbatches),
            layout.deferred_w,
            layout.lookahead,
        )
        return Plan(self.name, placement, pipe.run(), num_microbatches, layout.copies, layout.recompute)


@lru_cache(maxsize=256)
def _num_parts(placement: Placement) -> dict[str, int]:
    return {group.name: max(1, len(parts_of(placement, group.name))) for group in placement.groups}


def expected_durations(case: Case, placement: Placement) -> Duration:
    """Seconds of actions on the slowest rank of a group, under data-sheet assumptions; like ones looked up once."""
    costs = costs_of(case, placement, get_assumptions(PLANNED_ON))

    def one(code: int) -> float:
        action = view(code)
        return costs.transfer_s(action) if action.kind in TRANSFERS else float(np.max(costs.seconds(action)))

    def durations(codes: Codes) -> NDArray[np.float64]:
        different, like = costs.alike(codes)
        return np.array([one(code) for code in codes[different].tolist()])[like]

    return durations
