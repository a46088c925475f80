"""`tutel`: experts and all-to-alls pipelined within a layer, after Tutel (arXiv 2206.03382, microsoft/Tutel, MIT).

A layer's tokens are cut into `chunks` slices, Tutel's overlap degree. All dispatches are issued first, then all
combines (S S .. G G), on one all-to-all stream; experts take slice after slice on the compute stream. The backward is
that of the same operations: slices reversed, S standing for the combine's gradient and G for the dispatch's. Nothing
overlaps across layers or micro-batches; pipeline stages are those of `ep`.

What differs from the public code (tutel/impls/overlap.py, moe_layer.py):
- Tutel pads every expert to a capacity and cuts along it, so that all messages are equal; ours is dropless, cuts along
  tokens and sends what there is, so that it trains the same model as every other system.
- There autograd computes a slice's input and weight gradients in one operation, whose end the transfer waits for; here
  the transfer leaves with the input gradient, which is kinder to Tutel.
- The degree is a setting there; here it is the best of the powers of two. Its hierarchical all-to-all and its
  switch between kinds of parallelism are left out. Pipeline stages and recomputation, which it leaves to the trainer,
  are those that every baseline gets.
"""

from collections.abc import Iterator

from bench.action import Action, Pass
from bench.case import CaseSpec, Layout
from systems.baselines.colocated import Stage
from systems.baselines.interleaved import Turn
from systems.baselines.sliced import Sliced, SlicedLayer, sliced_layer

DEGREES = (4, 2, 1)
"""The first that divides the tokens; others are reached from it."""


class Tutel(Sliced):
    """All dispatches of a layer, then all combines; slices of the backward reversed."""

    name = "tutel"
    order_fields = ("pp", "vpp", "chunks")
    summary = "expert parallel, all-to-alls and experts of a layer pipelined in slices (dropless form of Tutel)"

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        for layout in super().space(spec):
            tokens = layout.mbs * spec.workload.seq_len // layout.sequence_ranks
            degree = next(n for n in DEGREES if tokens % n == 0)
            yield layout.model_copy(update={"chunks": degree})

    def layer(self, stage: Stage, turn: Turn, layer: int, chunks: int) -> SlicedLayer:
        slices = range(chunks) if turn.pass_ is Pass.F else range(chunks)[::-1]
        return sliced_layer(stage, turn, layer, slices)

    def streams(self, layer: SlicedLayer) -> dict[str, list[Action]]:
        return {"all-to-all": layer.to_experts + layer.from_experts}
