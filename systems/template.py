"""`template`: a pipeline of stages, one forward and one backward in turn (1F1B), with serial all-to-alls."""

from bench.action import Action, Kind, Pass
from bench.case import Case, Layout
from systems.baselines.colocated import Colocated, Stage
from systems.baselines.interleaved import Turn


class Template(Colocated):
    """Stages of `ep` ranks that hold attention and experts both; one chunk of layers a stage."""

    name = "template"
    summary = "1F1B pipeline with serial all-to-alls"
    fields = Colocated.fields - {"vpp"}  # layout fields that the tuner may choose

    def chunks_in_flight(self, stage: int, layout: Layout, num_microbatches: int) -> int:
        """Forwards that a stage has done before its first backward begins: what it has to keep in memory."""
        return min(layout.pp - stage, num_microbatches)

    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> dict[str, list[Action]]:
        """What the ranks of stage `number` do, by stream. Streams run side by side, each in its order."""
        warmup = min(case.layout.pp - number - 1, num_microbatches)
        turns = [Turn(Pass.F, 0, m) for m in range(warmup)]
        for m in range(num_microbatches):
            if m + warmup < num_microbatches:
                turns.append(Turn(Pass.F, 0, m + warmup))
            turns.append(Turn(Pass.B, 0, m))
        streams: dict[str, list[Action]] = {"compute": [], "hops": []}
        for turn in turns:
            streams["compute"] += stage.begin(turn)  # the embedding, or the head's backward, where they are
            layers = stage.layers(turn)
            for layer in layers if turn.pass_ is Pass.F else reversed(layers):
                streams["compute"] += self.layer(stage, turn, layer)
            streams["compute"] += stage.finish(turn)  # the head, or the embedding's backward
            streams["hops"] += stage.hops(turn)  # to the next stage, or back to the one before
        return streams

    def layer(self, stage: Stage, turn: Turn, layer: int) -> list[Action]:
        """One layer of one micro-batch. A transfer in the compute stream blocks what stands behind it."""

        def actions(kinds: list[Kind], pass_: Pass) -> list[Action]:
            return [Action(kind, pass_, layer, turn.microbatch) for kind in kinds]

        routed = stage.routed(layer)  # a dense layer has no experts
        if turn.pass_ is Pass.F:
            exchange = [Kind.DISPATCH, Kind.EXPERT, Kind.COMBINE] if routed else []
            return actions([Kind.ATTENTION, *exchange], Pass.F)
        work = []
        if routed:
            if stage.redispatches:  # attention and its dispatch once more, where the layout recomputes so
                work += actions([Kind.ATTENTION, Kind.DISPATCH], Pass.R)
            work += actions([Kind.COMBINE, Kind.EXPERT], Pass.B)
            work += actions([Kind.EXPERT], Pass.W)
            work += actions([Kind.DISPATCH], Pass.B)
        return work + actions([Kind.ATTENTION], Pass.B) + actions([Kind.ATTENTION], Pass.W)
