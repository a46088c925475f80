"""What a micro-batch puts on each rank: tokens, assignments, rows; and the messages between ranks that come of it."""

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Action, Kind, Pass
from bench.case import Case
from bench.edges import Rows, Volume, edges, ends
from bench.errors import BadInput
from bench.flops import has_part
from bench.placement import Placement
from bench.routing import Routing

Floats = NDArray[np.float64]
EXPERTS_RECEIVE = {(Kind.DISPATCH, Pass.F), (Kind.COMBINE, Pass.B)}


class Message(NamedTuple):
    """A transfer's bytes.

    num_bytes: [source ranks, target ranks], with what stays on its rank; over_nic, over_nvlink: which of it crosses
    which link (neither, where source and target are one rank).
    """

    num_bytes: Floats
    over_nic: NDArray[np.bool_]
    over_nvlink: NDArray[np.bool_]

    @property
    def crossing(self) -> Floats:
        """Bytes that cross a link."""
        return self.num_bytes * (self.over_nic | self.over_nvlink)


class Load:
    """Expected counts of one micro-batch, by layer. Rank r of replica 0 lies on node r // gpus_per_node."""

    def __init__(self, case: Case, placement: Placement, copies: str, routing: Routing) -> None:
        self.case = case
        self.placement = placement
        self.copies = copies
        self.routing = routing
        self.element_bytes = 4 if case.workload.dtype == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens on one data rank."""
        return self.case.layout.mbs * self.case.workload.seq_len

    @property
    def all_tokens(self) -> int:
        """Tokens on all data ranks of the replica."""
        return self.tokens * self.placement.data_ranks

    def num_expert_ranks(self, layer: int) -> int:
        """N of a layer. Raises BadInput for a dense layer."""
        return self.placement.by_name[self.placement.home(Kind.EXPERT, layer)].size

    def shares(self, layer: int) -> bool:
        """Whether the layer has shared experts beside its experts, on every expert rank."""
        return self.placement.shared_on == "expert" and has_part(self.case.model, "shared", layer)

    def assignments(self, layer: int) -> Floats:
        """[expert ranks]: (token, expert) pairs on each, those of shared experts left out."""
        return self.all_tokens * self.routing.assignments(layer, self.num_expert_ranks(layer))

    def shared_tokens(self, layer: int) -> float:
        """Tokens whose shared experts are on one expert rank."""
        return self.all_tokens / self.num_expert_ranks(layer)

    def copies_per_token(self, layer: int) -> Floats:
        """[expert ranks]: rows of a token that are sent to each, its own rank included."""
        num = self.num_expert_ranks(layer)
        return self.routing.copies(layer, num, self.copies, shared=self.shares(layer))

    def rows(self, layer: int) -> Floats:
        """[expert ranks]: rows that are dispatched to each, from its own rank too."""
        return self.all_tokens * self.copies_per_token(layer)

    @cached_property
    def volumes(self) -> Mapping[Action, Volume]:
        """Every transfer of micro-batch 0."""
        graph = edges(self.case.model, self.placement)
        return {edge.via: edge.volume for edge in graph if edge.via is not None}

    def message(self, transfer: Action) -> Message:
        """The bytes of a transfer. Raises BadInput for an action that is no transfer of this placement."""
        action = transfer._replace(microbatch=0, chunk=0)
        if action not in self.volumes:
            raise BadInput("transfer", str(transfer), "a transfer between the groups of this placement")
        source, target = (self.placement.by_name[name] for name in ends(self.placement, action))
        per_node = self.case.cluster.gpus_per_node
        from_rank, to_rank = np.array(source.ranks)[:, None], np.array(target.ranks)[None, :]
        over_nic = from_rank // per_node != to_rank // per_node
        num_bytes = np.zeros((source.size, target.size))
        for term in self.volumes[action].terms:
            width = term.hidden * self.case.model.hidden_size * self.element_bytes + term.extra_bytes
            num_bytes += width * self._rows_between(action, term.rows)
        return Message(num_bytes, over_nic, ~over_nic & (from_rank != to_rank))

    def _rows_between(self, action: Action, rows: Rows) -> Floats:
        """[source ranks, target ranks]."""
        if rows is Rows.TOKENS:
            return np.eye(self.placement.data_ranks) * self.tokens
        layer = action.layer
        if rows is Rows.COPIES:
            of_token = self.copies_per_token(layer)
        else:
            of_token = self.routing.assignments(layer, self.num_expert_ranks(layer), shared=self.shares(layer))
        between = np.tile(self.tokens * of_token, (self.placement.data_ranks, 1))
        return between if (action.kind, action.pass_) in EXPERTS_RECEIVE else between.T
