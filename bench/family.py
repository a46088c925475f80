"""What the costs of a case's actions stand on, and which of them are equal: found once for all of a family.

Costs are of one action on every rank of its group (arrays over the group's ranks, in order); they do not depend on the
micro-batch, nor on the chunk. Replica 0 stands for all replicas: its ranks lie on the first nodes.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.action import TRANSFERS, Action, Codes, Kind, Pass, unpack
from bench.assumptions import Assumptions, get_assumptions
from bench.case import Case
from bench.edges import ends
from bench.flops import Part, has_part
from bench.load import Load
from bench.nodes import Nodes
from bench.placement import Placement
from bench.routing import Routing
from bench.tally import Likeness, Tally, actions_of, lie, tally

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Family:
    """A case's actions on a placement.

    Args:
        copies, recompute, chunks: as in `bench.plan.Plan`.
        num_replicas: replicas over which gradients are summed.
        routing: that of the case's workload if not given.
        free_communication: transfers and gradient sums take no time.
        taxed_share: share of the computing time in which `communication_sms` are missing; all of it unless known.
    """

    case: Case
    placement: Placement
    copies: str = "rank"
    recompute: str = "none"
    num_replicas: int = 1
    assumptions: Assumptions | None = None
    routing: Routing | None = None
    free_communication: bool = False
    chunks: int = 1
    taxed_share: float = 1.0

    @cached_property
    def assumed(self) -> Assumptions:
        return self.assumptions or get_assumptions()

    @cached_property
    def routes(self) -> Routing:
        if self.routing is not None:
            return self.routing
        first = next(name for name in self.placement.expert if name is not None)
        return Routing.of(self.case.workload, self.case.model, self.placement.by_name[first].size)

    @cached_property
    def _load(self) -> Load:
        return Load(self.case, self.placement, self.copies, self.recompute, self.chunks, self.routes)

    @cached_property
    def tally(self) -> Tally:
        """The placement's layers and groups, those that cost the same together."""
        return tally(self.case.model, self.placement, Nodes.of(self.case, self.placement), self.routes.even)

    def actions_of(self, likeness: Likeness) -> list[Action]:
        """One action of each kind and pass of a layer of that likeness, chunk 0."""
        return actions_of(self.case.model, self.placement, likeness, self.recompute)

    def alike(self, codes: Codes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of actions of the first micro-batch in each direction: places of those that cost differently, and for every
        action the number of its like among these. Chunks of a micro-batch cost the same.
        """
        columns = unpack(codes)
        # A hop carries what the layer before made; embedding, head and the first hop are of no layer.
        outer = np.isin(columns.kind, (Kind.EMBED, Kind.HEAD))
        layer = np.where(outer, 0, columns.layer + (columns.kind != Kind.HOP))
        number = self.tally.of_layer[columns.microbatch, layer]
        _, first, which = np.unique(
            (number * len(Kind) + columns.kind) * len(Pass) + columns.pass_, return_index=True, return_inverse=True
        )
        return first, which

    def of_likeness(self, what: str, likeness: Likeness, make: Callable[[list[Action]], Any]) -> Any:
        """What `make` gives for a likeness's actions, made once for all placements where these cost the same."""
        return self._cached((what, likeness.key), lambda: make(self.actions_of(likeness)))

    def of_work(self, what: str, likeness: Likeness, make: Callable[[list[Action]], Any]) -> Any:
        """`of_likeness` of what depends on compute actions alone."""
        key = what, likeness.work
        if key not in self._work:
            self._work[key] = make(self.actions_of(likeness))
        return self._work[key]

    def of_placement(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` gives for the whole placement, made once for all cases where its actions cost the same."""
        return self._cached((what, self.placement), make)

    def computes_again(self, action: Action) -> bool:
        """Whether a backward runs its forward once more: what it needs was neither kept nor made again by pass R."""
        if self.recompute == "none" or action.pass_ is not Pass.B:
            return False
        mixture = action.kind is Kind.ATTENTION and not self.case.model.is_dense(action.layer)
        return not (self.recompute == "redispatch" and mixture)

    def _parts(self, action: Action) -> list[tuple[Part, Floats | float]]:
        """Parts of the model that an action computes, with the rows that pass each."""
        model, layer = self.case.model, action.layer
        match action.kind:
            case Kind.HEAD:
                return [("head", self._tokens)]
            case Kind.ATTENTION:
                names: list[Part] = ["attention", "router", "dense_ffn"]
                names += ["shared"] if self.placement.shared_on == "attention" else []
                return [(part, self._tokens) for part in names if has_part(model, part, layer)]
            case Kind.EXPERT:
                parts: list[tuple[Part, Floats | float]] = [("expert", self._load.assignments(layer))]
                return [*parts, ("shared", self._load.shared_tokens(layer))] if self._load.shares(layer) else parts
        return []

    def _joins(self, action: Action) -> int | None:
        """The layer whose expert outputs this action adds to the residual (F), or whose gradient rows it packs (B)."""
        if action.kind is Kind.JOIN:
            return action.layer
        layer = {Kind.ATTENTION: action.layer, Kind.HEAD: self.placement.num_layers}.get(action.kind, 0) - 1
        if layer < 0 or self.case.model.is_dense(layer) or self.placement.moves_on(layer):
            return None
        return layer

    def _likeness(self, action: Action) -> tuple[Hashable, ...]:
        """Equal for actions of equal cost, on this placement and on others with as many data ranks."""
        turn = action.microbatch % self.placement.directions
        one = action if turn == action.microbatch and not action.chunk else action._replace(microbatch=turn, chunk=0)
        if one not in self._likenesses:
            self._likenesses[one] = self._find_likeness(one)
        return self._likenesses[one]

    @cached_property
    def _likenesses(self) -> dict[Action, tuple[Hashable, ...]]:
        nodes = Nodes.of(self.case, self.placement)
        return _known_likenesses((self.case.model, self.placement, nodes, self.recompute, self.routes.even))

    def _find_likeness(self, action: Action) -> tuple[Hashable, ...]:
        key: tuple[Hashable, ...] = (action.kind, action.pass_)
        placement = self.placement
        if not self.routes.even:
            return (*key, action.layer, action.microbatch % placement.directions)
        if action.kind in TRANSFERS:
            source, target = (placement.by_name[name] for name in ends(placement, action))
            between = lie(source, target, Nodes.of(self.case, placement))
            return (*key, source is target, between, self._load.volume(action))
        if action.kind is Kind.EMBED:
            return key
        joined = self._joins(action)
        before = None if joined is None else self._load.num_expert_ranks(joined)
        if action.kind is Kind.HEAD:
            return (*key, before)
        experts = None if placement.expert[action.layer] is None else self._load.num_expert_ranks(action.layer)
        return (*key, experts, self.case.model.window(action.layer), before)

    @cached_property
    def _passes(self) -> dict[Hashable, Any]:
        """Costs of one pass of an action or a transfer, whatever is computed again and where state and values live."""
        found: dict[Hashable, Any] = self._passes_apart.setdefault(("of", self.placement.data_ranks), {})
        return found

    @cached_property
    def _passes_apart(self) -> dict[Hashable, Any]:
        """Costs of one pass of an action that does not depend on the number of data ranks."""
        # Where all tokens are routed evenly, what an action costs does not depend on the rest of the placement.
        if not self.routes.even:
            return {}
        case = self.case
        layout = case.layout
        given = (case.model, case.cluster, case.workload, layout.mbs, layout.tp, layout.cp, layout.ranks_over_nodes)
        apart = ("case", "placement", "num_replicas", "recompute")
        told = tuple(getattr(self, each.name) for each in fields(self) if each.name not in apart)
        return _known_costs((type(self), given, told, self.placement.shared_on))

    @cached_property
    def _cache(self) -> dict[Hashable, Any]:
        """The same of whole actions."""
        key = ("whole", self.recompute, self.case.layout.offloads_activations)
        found: dict[Hashable, Any] = self._passes.setdefault(key, {})
        return found

    @cached_property
    def _work(self) -> dict[Hashable, Any]:
        """`_cache`, one for copies a rank and copies a node: ranks compute the same, and only the way there differs."""
        return replace(self, copies="rank")._cache if self.copies == "node" and self.routes.even else self._cache

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._passes:
            self._passes[key] = make()
        return self._passes[key]

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    @property
    def _seq_len(self) -> int:
        return self.case.workload.seq_len

    @property
    def _tokens(self) -> int:
        return self._load.tokens

    def _size(self, action: Action) -> int:
        return self.placement.by_name[self.placement.home(action.kind, action.layer)].size


@lru_cache(maxsize=512)
def _known_costs(family: Hashable) -> dict[Hashable, Any]:
    """Costs by action's likeness, shared by all `Costs` of one family."""
    return {}


@lru_cache(maxsize=1024)
def _known_likenesses(placed: Hashable) -> dict[Action, tuple[Hashable, ...]]:
    """Likenesses of actions, shared by all `Costs` of one placement."""
    return {}
