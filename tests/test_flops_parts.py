"""FLOPs of what ranks really run, counted by torch, are those of `bench.flops`."""

from __future__ import annotations

import pytest

from bench.flops import CORE_TERMS, PASSES, forward_terms, model_parts
from bench.models import MLA, Model

torch = pytest.importorskip("torch")

from parts_step import Layout, Step  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 64}
SHAPE |= {"num_experts": 8, "top_k": 2, "expert_hidden_size": 24}
DENSE = {"num_dense_layers": 1, "dense_hidden_size": 40, "num_shared_experts": 1, "shared_hidden_size": 16}
LATENT = MLA(q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16)
MODELS = [
    Model(name="grouped", **SHAPE),
    Model(name="dense-and-shared", **SHAPE, **DENSE),
    Model(name="latent", **{**SHAPE, "num_kv_heads": 4, "head_dim": 16}, mla=LATENT),
]
SEQUENCES, SEQ_LEN = 4, 16


def gemm(*shapes: tuple[int, ...], out_shape: object = None, **_: object) -> int:
    """Of [m, k] by [k, n], or by one [k, n] a group of rows, or of [m, k] by [k, n] in groups of k."""
    first, second = shapes[-2:]
    return 2 * first[0] * first[1] * second[-1]


# Of torch's operators that it has no count of its own for. Arguments that are no tensors come along.
OTHERS = {
    torch.ops.aten.addmm_: lambda into, a, b, **rest: gemm(a, b),
    torch.ops.aten._grouped_mm: lambda a, b, *rest, **more: gemm(a, b),
}


def expected(model: Model, pass_: str) -> float:
    """By `bench.flops`, but for attention's core: plain attention has all pairs, causal or not."""
    factor = {"F": 1.0, "B": 2.0, "W": 0.0}[pass_] * 2 * SEQ_LEN / (SEQ_LEN + 1)
    return sum(
        flops * (factor if term in CORE_TERMS else 1.0)
        for part, layer in model_parts(model)
        for term, flops in forward_terms(model, part, layer, tokens=SEQUENCES * SEQ_LEN, seq_len=SEQ_LEN).items()
    )


def counted(model: Model, layout: Layout) -> dict[str, int]:
    """By torch, pass by pass."""
    counters = {pass_: FlopCounterMode(display=False, custom_mapping=OTHERS) for pass_ in PASSES}
    sequences = torch.randint(0, model.vocab_size, (SEQUENCES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    with sdpa_kernel(SDPBackend.MATH):
        Step(model, layout, SEQUENCES).run(sequences, watch=counters.__getitem__)
    return {pass_: counter.get_total_flops() for pass_, counter in counters.items()}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_parts_take_the_flops_that_are_counted(model: Model) -> None:
    """Every GEMM of embedding, attention, router, experts, shared experts and head, pass by pass."""
    assert counted(model, Layout()) == {pass_: expected(model, pass_) for pass_ in PASSES}


def test_what_is_computed_again_is_no_model_flops() -> None:
    """Full recomputation: torch counts the forward once more in the backward, the model's FLOPs do not."""
    model = MODELS[0]
    plain = {pass_: expected(model, pass_) for pass_ in PASSES}
    assert counted(model, Layout(recompute=True)) == plain | {"B": plain["B"] + plain["F"]}
