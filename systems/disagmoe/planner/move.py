"""What it takes to go from one layout to another while training: weights and optimizer state that change GPUs.

Every GPU holds a rectangle of each layer: of attention all weights and its shard of the optimizer's state, of the
experts a run of experts and its shard of theirs. A GPU receives what it will hold less what it holds; who holds a thing
sends it, in equal shares where several do.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.assumptions import Assumptions
from bench.case import Case, batch_of
from bench.cost import Costs
from bench.flops import Part, has_part, parameters
from bench.memory import Recipe
from bench.models import Model
from bench.placement import Group, Placement
from bench.sequence import CUT
from systems.disagmoe.placement import place

Floats = NDArray[np.float64]


class Move(NamedTuple):
    """Bytes that GPUs receive, all together; seconds of the busiest port.

    Between GPUs that is at the rate of a GPU's own NIC (NVLink on one node). State that the host holds before or after
    (`offload`) passes its GPU's link to the host as well, while other bytes travel.
    """

    total_bytes: float
    seconds: float


STAYS = Move(0.0, 0.0)


@dataclass(frozen=True)
class _Held:
    """Of one thing (a layer's attention, or its experts) on every GPU: [GPUs, 2] intervals, empty where none is held.

    items: of the thing's items (experts; one for attention). share: of each item's optimizer state.
    """

    items: Floats
    share: Floats

    def holders(self) -> NDArray[np.bool_]:
        return np.asarray(self.items[:, 1] > self.items[:, 0])


def move(before: Case, after: Case, assumptions: Assumptions) -> Move:
    """Bytes and seconds to go from the layout of one case to that of another, of equal model and cluster.

    Gradients do not travel: a move happens between steps. Nothing else runs meanwhile.
    """
    model, cluster = before.model, before.cluster
    old, new = place(model, before.layout), place(model, after.layout)
    recipe = Costs(before, old, recompute=before.layout.recompute, assumptions=assumptions).recipe
    traffic = _Traffic.of(cluster.num_gpus, recipe, before.layout.offloads_state, after.layout.offloads_state)
    for part, layer in _things(model):
        for cut in (False, True) if part == "attention" else (False,):
            size = _size(model, part, layer, cut)
            if size:
                ways = [_held(case, at, part, layer, cut) for case, at in ((before, old), (after, new))]
                traffic.add(ways[0], ways[1], size / _num_items(model, part))
    rate = cluster.nic_bytes_per_s_per_gpu * assumptions.nic_many_to_many
    if cluster.num_nodes == 1:
        rate = cluster.gpu.nvlink_bytes_per_s * assumptions.nvlink
    ports_s = max(traffic.received.max(), traffic.sent.max()) / rate
    host_s = 0.0
    if traffic.host.any():
        host_s = traffic.host.max() / (cluster.gpu.host_bytes_per_s * assumptions.host_link)
    return Move(float(traffic.received.sum()), float(max(ports_s, host_s)))


def _things(model: Model) -> list[tuple[Part, int]]:
    layers: tuple[Part, ...] = ("attention", "router", "dense_ffn", "shared", "expert")
    found: list[tuple[Part, int]] = [("embed", 0), ("head", 0)]
    return found + [(part, layer) for layer in range(model.num_layers) for part in layers]


def _size(model: Model, part: Part, layer: int, cut: bool) -> int:
    """Parameters of a thing; of attention, those that tensor parallelism divides (`cut`) or the others."""
    if not has_part(model, part, layer):
        return 0
    return sum(n for name, n in parameters(model, part, layer).items() if part != "attention" or (name in CUT) == cut)


def _num_items(model: Model, part: Part) -> int:
    return model.num_experts if part == "expert" else 1


def _home(placement: Placement, part: Part, layer: int) -> Group:
    if part in ("embed", "head"):
        name = placement.embed if part == "embed" else placement.head
    elif part == "expert" or (part == "shared" and placement.shared_on == "expert"):
        name = placement.expert[layer] or placement.attention[layer]
    else:
        name = placement.attention[layer]
    return placement.by_name[name]


def _held(case: Case, placement: Placement, part: Part, layer: int, cut: bool) -> _Held:
    """Who holds what of one thing."""
    gpus = case.cluster.num_gpus
    num_replicas = batch_of(case, placement).num_replicas
    group = _home(placement, part, layer)
    ranks = (np.arange(num_replicas)[:, None] * placement.size + np.array(group.ranks)).ravel()
    within = np.tile(np.arange(group.size), num_replicas)
    replica = np.repeat(np.arange(num_replicas), group.size)
    items, share = np.zeros((gpus, 2)), np.zeros((gpus, 2))
    if part == "expert":
        each = case.model.num_experts // group.size
        items[ranks] = np.stack([within * each, (within + 1) * each], axis=1)
        place_of, peers = replica, num_replicas
    elif cut:
        tp = case.layout.tp
        items[ranks] = np.stack([within % tp / tp, (within % tp + 1) / tp], axis=1)
        place_of, peers = replica * (group.size // tp) + within // tp, num_replicas * group.size // tp
    else:
        items[ranks] = (0.0, 1.0)
        place_of, peers = replica * group.size + within, num_replicas * group.size
    if not case.layout.shard_state:
        place_of, peers = np.zeros_like(place_of), 1
    share[ranks] = np.stack([place_of / peers, (place_of + 1) / peers], axis=1)
    return _Held(items, share)


def _overlap(a: Floats, b: Floats) -> Floats:
    """[GPUs]: length of the intersection of two intervals."""
    low, high = np.maximum(a[:, 0], b[:, 0]), np.minimum(a[:, 1], b[:, 1])
    return np.maximum(0.0, high - low)


def _length(a: Floats) -> Floats:
    return np.asarray(a[:, 1] - a[:, 0])


class _Traffic(NamedTuple):
    """Bytes of each GPU: received and sent by its port, and over its link to the host in the busier direction."""

    received: Floats
    sent: Floats
    host: Floats
    recipe: Recipe
    from_host: bool
    to_host: bool

    @classmethod
    def of(cls, gpus: int, recipe: Recipe, from_host: bool, to_host: bool) -> "_Traffic":
        return cls(np.zeros(gpus), np.zeros(gpus), np.zeros(gpus), recipe, from_host, to_host)

    def add(self, old: _Held, new: _Held, item_params: float) -> None:
        """Adds one thing's. Weights are held whole by every holder, optimizer state by shares."""
        state_bytes = item_params * (self.recipe.main_weight_bytes + 2 * self.recipe.moment_bytes)
        weight_bytes = item_params * self.recipe.weight_bytes
        both = _overlap(old.items, new.items)
        lacks_weights = weight_bytes * (_length(new.items) - both)
        stays = state_bytes * both * _overlap(old.share, new.share)
        will_hold = state_bytes * _length(new.items) * _length(new.share)
        lacks_state = will_hold - stays
        self.received[:] += lacks_weights + lacks_state
        # Every holder sends an equal part of what others lack: they hold equally much.
        holders = old.holders()
        self.sent[holders] += float((lacks_weights + lacks_state).sum()) / int(holders.sum())
        # State that stays passes the link where it changes sides.
        changes = stays if self.from_host != self.to_host else 0.0
        arrives = lacks_state + changes if self.to_host else 0.0
        leaves = float(lacks_state.sum()) / int(holders.sum()) * holders + changes if self.from_host else 0.0
        self.host[:] += np.maximum(arrives, leaves)
