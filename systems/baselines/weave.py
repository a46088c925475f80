"""A forward and a backward chunk woven layer by layer: computation on one stream, all-to-alls on another.

On the streams the order is that of megatron-core's combined 1F1B and of DeepSeek's profile of DualPipe alike:
computation attention.F, experts' dgrad, experts' wgrad, experts.F, attention's dgrad, attention's wgrad;
all-to-alls combine.B, dispatch.F, dispatch.B, combine.F.
"""

from itertools import zip_longest

from bench.action import Action, Kind, Pass
from systems.baselines.colocated import Stage
from systems.baselines.interleaved import Turn
from systems.baselines.tape import Streams

PUT_OFF = "put off"
"""The stream of weight gradients that are not computed with their turn."""


def weave(stage: Stage, forward: Turn | None, backward: Turn | None, *, put_off: bool = False) -> Streams:
    """One forward chunk beside one backward chunk, or one alone; as many layers are paired as both have.

    With `put_off`, the backward's weight gradients are apart from the computation. Where the stage
    recomputes by redispatch, a layer's attention and dispatch run once more before its backward; neither megatron-core
    nor DualPipe offers that, but what helps one system's memory is offered to all.
    """
    compute: list[Action] = []
    exchange: list[Action] = []
    hops: list[Action] = []
    weights: list[Action] = [] if put_off else compute
    for turn in (backward, forward):
        for action in stage.begin(turn) if turn else []:
            (weights if action.pass_ is Pass.W else compute).append(action)
    ascending = stage.layers(forward) if forward else range(0)
    descending = reversed(stage.layers(backward)) if backward else range(0)
    for up, down in zip_longest(ascending, descending):
        f = _actions(stage, forward, up, Pass.F)
        b = _actions(stage, backward, down, Pass.B)
        w = _actions(stage, backward, down, Pass.W)
        if stage.redispatches and down is not None and stage.routed(down):
            r = _actions(stage, backward, down, Pass.R)
            compute += r[Kind.ATTENTION]
            exchange += r[Kind.DISPATCH]
        exchange += b[Kind.COMBINE] + f[Kind.DISPATCH] + b[Kind.DISPATCH] + f[Kind.COMBINE]
        compute += f[Kind.ATTENTION] + b[Kind.EXPERT]
        weights += w[Kind.EXPERT]
        compute += f[Kind.EXPERT] + b[Kind.ATTENTION]
        weights += w[Kind.ATTENTION]
    for turn in (forward, backward):
        if turn:
            compute += stage.finish(turn)
            hops += stage.hops(turn)
    streams = {"compute": compute, "all-to-all": exchange, "hops": hops}
    return streams | {PUT_OFF: weights} if put_off else streams


def _actions(stage: Stage, turn: Turn | None, layer: int | None, pass_: Pass) -> dict[Kind, list[Action]]:
    """The layer's actions of a pass by kind; empty lists where there is no such turn, layer or expert."""
    kinds = (Kind.ATTENTION, Kind.DISPATCH, Kind.EXPERT, Kind.COMBINE)
    if turn is None or layer is None:
        return {kind: [] for kind in kinds}
    there = stage.routed(layer)
    return {
        kind: [Action(kind, pass_, layer, turn.microbatch)] if kind is Kind.ATTENTION or there else [] for kind in kinds
    }
