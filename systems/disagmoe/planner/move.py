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
from systems.disagmoe.placement import place

Floats = NDArray[np.float64]


class Move(NamedTuple):
    """Bytes over all GPUs; seconds of the busiest port, at the rate of a GPU's own NIC (NVLink on one node)."""

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
    received, sent = np.zeros(cluster.num_gpus), np.zeros(cluster.num_gpus)
    for part, layer in _things(model):
        size = _size(model, part, layer)
        if not size:
            continue
        ways = [_held(case, placement, part, layer) for case, placement in ((before, old), (after, new))]
        _add(received, sent, ways[0], ways[1], size / _num_items(model, part), recipe)
    rate = cluster.nic_bytes_per_s_per_gpu * assumptions.nic_many_to_many
    if cluster.num_nodes == 1:
        rate = cluster.gpu.nvlink_bytes_per_s * assumptions.nvlink
    return Move(float(received.sum()), float(max(received.max(), sent.max())) / rate)


def _things(model: Model) -> list[tuple[Part, int]]:
    layers: tuple[Part, ...] = ("attention", "router", "dense_ffn", "shared", "expert")
    found: list[tuple[Part, int]] = [("embed", 0), ("head", 0)]
    return found + [(part, layer) for layer in range(model.num_layers) for part in layers]


def _size(model: Model, part: Part, layer: int) -> int:
    return sum(parameters(model, part, layer).values()) if has_part(model, part, layer) else 0


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


def _held(case: Case, placement: Placement, part: Part, layer: int) -> _Held:
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


def _add(received: Floats, sent: Floats, old: _Held, new: _Held, item_params: float, recipe: Recipe) -> None:
    """Adds one thing's traffic. Weights are held whole by every holder, optimizer state by shares."""
    state_bytes = item_params * (recipe.main_weight_bytes + 2 * recipe.moment_bytes)
    weight_bytes = item_params * recipe.weight_bytes
    both = _overlap(old.items, new.items)
    lacks_weights = weight_bytes * (_length(new.items) - both)
    lacks_state = state_bytes * (_length(new.items) * _length(new.share) - both * _overlap(old.share, new.share))
    received += lacks_weights + lacks_state
    # Every holder sends an equal part of what others lack: they hold equally much.
    holders = old.holders()
    sent[holders] += float((lacks_weights + lacks_state).sum()) / int(holders.sum())
