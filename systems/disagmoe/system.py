"""`disagmoe`: attention and experts on disjoint groups of GPUs, many-to-many exchange, the AF-Pipe schedule."""

from collections.abc import Iterator, Mapping, Set
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.action import TRANSFERS, Codes, view
from bench.assumptions import Assumptions, get_assumptions
from bench.case import Case, CaseSpec, Layout, batch_of
from bench.errors import BadInput
from bench.flops import Part, has_part, part_flops
from bench.models import Model
from bench.placement import Placement
from bench.plan import RECOMPUTE, Plan
from bench.predict import costs_of
from bench.system import divisors, worthwhile_copies, worthwhile_offloads, worthwhile_shares
from systems.disagmoe.af_pipe import AFPipe, Duration
from systems.disagmoe.flow import flow_of, parts_of
from systems.disagmoe.orders import FIELDS, in_order_of, in_whole_rounds, regrouped, reordered
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

MOST_UNEVEN = 4.0
"""Nor are those in which a GPU has to do so many times its even share of the FLOPs."""


class DisagMoE:
    """The paper's system: `groups` A-groups of M ranks and F-groups of N ranks, layers dealt in turn."""

    name = "disagmoe"
    summary = "attention and experts on disjoint GPU groups, M2N exchange, AF-Pipe rounds"
    fields = frozenset(
        {"mbs", "replicas", "attention_ranks", "expert_ranks", "groups", "expert_groups", "tp", "cp"}
        | {"layers_per_chunk", "round_length", "deferred_w", "lookahead", "head_group", "shift_at", "shared_on"}
        | {"copies", "recompute", "shard_state", "offload", "ranks_over_nodes"}
    )

    stepped = FIELDS

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        shared = ("attention", "expert") if spec.model.num_shared_experts else ("attention",)
        for shape in self._shapes(spec):
            p = shape["groups"]
            held = worthwhile_offloads(spec, shape["mbs"])
            for recompute, shared_on, copies, offload in product(RECOMPUTE, shared, worthwhile_copies(spec), held):
                how = {"recompute": recompute, "copies": copies, "shared_on": shared_on, "offload": offload}
                # Rounds of 4p are long enough for the pipeline to be full when A, F and transfers balance; shorter
                # ones hold less. How much is put off, and rounds of other lengths, are found by moves.
                for rounds, deferred in ((4, 8), (2, 4), (1, 0)):
                    order = {"round_length": rounds * p, "deferred_w": deferred * p}
                    yield Layout.make(**shape, **order, **how)

    def moves(self, spec: CaseSpec, layout: Layout) -> Iterator[Layout]:
        tp, cp, mbs = layout.tp, layout.cp, layout.mbs
        yield from (in_whole_rounds(spec, layout.model_copy(update=order)) for order in reordered(spec, layout))
        yield from regrouped(spec, layout)
        changes: list[Mapping[str, int]] = [
            *({"tp": a, "cp": b} for a, b in ((2 * tp, cp // 2), (tp // 2, 2 * cp), (tp, cp // 2), (tp, 2 * cp))),
            *({"tp": share} for share in (tp // 2, 2 * tp)),
            *({"mbs": a, "cp": b} for a, b in ((2 * mbs, 2 * cp), (mbs // 2, cp // 2), (2 * mbs, cp), (mbs // 2, cp))),
        ]
        for change in changes:
            if min(change.values()) >= 1:
                yield in_whole_rounds(spec, layout.model_copy(update=change))

    def leaner(self, layout: Layout) -> Layout | None:
        if layout.round_length >= 2 * layout.groups and layout.deferred_w:
            return layout.model_copy(update={"round_length": layout.round_length // 2})
        return layout.model_copy(update={"deferred_w": 0}) if layout.deferred_w else None

    def in_order_of(self, layout: Layout, other: Layout) -> Layout:
        return in_order_of(layout, other)

    def _shapes(self, spec: CaseSpec) -> Iterator[dict[str, Any]]:
        """M, N, p, replicas, shift, tp, cp and mbs that fill the cluster and divide the batch."""
        gpus, model, sequences = spec.cluster.num_gpus, spec.model, spec.workload.num_sequences
        for m, n in product(divisors(sequences * spec.cluster.gpus_per_node), divisors(model.num_experts)):
            for p in (p for p in divisors(gpus // (m + n)) if p <= min(8, model.num_layers)):
                replicas = gpus // (p * (m + n))
                if replicas * p * (m + n) < LEAST_USED * gpus:
                    continue
                if (
                    _unevenness(model, spec.workload.seq_len, m / gpus * p * replicas, n / gpus * p * replicas)
                    > MOST_UNEVEN
                ):
                    continue
                shift_at = shift_of(model, spec.workload.seq_len, p)
                groups = {"attention_ranks": m, "expert_ranks": n, "groups": p, "replicas": replicas}
                for tp, cp in worthwhile_shares(spec, m):
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


def _unevenness(model: Model, seq_len: int, attention: float, experts: float) -> float:
    """FLOPs of the GPU that has most over an even share, given the shares of the GPUs that each side has.

    Shared experts may be on either side and count on neither.
    """
    on_attention, on_experts = _side_flops(model, seq_len)
    return max(on_attention / attention, on_experts / experts) / (on_attention + on_experts)


@lru_cache(maxsize=256)
def _side_flops(model: Model, seq_len: int) -> tuple[float, float]:
    """Forward FLOPs of a token on the attention side, and on the experts'."""

    def flops(part: Part) -> float:
        layers = [layer for layer in range(model.num_layers) if has_part(model, part, layer)]
        return sum(part_flops(model, part, layer, "F", tokens=1.0, seq_len=seq_len) for layer in layers)

    return flops("attention") + flops("router") + flops("dense_ffn"), flops("expert")


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
