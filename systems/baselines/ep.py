"""`ep`: expert parallelism, the plain baseline.

Attention is data parallel over the ranks that share the experts; both all-to-alls stand in the compute stream, so
nothing hides them. Pipeline stages are 1F1B, interleaved or not, in megatron-core's order.
"""

from functools import partial

from bench.action import Action, Kind, Pass
from bench.case import Case, Layout
from systems.baselines.colocated import Colocated, Stage
from systems.baselines.interleaved import Turn, num_warmup, order
from systems.baselines.tape import Streams, Tape, Written


class ExpertParallel(Colocated):
    """Serial all-to-alls; 1F1B or interleaved 1F1B over `pp` stages with `vpp` chunks each."""

    name = "ep"
    order_fields = ("pp", "vpp", "microbatch_group")
    serial = True
    summary = "expert parallel, serial all-to-alls, 1F1B or interleaved pipeline"

    def chunks_in_flight(self, stage: int, layout: Layout, num_microbatches: int) -> int:
        warmup = num_warmup(stage, layout.pp, layout.vpp, num_microbatches, group=layout.microbatch_group)
        return min(warmup + 1, num_microbatches * layout.vpp)

    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> Written:
        tape = Tape(partial(serial_turn, stage))
        layout = case.layout
        turns = order(number, layout.pp, layout.vpp, num_microbatches, group=layout.microbatch_group)
        tape.add_all(turns.flat())
        return tape.streams


def serial_turn(stage: Stage, turn: Turn) -> Streams:
    """A chunk of layers, one after the other."""
    compute = stage.begin(turn)
    layers = stage.layers(turn)
    for layer in layers if turn.pass_ is Pass.F else reversed(layers):
        compute += serial_layer(stage, turn, layer)
    return {"compute": [*compute, *stage.finish(turn)], "hops": stage.hops(turn)}


def serial_layer(stage: Stage, turn: Turn, layer: int) -> list[Action]:
    """One layer, one thing after the other."""
    if turn.pass_ is Pass.F:
        kinds = [Kind.ATTENTION, *[Kind.DISPATCH, Kind.EXPERT, Kind.COMBINE] * stage.routed(layer)]
        return [Action(kind, Pass.F, layer, turn.microbatch) for kind in kinds]
    work = [(Kind.ATTENTION, Pass.B), (Kind.ATTENTION, Pass.W)]
    if stage.routed(layer):
        again = [(Kind.ATTENTION, Pass.R), (Kind.DISPATCH, Pass.R)] if stage.redispatches else []
        experts = [(Kind.COMBINE, Pass.B), (Kind.EXPERT, Pass.B), (Kind.EXPERT, Pass.W), (Kind.DISPATCH, Pass.B)]
        work = [*again, *experts, *work]
    return [Action(kind, pass_, layer, turn.microbatch) for kind, pass_ in work]
