"""Bytes that a rank holds: parameters with their optimizer state, and activations from pass to pass.

An action's activations live in two spans. From F until B it holds what the backward of the part reads; from
B until W, which is deferred, only what the weight-gradient GEMMs read: their inputs and the gradients of
their outputs. Gradients of norms, biases and sinks are sums that B takes at once. What is short-lived
inside one pass is not counted here, nor are per-token scalars of norms. ``H`` is the hidden size and
``f`` the inner width of a SwiGLU.

Every tensor is counted by one part alone:

- ``attention`` (x -> h and u) holds x, h and u; u is also the input of the router, of a dense FFN and of
  shared experts on the same rank, which therefore do not count it. x of the layer above is a tensor of its
  own.
- ``expert`` holds the rows that were dispatched to it and, in the backward, the rows of the output's
  gradient, those of shared experts on the same rank among them: "shared" with ``rows`` given counts neither.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from bench.errors import BadInput, unknown
from bench.flops import Part, has_part
from bench.models import Model

Recompute = Literal["none", "full"]
ElementBytes = Annotated[int, Field(ge=0, le=8)]

FP32_BYTES = 4
INDEX_BYTES = 8
# Of one assignment: the row it reads, and its weight in fp32.
PAIR_BYTES = INDEX_BYTES + FP32_BYTES


class Recipe(BaseModel):
    """Bytes per parameter of AdamW: the trained copy, its gradient, the fp32 main copy, each of two moments.

    The defaults are 18 bytes: bf16 weights, fp32 gradients, and 12 bytes of optimizer state. Training in
        fp32 has
    ``weight_bytes=4, main_weight_bytes=0``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    weight_bytes: ElementBytes = 2
    grad_bytes: ElementBytes = 4
    main_weight_bytes: ElementBytes = 4
    moment_bytes: ElementBytes = 4


class Retained(NamedTuple):
    """Activation bytes held ``after_forward`` (from F until B) and ``after_backward`` (from B until W)."""

    after_forward: float
    after_backward: float


def state_bytes(num_params: int, recipe: Recipe, *, shards: int = 1) -> int:
    """Bytes of weights, gradients and optimizer state on one rank, rounded up.

    ``n (weight + grad) + n (main + 2 moment) / shards``: a distributed optimizer divides what only the
    update reads over the ``shards`` ranks that hold the same parameters.
    """
    if num_params < 0:
        raise BadInput("num_params", num_params, "0 or more")
    if shards < 1:
        raise BadInput("shards", shards, "at least 1")
    resident = num_params * (recipe.weight_bytes + recipe.grad_bytes)
    sharded = num_params * (recipe.main_weight_bytes + 2 * recipe.moment_bytes)
    return resident - (-sharded // shards)


def retained_bytes(
    model: Model,
    part: Part,
    layer: int,
    *,
    tokens: float,
    assignments: float | None = None,
    rows: float | None = None,
    dtype_bytes: int = 2,
    recompute: Recompute = "none",
) -> Retained:
    """Bytes of activations that one action's part keeps on one rank.

    The attention core is of the flash kind: it keeps one log-sum-exp per token and head and no scores, so the
    sequence length and the window do not matter.

    Args:
        part, layer: as in ``bench.flops.forward_terms``; a part that the layer does not have keeps nothing.
        tokens: tokens that pass the part on this rank.
        assignments: (token, expert) pairs that "expert" computes; ``tokens * top_k`` if not given.
        rows: rows of H elements that were dispatched to this rank, for "expert" (``assignments`` if not
            given) and for "shared" where it stands beside the experts.
        dtype_bytes: bytes of an element of the training dtype.
        recompute: with "full", F keeps the action's input (x, or the dispatched rows with their pairs) and
            what decided the routing, and B computes the rest again; what B leaves for W is the same.

    Raises:
        BadInput: an unknown part or recompute, a layer out of range.
    """
    if recompute not in ("none", "full"):
        raise unknown("recompute", recompute, ("none", "full"))
    if not has_part(model, part, layer):
        return Retained(0.0, 0.0)
    full = recompute == "full"
    if part == "attention":
        return _attention(model, tokens, dtype_bytes, full)
    if part == "router":
        return _router(model, tokens, full)
    if part == "expert":
        pairs = tokens * model.top_k if assignments is None else assignments
        return _expert(model, pairs, pairs if rows is None else rows, dtype_bytes, full)
    if part == "shared":
        return _ffn(model, tokens, model.shared_hidden_size, dtype_bytes, full, own_gradient=rows is None)
    if part == "dense_ffn":
        return _ffn(model, tokens, model.dense_hidden_size, dtype_bytes, full, own_gradient=True)
    if part == "head":
        return _head(model, tokens, dtype_bytes, full)
    # The embedding keeps token ids, and after B the gradient of its rows until W adds them up.
    ids = tokens * INDEX_BYTES
    return Retained(ids, ids + tokens * model.hidden_size * dtype_bytes)


def _attention(model: Model, tokens: float, dtype_bytes: int, full: bool) -> Retained:
    """x -> h = x + attention(norm x), u = norm h."""
    hidden, mla = model.hidden_size, model.mla
    out = model.attention_output_size
    if mla is None:
        projected = model.q_size + 2 * model.kv_size
        # q, k, v as the core reads them; with qk-norm q and k before it as well.
        inside = projected + (model.q_size + model.kv_size if model.qk_norm else 0)
        gemm_inputs = 0
        output_gradients = projected
    else:
        keys_and_values = model.num_heads * (mla.qk_head_dim + mla.v_head_dim)
        # Latents before their norm and after it, then q, k, v; the keys hold the shared rope part once a
        # head.
        kv_down = mla.kv_lora_rank + mla.qk_rope_head_dim
        gemm_inputs = mla.q_lora_rank + mla.kv_lora_rank
        inside = mla.q_lora_rank + kv_down + gemm_inputs + model.q_size + keys_and_values
        kv_up = model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        output_gradients = mla.q_lora_rank + model.q_size + kv_down + kv_up
    log_sum_exp = tokens * model.num_heads * FP32_BYTES
    # x and h (backward of the norms), norm x and u (GEMM inputs), the core's output (its backward and a
    # GEMM's input).
    kept = tokens * dtype_bytes * (4 * hidden + inside + out) + log_sum_exp
    # norm x, the latents, the core's output and u go into GEMMs; dh is the gradient of the output projection.
    left = tokens * dtype_bytes * (3 * hidden + gemm_inputs + out + output_gradients)
    return Retained(tokens * dtype_bytes * hidden if full else kept, left)


def _router(model: Model, tokens: float, full: bool) -> Retained:
    """u -> logits, ids and weights; scores are computed in fp32 and u belongs to the attention."""
    chosen = tokens * model.top_k * PAIR_BYTES
    logits = tokens * model.num_experts * FP32_BYTES
    return Retained(chosen if full else chosen + logits, logits)


def _ffn(
    model: Model, tokens: float, width: int, dtype_bytes: int, full: bool, *, own_gradient: bool
) -> Retained:
    """A SwiGLU whose input another part holds: gate and up (2 f), and their product (f)."""
    inner = tokens * dtype_bytes * 3 * width
    # After B: gradients of gate and up (2 f), the product (f), the gradient of the output (H).
    gradient = tokens * dtype_bytes * model.hidden_size if own_gradient else 0
    return Retained(0 if full else inner, inner + gradient)


def _expert(model: Model, pairs: float, rows: float, dtype_bytes: int, full: bool) -> Retained:
    """Dispatched rows and pairs -> weighted sums of the experts' outputs.

    Rows stay as they came and are gathered by expert again where a GEMM needs them. The second GEMM's
    output is not kept: the gradient of an assignment's weight is <G W_down^T, product>, which B has at
    hand.
    """
    received = rows * dtype_bytes * model.hidden_size + pairs * PAIR_BYTES
    inner = pairs * dtype_bytes * 3 * model.expert_hidden_size
    # After B: rows and pairs, gradients of gate and up (2 f), the product (f), and the rows of G.
    gradient = rows * dtype_bytes * model.hidden_size
    return Retained(received if full else received + inner, received + inner + gradient)


def _head(model: Model, tokens: float, dtype_bytes: int, full: bool) -> Retained:
    """x -> final norm -> logits -> loss: x, its norm, and fp32 logits, turned into probabilities in place."""
    labels = tokens * INDEX_BYTES
    row = tokens * dtype_bytes * model.hidden_size
    logits = tokens * FP32_BYTES * model.vocab_size
    # After B: norm x and the gradient of the logits in the training dtype.
    left = row + tokens * dtype_bytes * model.vocab_size
    return Retained(row + labels + (0 if full else row + logits), left)
