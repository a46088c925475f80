"""Which token goes to which expert rank, and how what comes back is added up: pure functions, no communication.

A data rank's T tokens have k experts each; expert e is local expert e mod (experts per rank) of expert rank
e // (experts per rank). A (token, expert) *assignment* has the number t * k + j. Shared experts that the expert ranks
compute are one more assignment of every token, number T * k + t, of weight 1: token t of data rank i is dealt to
expert rank (i * T + t) mod N, so that every expert rank gets as many, to one, from every data rank. Their slot is the
one behind the routed experts.

A message from a data rank to an expert rank is rows of u and *pairs* (row in this message, weight), one an
assignment, sorted by slot. With copies "rank" a token has one row a message however many of its experts live there;
with copies "expert" every assignment has a row of its own. Where a micro-batch passes the experts in chunks, all of
this is of one chunk, and T its tokens. Nothing here waits for a GPU: sizes that depend on the
routing come in as host numbers, and where they are not known yet tensors have their largest size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.execute.kernels import kernels

HostCounts = NDArray[np.int32]


@dataclass(frozen=True)
class Deal:
    """How the tokens of data rank `data_rank` are dealt out over the `num_ranks` expert ranks of a layer."""

    num_ranks: int
    experts_per_rank: int
    copies: str
    data_rank: int
    shared: bool = False

    @property
    def num_slots(self) -> int:
        return self.experts_per_rank + self.shared


class RowMap(NamedTuple):
    """The tokens whose rows the messages hold.

    token_index: int64, messages one after another; longer than the sum of the row counts where tokens share rows.
    row_counts: int32 [N], rows of every message.
    places: int32 [T, K], where a token's rows stand in `token_index`, as many as any token may have; -1 for none.
    """

    token_index: Tensor
    row_counts: Tensor
    places: Tensor


class Route(NamedTuple):
    """Everything about the messages of one data rank.

    rows: see `RowMap`.
    pair_row: int32 [A], every pair's row in its message; messages one after another, pairs by slot.
    order: int64 [A], every pair's assignment number.
    counts: int32 [N, 1 + slots], rows of every message, then its pairs of every slot.
    """

    rows: RowMap
    pair_row: Tensor
    order: Tensor
    counts: Tensor


class _Assignments(NamedTuple):
    token: Tensor  # int64 [A]
    rank: Tensor
    slot: Tensor


def route(expert_ids: Tensor, deal: Deal) -> Route:
    """The messages for expert ids [T, k] of one data rank."""
    assigned = _assignments(expert_ids, deal)
    num_bins = deal.num_ranks * deal.num_slots
    bins = assigned.rank * deal.num_slots + assigned.slot
    # A radix sort takes as many passes as the keys have bytes.
    ascending, order = bins.to(torch.int16 if num_bins < 2**15 else torch.int32).sort(stable=True)
    pairs = torch.zeros(num_bins, dtype=torch.int32, device=bins.device)
    pairs.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32))
    pairs = pairs.view(deal.num_ranks, deal.num_slots)
    rank = ascending.long() // deal.num_slots
    if deal.copies == "expert":
        places = _places_of_assignments(order, expert_ids.shape)
        rows = RowMap(assigned.token[order], pairs.sum(dim=1, dtype=torch.int32), places)
        first = rows.row_counts.cumsum(0) - rows.row_counts
        pair_row = torch.arange(len(order), device=order.device) - first[rank]
    else:
        rows, number = _distinct_rows(assigned, expert_ids.shape[0], deal)
        pair_row = number[rank, assigned.token[order]]
    counts = torch.cat((rows.row_counts[:, None], pairs), dim=1)
    return Route(rows, pair_row.to(torch.int32), order, counts)


def row_map(expert_ids: Tensor, deal: Deal) -> RowMap:
    """`route(...).rows`, for those who only have to add up what comes back."""
    if deal.copies == "expert":
        return route(expert_ids, deal).rows
    return _distinct_rows(_assignments(expert_ids, deal), expert_ids.shape[0], deal)[0]


def _assignments(expert_ids: Tensor, deal: Deal) -> _Assignments:
    num_tokens, top_k = expert_ids.shape
    ids = expert_ids.reshape(-1).long()
    rank = ids // deal.experts_per_rank
    slot = ids - rank * deal.experts_per_rank
    token = torch.arange(num_tokens * top_k, device=ids.device) // top_k
    if deal.shared:
        own = torch.arange(num_tokens, device=ids.device)
        token = torch.cat((token, own))
        rank = torch.cat((rank, (own + deal.data_rank * num_tokens) % deal.num_ranks))
        slot = torch.cat((slot, torch.full_like(own, deal.experts_per_rank)))
    return _Assignments(token, rank, slot)


def _distinct_rows(assigned: _Assignments, num_tokens: int, deal: Deal) -> tuple[RowMap, Tensor]:
    """One row for every (rank, token), in the order of the tokens; and the row's number in its message [N, T]."""
    there = torch.zeros(deal.num_ranks * num_tokens, dtype=torch.bool, device=assigned.token.device)
    there.index_fill_(0, assigned.rank * num_tokens + assigned.token, True)
    most = min(len(assigned.token), len(there))
    # What is not there is written behind the end; the number of rows is not known on the host.
    place = torch.where(there, there.cumsum(0) - 1, most)
    tokens = torch.arange(num_tokens, device=there.device).repeat(deal.num_ranks)
    token_index = torch.zeros(most + 1, dtype=torch.int64, device=there.device).scatter_(0, place, tokens)
    places = torch.where(there, place, -1).view(deal.num_ranks, num_tokens).t().to(torch.int32).contiguous()
    there = there.view(deal.num_ranks, num_tokens)
    row_counts = there.sum(dim=1, dtype=torch.int32)
    return RowMap(token_index[:most], row_counts, places), there.cumsum(1) - 1


def _places_of_assignments(order: Tensor, of_ids: Sequence[int]) -> Tensor:
    """int32 [T, k, and one where experts are shared]: where each of a token's assignments stands in the order."""
    num_tokens, top_k = of_ids
    numbers = torch.arange(len(order), dtype=torch.int32, device=order.device)
    place = torch.empty_like(numbers).scatter_(0, order, numbers)
    routed = place[: num_tokens * top_k].view(num_tokens, top_k)
    return torch.cat((routed, place[num_tokens * top_k :].view(num_tokens, -1)), dim=1)


class Merged(NamedTuple):
    """Received pairs in the order of the slots.

    permutation: int64 [P], their numbers among the received.
    rows: int64 [P], the row of every pair among all that were received.
    weights: fp32 [P].
    """

    permutation: Tensor
    rows: Tensor
    weights: Tensor


class Inbound:
    """What an expert rank received from M data ranks: rows and pairs one source after another.

    Args:
        counts: host int [M, 1 + slots], as in `Route.counts`.
    """

    def __init__(self, counts: HostCounts) -> None:
        self._pairs = counts[:, 1:].astype(np.int64)
        self.rows_from: list[int] = counts[:, 0].tolist()
        self.pairs_from: list[int] = self._pairs.sum(axis=1).tolist()
        self.slot_counts: list[int] = self._pairs.sum(axis=0).tolist()

    def merge(self, pairs: Tensor) -> Merged:
        """What the sources sent, int32 [P, 2] one after another, sorted by slot."""
        sizes = self._pairs.T.ravel()  # slot after slot, source after source
        received_at = (np.cumsum(self._pairs) - self._pairs.ravel()).reshape(self._pairs.shape).T.ravel()
        merged_at = np.cumsum(sizes) - sizes
        row_starts = np.tile(np.cumsum(self.rows_from) - self.rows_from, self._pairs.shape[1])
        segments = torch.from_numpy(np.stack((sizes, received_at, merged_at, row_starts)).astype(np.int64))
        segments = to_device(segments, pairs.device)
        fused = kernels("merge", pairs)
        if fused is not None:
            return Merged(*fused.merge(pairs, segments, int(sizes.max())))
        size, received, merged, row_start = segments
        shift, offset = (
            torch.repeat_interleave(values, size, output_size=len(pairs)) for values in (received - merged, row_start)
        )
        permutation = torch.arange(len(pairs), device=pairs.device) + shift
        rows, weights = pairs[permutation].unbind(1)
        return Merged(permutation, rows.long() + offset, weights.contiguous().view(torch.float32))


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for the device."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def all_weights(weights: Tensor, deal: Deal) -> Tensor:
    """fp32 [A]: the weights [T, k] of the routed assignments, then ones for the shared."""
    flat = weights.reshape(-1).float()
    return torch.cat((flat, flat.new_ones(weights.shape[0]))) if deal.shared else flat


def weight_gradients(pair_gradients: Tensor, order: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """Gradients of the weights [T, k] from those of the pairs [A]; those of shared assignments are dropped."""
    by_assignment = torch.empty_like(pair_gradients).index_copy_(0, order, pair_gradients)
    return by_assignment[: num_tokens * top_k].view(num_tokens, top_k)


def add_rows(base: Tensor | None, rows: Tensor, row_map: RowMap) -> Tensor:
    """base [T, H] + rows [R, H], each to its token; summed in fp32 at least, rounded once.

    Args:
        base: zeros where not given.
        rows: those of the tokens `row_map.token_index`, which may be longer.
    """
    fused = kernels("rows", rows)
    if fused is not None:
        out: Tensor = fused.add_rows(None if base is None else base.contiguous(), rows.contiguous(), row_map.places)
        return out
    wide = torch.promote_types(rows.dtype, torch.float32)
    if base is None:
        total = torch.zeros(row_map.places.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    else:
        total = base.to(wide, copy=True)
    return total.index_add_(0, row_map.token_index[: rows.shape[0]], rows.to(wide)).to(rows.dtype)


def split(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of neighbouring rows, `sizes[i]` each."""
    stops = list(accumulate(sizes))
    return [whole[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
