"""Attention variants: a sliding window, by layer, and latent attention, against the formulas written out."""

from __future__ import annotations

import math

import pytest
from cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.execute.pool import RankPool
from bench.execute.support import unsupported
from bench.models import MODELS, Model

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from bench.execute.init import initialise, parameter_shapes  # noqa: E402
from bench.execute.parts import AttentionPart  # noqa: E402
from bench.execute.parts.core import attend  # noqa: E402
from bench.execute.reference import ReferenceModel  # noqa: E402
from bench.execute.verify import verify  # noqa: E402
from bench.flops import attention_pairs, num_parameters  # noqa: E402

WINDOW, LATENT = MODELS["tiny-window"], MODELS["tiny-mla"]


def naive(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Query by query, over exactly the keys that it meets: [heads, S, d] each."""
    rows = []
    for i in range(q.shape[1]):
        first = max(0, i + 1 - (window or i + 1))
        scores = (k[:, first : i + 1] @ q[:, i, :, None])[..., 0] / math.sqrt(q.shape[-1])
        rows.append((scores.softmax(-1)[:, None] @ v[:, first : i + 1])[:, 0])
    return torch.stack(rows, dim=1)


@settings(max_examples=25)
@given(
    length=st.integers(1, 14),
    window=st.integers(0, 15),
    groups=st.sampled_from([1, 2]),
    share=st.sampled_from([1, 3]),
    value_dim=st.sampled_from([4, 6]),
)
def test_a_window_is_the_last_keys_and_gradients_follow(
    length: int, window: int, groups: int, share: int, value_dim: int
) -> None:
    torch.manual_seed(length * 23 + window)
    q = torch.randn(2, groups * share, length, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, groups, length, 6, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, groups, length, value_dim, dtype=torch.float64, requires_grad=True)
    out = attend(q, k, v, window=window)
    each = [naive(q[b], k[b].repeat_interleave(share, 0), v[b].repeat_interleave(share, 0), window) for b in (0, 1)]
    expected = torch.stack(each)
    torch.testing.assert_close(out, expected)
    grads = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grads), torch.autograd.grad(expected, (q, k, v), grads), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_the_keys_that_are_met_are_those_that_are_counted() -> None:
    """Values of one key each: with equal scores, what comes out is one over the number of keys."""
    for window in (0, 1, 5, 20):
        ones = torch.zeros(1, 1, 16, 8)
        weights = attend(ones, ones, torch.eye(16)[None, None], window=window)[0, 0]
        assert int((weights > 0).sum()) == attention_pairs(16, window)


def turned(x: Tensor, theta: float) -> Tensor:
    """Rotary positions as complex numbers: x [S, d], dimension i with i + d / 2."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(x.shape[0], dtype=torch.float64), frequencies)
    z = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), dim=-1)


def latent_by_hand(model: Model, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Head by head, with the projections of every head cut out: x fp64 [S, H]."""
    mla = model.mla
    assert mla is not None

    def normed(name: str, y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[name]

    query = normed("q_norm", x @ weights["q_down"].T) if mla.q_lora_rank else x
    low = x @ weights["kv_down"].T
    latent, shared = normed("kv_norm", low[:, : mla.kv_lora_rank]), turned(low[:, mla.kv_lora_rank :], model.rope_theta)
    out = []
    nope, rope, width = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.qk_nope_head_dim + mla.v_head_dim
    for head in range(model.num_heads):
        q = query @ weights["q_up"][head * (nope + rope) : (head + 1) * (nope + rope)].T
        kv = latent @ weights["kv_up"][head * width : (head + 1) * width].T
        q = torch.cat((q[:, :nope], turned(q[:, nope:], model.rope_theta)), dim=-1)
        k = torch.cat((kv[:, :nope], shared), dim=-1)
        out.append(naive(q[None], k[None], kv[None, :, nope:], model.window(0))[0])
    return torch.cat(out, dim=-1) @ weights["proj"].T


@pytest.mark.parametrize("q_lora_rank", [32, 0])
@pytest.mark.parametrize("window", [(), (5,)])
def test_latent_attention_is_its_formulas(q_lora_rank: int, window: tuple[int, ...]) -> None:
    """Of the reference and of the executor's part alike."""
    assert LATENT.mla is not None
    mla = LATENT.mla.model_copy(update={"q_lora_rank": q_lora_rank})
    model = LATENT.model_copy(update={"mla": mla, "window_pattern": window})
    reference = ReferenceModel(model, 1, norm_jitter=0.1)
    at = "layers.0.attention."
    weights = {
        name.removeprefix(at).removesuffix(".weight"): value.detach().double()
        for name, value in reference.parameters.items()
        if name.startswith(at)
    }
    x = torch.randn(2, 12, model.hidden_size)
    expected = torch.stack([latent_by_hand(model, weights, one.double()) for one in x])
    found = reference._attention(at, x, 0).detach()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    part = AttentionPart(model, 0, global_sequences=2, device="cpu", dtype=torch.float32)
    initialise(part, 1, norm_jitter=0.1)
    ours, _ = part.attention(x.transpose(0, 1), attention_mask=None)
    torch.testing.assert_close(ours.transpose(0, 1).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", [WINDOW, LATENT], ids=lambda model: model.name)
@pytest.mark.parametrize("system", ["ep", "disagmoe"])
def test_systems_equal_the_reference(model: Model, system: str, pool: RankPool) -> None:
    layout = {"ep": 2, "pp": 2} if system == "ep" else {"attention_ranks": 2, "expert_ranks": 1, "groups": 2}
    report = verify(make_case(system, model, microbatches=2, **layout), pool, dtype="fp32")
    assert report.ok, report


def test_the_window_changes_the_model() -> None:
    sequences = torch.arange(34).view(2, 17)
    losses = [
        ReferenceModel(WINDOW.model_copy(update={"window_pattern": pattern}), 0).loss_and_gradients(sequences).loss
        for pattern in ((6, 0), (0, 6), (6,), (), (16,))
    ]
    assert losses[3] == losses[4]  # a window as long as the sequence
    assert len(set(losses)) == 4


@pytest.mark.parametrize("model", [WINDOW, LATENT], ids=lambda model: model.name)
def test_parameters_are_those_that_are_counted(model: Model) -> None:
    assert sum(math.prod(shape) for shape in parameter_shapes(model).values()) == num_parameters(model).total


def test_what_is_not_supported_is_refused_by_name() -> None:
    named = " ".join(unsupported(MODELS["gpt-oss-120b"]))
    for field in ("attention_sinks", "attention_bias", "expert_bias", "router_linear_bias", "activation"):
        assert f"model.{field}: " in named
    assert "window_pattern" not in named
    with pytest.raises(BadInput, match="attention_sinks"):
        ReferenceModel(WINDOW.model_copy(update={"attention_sinks": True}), 0)
    assert unsupported(MODELS["deepseek-v2-lite"]) == []
    assert [line.partition(":")[0] for line in unsupported(MODELS["deepseek-v3"])] == [
        "model.router_bias",
        "model.router_groups",
    ]
