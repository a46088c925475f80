"""What one token costs each side, layer by layer: the coefficients of the planner, all read off the cost model.

A reference placement of two groups of each kind, with attention and expert ranks on different nodes, is priced with
`bench.cost.Costs`, as a simulation would be. Costs are divided by tokens, so they hold for any number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bench.action import Action, Kind, Pass
from bench.assumptions import Assumptions
from bench.case import CaseSpec
from bench.program import Held
from systems.disagmoe.planner.reference import Option, Reference, end_slots

Floats = NDArray[np.float64]
NIC_SEND, NVLINK_SEND, NIC_RECEIVE, NVLINK_RECEIVE = range(4)


@dataclass(frozen=True, eq=False)
class Side:
    """Costs of one token on one kind of group, forward and backward together. Slot l is layer l; the last, the head.

    Args:
        compute_s: [slots]: seconds of one GPU.
        weight_s: [slots]: the part of it for weight gradients, which nothing waits for.
        port_s: [4, slots]: seconds of one GPU's own NIC and NVLink ports, `NIC_SEND` to `NVLINK_RECEIVE`.
        moving_port_s: [4, slots]: the part of it for x and its gradient, which travels only between groups.
        kept_bytes: [slots]: bytes kept from forward to backward.
        passing_bytes: [slots]: the most bytes held while one action or transfer lasts.
    """

    compute_s: Floats
    weight_s: Floats
    port_s: Floats
    moving_port_s: Floats
    kept_bytes: Floats
    passing_bytes: Floats


@dataclass(frozen=True, eq=False)
class TokenCosts:
    """Both sides of an option, and the extra seconds of the embedding on its group."""

    attention: Side
    expert: Side
    embed_s: float | Floats


@dataclass(frozen=True, eq=False)
class Counts:
    """What a token of one side is counted with.

    Args:
        flops: [slots]: model FLOPs.
        sent_bytes: [slots]: bytes that leave the side for the other one or for another group of its own kind.
    """

    flops: Floats
    sent_bytes: Floats


def token_costs(spec: CaseSpec, option: Option, assumptions: Assumptions) -> TokenCosts:
    """Costs of a token of the spec's workload. Raises BadInput for an option that the model does not have."""
    return _prices(spec.model_copy(update={"system": "any"}), assumptions).of(option)


def costs_of_options(spec: CaseSpec, options: Sequence[Option], assumptions: Assumptions) -> list[TokenCosts]:
    """`token_costs` of each; what several agree on is priced once."""
    prices = _prices(spec.model_copy(update={"system": "any"}), assumptions)
    return [prices.of(option) for option in options]


def token_counts(spec: CaseSpec, option: Option, assumptions: Assumptions) -> tuple[Counts, Counts]:
    """Of attention and of experts."""
    at = Reference(spec.model_copy(update={"system": "any"}), replace(option, offload="none"), assumptions)
    costs = at.costs
    found = {side: Counts(*np.zeros((2, at.num_slots))) for side in "AF"}
    for action, slots in at.computed:
        if action.kind is not Kind.EMBED:
            side = at.side(action)
            found[side].flops[list(slots)] += float(costs.flops(action).max()) * at.per_token[side]
    for action in at.moved:
        source = at.sides(action)[0]
        sent = float(costs.message(action).crossing.sum(axis=1).max(initial=0.0))
        found[source].sent_bytes[end_slots(action)[0]] += sent * at.per_token[source]
    for counts in found.values():
        for column in vars(counts).values():
            column[:-1] = column[list(at.like)]
    return found["A"], found["F"]


@lru_cache(maxsize=64)
def _prices(spec: CaseSpec, assumptions: Assumptions) -> "_Prices":
    return _Prices(spec, assumptions)


class _Prices:
    """Costs of tokens of one workload.

    What an action computes does not depend on whether copies go to ranks or by way of their nodes, and only a backward
    takes longer for what is computed again. What a transfer takes of a port is in proportion to tokens, so to how many
    ranks share them, and of recomputation only dispatching once more adds a transfer.
    """

    def __init__(self, spec: CaseSpec, assumptions: Assumptions) -> None:
        self.spec, self.assumptions = spec, assumptions
        self._computed: dict[Option, dict[str, _Computed]] = {}
        self._moved: dict[Option, dict[str, _Moved]] = {}
        self._embed_s: dict[Option, float] = {}
        self._known: dict[Option, TokenCosts] = {}
        self._alike: dict[Option, dict[Action, float]] = {}

    def of(self, option: Option) -> TokenCosts:
        option = replace(option, offload="none")
        if option not in self._known:
            self._known[option] = self._of(option)
        return self._known[option]

    def _of(self, option: Option) -> TokenCosts:
        ours = replace(option, copies="rank") if option.copies == "node" else option
        again = option.recompute if option.recompute == "redispatch" else "none"
        theirs = replace(option, tp=1, cp=1, recompute=again)
        if ours not in self._computed:
            self._computed[ours], self._embed_s[ours] = _computed(
                Reference(self.spec, ours, self.assumptions),
                self._alike.setdefault(replace(ours, recompute="none"), {}),
            )
        if theirs not in self._moved:
            self._moved[theirs] = _moved(Reference(self.spec, theirs, self.assumptions))
        attention, expert = (_side(self._computed[ours][name], self._moved[theirs][name]) for name in "AF")
        return TokenCosts(attention, expert, self._embed_s[ours])


@dataclass(frozen=True, eq=False)
class _Computed:
    """As of `Side`, of computation."""

    compute_s: Floats
    weight_s: Floats
    kept_bytes: Floats
    passing_bytes: Floats


@dataclass(frozen=True, eq=False)
class _Moved:
    """As of `Side`, of transfers."""

    port_s: Floats
    moving_port_s: Floats
    passing_bytes: Floats


def _side(computed: _Computed, moved: _Moved) -> Side:
    passing = np.maximum(computed.passing_bytes, moved.passing_bytes)
    ports = (moved.port_s, moved.moving_port_s)
    return Side(computed.compute_s, computed.weight_s, *ports, computed.kept_bytes, passing)


def _computed(at: Reference, known: dict[Action, float]) -> tuple[dict[str, _Computed], float]:
    """By side, and the seconds of the embedding. `known`: seconds of forwards and of weight gradients."""
    found = {side: _Computed(*np.zeros((4, at.num_slots))) for side in "AF"}
    costs, embed_s = at.costs, 0.0
    for action, places in at.computed:
        seconds = known.get(action)
        if seconds is None:
            seconds = float(costs.seconds(action).max())
        if action.pass_ in (Pass.F, Pass.W):
            known[action] = seconds
        if action.kind is Kind.EMBED:
            embed_s += seconds * at.per_token["A"]
            continue
        name, slots = at.side(action), list(places)
        side, factor = found[name], at.per_token[name]
        side.compute_s[slots] += seconds * factor
        if action.pass_ is Pass.W:
            side.weight_s[slots] += seconds * factor
        passing = float(costs.working_bytes(action).max()) if costs.has_working_bytes else 0.0
        if action.pass_ is Pass.F:
            side.kept_bytes[slots] += float(costs.held_bytes(Held.FORWARD, action).max()) * factor
        elif action.pass_ is Pass.R:
            passing += costs.case.layout.lookahead * float(costs.held_bytes(Held.AGAIN, action).max())
        side.passing_bytes[slots] = np.maximum(side.passing_bytes[slots], passing * factor)
    _spread(found, at)
    return found, embed_s


def _moved(at: Reference) -> dict[str, _Moved]:
    """By side; a transfer is in the slots of its two ends."""
    zeros = np.zeros((2, 9, at.num_slots))
    found = {side: _Moved(each[:4], each[4:8], each[8]) for side, each in zip("AF", zeros, strict=True)}
    busiest: dict[int, tuple[list[float], tuple[float, float]]] = {}
    for action in at.moved:
        source, target = at.sides(action)
        first, last = end_slots(action)
        ports = at.costs.ports(action)  # one object for all transfers that are alike
        if id(ports) not in busiest:
            rows = at.costs.message(action).num_bytes
            held = (float(rows.sum(axis=1).max()), float(rows.sum(axis=0).max()))
            busiest[id(ports)] = [float(taken.max(initial=0.0)) for taken in ports[:4]], held
        seconds, held = busiest[id(ports)]
        moves = action.kind in (Kind.RESIDUAL, Kind.HOP)
        sends = ((source, first, NIC_SEND), (source, first, NVLINK_SEND))
        taken_at = (*sends, (target, last, NIC_RECEIVE), (target, last, NVLINK_RECEIVE))
        for (side, slot, port), taken_s in zip(taken_at, seconds, strict=True):
            found[side].port_s[port, slot] += taken_s * at.per_token[side]
            if moves:
                found[side].moving_port_s[port, slot] += taken_s * at.per_token[side]
        for side, slot, num_bytes in ((source, first, held[0]), (target, last, held[1])):
            passing = found[side].passing_bytes
            passing[slot] = max(passing[slot], num_bytes * at.per_token[side])
    _spread(found, at)
    return found


def _spread(found: "dict[str, _Computed] | dict[str, _Moved]", at: Reference) -> None:
    """Puts the costs of layers that stand for others in the others' slots."""
    for side in found.values():
        for column in vars(side).values():
            column[..., :-1] = column[..., list(at.like)]
