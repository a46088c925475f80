"""`dualpipe`: DeepSeek's bidirectional pipeline, with two copies of every parameter (DeepSeek-V3, arXiv 2412.19437,
section 3.2.1).

Half of the micro-batches go from stage 0 to P-1, the other half from P-1 to 0, so that rank r holds stages r and P-1-r.
Either direction is a phase of the eight steps; on the second half of the ranks the phases are swapped. Ranks that hold
the same stages sum their gradients and make the same update.

With one stage there is no pipeline, and nothing to run in two directions. What is left is the order of a woven pair,
which the plan then says by its trait: each parameter exists once, and the order is that of `megatron-overlap`.
"""

from collections.abc import Iterator

from bench.action import Pass
from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.placement import Placement
from systems.baselines.colocated import Colocated, Stage, chunks_of_layers
from systems.baselines.eight_steps import eight_steps
from systems.baselines.interleaved import Turn
from systems.baselines.megatron_overlap import combined_1f1b
from systems.baselines.tape import Written


class DualPipe(Colocated):
    """Two directions through `pp` stages, forward of one woven with backward of the other."""

    name = "dualpipe"
    summary = "bidirectional pipeline: woven forward and backward, two copies of every parameter"
    traits = ("two-copies",)
    fields = Colocated.fields - {"vpp"}
    order_fields = ("pp", "vpp", "microbatch_group")

    def chunks_of(self, stage: int, layout: Layout) -> list[int]:
        # Numbered by direction.
        return [0] if layout.pp == 1 else [stage, layout.pp - 1 - stage]

    def traits_of(self, layout: Layout) -> tuple[str, ...]:
        return ("pair-order",) if layout.pp == 1 else self.traits

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        for layout in super().space(spec):
            per_microbatch = (layout.replicas or 1) * layout.ep // layout.sequence_ranks * layout.mbs
            microbatches = spec.workload.num_sequences // per_microbatch
            if layout.pp % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * layout.pp:
                yield layout

    def placement(self, case: Case) -> Placement:
        pp = case.layout.pp
        if pp > 1 and pp % 2:
            raise BadInput("layout.pp", pp, "an even number of stages, or 1 for the order of a pair alone")
        return super().placement(case)

    def directions_of(self, layout: Layout) -> int:
        return 1 if layout.pp == 1 else 2

    def chunks_in_flight(self, stage: int, layout: Layout, num_microbatches: int) -> int:
        # Steps 1 and 2: P - h - 1 forwards of phase 0, h + 1 of phase 1.
        return layout.pp

    def in_flight(self, case: Case) -> dict[str, float]:
        pp, model = case.layout.pp, case.model
        if pp == 1:
            return super().in_flight(case)
        chunks = chunks_of_layers(model.num_layers, pp)
        # Counted by layers with experts. Dense layers, which come first, are in a phase 0, of which more is in flight:
        # whatever they keep, no less is held than this.
        routed = [sum(not model.is_dense(layer) for layer in layers) for layers in chunks]
        held = {}
        for stage, group in enumerate(self.placement(case).groups):
            h = _place(stage, pp)
            first, second = routed[h], routed[pp - 1 - h]
            held[group.name] = ((pp - h - 1) * first + (h + 1) * second) / max(first + second, 1)
        return held

    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> Written:
        pp = case.layout.pp
        if pp == 1:
            return combined_1f1b(stage, number, case.layout, num_microbatches)
        if num_microbatches % 2:
            raise BadInput("micro-batches", num_microbatches, "an even number, half of them in each direction")
        if num_microbatches < 2 * pp:
            raise BadInput("layout.pp", pp, f"at most half of the {num_microbatches} micro-batches")
        swapped = number >= pp // 2

        def turn_of(pass_: Pass, phase: int, turn: int) -> Turn:
            direction = phase ^ swapped
            return Turn(pass_, direction, 2 * turn + direction)

        return eight_steps(stage, _place(number, pp), pp // 2, num_microbatches // 2, turn_of)


def _place(stage: int, pp: int) -> int:
    """Of a stage in its half, counted from the outer end."""
    return min(stage, pp - 1 - stage)
