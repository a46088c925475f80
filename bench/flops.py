"""The one count of floating-point operations and of parameters, term by term.

Rules, which hold for every system alike:

- A fused multiply-add is 2. A GEMM of (m, k) by (k, n) is 2 m k n.
- Attention is causal and exact: query i of a sequence of S tokens meets min(i + 1, w) keys, w the window (S
  where there is none), which is w S - w (w - 1) / 2 pairs a sequence, S (S + 1) / 2 without a window.
  Scores and weighted values each cost 2 per pair, head and element of the head.
- Of the experts, the assignments that are computed count: ``top_k`` a token in the model FLOPs, padding
  never.
- The router's projection counts. Norms, rotary positions, softmax, sinks, biases, activations, the weighted
  sum over experts, the loss and the embedding's look-up do not: none of them is a matrix multiply.
- Backward: a GEMM's input gradient (pass B) and its weight gradient (pass W) cost as much as its forward;
  the attention core has two inputs in each of its two products and no weight, so all of its twofold cost is
  in B. Hence F + B + W = 3 F. What a system computes again (recompute, the scores inside a flash kernel) is
  never model FLOPs.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from bench.errors import BadInput, unknown
from bench.models import MLA, Model

Part = Literal["embed", "attention", "router", "dense_ffn", "shared", "expert", "head"]
Pass = Literal["F", "B", "W"]

PARTS: tuple[Part, ...] = get_args(Part)
LAYER_PARTS: tuple[Part, ...] = ("attention", "router", "dense_ffn", "shared", "expert")
PASSES: tuple[Pass, ...] = get_args(Pass)
CORE_TERMS = frozenset({"scores", "context"})


class ParameterCount(NamedTuple):
    """``total`` parameters, and those ``active`` for one token: all but the experts it does not choose."""

    total: int
    active: int


def attention_pairs(seq_len: int, window: int = 0) -> int:
    """Query-key pairs of one causal sequence; ``window`` tokens, the query's own included, or 0 for all."""
    if seq_len < 1:
        raise BadInput("seq_len", seq_len, "at least 1")
    if window < 0:
        raise BadInput("window", window, "0 (all) or more")
    reach = min(window or seq_len, seq_len)
    return reach * seq_len - reach * (reach - 1) // 2


def forward_terms(
    model: Model, part: Part, layer: int, *, tokens: float, seq_len: int, assignments: float | None = None
) -> dict[str, float]:
    """Forward FLOPs of one part of one layer, by term.

    Args:
        part: one of ``PARTS``. A part that the layer does not have, such as the experts of a dense layer,
            has no terms.
        layer: 0 to ``num_layers - 1``; of no meaning for "embed" and "head".
        tokens: tokens that pass the part, in sequences of ``seq_len``.
        assignments: (token, expert) pairs computed by "expert"; ``tokens * top_k`` if not given.

    Raises:
        BadInput: an unknown part, a layer out of range, a ``seq_len`` below 1.
    """
    if not has_part(model, part, layer):
        return {}
    hidden = model.hidden_size
    if part == "attention":
        return _attention_terms(model, layer, tokens, seq_len)
    if part == "router":
        return {"router": 2.0 * tokens * hidden * model.num_experts}
    if part == "dense_ffn":
        return _swiglu_terms(tokens, hidden, model.dense_hidden_size)
    if part == "shared":
        return _swiglu_terms(tokens, hidden, model.shared_hidden_size)
    if part == "expert":
        rows = tokens * model.top_k if assignments is None else assignments
        return _swiglu_terms(rows, hidden, model.expert_hidden_size)
    if part == "head":
        return {"logits": 2.0 * tokens * hidden * model.vocab_size}
    return {}  # the embedding is a look-up


def part_flops(
    model: Model,
    part: Part,
    layer: int,
    pass_: Pass,
    *,
    tokens: float,
    seq_len: int,
    assignments: float | None = None,
) -> float:
    """FLOPs of one pass of one part: F forward, B input gradients, W weight gradients."""
    if pass_ not in PASSES:
        raise unknown("pass", pass_, PASSES)
    terms = forward_terms(model, part, layer, tokens=tokens, seq_len=seq_len, assignments=assignments)
    core_factor = {"F": 1.0, "B": 2.0, "W": 0.0}[pass_]
    return sum(value * (core_factor if name in CORE_TERMS else 1.0) for name, value in terms.items())


def step_flops(model: Model, seq_len: int, tokens: int) -> float:
    """Model FLOPs of one training step over ``tokens`` tokens: thrice the forward, nothing recomputed."""
    forward = sum(
        sum(forward_terms(model, part, layer, tokens=tokens, seq_len=seq_len).values())
        for part, layer in model_parts(model)
    )
    return 3.0 * forward


def parameters(model: Model, part: Part, layer: int) -> dict[str, int]:
    """Number of trained parameters of one part of one layer, by tensor.

    "attention" holds both norms of its layer, "head" the final norm, "expert" all experts of the layer. A
    tied head has no projection of its own. The router's selection bias is no parameter: no gradient trains
    it.
    """
    if not has_part(model, part, layer):
        return {}
    hidden = model.hidden_size
    if part == "embed":
        return {"embedding": model.vocab_size * hidden}
    if part == "head":
        return {"final_norm": hidden} | ({} if model.tied_head else {"projection": hidden * model.vocab_size})
    if part == "attention":
        return _attention_parameters(model)
    if part == "router":
        return {"router": hidden * model.num_experts} | (
            {"router_bias": model.num_experts} if model.router_linear_bias else {}
        )
    if part == "dense_ffn":
        return _swiglu_parameters(hidden, model.dense_hidden_size)
    if part == "shared":
        return _swiglu_parameters(hidden, model.shared_hidden_size)
    count, width = model.num_experts, model.expert_hidden_size
    tensors = _swiglu_parameters(hidden, width)
    if model.expert_bias:
        tensors |= {"gate_up_bias": 2 * width, "down_bias": hidden}
    return {name: count * size for name, size in tensors.items()}


@lru_cache(maxsize=256)
def num_parameters(model: Model) -> ParameterCount:
    """Parameters of the whole model, the embedding included in both counts."""
    total = active = 0
    for part, layer in model_parts(model):
        size = sum(parameters(model, part, layer).values())
        total += size
        active += size // model.num_experts * model.top_k if part == "expert" else size
    return ParameterCount(total, active)


def has_part(model: Model, part: Part, layer: int) -> bool:
    """Whether the layer has this part. Raises ``BadInput`` for an unknown part or a layer out of range."""
    if part in ("embed", "head"):
        return True
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    dense = model.is_dense(layer)
    if part == "attention":
        return True
    if part == "dense_ffn":
        return dense
    return not dense and (part != "shared" or model.num_shared_experts > 0)


def model_parts(model: Model) -> Iterator[tuple[Part, int]]:
    """Every (part, layer) of the model in the order of its forward pass."""
    yield "embed", 0
    for layer in range(model.num_layers):
        for part in LAYER_PARTS:
            if has_part(model, part, layer):
                yield part, layer
    yield "head", model.num_layers - 1


def _attention_terms(model: Model, layer: int, tokens: float, seq_len: int) -> dict[str, float]:
    pairs = attention_pairs(seq_len, model.window(layer)) * tokens / seq_len
    core = {
        "scores": 2.0 * pairs * model.num_heads * model.head_dim,
        "context": 2.0 * pairs * model.num_heads * model.v_head_dim,
    }
    projections = {name: 2.0 * tokens * size for name, size in _attention_gemms(model).items()}
    return projections | core


def _attention_gemms(model: Model) -> dict[str, int]:
    """Elements of the weight of each projection."""
    hidden, mla = model.hidden_size, model.mla
    output = {"output": model.attention_output_size * hidden}
    if mla is None:
        return {"qkv": hidden * (model.q_size + 2 * model.kv_size)} | output
    if mla.q_lora_rank:
        query = {"q_down": hidden * mla.q_lora_rank, "q_up": mla.q_lora_rank * model.q_size}
    else:
        query = {"q": hidden * model.q_size}
    return query | _mla_kv_gemms(model, mla) | output


def _mla_kv_gemms(model: Model, mla: MLA) -> dict[str, int]:
    return {
        # The latent, and beside it the rope part of the keys, one for all heads.
        "kv_down": model.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim),
        "kv_up": mla.kv_lora_rank * model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
    }


def _attention_parameters(model: Model) -> dict[str, int]:
    tensors = {"attention_norm": model.hidden_size, **_attention_gemms(model), "ffn_norm": model.hidden_size}
    if model.mla is not None:
        if model.mla.q_lora_rank:
            tensors["q_latent_norm"] = model.mla.q_lora_rank
        tensors["kv_latent_norm"] = model.mla.kv_lora_rank
    if model.qk_norm:
        tensors |= {"q_norm": model.head_dim, "k_norm": model.head_dim}
    if model.attention_bias:
        tensors |= {"qkv_bias": model.q_size + 2 * model.kv_size, "output_bias": model.hidden_size}
    if model.attention_sinks:
        tensors["sinks"] = model.num_heads
    return tensors


def _swiglu_terms(rows: float, hidden: int, width: int) -> dict[str, float]:
    return {name: 2.0 * rows * size for name, size in _swiglu_parameters(hidden, width).items()}


def _swiglu_parameters(hidden: int, width: int) -> dict[str, int]:
    return {"gate_up": hidden * 2 * width, "down": width * hidden}
