"""The mathematics of a training step as data dependencies, written once for every system.

An `Edge` says that `dst` needs what `src` makes, and through which transfer it travels where the two live on
different ranks. Volumes are symbolic (rows times width); routing gives the rows, the model gives the width.

Layer l, with x_l formed on its consumer's group:
    forward   attention --dispatch(copies of u, pairs)--> expert --combine(copies)--> consumer of x_{l+1}
              attention --residual(h, row map)--> consumer of x_{l+1}
    backward  G = dL/dx_{l+1} on the consumer's group: combine(rows of G) --> expert.B, residual(G) --> attention.B
              expert.B --dispatch(du, dw)--> attention.B
The expert's output goes to whoever forms x_{l+1}, its input gradient to whoever sent u: the two differ where the
next layer's attention lives on another group.

With several chunks, chunk c of n is tokens c T/n .. (c+1) T/n - 1 of the T that a data rank has in a micro-batch. Its
dispatch, experts and combine are actions of their own, in every pass; attention and whoever forms x_{l+1} do all chunks
at once, and the residual is sent whole.
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from bench.action import Action, Kind, Pass
from bench.errors import BadInput
from bench.models import Model
from bench.placement import Placement

INDEX_BYTES = 4  # int32: a row's number, an expert's id
WEIGHT_BYTES = 4  # fp32: a router weight or its gradient


class Rows(StrEnum):
    """What a volume counts, per source rank and destination rank."""

    TOKENS = "tokens"  # every token of the source rank's micro-batch, to the same-numbered rank
    COPIES = "copies"  # rows of u under the layout's dispatch copies
    ASSIGNMENTS = "assignments"  # (token, expert) pairs


class Term(NamedTuple):
    """rows x (hidden * H activations + extra_bytes)."""

    rows: Rows
    hidden: int = 0
    extra_bytes: int = 0

    def __str__(self) -> str:
        width = [f"{self.hidden}h" if self.hidden > 1 else "h"] * bool(self.hidden)
        width += [f"{self.extra_bytes}B"] * bool(self.extra_bytes)
        return f"{self.rows.value}*{width[0]}" if len(width) == 1 else f"{self.rows.value}*({' + '.join(width)})"


class Volume(NamedTuple):
    """A sum of terms; prints as for example ``copies*h + assignments*8B``."""

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return " + ".join(str(term) for term in self.terms) or "0"

    @classmethod
    def parse(cls, text: str) -> "Volume":
        """The inverse of `str`. Raises BadInput."""
        if text == "0":
            return cls(())
        try:
            # A '+' inside brackets belongs to a width, so terms are split where a row kind begins.
            return cls(tuple(_parse_term(term) for term in _split_terms(text)))
        except ValueError:
            raise BadInput("volume", text, "sums of rows*width, e.g. copies*h + assignments*8B") from None


def _split_terms(text: str) -> list[str]:
    terms: list[str] = []
    for piece in text.split(" + "):
        if piece.split("*")[0] in {rows.value for rows in Rows}:
            terms.append(piece)
        else:
            terms[-1] += f" + {piece}"
    return terms


def _parse_term(text: str) -> Term:
    rows, width = text.split("*")
    hidden = extra = 0
    for piece in width.strip("()").split(" + "):
        if piece.endswith("B"):
            extra = int(piece[:-1])
        elif piece.endswith("h"):
            hidden = int(piece[:-1] or 1)
        else:
            raise ValueError(piece)
    return Term(Rows(rows), hidden, extra)


class Edge(NamedTuple):
    """`dst` needs what `src` makes; `via` is the transfer that carries it, None where it stays on its rank."""

    src: Action
    dst: Action
    via: Action | None
    volume: Volume

    def __str__(self) -> str:
        """``attn:F1.0 -> expert:F1.0 by dispatch:F1.0 [copies*h + assignments*8B]``; no ``by`` without a transfer."""
        carried = f" by {self.via} [{self.volume}]" if self.via is not None else ""
        return f"{self.src} -> {self.dst}{carried}"

    def of_microbatch(self, microbatch: int) -> "Edge":
        """The same dependency of another micro-batch."""
        src, dst = (end._replace(microbatch=microbatch) for end in (self.src, self.dst))
        return Edge(src, dst, self.via and self.via._replace(microbatch=microbatch), self.volume)

    @classmethod
    def parse(cls, text: str) -> "Edge":
        """The inverse of `str`. Raises BadInput."""
        match = _EDGE.fullmatch(text)
        if match is None:
            raise BadInput("edge", text, "SRC -> DST [by TRANSFER [VOLUME]], e.g. attn:B1.0 -> attn:W1.0")
        via = Action.parse(match[3]) if match[3] else None
        volume = Volume.parse(match[4]) if match[4] else NOTHING
        return cls(Action.parse(match[1]), Action.parse(match[2]), via, volume)


_EDGE = re.compile(r"(\S+) -> (\S+)(?: by (\S+) \[(.+)\])?")

NOTHING = Volume(())
HIDDEN_ROWS = Volume((Term(Rows.TOKENS, 1),))
COPIED_ROWS = Volume((Term(Rows.COPIES, 1),))
DISPATCH_FORWARD = Volume((Term(Rows.COPIES, 1), Term(Rows.ASSIGNMENTS, 0, INDEX_BYTES + WEIGHT_BYTES)))
DISPATCH_BACKWARD = Volume((Term(Rows.COPIES, 1), Term(Rows.ASSIGNMENTS, 0, WEIGHT_BYTES)))


def edges(model: Model, placement: Placement, recompute: str = "none", chunks: int = 1) -> Iterator[Edge]:
    """Every data dependency of one micro-batch (number 0), forward and backward; a volume counts rows of its chunk.

    Where a placement has two directions, those of micro-batch 1 follow.

    With `recompute` "redispatch" nothing but x is kept of a layer: its attention runs once more (pass R) and sends u
    once more, for the experts' backward. Weights and row numbers stay with the experts.

    No dependency crosses micro-batches, so those of another micro-batch of a direction are the same with its number.
    Gradient sums and the optimizer step are not in here: they wait for every action of their group (see `bench.lower`).
    """
    for microbatch in range(placement.directions):
        for edge in _one_way(model, placement.seen_by(microbatch), recompute, chunks):
            yield edge.of_microbatch(microbatch) if microbatch else edge


def _one_way(model: Model, placement: Placement, recompute: str, chunks: int) -> Iterator[Edge]:
    yield from outer_edges(placement)
    for layer in range(model.num_layers):
        yield from layer_edges(model, placement, layer, recompute, chunks)


def outer_edges(placement: Placement) -> Iterator[Edge]:
    """Those of no layer: from the embedding and to it, and of the head's own passes."""
    yield from _input_edge(placement, 0, Action(Kind.EMBED), Action(Kind.EMBED, Pass.B))
    yield from _own_passes(Kind.HEAD, 0)


def layer_edges(
    model: Model, placement: Placement, layer: int, recompute: str = "none", chunks: int = 1
) -> Iterator[Edge]:
    """Those of one layer: from its attention to whoever takes x_{layer+1}, and back."""
    yield from _layer_edges(model, placement, layer, chunks)
    if recompute == "redispatch" and not model.is_dense(layer):
        yield from _again_edges(layer, chunks)
    yield from _own_passes(Kind.ATTENTION, layer)


def consumer(placement: Placement, layer: int, pass_: Pass) -> Action:
    """The action that takes x_{layer} in (F) or gives its gradient (B): attention of the layer, or the head."""
    if layer == placement.num_layers:
        return Action(Kind.HEAD, pass_)
    return Action(Kind.ATTENTION, pass_, layer)


def _layer_edges(model: Model, placement: Placement, layer: int, chunks: int) -> Iterator[Edge]:
    forward, backward = Action(Kind.ATTENTION, Pass.F, layer), Action(Kind.ATTENTION, Pass.B, layer)
    if model.is_dense(layer):
        yield from _input_edge(placement, layer + 1, forward, backward)
        return
    if placement.moves_on(layer):
        joined, gradient = Action(Kind.JOIN, Pass.F, layer), Action(Kind.JOIN, Pass.B, layer)
        yield from _input_edge(placement, layer + 1, joined, gradient)
    else:
        joined, gradient = consumer(placement, layer + 1, Pass.F), consumer(placement, layer + 1, Pass.B)
    row_map = Volume((Term(Rows.TOKENS, 1, model.top_k * INDEX_BYTES),))
    stays = placement.stays(layer)

    def at(kind: Kind, pass_: Pass, chunk: int = 0) -> Action:
        return Action(kind, pass_, layer, chunk=chunk)

    for c in range(chunks):
        yield Edge(forward, at(Kind.EXPERT, Pass.F, c), at(Kind.DISPATCH, Pass.F, c), DISPATCH_FORWARD)
    yield Edge(forward, joined, None if stays else at(Kind.RESIDUAL, Pass.F), NOTHING if stays else row_map)
    for c in range(chunks):
        yield Edge(at(Kind.EXPERT, Pass.F, c), joined, at(Kind.COMBINE, Pass.F, c), COPIED_ROWS)
    for c in range(chunks):
        yield Edge(gradient, at(Kind.EXPERT, Pass.B, c), at(Kind.COMBINE, Pass.B, c), COPIED_ROWS)
    yield Edge(gradient, backward, None if stays else at(Kind.RESIDUAL, Pass.B), NOTHING if stays else HIDDEN_ROWS)
    for c in range(chunks):
        yield Edge(at(Kind.EXPERT, Pass.B, c), backward, at(Kind.DISPATCH, Pass.B, c), DISPATCH_BACKWARD)
        yield from _own_passes(Kind.EXPERT, layer, c)


def _again_edges(layer: int, chunks: int) -> Iterator[Edge]:
    """Attention once more, between its forward and its backward, and its dispatch to the experts' backward."""
    again = Action(Kind.ATTENTION, Pass.R, layer)
    yield Edge(Action(Kind.ATTENTION, Pass.F, layer), again, None, NOTHING)
    yield Edge(again, Action(Kind.ATTENTION, Pass.B, layer), None, NOTHING)
    for c in range(chunks):
        expert, dispatch = (Action(k, p, layer, 0, c) for k, p in ((Kind.EXPERT, Pass.B), (Kind.DISPATCH, Pass.R)))
        yield Edge(again, expert, dispatch, COPIED_ROWS)


def _input_edge(placement: Placement, layer: int, maker: Action, taker_of_gradient: Action) -> Iterator[Edge]:
    """x_layer from `maker` to its consumer, and its gradient back; over a HOP where the groups differ."""
    here = placement.home(maker.kind, maker.layer)
    stays = here == placement.pipeline_ends[layer]
    volume = NOTHING if stays else HIDDEN_ROWS

    def over(pass_: Pass) -> Action | None:
        return None if stays else Action(Kind.HOP, pass_, layer)

    yield Edge(maker, consumer(placement, layer, Pass.F), over(Pass.F), volume)
    yield Edge(consumer(placement, layer, Pass.B), taker_of_gradient, over(Pass.B), volume)


def _own_passes(kind: Kind, layer: int, chunk: int = 0) -> Iterator[Edge]:
    """Backward needs what forward kept, the weight gradient what backward kept."""
    forward, backward, weight = (Action(kind, pass_, layer, 0, chunk) for pass_ in (Pass.F, Pass.B, Pass.W))
    yield Edge(forward, backward, None, NOTHING)
    yield Edge(backward, weight, None, NOTHING)


def ends(placement: Placement, transfer: Action) -> tuple[str, str]:
    """Names of the groups a transfer leaves and reaches."""
    layer, placement = transfer.layer, placement.seen_by(transfer.microbatch)
    match transfer.kind:
        case Kind.DISPATCH:
            there = (placement.attention[layer], placement.home(Kind.EXPERT, layer))
        case Kind.COMBINE:
            there = (placement.home(Kind.EXPERT, layer), placement.join[layer])
        case Kind.RESIDUAL:
            there = (placement.attention[layer], placement.join[layer])
        case Kind.HOP:
            source = placement.embed if layer == 0 else placement.join[layer - 1]
            there = (source, placement.pipeline_ends[layer])
        case _:
            raise BadInput("transfer", str(transfer), "dispatch, combine, residual or hop")
    return there[::-1] if transfer.pass_ is Pass.B else there
