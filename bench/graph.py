"""Data dependencies as columns: what `bench.edges` says of a model on a placement, for long queues.

Layers whose dependencies differ in nothing but the layer's number are looked at once and shifted.
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import LAYER_STEP, MICROBATCH_STEP, TRANSFERS, Action, Codes, Kind, Pass, pack, unpack
from bench.edges import Edge, Volume, layer_edges, outer_edges
from bench.models import Model
from bench.placement import Placement

Index = NDArray[np.int64]
NONE = -1


class Graph(NamedTuple):
    """Edges of one micro-batch in each direction: codes of both ends and of the transfer, `NONE` where there is none,
    and the number of its volume in `volumes`."""

    src: Codes
    dst: Codes
    via: Codes
    volume: Index
    volumes: tuple[Volume, ...]

    @property
    def actions(self) -> Codes:
        """Every action once, sorted."""
        return np.unique(np.concatenate([self.src, self.dst, self.via[self.via != NONE]]))


@lru_cache(maxsize=16)
def graph_of(model: Model, placement: Placement, recompute: str = "none", chunks: int = 1) -> Graph:
    """`bench.edges.edges` as columns, in another order."""
    layers: dict[Hashable, list[int]] = {}
    for layer in range(model.num_layers):
        layers.setdefault(_likeness(model, placement, layer), []).append(layer)
    volumes: dict[Volume, int] = {}
    pieces = [_piece(list(outer_edges(placement)), np.zeros(1, dtype=np.int64), volumes)]
    for alike in layers.values():
        found = list(layer_edges(model, placement, alike[0], recompute, chunks))
        pieces.append(_piece(found, np.array(alike) - alike[0], volumes))
    src, dst, via, volume = (np.concatenate(column) for column in zip(*pieces, strict=True))
    # What one direction has on a group, the other has on its mirror image: the actions are the same.
    steps = MICROBATCH_STEP * np.arange(placement.directions)[:, None]
    carried = np.where(via == NONE, NONE, via + steps).ravel()
    every = np.tile(volume, placement.directions)
    return Graph((src + steps).ravel(), (dst + steps).ravel(), carried, every, tuple(volumes))


def ends_of(placement: Placement, codes: Codes) -> tuple[Index, Index]:
    """Indices of the groups: where each action stands, and where a transfer arrives (`NONE` for other actions).

    The same as `bench.placement.Placement.home` and `bench.edges.ends`.
    """
    columns = unpack(codes)
    source, target = np.full(len(codes), NONE), np.full(len(codes), NONE)
    index = placement.index
    for direction in range(placement.directions):
        seen = placement.seen_by(direction)
        attention, expert, join, takers = (
            np.array([NONE if name is None else index[name] for name in names])
            for names in (seen.attention, seen.expert, seen.join, seen.pipeline_ends)
        )
        makers = np.concatenate([[index[seen.embed]], join])
        layer = np.minimum(columns.layer, placement.num_layers - 1)
        hop = np.minimum(columns.layer, placement.num_layers)
        there: dict[Kind, tuple[Index, Index | int]] = {
            Kind.EMBED: (makers[:1][layer * 0], NONE),
            Kind.HEAD: (takers[-1:][layer * 0], NONE),
            Kind.ATTENTION: (attention[layer], NONE),
            Kind.JOIN: (join[layer], NONE),
            Kind.EXPERT: (expert[layer], NONE),
            Kind.DISPATCH: (attention[layer], expert[layer]),
            Kind.COMBINE: (expert[layer], join[layer]),
            Kind.RESIDUAL: (attention[layer], join[layer]),
            Kind.HOP: (makers[hop], takers[hop]),
        }
        mine = columns.microbatch % placement.directions == direction
        for kind, (start, end) in there.items():
            chosen = mine & (columns.kind == kind)
            source[chosen], target[chosen] = start[chosen], end if isinstance(end, int) else end[chosen]
    turned = (columns.pass_ == Pass.B) & is_transfer(codes)
    return np.where(turned, target, source), np.where(turned, source, target)


def is_transfer(codes: Codes) -> NDArray[np.bool_]:
    return np.isin(unpack(codes).kind, [int(kind) for kind in TRANSFERS])


def _likeness(model: Model, placement: Placement, layer: int) -> Hashable:
    """Equal for layers whose edges differ in the layer's number alone."""
    here, formed, taken = placement.attention[layer], placement.join[layer], placement.pipeline_ends[layer + 1]
    return model.is_dense(layer), here == formed, formed == taken, here == taken, layer + 1 == model.num_layers


def _piece(found: list[Edge], shifts: Index, volumes: dict[Volume, int]) -> tuple[Codes, Codes, Codes, Index]:
    """Edges of one layer, and of those that are alike."""
    staying = np.array([edge.via is None for edge in found])
    nowhere = Action(Kind.EMBED)
    ends = zip(*((edge.src, edge.dst, edge.via or nowhere) for edge in found), strict=True)
    src, dst, via = (_shifted(pack(column), shifts) for column in ends)
    volume = np.array([volumes.setdefault(edge.volume, len(volumes)) for edge in found])
    every = np.tile(volume, len(shifts))
    return src, dst, np.where(np.tile(staying, len(shifts)), NONE, via), every


def _shifted(codes: Codes, shifts: Index) -> Codes:
    """[shifts x codes]: with the layer moved on; embedding and head are of no layer."""
    moves = ~np.isin(unpack(codes).kind, (Kind.EMBED, Kind.HEAD))
    return (codes + LAYER_STEP * moves * shifts[:, None]).ravel()
