"""What one token costs each side, layer by layer: the coefficients of the planner, all read off the cost model.

A reference placement of two groups of each kind, with attention and expert ranks on different nodes, is priced with
`bench.cost.Costs`, as a simulation would be. Costs are divided by tokens, so they hold for any number of ranks.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from bench.action import COMPUTE, TRANSFERS, Action, Kind, Pass
from bench.assumptions import Assumptions
from bench.case import CaseSpec, Layout
from bench.cost import Costs
from bench.edges import ends, layer_edges, outer_edges
from bench.program import Held
from systems.disagmoe.placement import place

Floats = NDArray[np.float64]
NIC_SEND, NVLINK_SEND, NIC_RECEIVE, NVLINK_RECEIVE = range(4)


@dataclass(frozen=True)
class Option:
    """What changes a token's costs, next to the sequence length: N and how the layer is computed and dispatched.

    tp, cp: attention ranks that share a sequence. `offload` changes no token's costs, but what memory holds.
    """

    expert_ranks: int
    recompute: str = "none"
    shared_on: str = "attention"
    copies: str = "rank"
    tp: int = 1
    cp: int = 1
    offload: str = "none"


@dataclass(frozen=True, eq=False)
class Side:
    """Costs of one token on one kind of group, forward and backward together. Slot l is layer l; the last, the head.

    Args:
        compute_s: [slots]: seconds of one GPU.
        weight_s: [slots]: the part of it for weight gradients, which nothing waits for.
        flops: [slots]: model FLOPs.
        port_s: [4, slots]: seconds of one GPU's own NIC and NVLink ports, `NIC_SEND` to `NVLINK_RECEIVE`.
        moving_port_s: [4, slots]: the part of it for x and its gradient, which travels only between groups.
        sent_bytes: [slots]: bytes that leave the side for the other one or for another group of its own kind.
        kept_bytes: [slots]: bytes kept from forward to backward.
        passing_bytes: [slots]: the most bytes held while one action or transfer lasts.
    """

    compute_s: Floats
    weight_s: Floats
    flops: Floats
    port_s: Floats
    moving_port_s: Floats
    sent_bytes: Floats
    kept_bytes: Floats
    passing_bytes: Floats


@dataclass(frozen=True, eq=False)
class TokenCosts:
    """Both sides of an option, and the extra seconds of the embedding on its group."""

    attention: Side
    expert: Side
    embed_s: float


def token_costs(spec: CaseSpec, option: Option, assumptions: Assumptions) -> TokenCosts:
    """Costs of a token of the spec's workload. Raises BadInput for an option that the model does not have."""
    alike = spec if spec.system == "any" else spec.model_copy(update={"system": "any"})
    return _token_costs(alike, replace(option, offload="none"), assumptions)


@lru_cache(maxsize=2048)
def _token_costs(spec: CaseSpec, option: Option, assumptions: Assumptions) -> TokenCosts:
    costs = reference_costs(spec, option, assumptions)
    tokens = costs.case.layout.mbs * spec.workload.seq_len / costs.case.layout.sequence_ranks
    # Of all tokens of a micro-batch: what an attention rank spends on its own, and the fullest expert rank times N.
    per_token = {"A": 1.0 / tokens, "F": option.expert_ranks / (tokens * costs.placement.data_ranks)}
    slots = spec.model.num_layers + 1
    sides = {name: Side(*(np.zeros(shape) for shape in _shapes(slots))) for name in "AF"}
    like = _alike(spec, costs.routes.even)
    priced = {near for layer in like for near in (layer - 1, layer, layer + 1)}
    embed_s = 0.0
    for action in _actions(costs, priced):
        if action.kind is Kind.EMBED:
            embed_s += float(np.max(costs.seconds(action))) * per_token["A"]
        elif action.kind in COMPUTE and (action.kind is Kind.HEAD or action.layer in priced):
            _add_compute(sides, costs, action, per_token)
        elif action.kind in TRANSFERS and action.layer in priced:
            _add_transfer(sides, costs, action, per_token)
    for side in sides.values():
        for column in vars(side).values():
            column[..., :-1] = column[..., like]
    return TokenCosts(sides["A"], sides["F"], embed_s)


def _alike(spec: CaseSpec, even: bool) -> list[int]:
    """[layers]: for each layer the first one of equal costs, which are those of equal neighbours too."""
    model, last = spec.model, spec.model.num_layers - 1
    if not even:
        return list(range(last + 1))
    first: dict[tuple[object, ...], int] = {}
    like = []
    for layer in range(last + 1):
        near = [n for n in (layer - 1, layer, layer + 1) if 0 <= n <= last]
        key = (layer == 0, layer == last, *((model.window(n), model.is_dense(n)) for n in near))
        like.append(first.setdefault(key, layer))
    return like


def reference_costs(spec: CaseSpec, option: Option, assumptions: Assumptions) -> Costs:
    """Bare costs (no fixed ones) on two groups of each kind, attention and experts on nodes of their own.

    On a cluster of one node everything is one node. An attention group has as many ranks as an expert group, rounded
    up to whole nodes: a GEMM's share of reading weights is that of about as many tokens a rank on both sides.
    """
    cluster = spec.cluster
    per_node = cluster.gpus_per_node
    attention_ranks = -(-option.expert_ranks // per_node) * per_node
    groups = min(2, spec.model.num_layers)
    if cluster.num_nodes == 1:
        whole = -(-groups * (attention_ranks + option.expert_ranks) // per_node) * per_node
        cluster = cluster.model_copy(update={"gpus_per_node": whole, "nics_per_node": whole})
    layout = Layout.make(
        attention_ranks=attention_ranks,
        expert_ranks=option.expert_ranks,
        groups=groups,
        recompute=option.recompute,
        shared_on=option.shared_on,
        copies=option.copies,
        tp=option.tp,
        cp=option.cp,
    )
    case = spec.model_copy(update={"cluster": cluster}).with_layout(layout)
    placement = place(spec.model, layout)
    costs = Costs(case, placement, copies=option.copies, recompute=option.recompute, assumptions=assumptions)
    return costs.without_overheads()


def _shapes(slots: int) -> list[int | tuple[int, int]]:
    return [slots, slots, slots, (4, slots), (4, slots), slots, slots, slots]


def _side(group: str) -> str:
    return group[0]


def _actions(costs: Costs, layers: Collection[int]) -> list[Action]:
    """The actions of some layers, those of the layers beside them among others, and of none, of micro-batch 0."""
    model, placement, found = costs.case.model, costs.placement, dict[Action, None]()
    near = sorted({n for layer in layers for n in (layer - 1, layer, layer + 1) if 0 <= n < model.num_layers})
    of_layers = (layer_edges(model, placement, layer, costs.recompute) for layer in near)
    for edge in chain(outer_edges(placement), *of_layers):
        for end in (edge.src, edge.dst, edge.via):
            if end is not None:
                found[end] = None
    return list(found)


def _add_compute(sides: dict[str, Side], costs: Costs, action: Action, per_token: dict[str, float]) -> None:
    name = _side(costs.placement.home(action.kind, action.layer))
    side, factor = sides[name], per_token[name]
    slot = -1 if action.kind is Kind.HEAD else action.layer
    seconds = float(np.max(costs.seconds(action))) * factor
    side.compute_s[slot] += seconds
    if action.pass_ is Pass.W:
        side.weight_s[slot] += seconds
    side.flops[slot] += float(np.max(costs.flops(action))) * factor
    passing = float(np.max(costs.working_bytes(action)))
    if action.pass_ is Pass.F:
        side.kept_bytes[slot] += float(np.max(costs.held_bytes(Held.FORWARD, action))) * factor
    elif action.pass_ is Pass.R:
        passing += costs.case.layout.lookahead * float(np.max(costs.held_bytes(Held.AGAIN, action)))
    side.passing_bytes[slot] = max(side.passing_bytes[slot], passing * factor)


def _add_transfer(sides: dict[str, Side], costs: Costs, action: Action, per_token: dict[str, float]) -> None:
    """Adds a transfer to the slots of its two ends."""
    source, target = (_side(group) for group in ends(costs.placement, action))
    first, last = _end_slots(action)
    ports, message = costs.ports(action), costs.message(action)
    moves = action.kind in (Kind.RESIDUAL, Kind.HOP)
    sends = ((source, first, NIC_SEND), (source, first, NVLINK_SEND))
    taken_at = (*sends, (target, last, NIC_RECEIVE), (target, last, NVLINK_RECEIVE))
    for (side, slot, port), taken in zip(taken_at, ports[:4], strict=True):
        seconds = float(np.max(taken, initial=0.0)) * per_token[side]
        sides[side].port_s[port, slot] += seconds
        if moves:
            sides[side].moving_port_s[port, slot] += seconds
    sent = float(np.max(message.crossing.sum(axis=1), initial=0.0))
    sides[source].sent_bytes[first] += sent * per_token[source]
    for side, slot, axis in ((source, first, 1), (target, last, 0)):
        held = float(np.max(message.num_bytes.sum(axis=axis))) * per_token[side]
        sides[side].passing_bytes[slot] = max(sides[side].passing_bytes[slot], held)


def _end_slots(action: Action) -> tuple[int, int]:
    """Slots of the group that sends and of the group that receives."""
    layer = action.layer
    match action.kind:
        case Kind.DISPATCH:
            there = (layer, layer)
        case Kind.COMBINE | Kind.RESIDUAL:
            there = (layer, layer + 1)
        case _:  # HOP carries x of its layer from the layer before
            there = (max(layer - 1, 0), layer)
    return there[::-1] if action.pass_ is Pass.B else there
