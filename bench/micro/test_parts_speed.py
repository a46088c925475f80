"""One layer's parts on one rank, forward and backward: permutation, router, grouped GEMM, attention.

Shapes are of Qwen3-235B's layer on CUDA, in bf16, and a fraction of them on the CPU, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.models import Model, get_model

if TYPE_CHECKING:
    import torch

NUM_RANKS = 8  # over which a layer's experts are spread
SMALL = Model(
    name="micro",
    num_layers=1,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    num_experts=32,
    top_k=4,
    expert_hidden_size=128,
    vocab_size=256,
)
# Model, tokens of one sequence, dtype.
SHAPES: dict[str, tuple[Model, int, str]] = {
    "cpu": (SMALL, 512, "float32"),
    "cuda": (get_model("qwen3-235b"), 4096, "bfloat16"),
}


class Shape:
    """What a benchmark needs to make tensors on a device."""

    def __init__(self, device: str) -> None:
        import torch

        self.model, self.tokens, dtype = SHAPES[device]
        self.device, self.dtype = torch.device(device), getattr(torch, dtype)
        self.generator = torch.Generator(device).manual_seed(0)

    def randn(self, *size: int) -> torch.Tensor:
        import torch

        return torch.randn(*size, device=self.device, dtype=self.dtype, generator=self.generator)

    def filled(self, part: torch.nn.Module) -> Any:
        """The part with small random weights and gradient buffers."""
        import torch

        with torch.no_grad():
            for parameter in part.parameters():
                parameter.copy_(0.02 * self.randn(*parameter.shape))
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        return part

    def timed(self, benchmark: BenchmarkFixture, call: Callable[[], Any], **info: float) -> None:
        """Times calls, each until the device is done."""
        import torch

        def whole() -> None:
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        rounds = 10 if benchmark.enabled else 1
        benchmark.pedantic(whole, rounds=rounds, warmup_rounds=3 if benchmark.enabled else 0)
        if benchmark.stats is not None:
            seconds = benchmark.stats.stats.median
            benchmark.extra_info.update({name: amount / seconds for name, amount in info.items()})


@pytest.fixture
def shape(device: str) -> Shape:
    return Shape(device)


def expert_ids(shape: Shape) -> torch.Tensor:
    import torch

    scores = torch.rand(shape.tokens, shape.model.num_experts, device=shape.device, generator=shape.generator)
    return scores.topk(shape.model.top_k, dim=1).indices


@pytest.mark.parametrize("copies", ["rank", "expert"])
def test_permutation(benchmark: BenchmarkFixture, shape: Shape, copies: Any) -> None:
    """From expert ids to the rows of every message, and back to their tokens."""
    from bench.execute.exchange import Deal, add_rows, route

    deal = Deal(NUM_RANKS, shape.model.num_experts // NUM_RANKS, copies, 0, False)
    ids, u = expert_ids(shape), shape.randn(shape.tokens, shape.model.hidden_size)

    def there_and_back() -> torch.Tensor:
        rows = route(ids, deal).rows
        return add_rows(u, u[rows.token_index], rows)

    shape.timed(benchmark, there_and_back, tokens_per_s=shape.tokens)


def test_router(benchmark: BenchmarkFixture, shape: Shape) -> None:
    import torch

    from bench.execute.parts.router import Router

    router = shape.filled(Router(shape.model, global_sequences=1, device=shape.device, dtype=shape.dtype))
    u = shape.randn(shape.tokens, shape.model.hidden_size).requires_grad_()

    def both_ways() -> None:
        torch.autograd.grad(router(u, 1).weights.sum(), [u])

    shape.timed(benchmark, both_ways, tokens_per_s=shape.tokens)


def test_grouped_gemm(benchmark: BenchmarkFixture, shape: Shape) -> None:
    """The experts of one rank, forward and input gradients, on the pairs that a balanced router gives it."""
    import torch

    from bench.execute.parts import ExpertPart

    model = shape.model
    local = model.num_experts // NUM_RANKS
    part = shape.filled(
        ExpertPart(model, 0, first_expert=0, num_local_experts=local, device=shape.device, dtype=shape.dtype)
    )
    per_expert = shape.tokens * model.top_k // model.num_experts * NUM_RANKS
    pairs = per_expert * local
    rows = shape.randn(pairs, model.hidden_size).requires_grad_()
    index = torch.arange(pairs, device=shape.device)
    weights = torch.ones(pairs, device=shape.device)
    flops = 2 * 6 * pairs * model.hidden_size * model.expert_hidden_size

    def both_ways() -> None:
        torch.autograd.grad(part(rows, index, weights, [per_expert] * local).sum(), [rows])

    shape.timed(benchmark, both_ways, flops_per_s=flops)


def test_attention(benchmark: BenchmarkFixture, shape: Shape) -> None:
    """The whole attention part with its router, forward and input gradients, on one sequence."""
    import torch

    from bench.execute.parts import AttentionPart

    part = shape.filled(AttentionPart(shape.model, 0, global_sequences=1, device=shape.device, dtype=shape.dtype))
    x = shape.randn(shape.tokens, shape.model.hidden_size).requires_grad_()

    def both_ways() -> None:
        torch.autograd.grad(part(x, 1).h.sum(), [x])

    shape.timed(benchmark, both_ways, tokens_per_s=shape.tokens)
