"""`megatron-overlap`: expert parallelism whose all-to-alls hide behind another micro-batch (combined 1F1B).

Forward of one micro-batch and backward of another run as a pair, layer by layer, computation on one stream and
all-to-alls on another, in the order in which megatron-core issues them (pipeline_parallel/combined_1f1b.py):
combine.B, attention.F, experts' dgrad, dispatch.F, experts' wgrad, dispatch.B, experts.F, combine.F, attention's dgrad,
attention's wgrad. Needs one more micro-batch of activations than 1F1B.
"""

from itertools import zip_longest

from bench.action import Action, Kind, Pass
from bench.case import Case
from systems.baselines.colocated import Colocated, Stage
from systems.baselines.interleaved import Turn, order


class MegatronOverlap(Colocated):
    """Interleaved 1F1B with forward and backward combined layer by layer."""

    name = "megatron-overlap"
    summary = "expert parallel, all-to-alls of one micro-batch behind another's computation (combined 1F1B)"

    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> dict[str, list[Action]]:
        streams: dict[str, list[Action]] = {"compute": [], "all-to-all": [], "hops": []}
        turns = order(number, case.layout.pp, case.layout.vpp, num_microbatches, ahead=1)
        for turn in turns.warmup:
            weave(stage, turn, None, streams)
        for forward, backward in turns.pairs:
            weave(stage, forward, backward, streams)
        for turn in turns.cooldown:
            weave(stage, None, turn, streams)
        return streams


def weave(stage: Stage, forward: Turn | None, backward: Turn | None, streams: dict[str, list[Action]]) -> None:
    """One forward chunk beside one backward chunk, or one alone; as many layers are paired as both have."""
    compute, exchange = streams["compute"], streams["all-to-all"]
    for turn in (backward, forward):
        compute += stage.begin(turn) if turn else []
    ascending = stage.layers(forward) if forward else range(0)
    descending = reversed(stage.layers(backward)) if backward else range(0)
    for up, down in zip_longest(ascending, descending):
        f = _actions(stage, forward, up, Pass.F)
        b = _actions(stage, backward, down, Pass.B)
        w = _actions(stage, backward, down, Pass.W)
        exchange += b[Kind.COMBINE] + f[Kind.DISPATCH] + b[Kind.DISPATCH] + f[Kind.COMBINE]
        compute += f[Kind.ATTENTION] + b[Kind.EXPERT] + w[Kind.EXPERT] + f[Kind.EXPERT]
        compute += b[Kind.ATTENTION] + w[Kind.ATTENTION]
    for turn in (forward, backward):
        if turn:
            compute += stage.finish(turn)
            streams["hops"] += stage.hops(turn)


def _actions(stage: Stage, turn: Turn | None, layer: int | None, pass_: Pass) -> dict[Kind, list[Action]]:
    """The layer's actions of a pass by kind; empty lists where there is no such turn, layer or expert."""
    kinds = (Kind.ATTENTION, Kind.DISPATCH, Kind.EXPERT, Kind.COMBINE)
    if turn is None or layer is None:
        return {kind: [] for kind in kinds}
    there = stage.routed(layer)
    return {
        kind: [Action(kind, pass_, layer, turn.microbatch)] if kind is Kind.ATTENTION or there else [] for kind in kinds
    }
