"""A layer whose experts take a micro-batch in slices, so that the exchange of one hides behind the experts of another.

Nothing overlaps beyond the layer: what follows it in the compute stream needs all slices.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from bench.action import Action, Kind, Pass
from bench.case import Case, CaseSpec, Layout
from systems.baselines.colocated import Stage
from systems.baselines.ep import ExpertParallel
from systems.baselines.interleaved import Turn, order
from systems.baselines.tape import Streams, Tape, Written


class SlicedLayer(NamedTuple):
    """A layer's actions: computation, and transfers that bring rows to the experts or take them away."""

    compute: list[Action]
    to_experts: list[Action]
    from_experts: list[Action]


class Sliced(ExpertParallel):
    """Base of systems that pipeline within a layer; 1F1B or interleaved stages as in `ep`."""

    fields = ExpertParallel.fields | {"chunks"}
    stepped: tuple[str, ...] = ("chunks",)

    def moves(self, spec: CaseSpec, layout: Layout) -> Iterator[Layout]:
        yield from (layout.model_copy(update={"chunks": n}) for n in (layout.chunks * 2, layout.chunks // 2) if n)
        yield from super().moves(spec, layout)

    @abstractmethod
    def layer(self, stage: Stage, turn: Turn, layer: int, chunks: int) -> SlicedLayer:
        """One layer of a turn."""

    @abstractmethod
    def streams(self, layer: SlicedLayer) -> dict[str, list[Action]]:
        """A layer's transfers by stream."""

    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> Written:
        layout = case.layout
        tape = Tape(partial(self._turn, stage, layout.chunks))
        tape.add_all(order(number, layout.pp, layout.vpp, num_microbatches).flat())
        return tape.streams

    def _turn(self, stage: Stage, chunks: int, turn: Turn) -> Streams:
        streams: Streams = {"compute": stage.begin(turn)}
        layers = stage.layers(turn)
        for index in layers if turn.pass_ is Pass.F else reversed(layers):
            layer = self.layer(stage, turn, index, chunks)
            streams["compute"] += layer.compute
            for stream, transfers in self.streams(layer).items():
                streams.setdefault(stream, []).extend(transfers)
        streams["compute"] += stage.finish(turn)
        return streams | {"hops": stage.hops(turn)}


def sliced_layer(
    stage: Stage, turn: Turn, layer: int, slices: Sequence[int], *, weights_last: bool = False
) -> SlicedLayer:
    """A layer with its slices in the given order, transfers to the experts in that of the computation.

    Args:
        weights_last: whether the experts' weight gradients come after all of their input gradients, not each after
            its own.
    """

    def all_of(kind: Kind, pass_: Pass) -> list[Action]:
        chosen = slices if kind is not Kind.ATTENTION else (0,)
        return [Action(kind, pass_, layer, turn.microbatch, c) for c in chosen]

    if turn.pass_ is Pass.F:
        attention = all_of(Kind.ATTENTION, Pass.F)
        if not stage.routed(layer):
            return SlicedLayer(attention, [], [])
        compute = attention + all_of(Kind.EXPERT, Pass.F)
        return SlicedLayer(compute, all_of(Kind.DISPATCH, Pass.F), all_of(Kind.COMBINE, Pass.F))
    attention = all_of(Kind.ATTENTION, Pass.B) + all_of(Kind.ATTENTION, Pass.W)
    if not stage.routed(layer):
        return SlicedLayer(attention, [], [])
    inputs, weights = all_of(Kind.EXPERT, Pass.B), all_of(Kind.EXPERT, Pass.W)
    each_after_its_own = [action for pair in zip(inputs, weights, strict=True) for action in pair]
    experts = inputs + weights if weights_last else each_after_its_own
    compute, to_experts = experts + attention, all_of(Kind.COMBINE, Pass.B)
    if stage.redispatches:
        compute = all_of(Kind.ATTENTION, Pass.R) + compute
        to_experts = all_of(Kind.DISPATCH, Pass.R) + to_experts
    return SlicedLayer(compute, to_experts, all_of(Kind.DISPATCH, Pass.B))
