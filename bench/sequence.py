"""Tensor and context parallelism of attention: who holds which weights, and what its ranks exchange. Modelled only.

The sequences of a data rank are dealt over tp x cp neighbouring ranks of one node. With sequence parallelism
(arXiv 2205.05198) everything but attention works on a rank's own tokens, weights whole; so do experts, whose ranks are
then tp x cp x data parallel. Attention of tp ranks has 1/tp of the heads and of the weights each, for the tokens of
all: their input rows are gathered, their sums are scattered. Each of cp ranks (context parallelism) has the queries of
two pieces of a causal sequence, one from either end, so that all have equally many pairs; keys and values go round a
ring, while the core computes (as TransformerEngine's "p2p"; arXiv 2310.01889).

Rows, like tokens, are those of one rank: tp x cp ranks with ``tokens`` rows each hold the sequences of one data rank.
"""

from typing import NamedTuple

from bench.action import Pass
from bench.case import Layout
from bench.models import Model

CUT = frozenset({"qkv", "q", "q_up", "kv_up", "output", "qkv_bias", "sinks"})
"""Attention's parameters and GEMMs with a head in them; down-projections of MLA and norms are whole on every rank."""


class Exchange(NamedTuple):
    """What one attention action sends and receives on a rank, over NVLink: bytes in each direction, and messages."""

    num_bytes: float
    num_messages: int


NOTHING = Exchange(0.0, 0)


def gathered_width(model: Model) -> int:
    """Elements a token of what goes into the projections that are cut: the normed row, or MLA's normed latents."""
    if model.mla is None:
        return model.hidden_size
    return (model.mla.q_lora_rank or model.hidden_size) + model.mla.kv_lora_rank + model.mla.qk_rope_head_dim


def tensor_exchange(model: Model, layout: Layout, pass_: Pass, tokens: float, element_bytes: int) -> Exchange:
    """All-gathers and reduce-scatters round the attention of a layer, each of (tp - 1) rows a token of the rank.

    F: the input is gathered, the output scattered. B: the output's gradient is gathered, and kept for W; the input's
    scattered. W: the input is gathered once more, as a rank keeps its own rows alone.
    """
    if layout.tp == 1:
        return NOTHING
    hidden, width = model.hidden_size, gathered_width(model)
    widths = (width,) if pass_ is Pass.W else (hidden, width)
    return Exchange((layout.tp - 1) * tokens * sum(widths) * element_bytes, len(widths))


def ring_rows(model: Model, layout: Layout, layer: int, tokens: float, seq_len: int) -> float:
    """Rows of keys and values that a rank receives, as wide as all heads (of tp ranks each has 1/tp of tp x the rows).

    (cp - 1) x its own; with a window of w no more than the w - 1 before each of a sequence's two pieces.
    """
    if layout.cp == 1:
        return 0.0
    whole, window = (layout.cp - 1) * tokens, model.window(layer)
    return min(whole, 2 * (window - 1) * layout.cp * tokens / seq_len) if window else whole


def kept_width(model: Model) -> int:
    """Elements a token of keys and values as the core reads them."""
    return model.kv_size + model.num_kv_heads * model.v_head_dim


def ring_exchange(
    model: Model, layout: Layout, layer: int, pass_: Pass, tokens: float, seq_len: int, element_bytes: int
) -> Exchange:
    """Keys and values (F), and their gradients with them (B), in cp - 1 steps."""
    rows = ring_rows(model, layout, layer, tokens, seq_len)
    if not rows or pass_ is Pass.W:
        return NOTHING
    return Exchange((2 if pass_ is Pass.B else 1) * rows * kept_width(model) * element_bytes, layout.cp - 1)


def passing_bytes(model: Model, layout: Layout, pass_: Pass, tokens: float, element_bytes: int) -> float:
    """Held while an attention action runs: gathered rows, and two buffers of a ring (B: of gradients as well)."""
    gathered = layout.tp * tokens * gathered_width(model) if layout.tp > 1 else 0.0
    ring = 2 * tokens * kept_width(model) if layout.cp > 1 and pass_ is not Pass.W else 0.0
    return (gathered + ring * (2 if pass_ is Pass.B else 1)) * element_bytes
