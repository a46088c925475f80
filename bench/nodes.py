"""Which node a rank lies on, and its place there."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bench.case import Case
from bench.placement import Placement

Ranks = NDArray[np.int64]


class Slot(NamedTuple):
    """GPUs: the node of each, and its number on that node (its rail, where every GPU has a NIC)."""

    node: Ranks
    local: Ranks


class Nodes(NamedTuple):
    """How ranks are dealt over nodes of `gpus_per_node`.

    Packed: one node after the other is filled, replica after replica. Strided: neighbouring ranks of a replica, `block`
    of them together, lie on the replica's nodes in turn; a replica has whole nodes then.
    """

    gpus_per_node: int
    replica_size: int
    block: int = 1
    strided: bool = False

    @classmethod
    def of(cls, case: Case, placement: Placement) -> "Nodes":
        """Those of a case; ranks that share sequences stay together."""
        layout = case.layout
        strided = layout.ranks_over_nodes == "strided"
        return cls(case.cluster.gpus_per_node, placement.size, layout.sequence_ranks if strided else 1, strided)

    def slot(self, ranks: ArrayLike) -> Slot:
        """Of global ranks (replica k's begin at k times its size), in their shape."""
        place = np.asarray(ranks, dtype=np.int64)
        if not self.strided:
            return Slot(place // self.gpus_per_node, place % self.gpus_per_node)
        num_nodes = self.replica_size // self.gpus_per_node
        replica, place = np.divmod(place, self.replica_size)
        turn, within = np.divmod(place, self.block)
        return Slot(replica * num_nodes + turn % num_nodes, turn // num_nodes * self.block + within)

    def node(self, ranks: ArrayLike) -> Ranks:
        """The node of each of these global ranks."""
        return self.slot(ranks).node
