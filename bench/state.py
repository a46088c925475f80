"""Static state and the end of the step: parameters of a group, who shares them, their gradient sums and update."""

from collections.abc import Hashable
from functools import lru_cache
from math import log2
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.assumptions import Assumptions
from bench.case import Case
from bench.flops import Part, has_part, parameters
from bench.memory import Recipe, state_bytes
from bench.models import Model
from bench.nodes import Nodes
from bench.placement import Group, Placement
from bench.sequence import CUT


class Shared(NamedTuple):
    """Parameters of a rank of a group, and the ranks of all replicas that hold the same.

    These are every `step`-th rank of each of `holders`, from the rank's own place on, in every replica.
    """

    num_params: int
    holders: tuple[Group, ...]
    step: int
    num_peers: int


class State:
    """Bytes and seconds of parameters, per rank of a group; all ranks of a group hold equally many.

    Gradients are summed over the ranks that hold the same parameters. Where the optimizer's state is sharded over
    them, a reduce-scatter, the update of a shard and an all-gather of the weights take the place of an all-reduce.
    """

    def __init__(
        self, case: Case, placement: Placement, num_replicas: int, assumed: Assumptions, recipe: Recipe
    ) -> None:
        self.case = case
        self.placement = placement
        self.num_replicas = num_replicas
        self.assumed = assumed
        self.recipe = recipe
        # What it all depends on, in which many cases are alike.
        layout = case.layout
        shares = (layout.tp, layout.cp, layout.shard_state, layout.offloads_state)
        self._known = _known((case.model, case.cluster, shares, placement, num_replicas, assumed, recipe))

    def shared(self, group: str) -> list[Shared]:
        """What the ranks of a group hold, by who else holds it."""
        if ("shared", group) not in self._known:
            self._known["shared", group] = self._shared(self.placement.by_name[group])
        found: list[Shared] = self._known["shared", group]
        return found

    def static_bytes(self, group: str) -> float:
        """What a rank holds from the first action to the last: the sum of `static_parts`."""
        if ("bytes", group) not in self._known:
            self._known["bytes", group] = sum(self.static_parts(group).values())
        return float(self._known["bytes", group])

    def static_parts(self, group: str) -> dict[str, float]:
        """Bytes of `static_bytes` by what they are."""
        parts = dict.fromkeys(("weights", "gradients", "optimizer state"), 0.0)
        for each in self.shared(group):
            resident = (each.num_params * self.recipe.weight_bytes, each.num_params * self.recipe.grad_bytes)
            whole = state_bytes(each.num_params, self.recipe, shards=self._shards(each))
            for name, size in zip(parts, (*resident, whole - sum(resident)), strict=True):
                parts[name] += size
        if self.case.layout.offloads_state:
            parts["optimizer state"] = 0.0
        communicators = sum(each.num_peers > 1 for each in self.shared(group)) + (self.placement.size > 1)
        if group in self.placement.attention:
            communicators += (self.case.layout.tp > 1) + (self.case.layout.cp > 1)
        return parts | {"reserve": self.reserve_bytes(communicators)}

    def reserve_bytes(self, num_communicators: int) -> float:
        """Memory that no tensor can have: context, communicators' buffers, what the allocator cannot use.

        A rank has one communicator for its exchanges, one for each kind of gradient sum, and one each for the ranks
        that share its heads and its sequences.
        """
        assumed, gpu = self.assumed, self.case.cluster.gpu
        buffers = num_communicators * assumed.communicator_bytes
        return assumed.context_bytes + buffers + assumed.fragmentation * gpu.memory_bytes

    def update_s(self, group: str) -> float:
        """AdamW is bound by memory: gradient read for the clip norm, read and set to zero, main weight and two moments
        read and written, weight written.

        State that lives with the host streams through the GPU: read over the link while what is done is written back.
        """
        if ("update", group) not in self._known:
            params = sum(each.num_params / self._shards(each) for each in self.shared(group))
            self._known["update", group] = self.update_of(params)
        return float(self._known["update", group])

    def update_of(self, params: float) -> float:
        """`update_s` of a rank that updates so many parameters."""
        recipe = self.recipe
        main = 2 * recipe.main_weight_bytes or recipe.weight_bytes
        per_param = 3 * recipe.grad_bytes + main + 4 * recipe.moment_bytes + recipe.weight_bytes
        gpu = self.case.cluster.gpu
        seconds = params * per_param / (gpu.hbm_bytes_per_s * self.assumed.optimizer)
        if not self.case.layout.offloads_state:
            return seconds
        streamed = params * (recipe.main_weight_bytes + 2 * recipe.moment_bytes)
        return max(seconds, streamed / (gpu.host_bytes_per_s * self.assumed.host_link))

    def sync_bytes(self, group: str) -> float:
        """Bytes that a rank sends: a ring sends (n - 1) / n of the data once to reduce it and once to spread it."""
        return sum(self._ring_bytes(each) for each in self.shared(group))

    def sync_s(self, group: str) -> float:
        """Rings one after the other; the latency is that of two trees over the peers."""
        key = "sum", self.case.layout.ranks_over_nodes, group
        if key not in self._known:
            self._known[key] = self._sync_s(group)
        return float(self._known[key])

    def _sync_s(self, group: str) -> float:
        total = 0.0
        for each in self.shared(group):
            if each.num_peers > 1:
                rate, latency = self._link(self._peers(each))
                total += self._ring_bytes(each) / rate
                total += 2 * log2(each.num_peers) * (latency + self.assumed.transfer_s)
        return total

    def _ring_bytes(self, each: Shared) -> float:
        num_peers = each.num_peers
        spread = self.recipe.weight_bytes if self.case.layout.shard_state else self.recipe.grad_bytes
        return each.num_params * (self.recipe.grad_bytes + spread) * (num_peers - 1) / num_peers

    def _link(self, peers: NDArray[np.int64]) -> tuple[float, float]:
        """Bytes/s of a rank in the slowest of several rings, and seconds of latency.

        A node's NICs work together for one ring: as many of them as it has GPUs in the ring.
        """
        cluster = self.case.cluster
        nvlink = cluster.gpu.nvlink_bytes_per_s * self.assumed.nvlink
        nic = cluster.nic_bytes_per_s_per_gpu * self.assumed.nic_collective
        node = Nodes.of(self.case, self.placement).node(peers)
        # Of every ring, each node that it touches, and how many GPUs it has there.
        num_nodes = int(node.max()) + 1
        touched, on_node = np.unique(np.arange(len(node))[:, None] * num_nodes + node, return_counts=True)
        begins = np.flatnonzero(np.diff(touched // num_nodes, prepend=-1))
        across = np.diff(begins, append=len(touched)) > 1
        fewest, most = np.minimum.reduceat(on_node, begins), np.maximum.reduceat(on_node, begins)
        rate = np.minimum(np.where(across, fewest * nic, np.inf), np.where(most > 1, nvlink, np.inf)).min()
        return float(rate), cluster.nic_latency_s if across.any() else cluster.nvlink_latency_s

    def _shards(self, each: Shared) -> int:
        return each.num_peers if self.case.layout.shard_state else 1

    def _peers(self, each: Shared) -> NDArray[np.int64]:
        """[rings, peers]: ranks that sum the same gradients."""
        offsets = np.arange(self.num_replicas)[:, None] * self.placement.size
        same = [np.concatenate([holder.ranks[i :: each.step] for holder in each.holders]) for i in range(each.step)]
        return np.stack([(offsets + ranks).ravel() for ranks in same])

    def _shared(self, group: Group) -> list[Shared]:
        holders = self.placement.holders(group.name)
        # With two directions, a group has what is its own in either, and so has its mirror image.
        known = _counts(self.case.model, self.placement, self.case.layout.tp > 1)
        counts = [known[holder.name] for holder in holders]
        tp = self.case.layout.tp

        def shared(num_params: int, step: int) -> Shared:
            return Shared(num_params, holders, step, self.num_replicas * sum(h.size // step for h in holders))

        found = [
            shared(sum(each.replicated for each in counts), 1),
            shared(sum(each.cut for each in counts) // tp, tp),  # every tp-th rank has the same heads
            shared(sum(each.experts for each in counts) // group.size, group.size),
            shared(sum(each.shared_experts for each in counts), 1),
        ]
        return [each for each in found if each.num_params]


@lru_cache(maxsize=1024)
def _known(cases: Hashable) -> dict[tuple[str, ...], Any]:
    """What was found out about states that are alike, by what it is and group."""
    return {}


@lru_cache(maxsize=1024)
def _counts(model: Model, placement: Placement, cuts: bool) -> dict[str, "_Counts"]:
    """Parameters of each group in one direction: held by every rank, cut over tp ranks (where `cuts`), divided over
    all, and shared experts."""
    counts = {group.name: _Counts() for group in placement.groups}
    known: dict[tuple[Part, bool], int] = {}

    def size(part: Part, layer: int) -> int:
        # Layers differ in whether their FFN is dense, and in nothing else.
        key = part, model.is_dense(layer)
        if key not in known:
            known[key] = sum(parameters(model, part, layer).values()) if has_part(model, part, layer) else 0
        return known[key]

    on_attention: tuple[Part, ...] = ("attention", "router", "dense_ffn")
    on_attention += ("shared",) if placement.shared_on == "attention" else ()
    cut = sum(n for name, n in parameters(model, "attention", 0).items() if name in CUT) if cuts else 0
    for layer in range(placement.num_layers):
        counts[placement.attention[layer]].cut += cut
        counts[placement.attention[layer]].replicated -= cut
        for part in on_attention:
            counts[placement.attention[layer]].replicated += size(part, layer)
        expert = placement.expert[layer]
        if expert is not None:
            counts[expert].experts += size("expert", layer)
            if placement.shared_on == "expert":
                counts[expert].shared_experts += size("shared", layer)
    counts[placement.embed].replicated += size("embed", 0)
    counts[placement.head].replicated += size("head", 0)
    if model.tied_head and placement.embed not in (holder.name for holder in placement.holders(placement.head)):
        # A tied head away from the embedding is a second copy of it.
        counts[placement.head].replicated += size("embed", 0)
    return counts


class _Counts:
    """Numbers of parameters of a group."""

    def __init__(self) -> None:
        self.replicated = self.cut = self.experts = self.shared_experts = 0
