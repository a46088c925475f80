"""`disagmoe`: attention and experts on disjoint groups of GPUs, many-to-many exchange, the AF-Pipe schedule."""

from collections.abc import Iterator

from bench.action import Action
from bench.case import Case, CaseSpec, Layout, batch_of
from bench.edges import edges
from bench.plan import ActionColumn, Plan
from systems.disagmoe.af_pipe import AFPipe
from systems.disagmoe.placement import place


class DisagMoE:
    """The paper's system: `groups` A-groups of M ranks and F-groups of N ranks, layers dealt in turn."""

    name = "disagmoe"
    summary = "attention and experts on disjoint GPU groups, M2N exchange, AF-Pipe rounds"
    fields = frozenset(
        {
            "mbs",
            "replicas",
            "attention_ranks",
            "expert_ranks",
            "groups",
            "layers_per_chunk",
            "round_length",
            "head_group",
        }
        | {"shared_on", "copies", "recompute", "shard_state"}
    )

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        gpus, model = spec.cluster.num_gpus, spec.model
        for groups in (4, 2, 8, 1):
            for m, n in ((16, 16), (8, 8), (8, 16), (16, 8), (32, 32)):
                if (m + n) * groups <= gpus and model.num_experts % n == 0 and groups <= model.num_layers:
                    for recompute in ("none", "full"):
                        for rounds in (groups, 2 * groups, 4 * groups):
                            yield Layout.make(
                                groups=groups,
                                attention_ranks=m,
                                expert_ranks=n,
                                round_length=rounds,
                                recompute=recompute,
                            )

    def plan(self, case: Case) -> Plan:
        layout = case.layout
        placement = place(case.model, layout)
        num_microbatches = batch_of(case, placement).num_microbatches
        pipe = AFPipe(
            placement,
            list(edges(case.model, placement)),
            num_microbatches,
            _unit,
            min(layout.round_length, num_microbatches),
            deferred=0,
        )
        queues = {key: ActionColumn.of(queue) for key, queue in pipe.run().items()}
        return Plan(self.name, placement, queues, num_microbatches, layout.copies, layout.recompute)


def _unit(action: Action) -> float:
    return 1.0
