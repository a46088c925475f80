"""`dualpipe-v`: DualPipe folded into a V: every rank holds one stage of the first half and one of the second, and each
parameter exists once.

Rank h of H holds chunk h (phase 0) and chunk 2H-1-h (phase 1), and goes through the eight steps.
"""

from collections.abc import Iterator

from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.placement import Placement
from systems.baselines.colocated import Colocated, Stage
from systems.baselines.eight_steps import eight_steps
from systems.baselines.interleaved import Turn
from systems.baselines.tape import Written


class DualPipeV(Colocated):
    """Two chunks a rank in V shape; forward and backward woven; weight gradients fill the ends."""

    name = "dualpipe-v"
    order_fields = ("pp",)
    summary = "DualPipe folded into a V: woven forward and backward, weight gradients put off at the ends"

    def stage_of(self, chunk: int, pp: int) -> int:
        return min(chunk, 2 * pp - 1 - chunk)

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        for layout in super().space(spec):
            per_microbatch = (layout.replicas or 1) * layout.ep // layout.sequence_ranks * layout.mbs
            microbatches = spec.workload.num_sequences // per_microbatch
            if layout.pp > 1 and layout.vpp == 2 and microbatches >= 2 * layout.pp:
                yield layout

    def placement(self, case: Case) -> Placement:
        if case.layout.pp < 2 or case.layout.vpp != 2:
            raise BadInput("layout", str(case.layout), "pp of 2 or more and vpp=2: the V holds two chunks a stage")
        return super().placement(case)

    def chunks_in_flight(self, stage: int, layout: Layout, num_microbatches: int) -> int:
        # Steps 1 and 2: 2 (H - h - 1) forwards of phase 0, then h + 1 of each.
        return 2 * layout.pp

    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> Written:
        if num_microbatches < 2 * case.layout.pp:
            raise BadInput("layout.pp", case.layout.pp, f"at most half of the {num_microbatches} micro-batches")
        return eight_steps(stage, number, case.layout.pp, num_microbatches, Turn)
