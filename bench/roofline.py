"""What an action makes a GPU do: kernels with their FLOPs and the bytes they move through memory, per rank.

A kernel takes the longer of its two roofline times. Model FLOPs are those of `bench.flops`; what a kernel does on top
(scores computed again in a flash backward) is here. Bytes of a GEMM: its weights once (in pass W, the fp32 gradient
read and written) and its rows in and out. Bytes of elementwise kernels: elements read and written, fused as is usual.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Pass
from bench.assumptions import Assumptions
from bench.flops import CORE_TERMS, Part, forward_terms
from bench.models import Model
from bench.sequence import CUT, kept_width

Floats = NDArray[np.floating[Any]]

GRAD_BYTES = 4  # weight gradients are added up in fp32
LOGIT_BYTES = 4  # the loss is computed in fp32


class Kernel(NamedTuple):
    """FLOPs and bytes, a number or one a rank. `reached` is the share of the dense peak that its FLOPs come at."""

    flops: Floats | float
    num_bytes: Floats | float
    reached: float


class Machine(NamedTuple):
    """One GPU under assumptions: FLOP/s of the dense peak left to computation, bytes/s of memory reached."""

    flops_per_s: float
    bytes_per_s: float
    kernel_s: float

    def seconds(self, kernel: Kernel) -> Floats | float:
        """The longer of the two roofline times, and the fixed cost; 0 for a kernel without work. As the kernel has its
        FLOPs and bytes, a number or one a rank."""
        if not isinstance(kernel.flops, np.ndarray) and not isinstance(kernel.num_bytes, np.ndarray):
            longer = max(kernel.flops / (self.flops_per_s * kernel.reached), kernel.num_bytes / self.bytes_per_s)
            return longer + self.kernel_s if longer > 0 else 0.0
        math_s = np.asarray(kernel.flops) / (self.flops_per_s * kernel.reached)
        time = np.maximum(math_s, np.asarray(kernel.num_bytes) / self.bytes_per_s)
        return np.where(time > 0, time + self.kernel_s, 0.0)


class Work(NamedTuple):
    """What one part is given on every rank: `rows` that pass its GEMMs, and the weights' copies (local experts).

    shards: ranks over which weights with heads in them are cut; each then has 1/shards of the columns or rows of the
    weight, for its own rows and those of the others.
    """

    rows: Floats | float
    num_weights: float = 1.0
    shards: int = 1


def gemms(
    model: Model, part: Part, layer: int, pass_: Pass, work: Work, element_bytes: int, assumed: Assumptions
) -> Iterator[Kernel]:
    """One kernel for each GEMM of a part; a grouped GEMM counts as one."""
    grouped = part == "expert"
    reached = assumed.gemm
    if grouped:
        reached = assumed.grouped_gemm if pass_ is Pass.F else assumed.grouped_gemm_backward
    for term, flops, width in _gemm_terms(model, part, layer, work.shards):
        weights = work.num_weights * flops / 2
        if term in CUT:
            weights /= work.shards
        of_weights = weights * (2 * GRAD_BYTES if pass_ is Pass.W else element_bytes)
        # No rows, no kernel: a rank whose experts got no tokens does not read its weights either.
        moved = of_weights * (work.rows > 0) + element_bytes * work.rows * width
        yield Kernel(work.rows * flops, moved, reached)


@lru_cache(maxsize=4096)
def _gemm_terms(model: Model, part: Part, layer: int, shards: int) -> tuple[tuple[str, float, int], ...]:
    """Of each GEMM its name, and of one row its FLOPs and the elements in and out; all are linear in the rows."""
    terms = forward_terms(model, part, layer, tokens=1.0, seq_len=1, assignments=1.0)
    return tuple(
        (term, flops, _row_width(model, part, term, shards)) for term, flops in terms.items() if term not in CORE_TERMS
    )


def attention_core(
    model: Model,
    layer: int,
    pass_: Pass,
    tokens: float,
    seq_len: int,
    element_bytes: int,
    assumed: Assumptions,
    received: float = 0.0,
) -> Kernel:
    """Scores, softmax and weighted values in one kernel; `received` rows of keys and values are other ranks'."""
    terms = forward_terms(model, "attention", layer, tokens=tokens, seq_len=seq_len)
    flops = sum(value for term, value in terms.items() if term in CORE_TERMS)
    pairs = terms["context"] / (2.0 * model.num_heads * model.v_head_dim)
    span = 2.0 * pairs / tokens
    row = model.q_size + model.kv_size + model.num_kv_heads * model.v_head_dim + model.attention_output_size
    moved = element_bytes * (tokens * row + received * kept_width(model))
    share = span / (span + assumed.attention_half_span)
    if pass_ is Pass.F:
        return Kernel(flops, moved, assumed.attention_forward * share)
    # Reads what the forward read and wrote, and the output's gradient; writes three gradients.
    return Kernel(flops * assumed.attention_backward_factor, 2 * moved, assumed.attention_backward * share)


def attention_elements(model: Model, pass_: Pass) -> float:
    """Elements a token that the elementwise kernels of an attention move; none in pass W.

    Forward: norm (2 H), rotary positions of q and k (2 (q + kv)), residual with the second norm (4 H). Backward: the
    same tensors and their gradients.
    """
    forward = 6 * model.hidden_size + 2 * (model.q_size + model.kv_size)
    return {Pass.F: forward, Pass.B: 2 * forward, Pass.W: 0}[pass_]


def inner_width(model: Model, part: Part) -> int:
    """Width of a SwiGLU's product; of other parts that of the dense layers, which they do not use."""
    widths = {"expert": model.expert_hidden_size, "shared": model.shared_hidden_size}
    return widths.get(part, model.dense_hidden_size)


def swiglu_elements(width: int, pass_: Pass) -> float:
    """Elements a row: gate and up in, product out; backward, gate, up and the product's gradient in, two gradients out.

    The product is kept for the weight gradients of the next GEMM, and not made again.
    """
    return {Pass.F: 3 * width, Pass.B: 5 * width, Pass.W: 0}[pass_]


def head_bytes(model: Model, pass_: Pass, element_bytes: int) -> float:
    """Bytes a token of the final norm and the loss, next to the GEMM: logits in, fp32 probabilities out, and back."""
    norm = 2 * model.hidden_size * element_bytes
    loss = model.vocab_size * (element_bytes + LOGIT_BYTES)
    return {Pass.F: norm + loss, Pass.B: 2 * norm + loss, Pass.W: 0}[pass_]


def _row_width(model: Model, part: Part, term: str, shards: int = 1) -> int:
    """Elements of a GEMM's input row and output row together; of what all `shards` ranks have whole, all their rows."""
    hidden, mla = model.hidden_size, model.mla
    inner = inner_width(model, part)
    latent = mla.kv_lora_rank if mla else 0
    widths = {
        "qkv": shards * hidden + model.q_size + 2 * model.kv_size,
        "output": model.attention_output_size + shards * hidden,
        "q": shards * hidden + model.q_size,
        "q_down": hidden + (mla.q_lora_rank if mla else 0),
        "q_up": shards * (mla.q_lora_rank if mla else 0) + model.q_size,
        "kv_down": hidden + latent + (mla.qk_rope_head_dim if mla else 0),
        "kv_up": shards * latent + model.num_heads * ((mla.qk_nope_head_dim if mla else 0) + model.v_head_dim),
        "router": hidden + model.num_experts,
        "gate_up": hidden + 2 * inner,
        "down": inner + hidden,
        "logits": hidden + model.vocab_size,
    }
    return widths[term]
