"""The compute actions: what each takes from the step's values, which island it runs, what it puts back.

Values, by (name, layer, micro-batch):
    x, g                  x_l and dL/dx_l on their way to the consumer or the maker of x_l (layer 0 .. L)
    h, ids                of layer l's attention, and where they arrive with the residual
    G, Gh                 dL/dx_{l+1} at the group that forms x_{l+1}; the same where it came as the residual's gradient
    kept_x                with redispatch: what attention's F keeps for R

and by (name, layer, micro-batch, chunk):
    u, weights            of layer l's attention
    route                 `Route` of a data rank's tokens, with its counts on the host (layer l's attention)
    row_counts, row_map   rows from every expert rank, and their `RowMap` (whoever forms x_{l+1})
    outgoing              rows of u and pairs, before they are split into messages
    rows, inbound         what the expert rank received, and `Inbound`
    permutation           of its pairs, see `Merged`
    y, y_in               expert outputs where they are made and where they are added up
    g_rows, d_rows, d_in  rows of G at the experts; their gradients (du rows, dw), made and arrived
    kept_pairs            with redispatch: what the experts' F keeps for B
    u_again, rows_again   with redispatch: u and its rows, made and arrived once more

With recompute "full" a backward first runs its part once more, see `Island`. With "redispatch" attention's second run
is an action, R, which sends u again; in between attention keeps x, and the experts which rows and weights they had.
Rows and pairs of a chunk count its own tokens, from 0 on. The islands of experts are keyed by (micro-batch, chunk).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bench.action import Action, Kind, Pass
from bench.execute.exchange import Route, add_rows, route, to_device, weight_gradients
from bench.execute.home import Home
from bench.execute.streams import HostCopy, Streams
from bench.execute.values import Values

Sequences = Callable[[int], Tensor]
"""Micro-batch -> int64 [mbs, S + 1], this rank's sequences."""
ForcedRouting = Callable[[int, range], Tensor]
"""(layer, numbers of sequences within the global batch) -> expert ids int64 [sequences, S, k]."""


class Routed(NamedTuple):
    """A `Route`, and its counts on their way to the host."""

    route: Route
    counts: HostCopy


class RowCounts(NamedTuple):
    """Rows that a data rank gets back from every expert rank."""

    counts: HostCopy

    def get(self) -> list[int]:
        """Waits for the copy to the host."""
        numbers = self.counts.get()
        sizes: list[int] = (numbers if numbers.ndim == 1 else numbers[:, 0]).tolist()
        return sizes


class Compute:
    """Runs the compute actions of one rank in one step."""

    def __init__(
        self,
        home: Home,
        values: Values,
        streams: Streams,
        sequences: Sequences,
        routing: ForcedRouting | None = None,
        keep_expert_ids: bool = False,
    ) -> None:
        self.home, self.values, self.streams = home, values, streams
        self.sequences, self.routing, self.keep_expert_ids = sequences, routing, keep_expert_ids
        self.recompute = home.program.plan.recompute != "none"
        self.redispatch = home.program.plan.recompute == "redispatch"
        self.losses: list[Tensor] = []  # terms of the loss, on the device
        self.load: dict[int, list[int]] = {}  # layer -> pairs of every local expert
        self.expert_ids: dict[tuple[int, int], Tensor] = {}
        self._run: dict[tuple[Kind, Pass], Callable[..., None]] = {
            (Kind.EMBED, Pass.F): self._embed_forward,
            (Kind.EMBED, Pass.B): self._embed_backward,
            (Kind.ATTENTION, Pass.F): self._attention_forward,
            (Kind.ATTENTION, Pass.R): self._attention_again,
            (Kind.ATTENTION, Pass.B): self._attention_backward,
            (Kind.EXPERT, Pass.F): self._expert_forward,
            (Kind.EXPERT, Pass.B): self._expert_backward,
            (Kind.JOIN, Pass.F): self._join_forward,
            (Kind.JOIN, Pass.B): self._join_backward,
            (Kind.HEAD, Pass.F): self._head_forward,
            (Kind.HEAD, Pass.B): self._head_backward,
        }

    def run(self, action: Action) -> None:
        """Runs one action in the current stream."""
        part, m = (action.kind, action.layer), action.microbatch
        chunk = (action.chunk,) if action.kind is Kind.EXPERT else ()
        if action.pass_ in (Pass.F, Pass.R) or action.kind is Kind.JOIN:
            self._run[action.kind, action.pass_](action.layer, m, *chunk)
            return
        with self.home.accumulating(part, self.streams):
            if action.pass_ is Pass.W:
                self.home.islands[part].weight_gradient((m, *chunk) if chunk else m)
            else:
                self._run[action.kind, action.pass_](action.layer, m, *chunk)

    def fetch(self, action: Action) -> None:
        """Says that an action comes next: what its backward needs of the host's memory begins to come."""
        island = self.home.islands.get((action.kind, action.layer))
        if island is not None and action.pass_ is Pass.B:
            island.fetch((action.microbatch, action.chunk) if action.kind is Kind.EXPERT else action.microbatch)

    def loss(self) -> float:
        """This rank's terms of the loss so far; waits for the device."""
        return float(torch.stack(self.losses).double().sum()) if self.losses else 0.0

    def _tokens(self, microbatch: int) -> Tensor:
        return to_device(self.sequences(microbatch), self.home.device)

    def _embed_forward(self, layer: int, m: int) -> None:
        tokens = self._tokens(m)[:, :-1]
        self.values.put("x", 0, m, self.home.islands[Kind.EMBED, 0].forward(m, tokens))

    def _embed_backward(self, layer: int, m: int) -> None:
        self.home.islands[Kind.EMBED, 0].backward(m, self.values.take("g", 0, m))

    def _attention_forward(self, layer: int, m: int) -> None:
        home, part = self.home, (Kind.ATTENTION, layer)
        dense = home.model.is_dense(layer)
        options = {} if self.routing is None or dense else {"replay_ids": self._forced(layer, m)}
        x = self._input(layer, m)
        if self.redispatch and not dense:
            with torch.no_grad():
                out = home.parts[part](x, home.batch.mbs, **options)
            self.values.put("kept_x", layer, m, (x, out.expert_ids))
        else:
            out = home.islands[part].forward(m, x, home.batch.mbs, recompute=self.recompute, **options)
        if dense:
            self.values.put("x", layer + 1, m, out.h)
            return
        self.losses.append(out.aux)
        if self.keep_expert_ids:
            self.expert_ids[layer, m] = out.expert_ids
        stays = home.placement.stays(layer)
        pieces = zip(home.split(out.expert_ids), home.split(out.u), home.split(out.weights), strict=True)
        for c, (ids, u, weights) in enumerate(pieces):
            routed = route(ids, home.deal(layer))
            counts = HostCopy(routed.counts)
            self.values.put("route", layer, m, Routed(routed, counts), chunk=c)
            self.values.put("u", layer, m, u, chunk=c)
            self.values.put("weights", layer, m, weights, chunk=c)
            if stays:
                self.values.put("row_map", layer, m, routed.rows, chunk=c)
                self.values.put("row_counts", layer, m, RowCounts(counts), chunk=c)
        self.values.put("h", layer, m, out.h)
        if not stays:
            self.values.put("ids", layer, m, out.expert_ids.to(torch.int32))

    def _attention_again(self, layer: int, m: int) -> None:
        x, ids = self.values.take("kept_x", layer, m)
        out = self.home.islands[Kind.ATTENTION, layer].forward(m, x, self.home.batch.mbs, replay_ids=ids)
        for c, u in enumerate(self.home.split(out.u)):
            self.values.put("u_again", layer, m, u, chunk=c)

    def _forced(self, layer: int, m: int) -> Tensor:
        assert self.routing is not None
        first = self.home.first_sequence(m)
        ids = self.routing(layer, range(first, first + self.home.batch.mbs))
        return to_device(ids.reshape(self.home.tokens, self.home.model.top_k), self.home.device)

    def _attention_backward(self, layer: int, m: int) -> None:
        home = self.home
        if home.model.is_dense(layer):
            grads: tuple[Tensor | None, ...] = (self.values.take("g", layer + 1, m),)
        else:
            grad_h = self.values.take("G" if home.placement.stays(layer) else "Gh", layer, m)
            grad_u, grad_weights = self._gradients_from_experts(layer, m)
            grads = grad_h, grad_u, None, grad_weights
        self._put_input_gradient(layer, m, home.islands[Kind.ATTENTION, layer].backward(m, *grads)[0])

    def _gradients_from_experts(self, layer: int, m: int) -> tuple[Tensor, Tensor]:
        """Gradients of u and of the weights: those of all chunks, one after another."""
        of_u, of_weights = [], []
        for c in range(self.home.chunks):
            routed = self.values.take("route", layer, m, c).route
            rows, pairs = self.values.take("d_in", layer, m, c)
            of_u.append(add_rows(None, rows, routed.rows))
            of_weights.append(weight_gradients(pairs, routed.order, len(of_u[-1]), self.home.model.top_k))
        return _joined_up(of_u), _joined_up(of_weights)

    def _expert_forward(self, layer: int, m: int, c: int) -> None:
        rows, row_index, weights, counts = self.values.take("rows", layer, m, c)
        load = self.load.setdefault(layer, [0] * len(counts))
        self.load[layer] = [total + one for total, one in zip(load, counts, strict=True)]
        if self.redispatch:
            with torch.no_grad():
                y = self.home.parts[Kind.EXPERT, layer](rows, row_index, weights, counts)
            self.values.put("kept_pairs", layer, m, (row_index, weights, counts), chunk=c)
        else:
            island = self.home.islands[Kind.EXPERT, layer]
            y = island.forward((m, c), rows, row_index, weights, counts, recompute=self.recompute)
        self.values.put("y", layer, m, y, chunk=c)

    def _expert_backward(self, layer: int, m: int, c: int) -> None:
        island = self.home.islands[Kind.EXPERT, layer]
        if self.redispatch:
            rows, pairs = (self.values.take(name, layer, m, c) for name in ("rows_again", "kept_pairs"))
            island.forward((m, c), rows, *pairs)
        grads = island.backward((m, c), self.values.take("g_rows", layer, m, c))
        self.values.put("d_rows", layer, m, (grads[0], grads[2]), chunk=c)

    def _join_forward(self, layer: int, m: int) -> None:
        self.values.put("x", layer + 1, m, self._joined(layer, m))

    def _join_backward(self, layer: int, m: int) -> None:
        self.values.put("G", layer, m, self.values.take("g", layer + 1, m), uses=self.home.chunks + 1)

    def _head_forward(self, layer: int, m: int) -> None:
        labels = self._tokens(m)[:, 1:].reshape(-1)
        scale = 1.0 / (self.home.batch.num_sequences * self.home.seq_len)
        x = self._input(self.home.model.num_layers, m)
        loss = self.home.islands[Kind.HEAD, 0].forward(m, x, labels, scale, recompute=self.recompute)
        self.losses.append(loss)

    def _head_backward(self, layer: int, m: int) -> None:
        self._put_input_gradient(self.home.model.num_layers, m, self.home.islands[Kind.HEAD, 0].backward(m)[0])

    def _input(self, layer: int, m: int) -> Tensor:
        """x_layer; forms it where that is no action of its own."""
        if self._joins_here(layer):
            return self._joined(layer - 1, m)
        x: Tensor = self.values.take("x", layer, m)
        return x

    def _put_input_gradient(self, layer: int, m: int, grad: Tensor | None) -> None:
        if self._joins_here(layer):
            self.values.put("G", layer - 1, m, grad, uses=self.home.chunks + 1)
        else:
            self.values.put("g", layer, m, grad)

    def _joins_here(self, layer: int) -> bool:
        below = layer - 1
        return below >= 0 and not self.home.model.is_dense(below) and not self.home.placement.moves_on(below)

    def _joined(self, layer: int, m: int) -> Tensor:
        """x_{layer+1} = h + the sum of the experts' outputs."""
        return _joined_up(
            [
                add_rows(h, self.values.take("y_in", layer, m, c), self.values.peek("row_map", layer, m, c))
                for c, h in enumerate(self.home.split(self.values.take("h", layer, m)))
            ]
        )


def _joined_up(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
