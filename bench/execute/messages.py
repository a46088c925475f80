"""The transfer actions: what a message holds, how large it is, and what becomes of it on arrival.

The two ends of a transfer agree on sizes in one of three ways: they are those of a micro-batch (residual, hop), both
ends know them from the forward pass (combine, all backward transfers), or counts go ahead (dispatch and residual,
forward).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.action import Action, Kind, Pass
from bench.edges import ends
from bench.execute.compute import RowCounts
from bench.execute.exchange import HostCounts, Inbound, all_weights, row_map, split
from bench.execute.home import Home
from bench.execute.streams import HostCopy
from bench.execute.transport import COUNTS_PART, PARTS_PER_OPERATION, Packet
from bench.execute.values import Values


class Incoming(NamedTuple):
    """Packets to receive, and what puts them among the values once they are there, in the current stream."""

    packets: list[Packet]
    deliver: Callable[[], None]


class Messages:
    """Packs and unpacks the messages of one rank in one step. `number` is the SEND's operation number, on both ends."""

    def __init__(self, home: Home, values: Values) -> None:
        self.home, self.values = home, values
        self._pack = {
            (Kind.DISPATCH, Pass.F): self._pack_dispatch,
            (Kind.DISPATCH, Pass.R): lambda layer, m, c: [self._pack_rows("u_again", layer, m, c)],
            (Kind.COMBINE, Pass.F): self._pack_outputs,
            (Kind.COMBINE, Pass.B): self._pack_gradients,
            (Kind.DISPATCH, Pass.B): self._pack_dispatch_gradients,
            (Kind.RESIDUAL, Pass.F): self._pack_residual,
            (Kind.RESIDUAL, Pass.B): self._pack_residual_gradient,
            (Kind.HOP, Pass.F): lambda layer, m, c: [[self.values.take("x", layer, m)]],
            (Kind.HOP, Pass.B): lambda layer, m, c: [[self.values.take("g", layer, m)]],
        }
        self._expect = {
            (Kind.DISPATCH, Pass.R): lambda layer, m, c: self._expect_from_sources("rows_again", layer, m, c),
            (Kind.COMBINE, Pass.F): self._expect_outputs,
            (Kind.COMBINE, Pass.B): lambda layer, m, c: self._expect_from_sources("g_rows", layer, m, c),
            (Kind.DISPATCH, Pass.B): self._expect_dispatch_gradients,
            (Kind.RESIDUAL, Pass.B): lambda layer, m, c: self._expect_hidden("Gh", layer, m),
            (Kind.HOP, Pass.F): lambda layer, m, c: self._expect_hidden("x", layer, m),
            (Kind.HOP, Pass.B): lambda layer, m, c: self._expect_hidden("g", layer, m),
        }

    def outgoing_counts(self, action: Action, number: int) -> list[Packet]:
        """Counts that go ahead of a payload; waits until they are on the host."""
        if not _counts_go_ahead(action):
            return []
        chunks = range(self.home.chunks) if action.kind is Kind.RESIDUAL else (action.chunk,)
        every = [self.values.peek("route", action.layer, action.microbatch, c).counts.get() for c in chunks]
        counts = every[0] if action.kind is Kind.DISPATCH else np.concatenate([one[:, 0] for one in every])[None]
        tag = number * PARTS_PER_OPERATION + COUNTS_PART
        ranks = self._others(action, target=True)
        return [Packet(rank, tag, torch.from_numpy(row)) for rank, row in zip(ranks, counts, strict=True)]

    def incoming_counts(self, action: Action, number: int) -> tuple[HostCounts, list[Packet]]:
        """Where counts that go ahead will be, a row a source, and the packets that put them there."""
        ranks = self._others(action, target=False) if _counts_go_ahead(action) else []
        deal = self.home.deal(action.layer) if ranks else None
        width = 0
        if deal is not None:
            width = deal.num_ranks * self.home.chunks if action.kind is Kind.RESIDUAL else 1 + deal.num_slots
        counts = np.zeros((len(ranks), width), dtype=np.int32)
        tag = number * PARTS_PER_OPERATION + COUNTS_PART
        return counts, [Packet(rank, tag, torch.from_numpy(row)) for rank, row in zip(ranks, counts, strict=True)]

    def prepare(self, action: Action) -> None:
        """Whatever of packing needs no counts, in the current stream: done while the host waits for them."""
        if (action.kind, action.pass_) == (Kind.DISPATCH, Pass.F):
            self._prepare_dispatch(action.layer, action.microbatch, action.chunk)

    def pack(self, action: Action, number: int) -> list[Packet]:
        """The payload, in the current stream."""
        parts = self._pack[action.kind, action.pass_](action.layer, action.microbatch, action.chunk)
        return _packets(self._others(action, target=True), number, parts)

    def expect(self, action: Action, number: int, counts: HostCounts) -> Incoming:
        """Memory for a payload; waits until its size is known.

        Args:
            counts: what `incoming_counts` announced, once it is there.
        """
        layer, m, c = action.layer, action.microbatch, action.chunk
        match action.kind, action.pass_:
            case Kind.DISPATCH, Pass.F:
                parts, deliver = self._expect_dispatch(layer, m, c, counts)
            case Kind.RESIDUAL, Pass.F:
                parts, deliver = self._expect_residual(layer, m, counts)
            case kind, pass_:
                parts, deliver = self._expect[kind, pass_](layer, m, c)
        return Incoming(_packets(self._others(action, target=False), number, parts), deliver)

    def _others(self, action: Action, *, target: bool) -> list[int]:
        """Global ranks of the other end, as many as there are messages."""
        ranks = self.home.ranks(ends(self.home.placement, action)[target])
        return [ranks[self.home.index]] if action.kind in (Kind.RESIDUAL, Kind.HOP) else ranks

    def _prepare_dispatch(self, layer: int, m: int, c: int) -> None:
        (rows, pair_row, order, _), _ = self.values.peek("route", layer, m, c)
        weights = all_weights(self.values.take("weights", layer, m, c), self.home.deal(layer))
        pairs = torch.stack((pair_row, weights[order].view(torch.int32)), dim=1)
        u = self.values.take("u", layer, m, c).index_select(0, rows.token_index)
        self.values.put("outgoing", layer, m, (u, pairs), chunk=c)

    def _pack_dispatch(self, layer: int, m: int, c: int) -> _Parts:
        counts = self.values.peek("route", layer, m, c).counts.get()
        rows, pairs = self.values.take("outgoing", layer, m, c)
        return [split(rows, counts[:, 0].tolist()), split(pairs, counts[:, 1:].sum(axis=1).tolist())]

    def _pack_rows(self, name: str, layer: int, m: int, c: int) -> list[Tensor]:
        """Rows of u for every expert rank."""
        routed, counts = self.values.peek("route", layer, m, c)
        sizes = counts.get()[:, 0].tolist()
        token_index = routed.rows.token_index[: sum(sizes)]
        return split(self.values.take(name, layer, m, c).index_select(0, token_index), sizes)

    def _expect_dispatch(self, layer: int, m: int, c: int, counts: HostCounts) -> _Expected:
        inbound = Inbound(counts)
        self.values.put("inbound", layer, m, inbound, chunk=c)
        rows = self._hidden(sum(inbound.rows_from))
        pairs = torch.empty(sum(inbound.pairs_from), 2, dtype=torch.int32, device=self.home.device)

        def deliver() -> None:
            merged = inbound.merge(pairs)
            self.values.put("permutation", layer, m, merged.permutation, chunk=c)
            self.values.put("rows", layer, m, (rows, merged.rows, merged.weights, inbound.slot_counts), chunk=c)

        return [split(rows, inbound.rows_from), split(pairs, inbound.pairs_from)], deliver

    def _pack_outputs(self, layer: int, m: int, c: int) -> _Parts:
        rows_from = self.values.peek("inbound", layer, m, c).rows_from
        return [split(self.values.take("y", layer, m, c), rows_from)]

    def _expect_outputs(self, layer: int, m: int, c: int) -> _Expected:
        return self._expect_rows("y_in", layer, m, c, self.values.wait("row_counts", layer, m, c).get())

    def _pack_gradients(self, layer: int, m: int, c: int) -> _Parts:
        sizes = self.values.take("row_counts", layer, m, c).get()
        token_index = self.values.take("row_map", layer, m, c).token_index[: sum(sizes)]
        of_chunk = self.home.split(self.values.take("G", layer, m))[c]
        return [split(of_chunk.index_select(0, token_index), sizes)]

    def _expect_from_sources(self, name: str, layer: int, m: int, c: int) -> _Expected:
        """As many rows from every data rank as its dispatch brought."""
        return self._expect_rows(name, layer, m, c, self.values.wait("inbound", layer, m, c).rows_from)

    def _pack_dispatch_gradients(self, layer: int, m: int, c: int) -> _Parts:
        inbound = self.values.take("inbound", layer, m, c)
        rows, merged = self.values.take("d_rows", layer, m, c)
        pairs = torch.empty_like(merged).index_copy_(0, self.values.take("permutation", layer, m, c), merged)
        return [split(rows, inbound.rows_from), split(pairs, inbound.pairs_from)]

    def _expect_dispatch_gradients(self, layer: int, m: int, c: int) -> _Expected:
        counts = self.values.wait("route", layer, m, c).counts.get()
        num_rows, num_pairs = counts[:, 0].tolist(), counts[:, 1:].sum(axis=1).tolist()
        rows = self._hidden(sum(num_rows))
        pairs = torch.empty(sum(num_pairs), dtype=torch.float32, device=self.home.device)
        parts = [split(rows, num_rows), split(pairs, num_pairs)]
        return parts, lambda: self.values.put("d_in", layer, m, (rows, pairs), chunk=c)

    def _pack_residual(self, layer: int, m: int, _: int) -> _Parts:
        return [[self.values.take("h", layer, m)], [self.values.take("ids", layer, m)]]

    def _expect_residual(self, layer: int, m: int, counts: HostCounts) -> _Expected:
        h = self._hidden(self.home.tokens)
        ids = torch.empty(self.home.tokens, self.home.model.top_k, dtype=torch.int32, device=self.home.device)
        # The outputs that will be added to h can be received before it has come.
        for c, sizes in enumerate(counts[0].reshape(self.home.chunks, -1)):
            self.values.put("row_counts", layer, m, RowCounts(HostCopy(torch.from_numpy(sizes))), chunk=c)

        def deliver() -> None:
            for c, of_chunk in enumerate(self.home.split(ids)):
                self.values.put("row_map", layer, m, row_map(of_chunk, self.home.deal(layer)), chunk=c)
            self.values.put("h", layer, m, h)

        return [[h], [ids]], deliver

    def _pack_residual_gradient(self, layer: int, m: int, _: int) -> _Parts:
        return [[self.values.take("G", layer, m)]]

    def _expect_hidden(self, name: str, layer: int, m: int) -> _Expected:
        return self._expect_rows(name, layer, m, 0, [self.home.tokens])

    def _expect_rows(self, name: str, layer: int, m: int, c: int, sizes: list[int]) -> _Expected:
        rows = self._hidden(sum(sizes))
        return [split(rows, sizes)], lambda: self.values.put(name, layer, m, rows, chunk=c)

    def _hidden(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self.home.model.hidden_size, dtype=self.home.dtype, device=self.home.device)


_Parts = list[list[Tensor]]  # part of the message -> tensor of every other rank
_Expected = tuple[_Parts, Callable[[], None]]


def _counts_go_ahead(action: Action) -> bool:
    return action.pass_ is Pass.F and action.kind in (Kind.DISPATCH, Kind.RESIDUAL)


def _packets(ranks: list[int], number: int, parts: _Parts) -> list[Packet]:
    return [
        Packet(rank, number * PARTS_PER_OPERATION + part, tensors[i].contiguous())
        for i, rank in enumerate(ranks)
        for part, tensors in enumerate(parts)
    ]
