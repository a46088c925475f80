"""`ep`: expert parallelism, the plain baseline.

Attention is data parallel over the ranks that share the experts; both all-to-alls stand in the compute stream, so
nothing hides them. Pipeline stages are 1F1B, interleaved or not, in megatron-core's order.
"""

from collections.abc import Iterator
from itertools import pairwise, product

from bench.action import Action, Kind, Pass
from bench.case import Case, CaseSpec, Layout, batch_of
from bench.errors import BadInput
from bench.models import Model
from bench.placement import Group, Placement
from bench.plan import ActionColumn, Plan
from bench.system import divisors, require_divides
from systems.baselines.interleaved import Turn, turns


def chunks_of_layers(num_layers: int, num_chunks: int) -> list[range]:
    """Neighbouring layers dealt to chunks as evenly as can be, the larger chunks first."""
    size, extra = divmod(num_layers, num_chunks)
    bounds = [0]
    for chunk in range(num_chunks):
        bounds.append(bounds[-1] + size + (chunk < extra))
    return [range(low, high) for low, high in pairwise(bounds)]


class ExpertParallel:
    """Serial all-to-alls; 1F1B or interleaved 1F1B over `pp` stages with `vpp` chunks each."""

    name = "ep"
    summary = "expert parallel, serial all-to-alls, 1F1B or interleaved pipeline"
    fields = frozenset({"mbs", "replicas", "ep", "pp", "vpp", "copies", "recompute", "shard_state"})

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        gpus, model, sequences = spec.cluster.num_gpus, spec.model, spec.workload.num_sequences
        for ep in (n for n in divisors(model.num_experts) if n <= gpus):
            for pp in (n for n in divisors(gpus // ep) if n <= model.num_layers):
                replicas = gpus // (ep * pp)
                for mbs, vpp, recompute in product((1, 2), (1, 2, 4), ("none", "full")):
                    num_microbatches, left = divmod(sequences, replicas * ep * mbs)
                    interleaves = pp > 1 and pp * vpp <= model.num_layers and num_microbatches % pp == 0
                    if left == 0 and num_microbatches and (vpp == 1 or interleaves):
                        yield Layout.make(ep=ep, pp=pp, vpp=vpp, mbs=mbs, replicas=replicas, recompute=recompute)

    def placement(self, case: Case) -> Placement:
        layout, model = case.layout, case.model
        require_divides("layout.ep", layout.ep, model.num_experts, f"experts of {model.name}")
        if layout.pp == 1 and layout.vpp > 1:
            raise BadInput("layout.vpp", layout.vpp, "1 where pp is 1")
        if layout.pp * layout.vpp > model.num_layers:
            raise BadInput("layout.pp", layout.pp, f"pp x vpp of at most {model.num_layers} layers of {model.name}")
        groups = tuple(Group(f"S{stage}", stage * layout.ep, layout.ep) for stage in range(layout.pp))
        homes = [""] * model.num_layers
        for chunk, layers in enumerate(chunks_of_layers(model.num_layers, layout.pp * layout.vpp)):
            for layer in layers:
                homes[layer] = groups[chunk % layout.pp].name
        return Placement(
            groups=groups,
            embed=homes[0],
            head=homes[-1],
            attention=tuple(homes),
            expert=tuple(None if model.is_dense(layer) else home for layer, home in enumerate(homes)),
            join=tuple(homes),
        )

    def plan(self, case: Case) -> Plan:
        layout, model = case.layout, case.model
        placement = self.placement(case)
        num_microbatches = batch_of(case, placement).num_microbatches
        if layout.vpp > 1 and num_microbatches % layout.pp:
            raise BadInput("layout.vpp", layout.vpp, f"1 where pp does not divide the {num_microbatches} micro-batches")
        chunks = chunks_of_layers(model.num_layers, layout.pp * layout.vpp)
        queues = {}
        for stage, group in enumerate(placement.groups):
            compute: list[Action] = []
            hops: list[Action] = []
            for turn in turns(stage, layout.pp, layout.vpp, num_microbatches):
                layers = chunks[turn.chunk * layout.pp + stage]
                step = _forward if turn.pass_ is Pass.F else _backward
                step(model, placement, layers, turn, compute, hops)
            compute += [Action(Kind.SYNC), Action(Kind.UPDATE)]
            queues[group.name, "compute"] = ActionColumn.of(compute)
            if hops:
                queues[group.name, "hops"] = ActionColumn.of(hops)
        return Plan(self.name, placement, queues, num_microbatches, layout.copies, layout.recompute)


def _forward(model: Model, at: Placement, layers: range, turn: Turn, compute: list[Action], hops: list[Action]) -> None:
    m = turn.microbatch
    if layers.start == 0:
        compute.append(Action(Kind.EMBED, Pass.F, 0, m))
    for layer in layers:
        compute.append(Action(Kind.ATTENTION, Pass.F, layer, m))
        if not model.is_dense(layer):
            compute += [Action(kind, Pass.F, layer, m) for kind in (Kind.DISPATCH, Kind.EXPERT, Kind.COMBINE)]
    last = layers.stop - 1
    if layers.stop == model.num_layers:
        compute.append(Action(Kind.HEAD, Pass.F, 0, m))
    elif at.moves_on(last):
        if not model.is_dense(last):
            compute.append(Action(Kind.JOIN, Pass.F, last, m))
        hops.append(Action(Kind.HOP, Pass.F, layers.stop, m))


def _backward(
    model: Model, at: Placement, layers: range, turn: Turn, compute: list[Action], hops: list[Action]
) -> None:
    m = turn.microbatch
    last = layers.stop - 1
    if layers.stop == model.num_layers:
        compute += [Action(Kind.HEAD, Pass.B, 0, m), Action(Kind.HEAD, Pass.W, 0, m)]
    elif at.moves_on(last) and not model.is_dense(last):
        compute.append(Action(Kind.JOIN, Pass.B, last, m))
    for layer in reversed(layers):
        if not model.is_dense(layer):
            compute += [Action(Kind.COMBINE, Pass.B, layer, m), Action(Kind.EXPERT, Pass.B, layer, m)]
            compute += [Action(Kind.EXPERT, Pass.W, layer, m), Action(Kind.DISPATCH, Pass.B, layer, m)]
        compute += [Action(Kind.ATTENTION, Pass.B, layer, m), Action(Kind.ATTENTION, Pass.W, layer, m)]
    if layers.start == 0:
        compute.append(Action(Kind.EMBED, Pass.B, 0, m))
    elif at.moves_on(layers.start - 1):
        hops.append(Action(Kind.HOP, Pass.B, layers.start, m))
