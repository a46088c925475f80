"""`megatron-overlap`: expert parallelism whose all-to-alls hide behind another micro-batch (combined 1F1B).

Forward of one micro-batch and backward of another run as a pair, layer by layer, computation on one stream and
all-to-alls on another, in the order in which megatron-core issues them (pipeline_parallel/combined_1f1b.py):
combine.B, attention.F, experts' dgrad, dispatch.F, experts' wgrad, dispatch.B, experts.F, combine.F, attention's dgrad,
attention's wgrad. Needs one more micro-batch of activations than 1F1B.
"""

from collections.abc import Iterator
from functools import partial

from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.placement import Placement
from systems.baselines.colocated import Colocated, Stage
from systems.baselines.interleaved import num_warmup, order
from systems.baselines.tape import Tape, Written
from systems.baselines.weave import weave
from systems.megatron_core.limits import require_native_overlap


class MegatronOverlap(Colocated):
    """Interleaved 1F1B with forward and backward combined layer by layer."""

    name = "megatron-overlap"
    fields = Colocated.fields | {"microbatch_group"}
    order_fields = ("pp", "vpp", "microbatch_group")
    trainers = ("plan", "native")
    native = "systems.megatron_core.trainer:OverlapTrainer"
    summary = "expert parallel, all-to-alls of one micro-batch behind another's computation (combined 1F1B)"

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        return (layout for layout in super().space(spec) if layout.pp == 1 or layout.vpp > 1)

    def placement(self, case: Case) -> Placement:
        if case.layout.pp > 1 and case.layout.vpp == 1:
            raise BadInput("layout.vpp", 1, "2 or more where pp > 1, as in megatron-core's combined 1F1B")
        return super().placement(case)

    def require_native(self, case: Case) -> None:
        require_native_overlap(case)

    def chunks_in_flight(self, stage: int, layout: Layout, num_microbatches: int) -> int:
        return num_warmup(stage, layout.pp, layout.vpp, num_microbatches, 1, layout.microbatch_group)

    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> Written:
        return combined_1f1b(stage, number, case.layout, num_microbatches)


def combined_1f1b(stage: Stage, number: int, layout: Layout, num_microbatches: int) -> Written:
    """Streams of stage `number`: warm-up forwards, woven pairs, the remaining backwards."""
    tape = Tape(partial(weave, stage))
    turns = order(number, layout.pp, layout.vpp, num_microbatches, 1, layout.microbatch_group)
    tape.add_all(turns.warmup, None)
    tape.add_all(*turns.pairs)
    tape.add_all(None, turns.cooldown)
    return tape.streams
