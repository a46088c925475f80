"""What actions cost on a cluster: seconds, FLOPs, messages, bytes held. One `Costs` for every system alike.

Costs are of one action on every rank of its group (arrays over the group's ranks, in order); they do not depend on the
micro-batch, nor on the chunk. Replica 0 stands for all replicas: its ranks lie on the first nodes.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import inf
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bench.action import TRANSFERS, Action, Codes, Kind, Pass, unpack
from bench.assumptions import Assumptions, get_assumptions
from bench.case import Case
from bench.edges import ends
from bench.errors import BadInput
from bench.flops import Part, has_part, part_flops
from bench.flops import Pass as PassWord
from bench.load import EXPERTS_RECEIVE, Link, Load, Message, Ports
from bench.memory import Recipe, retained_bytes
from bench.nodes import Nodes
from bench.placement import Placement
from bench.program import Held
from bench.roofline import (
    GRAD_BYTES,
    Kernel,
    Machine,
    Work,
    attention_core,
    attention_elements,
    gemms,
    head_bytes,
    inner_width,
    swiglu_elements,
)
from bench.routing import Routing
from bench.sequence import Exchange, passing_bytes, ring_exchange, ring_rows, tensor_exchange
from bench.state import State
from bench.tally import Likeness, Tally, actions_of, lie, tally

Floats = NDArray[np.float64]
PASS_WORDS: dict[Pass, PassWord] = {Pass.F: "F", Pass.B: "B", Pass.W: "W"}


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of a case's actions on a placement.

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

    def with_free_communication(self) -> Self:
        """The same costs, with transfers and gradient sums that take no time."""
        return replace(self, free_communication=True)

    def without_overheads(self) -> Self:
        """The same costs, without fixed costs of kernels and transfers and without SMs given to communication."""
        bare = self.assumed.without_overheads()
        return self if bare is self.assumptions else replace(self, assumptions=bare)

    @property
    def uniform(self) -> bool:
        """Whether all ranks of every group have equal costs, so that one rank may stand for several."""
        if not self.routes.even:
            return False
        return all(
            np.ptp(column) <= 1e-9 * abs(column.max())
            for likeness in self.tally.likenesses
            for transfer in self.actions_of(likeness)
            if transfer.kind in TRANSFERS
            for column in self.ports(transfer)
            if len(column)
        )

    @property
    def load_imbalance(self) -> float:
        """Assignments of the most loaded expert rank over the mean, in the layer where this is largest."""
        moe = [layer for layer, home in enumerate(self.placement.expert) if home is not None]
        return max(self.routes.imbalance(layer, self._load.num_expert_ranks(layer)) for layer in moe)

    # Computation

    def seconds(self, action: Action) -> Floats:
        """[ranks of its group]: seconds of a compute action.

        With offloaded activations it takes no less than their way over the host's link, which runs beside it.
        """
        return self._cached(
            ("seconds", *self._likeness(action)), lambda: self._with_offload(action, self._seconds(action))
        )

    def flops(self, action: Action) -> Floats:
        """[ranks of its group]: model FLOPs of a compute action; what is computed again does not count."""
        return self._cached(("flops", *self._likeness(action)), lambda: self._flops(action))

    def _seconds(self, action: Action) -> Floats:
        total = np.zeros(self._size(action))
        for pass_ in [Pass.R] * self.computes_again(action) + [action.pass_]:
            for seconds in self._kernel_seconds(action._replace(pass_=pass_)):
                total = total + seconds
            if action.kind is Kind.ATTENTION and self.case.layout.sequence_ranks > 1:
                total = total + self._exchange_s(action._replace(pass_=Pass.F if pass_ is Pass.R else pass_))
        return total

    def _kernel_seconds(self, action: Action) -> list[Floats | float]:
        """Seconds of each kernel of one pass; what is computed again counts as pass R."""
        sends = action.pass_ is Pass.R and self.recompute == "redispatch"
        key = ("kernels", sends, *self._likeness(action))
        known = self._passes if action.kind is Kind.EXPERT else self._passes_apart
        if key not in known:
            known[key] = [self._machine.seconds(kernel) for kernel in self._kernels(action)]
        found: list[Floats | float] = known[key]
        return found

    def offloaded_bytes(self, action: Action) -> Floats:
        """[ranks]: bytes that a compute action sends to the host (F) or fetches from there (B).

        What attention and experts keep from F until B; the few bytes of a token's choice of experts included, which
        an execution leaves where they are.
        """
        moved = self.case.layout.offloads_activations and action.pass_ in (Pass.F, Pass.B)
        if not moved or action.kind not in (Kind.ATTENTION, Kind.EXPERT):
            return np.zeros(self._size(action))
        return self._retained(Held.FORWARD, action._replace(pass_=Pass.F))

    def _with_offload(self, action: Action, seconds: Floats) -> Floats:
        if not self.case.layout.offloads_activations:
            return seconds
        link = self.case.cluster.gpu.host_bytes_per_s * self.assumed.host_link
        return np.maximum(seconds, self.offloaded_bytes(action) / link)

    def _exchange_s(self, attention: Action) -> float:
        """Seconds by which the exchanges of ranks that share sequences make an attention action longer."""
        if self.free_communication:
            return 0.0
        cluster, assumed = self.case.cluster, self.assumed
        tensor, ring = self.sequence_exchanges(attention)
        rate, latency = cluster.gpu.nvlink_bytes_per_s * assumed.nvlink, cluster.nvlink_latency_s + assumed.transfer_s
        tensor_s, ring_s = (each.num_bytes / rate + each.num_messages * latency for each in (tensor, ring))
        core_s = float(self._machine.seconds(self._core(attention))) if ring.num_bytes else 0.0
        return tensor_s * assumed.tensor_exposed + max(ring_s * assumed.ring_exposed, ring_s - core_s)

    def sequence_exchanges(self, attention: Action) -> tuple[Exchange, Exchange]:
        """What an attention action moves between the ranks that share its heads, and those that share its sequences."""
        model, layout, e = self.case.model, self.case.layout, self._load.element_bytes
        pass_ = Pass.F if attention.pass_ is Pass.R else attention.pass_
        return (
            tensor_exchange(model, layout, pass_, self._tokens, e),
            ring_exchange(model, layout, attention.layer, pass_, self._tokens, self._seq_len, e),
        )

    def computes_again(self, action: Action) -> bool:
        """Whether a backward runs its forward once more: what it needs was neither kept nor made again by pass R."""
        if self.recompute == "none" or action.pass_ is not Pass.B:
            return False
        mixture = action.kind is Kind.ATTENTION and not self.case.model.is_dense(action.layer)
        return not (self.recompute == "redispatch" and mixture)

    def _flops(self, action: Action) -> Floats:
        total = np.zeros(self._size(action))
        if action.pass_ is Pass.R:
            return total
        for part, rows in self._parts(action):
            layer = action.layer if part not in ("embed", "head") else 0
            # Linear in the rows.
            of_one = part_flops(
                self.case.model,
                part,
                layer,
                PASS_WORDS[action.pass_],
                tokens=1.0,
                seq_len=self._seq_len,
                assignments=1.0,
            )
            total = total + rows * of_one
        return total

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

    def _kernels(self, action: Action) -> list[Kernel]:
        model, layer, e = self.case.model, action.layer, self._load.element_bytes
        pass_ = Pass.F if action.pass_ is Pass.R else action.pass_
        found: list[Kernel] = []
        for part, rows in self._parts(action):
            local = model.num_experts / self._load.num_expert_ranks(layer) if part == "expert" else 1.0
            work = Work(rows, local, self.case.layout.tp)
            found += gemms(model, part, layer if part != "head" else 0, pass_, work, e, self.assumed)
            if part in ("dense_ffn", "shared", "expert"):
                found.append(self._moves(rows * swiglu_elements(inner_width(model, part), pass_)))
        match action.kind:
            case Kind.ATTENTION:
                if pass_ is not Pass.W:
                    found.append(self._core(action._replace(pass_=pass_)))
                found.append(self._moves(self._tokens * attention_elements(model, pass_)))
            case Kind.HEAD:
                found.append(Kernel(0.0, self._tokens * head_bytes(model, pass_, e), 1.0))
            case Kind.EMBED:
                # Backward adds rows into an fp32 gradient.
                moved = e + (e if pass_ is Pass.F else 2 * GRAD_BYTES)
                found.append(Kernel(0.0, self._tokens * model.hidden_size * moved, 1.0))
        if pass_ is not Pass.W:
            # Packed and added up chunk by chunk.
            pieces = 1 if action.kind is Kind.EXPERT else self.chunks
            found += [self._moves(self._gathered_rows(action) / pieces * model.hidden_size)] * pieces
        return found

    def _core(self, attention: Action) -> Kernel:
        model, layout, tokens, seq_len = self.case.model, self.case.layout, self._tokens, self._seq_len
        layer, e = attention.layer, self._load.element_bytes
        received = ring_rows(model, layout, layer, tokens, seq_len)
        return attention_core(model, layer, attention.pass_, tokens, seq_len, e, self.assumed, received)

    def _gathered_rows(self, action: Action) -> Floats | float:
        """Rows read and written to pack, unpack and add up what is exchanged, on the ranks of the action."""
        model, layer = self.case.model, action.layer
        if action.pass_ is Pass.R:
            sends = self.recompute == "redispatch" and action.kind is Kind.ATTENTION and not model.is_dense(layer)
            return self._tokens * (float(self._load.copies_per_token(layer).sum()) + 1) if sends else 0.0
        if action.kind is Kind.EXPERT:
            # Rows to assignments and back, with the weighted sum.
            return 2 * self._load.assignments(layer) + self._load.rows(layer) + self._load.assignments(layer)
        rows = 0.0
        if action.kind is Kind.ATTENTION and not model.is_dense(layer):
            rows += float(self._load.copies_per_token(layer).sum()) + 1
        joined = self._joins(action)
        if joined is not None:
            rows += float(self._load.copies_per_token(joined).sum()) + 2
        return rows * self._tokens

    def _joins(self, action: Action) -> int | None:
        """The layer whose expert outputs this action adds to the residual (F), or whose gradient rows it packs (B)."""
        if action.kind is Kind.JOIN:
            return action.layer
        layer = {Kind.ATTENTION: action.layer, Kind.HEAD: self.placement.num_layers}.get(action.kind, 0) - 1
        if layer < 0 or self.case.model.is_dense(layer) or self.placement.moves_on(layer):
            return None
        return layer

    # Transfers

    def message(self, action: Action) -> Message:
        """The bytes of a transfer. Raises BadInput for an action that is no transfer of this placement."""
        return self._once(("message", *self._likeness(action)), lambda: self._load.message(action))

    def ports(self, action: Action) -> Ports:
        """How long a transfer takes its ports, and its latency."""
        return self._once(("ports", *self._likeness(action)), lambda: self._ports(action))

    def transfer_s(self, action: Action) -> float:
        """Seconds of a transfer alone: of its busiest port, and the latency."""
        return float(self._cached(("transfer", *self._likeness(action)), lambda: self._transfer_s(self.ports(action))))

    def _transfer_s(self, ports: Ports) -> float:
        return max(float(column.max(initial=0.0)) for column in ports[:4]) + float(ports.latency_s.max(initial=0.0))

    def _ports(self, action: Action) -> Ports:
        cluster, assumed = self.case.cluster, self.assumed
        source, target = ends(self.placement, action)
        nic_share = assumed.nic_all_to_all if source == target else assumed.nic_many_to_many
        nic_rate, nic_latency = cluster.nic_bytes_per_s_per_gpu * nic_share, cluster.nic_latency_s + assumed.transfer_s
        nic = Link(nic_rate, nic_latency, assumed.cross_rail, assumed.incast)
        nvlink = Link(cluster.gpu.nvlink_bytes_per_s * assumed.nvlink, cluster.nvlink_latency_s + assumed.transfer_s)
        if self.free_communication:
            nic = nvlink = Link(inf, 0.0)
        relays_at_target = (action.kind, action.pass_) in EXPERTS_RECEIVE
        return self.message(action).ports(nic, nvlink, relays_at_target=relays_at_target)

    # Memory

    def held_bytes(self, held: Held, action: Action) -> Floats:
        """[ranks]: bytes held for a reason. `action` is F (FORWARD), B (BACKWARD), or the transfer (SENT, RECEIVED)."""
        return self._cached(("held", held, *self._likeness(action)), lambda: self._held_bytes(held, action))

    def _held_bytes(self, held: Held, action: Action) -> Floats:
        if held in (Held.SENT, Held.RECEIVED):
            return self.message(action).num_bytes.sum(axis=1 if held is Held.SENT else 0)
        retained = self._retained(held, action)
        return retained - self.offloaded_bytes(action) if held is Held.FORWARD else retained

    def _retained(self, held: Held, action: Action) -> Floats:
        """The same of values that are no messages, wherever they are."""
        total = np.zeros(self._size(action))
        rows = self._load.rows(action.layer) if action.kind is Kind.EXPERT else None
        if rows is not None and held is Held.FORWARD and self.recompute == "redispatch":
            rows = np.zeros_like(rows)  # they come once more
        if held is Held.AGAIN:
            forward = action._replace(pass_=Pass.F)
            return replace(self, recompute="none").held_bytes(Held.FORWARD, forward) - self.held_bytes(
                Held.FORWARD, forward
            )
        parts = self._parts(action)
        same = (rows is None or np.ptp(rows) == 0) and all(np.ptp(amount) == 0 for _, amount in parts)
        for part, amount in parts:
            for i in range(1 if same else len(total)):
                kept = retained_bytes(
                    self.case.model,
                    part,
                    0 if part == "head" else action.layer,
                    tokens=_at(amount, i),
                    assignments=_at(amount, i) if part == "expert" else None,
                    rows=None if rows is None else _at(rows, i),
                    dtype_bytes=self._load.element_bytes,
                    recompute="none" if self.recompute == "none" else "full",
                )
                total[i] += kept.after_forward if held is Held.FORWARD else kept.after_backward
        if same:
            total = np.full(len(total), total[0])
        if action.kind is Kind.ATTENTION and held is Held.BACKWARD:
            # The gathered gradient of the output stays for the weight gradients.
            others = self.case.layout.tp - 1
            total += others * self._tokens * self.case.model.hidden_size * self._load.element_bytes
        return total

    def working_bytes(self, action: Action) -> Floats:
        """[ranks]: bytes held while a compute action runs and no longer.

        What a backward computes again, what ranks that share sequences have of each other, and of activations with the
        host the action's own, and as much of the one before or after it, which is on its way.
        """
        working = 2 * self.offloaded_bytes(action)
        if action.kind is Kind.ATTENTION:
            model, layout = self.case.model, self.case.layout
            working += passing_bytes(model, layout, action.pass_, self._tokens, self._load.element_bytes)
        if not self.computes_again(action):
            return working
        forward = action._replace(pass_=Pass.F)
        whole = replace(self, recompute="none").held_bytes(Held.FORWARD, forward)
        return working + (whole - self.held_bytes(Held.FORWARD, forward))

    @property
    def has_working_bytes(self) -> bool:
        """Whether `working_bytes` of any action may be more than 0."""
        layout = self.case.layout
        return self.recompute != "none" or layout.sequence_ranks > 1 or layout.offloads_activations

    def static_bytes(self, group: str) -> float:
        """Weights, gradients and optimizer state of a rank of the group, and what is reserved beside them."""
        return self._state.static_bytes(group)

    def static_parts(self, group: str) -> dict[str, float]:
        """`static_bytes` by what they are."""
        return self._state.static_parts(group)

    # End of the step

    def sync_s(self, group: str) -> float:
        """Seconds of the gradient sums of a group, and of gathering weights whose update is sharded."""
        return 0.0 if self.free_communication else self._state.sync_s(group)

    def sync_bytes(self, group: str) -> float:
        """Bytes that each rank sends for `sync_s`."""
        return self._state.sync_bytes(group)

    def update_s(self, group: str) -> float:
        """Seconds of the optimizer step."""
        return self._state.update_s(group)

    # What all of the above stand on

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
    def recipe(self) -> Recipe:
        """Bytes a parameter takes; fp32 needs no main copy."""
        return Recipe(weight_bytes=4, main_weight_bytes=0) if self.case.workload.dtype == "fp32" else Recipe()

    @cached_property
    def _state(self) -> State:
        return State(self.case, self.placement, self.num_replicas, self.assumed, self.recipe)

    @cached_property
    def _machine(self) -> Machine:
        gpu, assumed = self.case.cluster.gpu, self.assumed
        if assumed.communication_sms >= gpu.num_sms:
            raise BadInput("assumptions.communication_sms", assumed.communication_sms, f"less than {gpu.num_sms} SMs")
        left = 1 - assumed.communication_sms / gpu.num_sms * self.taxed_share
        return Machine(
            gpu.peak_flops(self.case.workload.dtype) * left, gpu.hbm_bytes_per_s * assumed.hbm, assumed.kernel_s
        )

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

    def of_placement(self, what: str, make: Callable[[], Any]) -> Any:
        """What `make` gives for the whole placement, made once for all cases where its actions cost the same."""
        return self._cached((what, self.placement), make)

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

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._passes:
            self._passes[key] = make()
        return self._passes[key]

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

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

    @property
    def _seq_len(self) -> int:
        return self.case.workload.seq_len

    @property
    def _tokens(self) -> int:
        return self._load.tokens

    def _size(self, action: Action) -> int:
        return self.placement.by_name[self.placement.home(action.kind, action.layer)].size

    def _moves(self, elements: Floats | float) -> Kernel:
        return Kernel(0.0, self._load.element_bytes * elements, 1.0)


@lru_cache(maxsize=512)
def _known_costs(family: Hashable) -> dict[Hashable, Any]:
    """Costs by action's likeness, shared by all `Costs` of one family."""
    return {}


@lru_cache(maxsize=1024)
def _known_likenesses(placed: Hashable) -> dict[Action, tuple[Hashable, ...]]:
    """Likenesses of actions, shared by all `Costs` of one placement."""
    return {}


def _at(amount: Floats | float, i: int) -> float:
    return float(amount[i]) if isinstance(amount, np.ndarray) else float(amount)
