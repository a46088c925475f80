"""What all systems share whose GPUs hold attention and experts both: stages, their layers, and the ends of a chunk."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np

from bench.action import Action, BadAction, Codes, Kind, Pass, pack
from bench.case import Case, CaseSpec, Layout, batch_of
from bench.errors import BadInput
from bench.kept import Kept
from bench.models import Model
from bench.placement import Group, Placement
from bench.plan import COMPUTE_STREAM, RECOMPUTE, ActionColumn, Plan
from bench.system import divisors, require_divides, worthwhile_copies, worthwhile_offloads, worthwhile_shares
from systems.baselines.interleaved import Turn
from systems.baselines.moves import moves


def chunks_of_layers(num_layers: int, num_chunks: int) -> list[range]:
    """Neighbouring layers dealt to chunks as evenly as can be, the larger chunks first."""
    size, extra = divmod(num_layers, num_chunks)
    bounds = [0]
    for chunk in range(num_chunks):
        bounds.append(bounds[-1] + size + (chunk < extra))
    return [range(low, high) for low, high in pairwise(bounds)]


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers by chunk, and what stands at either end of a chunk."""

    model: Model
    at: Placement
    chunks: tuple[range, ...]
    redispatches: bool = False

    def layers(self, turn: Turn) -> range:
        return self.chunks[turn.chunk]

    def routed(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return not self.model.is_dense(layer)

    def begin(self, turn: Turn) -> list[Action]:
        """Computation before a chunk's first layer (F), or before its last (B)."""
        m, layers = turn.microbatch, self.layers(turn)
        if turn.pass_ is Pass.F:
            return [Action(Kind.EMBED, Pass.F, 0, m)] if layers.start == 0 else []
        if layers.stop == self.model.num_layers:
            return [Action(Kind.HEAD, Pass.B, 0, m), Action(Kind.HEAD, Pass.W, 0, m)]
        return [Action(Kind.JOIN, Pass.B, layers.stop - 1, m)] if self._joins(layers) else []

    def finish(self, turn: Turn) -> list[Action]:
        """Computation after a chunk's last layer (F), or after its first (B)."""
        m, layers = turn.microbatch, self.layers(turn)
        if turn.pass_ is Pass.B:
            return [Action(Kind.EMBED, Pass.B, 0, m)] if layers.start == 0 else []
        if layers.stop == self.model.num_layers:
            return [Action(Kind.HEAD, Pass.F, 0, m)]
        return [Action(Kind.JOIN, Pass.F, layers.stop - 1, m)] if self._joins(layers) else []

    def hops(self, turn: Turn) -> list[Action]:
        """The transfer to the stage that comes next (F) or before (B)."""
        layers = self.layers(turn)
        boundary = layers.stop if turn.pass_ is Pass.F else layers.start
        inside = 0 < boundary < self.model.num_layers and self.at.moves_on(boundary - 1)
        return [Action(Kind.HOP, turn.pass_, boundary, turn.microbatch)] if inside else []

    def _joins(self, layers: range) -> bool:
        return self.at.moves_on(layers.stop - 1) and self.routed(layers.stop - 1)


Work: TypeAlias = Sequence[Action] | Codes
"""A queue, as actions or as their codes."""

Queues: TypeAlias = Mapping[tuple[str, str], ActionColumn]
"""By group and stream."""

_known_queues: Kept[Queues] = Kept(most=2_000_000)
"""Queues that layouts share; of two million actions in all, 16 MB."""


class Colocated(ABC):
    """Base of systems with `pp` stages of `ep` ranks, `vpp` chunks each; `work` gives a stage's streams."""

    name = ""
    traits: tuple[str, ...] = ()
    fields = frozenset(
        {"mbs", "replicas", "ep", "pp", "vpp", "tp", "cp", "copies", "recompute", "shard_state", "offload"}
        | {"ranks_over_nodes"}
    )

    recomputes: tuple[str, ...] = RECOMPUTE
    all_copies: tuple[str, ...] = ()
    """What the space has of them; copies: none where all worthwhile ones are."""

    order_fields: tuple[str, ...] | None = None
    """Layout fields that decide the order of the work, beside micro-batches, stages and whether the backward dispatches
    once more. Layouts that share them share their queues; None where the order may depend on anything, as in every
    class that does not say its own."""

    serial = False
    """Whether both exchanges stand in the compute stream. As with `order_fields`, every class says it for itself."""

    def __init_subclass__(cls) -> None:
        cls.order_fields = cls.__dict__.get("order_fields")
        cls.serial = cls.__dict__.get("serial", False)

    @abstractmethod
    def work(self, stage: Stage, number: int, case: Case, num_microbatches: int) -> Mapping[str, Work]:
        """Queues by stream of stage `number`, without the end of the step."""

    def stage_of(self, chunk: int, pp: int) -> int:
        """The stage that holds a chunk of layers."""
        return chunk % pp

    def chunks_of(self, stage: int, layout: Layout) -> list[int]:
        """The chunks that a stage holds, in the order in which its turns number them."""
        return [chunk for chunk in range(layout.pp * layout.vpp) if self.stage_of(chunk, layout.pp) == stage]

    def traits_of(self, layout: Layout) -> tuple[str, ...]:
        """Traits of a plan of that layout."""
        return self.traits

    @abstractmethod
    def chunks_in_flight(self, stage: int, layout: Layout, num_microbatches: int) -> int:
        """Chunks of forward work that a stage has done before its first backward begins."""

    def in_flight(self, case: Case) -> dict[str, float]:
        layout, placement = case.layout, self.placement(case)
        m = batch_of(case, placement).num_microbatches
        return {
            group.name: self.chunks_in_flight(stage, layout, m) / layout.vpp
            for stage, group in enumerate(placement.groups)
        }

    def space(self, spec: CaseSpec) -> Iterator[Layout]:
        gpus, model, sequences = spec.cluster.num_gpus, spec.model, spec.workload.num_sequences
        for ep in (n for n in divisors(model.num_experts) if n <= gpus):
            for pp in (n for n in divisors(gpus // ep) if n <= model.num_layers):
                replicas = gpus // (ep * pp)
                chunks = (1, 2, 4) if "vpp" in self.fields else (1,)
                # Inside a node a copy a node is a copy a rank; beyond, it is the likelier one.
                inside = spec.cluster.gpus_per_node % ep == 0
                all_copies = ("rank",) if inside else worthwhile_copies(spec)[::-1]
                shares = worthwhile_shares(spec, ep)
                # Sequences that are shared come one at a time.
                dealt = [(mbs, tp, cp) for tp, cp in shares for mbs in ((1, 2) if tp * cp == 1 else (1,))]
                dealt_and_held = [(*deal, offload) for deal in dealt for offload in worthwhile_offloads(spec, deal[0])]
                choices = product(dealt_and_held, chunks, self.recomputes, self.all_copies or all_copies)
                for (mbs, tp, cp, offload), vpp, recompute, copies in choices:
                    num_microbatches, left = divmod(sequences, replicas * ep // (tp * cp) * mbs)
                    interleaves = pp > 1 and pp * vpp <= model.num_layers and num_microbatches % pp == 0
                    if left == 0 and num_microbatches and (vpp == 1 or interleaves):
                        where = {"ep": ep, "pp": pp, "vpp": vpp, "tp": tp, "cp": cp, "replicas": replicas}
                        yield Layout.make(**where, mbs=mbs, recompute=recompute, copies=copies, offload=offload)

    stepped: tuple[str, ...] = ("microbatch_group",)

    def moves(self, spec: CaseSpec, layout: Layout) -> Iterator[Layout]:
        return moves(spec, layout, self.fields)

    def leaner(self, layout: Layout) -> Layout | None:
        return None if layout.microbatch_group is None else layout.model_copy(update={"microbatch_group": None})

    def in_order_of(self, layout: Layout, other: Layout) -> Layout:
        return layout.model_copy(update={name: getattr(other, name) for name in self.stepped})

    def directions_of(self, layout: Layout) -> int:
        """Directions in which micro-batches go through the pipeline."""
        return 1

    def placement(self, case: Case) -> Placement:
        layout, model = case.layout, case.model
        require_divides("layout.ep", layout.ep, model.num_experts, f"experts of {model.name}")
        if layout.pp == 1 and layout.vpp > 1:
            raise BadInput("layout.vpp", layout.vpp, "1 where pp is 1")
        if layout.pp * layout.vpp > model.num_layers:
            raise BadInput("layout.pp", layout.pp, f"pp x vpp of at most {model.num_layers} layers of {model.name}")
        stages = self._stages(layout.pp, layout.vpp)
        return _placed(model, layout.ep, layout.pp, stages, self.directions_of(layout))

    @lru_cache(maxsize=1024)  # noqa: B019 (systems live as long as the process)
    def _stages(self, pp: int, vpp: int) -> tuple[int, ...]:
        """The stage of every chunk of layers."""
        return tuple(self.stage_of(chunk, pp) for chunk in range(pp * vpp))

    def plan(self, case: Case) -> Plan:
        layout = case.layout
        placement = self.placement(case)
        num_microbatches = batch_of(case, placement).num_microbatches
        how = (layout.copies, layout.recompute, self.traits_of(layout), layout.chunks)
        queues = self._queues(case, placement, num_microbatches)
        return Plan(self.name, placement, queues, num_microbatches, *how)

    def _queues(self, case: Case, placement: Placement, num_microbatches: int) -> Queues:
        if self.order_fields is None:
            return self._written(case, placement, num_microbatches)
        chosen = tuple(getattr(case.layout, field) for field in self.order_fields)
        redispatches = case.layout.recompute == "redispatch"
        key = type(self), case.model, placement.outline, num_microbatches, redispatches, chosen
        known = _known_queues.get(key)
        if known is None:
            known = self._written(case, placement, num_microbatches)
            _known_queues.put(key, known, sum(map(len, known.values())))
        return known

    def _written(self, case: Case, placement: Placement, num_microbatches: int) -> Queues:
        layout, model = case.layout, case.model
        chunks = chunks_of_layers(model.num_layers, layout.pp * layout.vpp)
        queues = {}
        for number, group in enumerate(placement.groups):
            mine = tuple(chunks[chunk] for chunk in self.chunks_of(number, layout))
            stage = Stage(model, placement, mine, layout.recompute == "redispatch")
            for stream, work in self.work(stage, number, case, num_microbatches).items():
                try:
                    codes = work if isinstance(work, np.ndarray) else pack(work)
                except BadAction as error:
                    raise error.of_queue(group.name, stream) from None
                if stream == COMPUTE_STREAM:
                    codes = np.concatenate([codes, pack([Action(Kind.SYNC), Action(Kind.UPDATE)])])
                if len(codes):
                    queues[group.name, stream] = ActionColumn(codes)
        return queues


@lru_cache(maxsize=256)
def _placed(model: Model, ep: int, pp: int, stages: tuple[int, ...], directions: int) -> Placement:
    """Stages of `ep` ranks; `stages` has that of every chunk of layers."""
    groups = tuple(Group(f"S{stage}", stage * ep, ep) for stage in range(pp))
    chunks = zip(stages, chunks_of_layers(model.num_layers, len(stages)), strict=True)
    homes = tuple(groups[stage].name for stage, layers in chunks for _ in layers)
    return Placement(
        groups=groups,
        embed=homes[0],
        head=homes[-1],
        attention=homes,
        expert=tuple(None if model.is_dense(layer) else home for layer, home in enumerate(homes)),
        join=homes,
        directions=directions,
    )
