"""`pingpong`: micro-batches in pairs; the all-to-alls of one hide behind the computation of the other."""

from bench.action import Action, Kind, Pass
from bench.case import Case, Layout
from systems.baselines.colocated import Colocated, Stage
from systems.baselines.interleaved import Turn


class PingPong(Colocated):
    name = "pingpong"
    summary = "two micro-batches alternate: all-to-alls of one behind computation of the other"
    fields = Colocated.fields - {"vpp"}

    def chunks_in_flight(self, stage: int, layout: Layout, num_microbatches: int) -> int:
        return min(2 * (layout.pp - stage), num_microbatches)

    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> dict[str, list[Action]]:
        pairs = [range(m, min(m + 2, num_microbatches)) for m in range(0, num_microbatches, 2)]
        warmup = min(case.layout.pp - number - 1, len(pairs))
        streams: dict[str, list[Action]] = {"compute": [], "all-to-all": [], "hops": []}
        for i in range(len(pairs) + warmup):
            if i < len(pairs):
                self.pass_of_pair(stage, Pass.F, pairs[i], streams)
            if i >= warmup:
                self.pass_of_pair(stage, Pass.B, pairs[i - warmup], streams)
        return streams

    def pass_of_pair(self, stage: Stage, pass_: Pass, pair: range, streams: dict[str, list[Action]]) -> None:
        turns = [Turn(pass_, 0, m) for m in pair]
        streams["compute"] += [action for turn in turns for action in stage.begin(turn)]
        layers = stage.layers(turns[0])
        for layer in layers if pass_ is Pass.F else reversed(layers):
            for stream, kind, of in self.layer(stage, pass_, stage.routed(layer)):
                streams[stream] += [Action(kind, of, layer, m) for m in pair]
        streams["compute"] += [action for turn in turns for action in stage.finish(turn)]
        streams["hops"] += [action for turn in turns for action in stage.hops(turn)]

    def layer(self, stage: Stage, pass_: Pass, routed: bool) -> list[tuple[str, Kind, Pass]]:
        attention, experts = ("compute", Kind.ATTENTION), ("compute", Kind.EXPERT)
        dispatch, combine = ("all-to-all", Kind.DISPATCH), ("all-to-all", Kind.COMBINE)
        if pass_ is Pass.F:
            order = [attention, dispatch, experts, combine] if routed else [attention]
            return [(*what, Pass.F) for what in order]
        work = [(*attention, Pass.B), (*attention, Pass.W)]
        if routed:
            again = [(*attention, Pass.R), (*dispatch, Pass.R)] if stage.redispatches else []
            back = [(*combine, Pass.B), (*experts, Pass.B), (*experts, Pass.W), (*dispatch, Pass.B)]
            work = [*again, *back, *work]
        return work
