"""What a micro-batch puts on each rank: tokens, assignments, rows; and the messages between ranks that come of it.

Where a plan has chunks, experts and their messages have one n-th of a micro-batch's tokens at a time.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import TRANSFERS, Action, Kind, Pass
from bench.case import Case
from bench.edges import HIDDEN_ROWS, Rows, Volume, ends, layer_edges
from bench.errors import BadInput
from bench.flops import has_part
from bench.models import Model
from bench.nodes import Nodes
from bench.placement import Group, Placement
from bench.routing import Routing

Floats = NDArray[np.float64]
EXPERTS_RECEIVE = {(Kind.DISPATCH, Pass.F), (Kind.DISPATCH, Pass.R), (Kind.COMBINE, Pass.B)}


class Link(NamedTuple):
    """A rank's port to a kind of link: bytes/s in each direction, seconds of latency.

    cross_rail: share of the rate for bytes to another rail. incast: share of a receiving port's time that is added for
    each doubling of the sources that send to it at once.
    """

    bytes_per_s: float
    latency_s: float
    cross_rail: float = 1.0
    incast: float = 0.0


class Ports(NamedTuple):
    """A transfer on its ports: seconds that each rank's ports are taken, [source ranks] or [target ranks].

    latency_s: [target ranks], from a send's start to the first byte's arrival, and from its end to the last byte's.
    """

    nic_send_s: Floats
    nvlink_send_s: Floats
    nic_receive_s: Floats
    nvlink_receive_s: Floats
    latency_s: Floats

    def times(self, number: int) -> "Ports":
        """Those of so many times the bytes."""
        nic_out, nvlink_out, nic_in, nvlink_in = (number * seconds for seconds in self[:4])
        return Ports(nic_out, nvlink_out, nic_in, nvlink_in, self.latency_s)


class Message(NamedTuple):
    """A transfer's bytes.

    Each [source ranks, target ranks]. num_bytes: what the target needs of the source, with what stays on its rank.
    nic_bytes, nvlink_bytes: what crosses each link between the two. cross_rail_bytes: what of nic_bytes leaves one rail
    for another. relayed_bytes [expert ranks]: what reaches or leaves an expert rank over NVLink on behalf of its node,
    where a node gets one row for all its ranks.
    """

    num_bytes: Floats
    nic_bytes: Floats
    nvlink_bytes: Floats
    relayed_bytes: Floats
    cross_rail_bytes: Floats

    def times(self, number: int) -> "Message":
        """So many times the bytes."""
        return Message(*(number * num_bytes for num_bytes in self))

    @property
    def crossing(self) -> Floats:
        """Bytes that cross a link between source and target."""
        return self.nic_bytes + self.nvlink_bytes

    def ports(self, nic: Link, nvlink: Link, *, relays_at_target: bool) -> Ports:
        """Bytes over the rate of each port; a target's latency is that of the NIC where bytes reach it over one.

        What is relayed takes the NVLink ports of the expert ranks, which are the targets or the sources.
        """
        at_source, at_target = (0.0, self.relayed_bytes) if relays_at_target else (self.relayed_bytes, 0.0)
        crosses_nic = self.nic_bytes.any(axis=0)
        slowed = self.nic_bytes + self.cross_rail_bytes * (1.0 / nic.cross_rail - 1.0)
        num_sources = np.maximum(np.count_nonzero(self.nic_bytes, axis=0), 1)
        latency_s = np.where(crosses_nic, nic.latency_s, nvlink.latency_s)
        return Ports(
            slowed.sum(axis=1) / nic.bytes_per_s,
            (self.nvlink_bytes.sum(axis=1) + at_source) / nvlink.bytes_per_s,
            slowed.sum(axis=0) / nic.bytes_per_s * (1.0 + nic.incast * np.log2(num_sources)),
            (self.nvlink_bytes.sum(axis=0) + at_target) / nvlink.bytes_per_s,
            np.where(crosses_nic | self.nvlink_bytes.any(axis=0), latency_s, 0.0),
        )


class Load:
    """Expected counts of one micro-batch, by layer."""

    def __init__(
        self, case: Case, placement: Placement, copies: str, recompute: str, chunks: int, routing: Routing
    ) -> None:
        self.case = case
        self.placement = placement
        self.copies = copies
        self.recompute = recompute
        self.chunks = chunks
        self.routing = routing
        self.element_bytes = 4 if case.workload.dtype == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens on one data rank, with its share of the sequences where several ranks share them."""
        return self.case.layout.mbs * self.case.workload.seq_len // self.case.layout.sequence_ranks

    @property
    def chunk_tokens(self) -> float:
        """Tokens of one chunk on one data rank."""
        return self.tokens / self.chunks

    @property
    def all_tokens(self) -> float:
        """Tokens of one chunk on all data ranks of the replica."""
        return self.chunk_tokens * self.placement.data_ranks

    def num_expert_ranks(self, layer: int) -> int:
        """N of a layer. Raises BadInput for a dense layer."""
        return self.placement.by_name[self.placement.home(Kind.EXPERT, layer)].size

    def shares(self, layer: int) -> bool:
        """Whether the layer has shared experts beside its experts, on every expert rank."""
        return self.placement.shared_on == "expert" and has_part(self.case.model, "shared", layer)

    def assignments(self, layer: int) -> Floats:
        """[expert ranks]: (token, expert) pairs of a chunk on each, those of shared experts left out."""
        return self.all_tokens * self.routing.assignments(layer, self.num_expert_ranks(layer))

    def shared_tokens(self, layer: int) -> float:
        """Tokens of a chunk whose shared experts are on one expert rank."""
        return self.all_tokens / self.num_expert_ranks(layer)

    def copies_per_token(self, layer: int) -> Floats:
        """[expert ranks]: rows of a token that are sent to each, its own rank included."""
        num = self.num_expert_ranks(layer)
        copies = "rank" if self.copies == "node" else self.copies
        return self.routing.copies(layer, num, copies, shared=self.shares(layer))

    def rows(self, layer: int) -> Floats:
        """[expert ranks]: rows of a chunk that are dispatched to each, from its own rank too."""
        return self.all_tokens * self.copies_per_token(layer)

    def volume(self, transfer: Action) -> Volume:
        """Symbolic volume of a transfer. Raises BadInput for an action that is no transfer of this placement."""
        action = transfer._replace(microbatch=0, chunk=0)
        if action not in self._volumes:
            model, placement, hop = self.case.model, self.placement, action.kind is Kind.HOP
            if action.layer == 0 and hop and placement.embed != placement.pipeline_ends[0]:
                self._volumes[action] = HIDDEN_ROWS
            elif action.kind in TRANSFERS and 0 <= action.layer - hop < model.num_layers:
                for edge in layer_edges(model, placement, action.layer - hop, self.recompute):
                    if edge.via is not None:
                        self._volumes[edge.via] = edge.volume
            if action not in self._volumes:
                raise BadInput("transfer", str(transfer), "a transfer between the groups of this placement")
        return self._volumes[action]

    @cached_property
    def _volumes(self) -> dict[Action, Volume]:
        return _known_volumes(self.case.model, self.placement, self.recompute)

    def message(self, transfer: Action) -> Message:
        """The bytes of a transfer. Raises BadInput for an action that is no transfer of this placement."""
        action, volume = transfer._replace(microbatch=0, chunk=0), self.volume(transfer)
        source, target = (self.placement.by_name[name] for name in ends(self.placement, transfer))
        nodes = Nodes.of(self.case, self.placement)
        over_nic, over_rails, over_nvlink = _links(source, target, nodes, self.case.cluster.nics_per_node)
        num_bytes, nic_bytes, cross_rail_bytes = np.zeros((3, source.size, target.size))
        experts = target if (action.kind, action.pass_) in EXPERTS_RECEIVE else source
        relayed_bytes = np.zeros(experts.size)
        for term in volume.terms:
            width = term.hidden * self.case.model.hidden_size * self.element_bytes + term.extra_bytes
            rows = self._rows_between(action, term.rows)
            num_bytes += width * rows
            if term.rows is Rows.COPIES and self.copies == "node":
                once, relays = self._once_per_node(action.layer, nodes.node(experts.ranks))
                nic_bytes += width * over_nic * (once if experts is target else once[:, None])
                outside = over_nic.mean(axis=0 if experts is target else 1)
                relayed_bytes += width * outside * self.all_tokens * relays
            else:
                nic_bytes += width * over_nic * rows
                cross_rail_bytes += width * over_rails * rows
        nvlink_bytes = num_bytes * over_nvlink
        return Message(num_bytes, nic_bytes, nvlink_bytes, relayed_bytes, cross_rail_bytes)

    def _once_per_node(self, layer: int, node: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """[expert ranks]: rows of a data rank over each NIC, one a node, dealt to its ranks; and rows a token relayed.

        Such a row stays on its rail, as NVLink takes it on anyway; all ranks being alike, that loads the same ports.
        A node's row arrives at one of its ranks and goes on over NVLink to those that need it: of what a rank needs,
        all but the share that arrives at itself.
        """
        _, place, ranks = np.unique(node, return_inverse=True, return_counts=True)
        reached = self.routing.reached(layer, node, shared=self.shares(layer))
        relays = self.copies_per_token(layer) * (1.0 - 1.0 / ranks[place])
        return self.chunk_tokens * reached / ranks[place], relays

    def _rows_between(self, action: Action, rows: Rows) -> Floats:
        """[source ranks, target ranks]."""
        if rows is Rows.TOKENS:
            return np.eye(self.placement.data_ranks) * self.tokens
        layer = action.layer
        if rows is Rows.COPIES:
            of_token = self.copies_per_token(layer)
        else:
            of_token = self.routing.assignments(layer, self.num_expert_ranks(layer), shared=self.shares(layer))
        between = np.broadcast_to(self.chunk_tokens * of_token, (self.placement.data_ranks, len(of_token)))
        return between if (action.kind, action.pass_) in EXPERTS_RECEIVE else between.T


class _Links(NamedTuple):
    """Whether bytes between two ranks cross each link; all [source ranks, target ranks]."""

    nic: NDArray[np.bool_]
    rails: NDArray[np.bool_]
    nvlink: NDArray[np.bool_]


@lru_cache(maxsize=1024)
def _links(source: Group, target: Group, nodes: Nodes, nics_per_node: int) -> _Links:
    from_rank, to_rank = np.array(source.ranks)[:, None], np.array(target.ranks)[None, :]
    there, here = nodes.slot(from_rank), nodes.slot(to_rank)
    nic = there.node != here.node
    # The number on its node of the NIC that each rank has, alone or with others.
    rails = [each.local * nics_per_node // nodes.gpus_per_node for each in (there, here)]
    return _Links(nic, nic & (rails[0] != rails[1]), ~nic & (from_rank != to_rank))


@lru_cache(maxsize=1024)
def _known_volumes(model: Model, placement: Placement, recompute: str) -> dict[Action, Volume]:
    """Volumes of transfers, shared by all loads of one placement."""
    return {}
