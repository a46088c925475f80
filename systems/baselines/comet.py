"""`comet`: an exchange fused into the experts' GEMMs, tile by tile, after Comet (arXiv 2502.19811, bytedance/flux).

Modelled only: the plan describes what fused kernels do, and nothing here executes them. Published: thread blocks of one
kernel are divided between communication and GEMM, `comm_sms` of them for communication, the best number found by
profiling; GEMM tiles begin when the rows they need have come, and finished ones leave while others are computed; the
caller sees one stream, so nothing overlaps across layers or micro-batches.

Ours, as the simulator needs it:
- A fused kernel is many slices of the tokens, the next one's dispatch and the last one's combine beside the experts of
  this one. Slices are no launches: they add no fixed cost beyond the latency of the first arrival (`bench.fusion`).
- Slices pass both GEMMs. Comet has two kernels, dispatch with the first GEMM and combine with the second, cut along
  columns there: what one of the two hides less well than the other, ours does not show.
- How fast `comm_sms` thread blocks communicate (assumption `saturating_sms`); the search takes the best by steps of 4.
- The backward is not described. Here it mirrors the forward: combine's gradient with the experts' input gradient and
  that with dispatch's; weight gradients follow on all SMs.
- The public code runs on one node. Here the fused exchange crosses nodes at the rates that every system gets.
- The buffers shared by all layers, 2 x tokens x hidden size, are not charged.
"""

from collections.abc import Iterator

from bench.action import Action
from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.placement import Placement
from systems.baselines.colocated import Stage
from systems.baselines.interleaved import Turn
from systems.baselines.moves import moves
from systems.baselines.sliced import Sliced, SlicedLayer, sliced_layer

SLICES = (8, 4, 2, 1)
"""The finest that divides the tokens stands for tiles."""

FINEST = 16
"""What stands for tiles in the layout that no step beats: a simulation takes as many times as long."""

COMM_SMS, STEP_SMS = 20, 4
"""SMs for communication of the layouts in the space; of the best one, more and fewer by steps."""


class Comet(Sliced):
    """Slices flow to the experts and from them on streams of their own, with SMs taken from the experts."""

    name = "comet"
    order_fields = ("pp", "vpp", "chunks")
    summary = "expert parallel, exchange fused into the experts' kernels tile by tile (modelled only)"
    traits = ("modelled-only",)
    fields = Sliced.fields | {"comm_sms"}
    stepped = ("chunks", "comm_sms")

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        for layout in super().space(spec):
            tokens = layout.mbs * spec.workload.seq_len // layout.sequence_ranks
            finest = next(n for n in SLICES if tokens % n == 0)
            sms = min(COMM_SMS, max(1, spec.cluster.gpu.num_sms - 1))
            yield layout.model_copy(update={"chunks": finest, "comm_sms": sms})

    def moves(self, spec: CaseSpec, layout: Layout) -> Iterator[Layout]:
        if layout.chunks > SLICES[0]:
            return
        sms = layout.comm_sms
        for near in (sms - STEP_SMS, sms + STEP_SMS):
            if 1 <= near < spec.cluster.gpu.num_sms:
                yield layout.model_copy(update={"comm_sms": near})
        yield from moves(spec, layout, self.fields)
        yield layout.model_copy(update={"chunks": FINEST})

    def in_order_of(self, layout: Layout, other: Layout) -> Layout:
        # Not its slices: those of the best alone are finer.
        return layout.model_copy(update={"comm_sms": other.comm_sms})

    def placement(self, case: Case) -> Placement:
        if case.layout.comm_sms < 1:
            raise BadInput("layout.comm_sms", case.layout.comm_sms, "1 or more SMs for the fused exchange")
        return super().placement(case)

    def layer(self, stage: Stage, turn: Turn, layer: int, chunks: int) -> SlicedLayer:
        return sliced_layer(stage, turn, layer, range(chunks), weights_last=True)

    def streams(self, layer: SlicedLayer) -> dict[str, list[Action]]:
        return {"to-experts": layer.to_experts, "from-experts": layer.from_experts}
