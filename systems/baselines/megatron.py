"""`megatron`: megatron-core's expert parallelism, as it runs without overlap.

The order is that of its schedules (pipeline_parallel/schedules.py, 0.16.1): 1F1B, or interleaved 1F1B with a warm-up of
2 (P - p - 1) + (v - 1) G forwards on stage p, micro-batches going through a chunk in groups of G, P unless told.
Its all-to-all dispatcher (transformer/moe/token_dispatcher.py) sends one row per (token, expert), and what follows
waits for it.
Optimizer state is sharded over data-parallel ranks (distributed optimizer) unless the layout says otherwise. `ep` has
the same order with the copies that every other system of this harness may choose.

Recomputation is that of a whole layer from its input, exchange and all (recompute_granularity full, one layer a unit):
`redispatch` here. It runs the combine once more as well, whose result nobody reads: left out.
"""

from collections.abc import Mapping

from bench.case import Case
from bench.errors import BadInput
from bench.placement import Placement
from systems.baselines.ep import ExpertParallel
from systems.megatron_core.limits import require_native

RECOMPUTE = ("none", "redispatch")


class Megatron(ExpertParallel):
    """`ep` with what megatron-core offers, no more: one row per (token, expert), whole layers recomputed or nothing."""

    name = "megatron"
    order_fields = ("pp", "vpp", "microbatch_group")
    serial = True
    summary = "megatron-core's expert parallelism: all-to-all dispatcher, 1F1B or interleaved pipeline"
    defaults: Mapping[str, object] = {"copies": "expert"}
    recomputes, all_copies = RECOMPUTE, ("expert",)
    fields = ExpertParallel.fields | {"microbatch_group"}
    trainers = ("native", "plan")
    native = "systems.megatron_core.trainer:MegatronTrainer"

    def placement(self, case: Case) -> Placement:
        layout = case.layout
        if layout.copies != "expert":
            allowed = "expert: megatron-core's all-to-all dispatcher sends one row per token and expert"
            raise BadInput("layout.copies", layout.copies, allowed)
        if layout.recompute not in RECOMPUTE:
            allowed = "none, or redispatch: megatron-core recomputes whole layers, exchange and all"
            raise BadInput("layout.recompute", layout.recompute, allowed)
        return super().placement(case)

    def require_native(self, case: Case) -> None:
        require_native(case)
