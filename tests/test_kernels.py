"""Kernels of the ends, the sums, the weight gradients and the optimizer, and what stands in for them without CUDA."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from bench.execute import wgrad  # noqa: E402
from bench.execute.entropy import cross_entropy  # noqa: E402
from bench.execute.exchange import Deal, add_rows, route  # noqa: E402
from bench.execute.heads import split_heads  # noqa: E402
from bench.execute.optimizer import AdamW  # noqa: E402

DEVICES = ["cpu"] + [pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.parametrize("device", DEVICES)


def apart(found, expected):
    """||found - expected|| / ||expected||."""
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), [(5, 64), (3, 4096), (2, 10001), (1, 1)])
def test_cross_entropy(device, dtype, rows, vocabulary):
    torch.manual_seed(0)
    logits = (torch.randn(rows, vocabulary, device=device) * 5).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device=device)
    weights = torch.rand(rows, device=device)
    wide = logits.detach().double().requires_grad_()
    losses, expected = cross_entropy(logits, labels), functional.cross_entropy(wide, labels, reduction="none")
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    assert logits.grad.dtype == dtype
    near = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(logits.grad.double(), wide.grad, **near)


def test_cross_entropy_of_logits_far_from_zero(device):
    logits = torch.tensor([[1e3, 1e3, -1e3], [float("-inf"), 0.0, 0.0]], device=device)
    losses = cross_entropy(logits, torch.tensor([1, 2], device=device))
    assert losses.tolist() == pytest.approx([0.6931472, 0.6931472], abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copies", ["expert", "rank"])
@pytest.mark.parametrize("width", [8, 2056])
def test_rows_are_added_to_their_tokens(device, dtype, copies, width):
    torch.manual_seed(0)
    ids = torch.rand(33, 8, device=device).topk(3, dim=1).indices
    found = route(ids, Deal(4, 2, copies, 1, shared=True)).rows
    rows = torch.randn(int(found.row_counts.sum()), width, device=device).to(dtype)
    base = torch.randn(33, width, device=device).to(dtype)
    exact = torch.zeros(33, width, dtype=torch.float64, device=device)
    exact.index_add_(0, found.token_index[: len(rows)], rows.double())
    near = 1e-6 if dtype == torch.float32 else 4e-3
    for total, expected in [(add_rows(None, rows, found), exact), (add_rows(base, rows, found), exact + base.double())]:
        assert total.dtype == dtype
        assert apart(total, expected) < near


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [(5, 0, 200, 1), (0, 0), (64, 128)], ids=str)
@pytest.mark.parametrize(("width_out", "width_in"), [(16, 8), (136, 264)])
def test_grouped_weight_gradients_are_added(device, dtype, counts, width_out, width_in):
    torch.manual_seed(0)
    x = torch.randn(sum(counts), width_in, device=device).to(dtype)
    weight = torch.randn(len(counts), width_out, width_in, device=device).to(dtype).requires_grad_()
    weight.main_grad = torch.randn(weight.shape, device=device)
    before = weight.main_grad.double()
    offsets = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    grad = torch.randn(sum(counts), width_out, device=device).to(dtype)
    wgrad.grouped_linear(x.requires_grad_(), weight, counts, offsets).backward(grad)
    expected = before.clone()
    ends = torch.tensor(counts).cumsum(0).tolist()
    for group, (stop, count) in enumerate(zip(ends, counts, strict=True)):
        expected[group] += grad[stop - count : stop].double().t() @ x.detach()[stop - count : stop].double()
    # Without the kernel the product is rounded to the activations' dtype before it is added.
    near = 1e-5 if dtype == torch.float32 or device == "cuda" else 4e-3
    assert apart(weight.main_grad, expected) < near


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_update_follows_torchs_adamw(device, dtype):
    torch.manual_seed(0)
    shapes = [(40, 33), (7,), (1, 2049)]
    ours = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    exact = [torch.nn.Parameter(value.double()) for value in ours]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    mine = AdamW(ours, weight_decay=0.1, **options)
    torchs = torch.optim.AdamW(
        [{"params": [p for p in exact if p.dim() == n], "weight_decay": 0.1 * (n > 1)} for n in (1, 2)], **options
    )
    for _ in range(4):
        for value, other in zip(ours, exact, strict=True):
            value.main_grad = torch.randn(value.shape, device=device)
            other.grad = value.main_grad.double() * 0.25
        mine.step(torch.tensor(0.25, dtype=torch.float64, device=device))
        torchs.step()
    for value, main, other in zip(ours, mine.main, exact, strict=True):
        torch.testing.assert_close(main.double(), other.detach(), rtol=2e-6, atol=2e-6)
        assert torch.equal(value, main.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_warm_up_of_the_update_changes_nothing(device, dtype):
    torch.manual_seed(0)
    params = [torch.randn(shape, device=device).to(dtype) for shape in [(40, 33), (7,)]]
    optimizer = AdamW(params, lr=0.1)
    for _ in range(2):
        for param in params:
            param.main_grad = torch.randn(param.shape, device=device)
        before = [value.clone() for value in (*params, *optimizer.state, *optimizer.main)]
        optimizer.warm_up()
        after = [*params, *optimizer.state, *optimizer.main]
        assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 16), (3, 1, 12), (2, 2, 48)])
def test_heads_are_split_normalised_and_turned(device, dtype, normed, heads, groups, dim):
    """Against the same in fp64, with positions and sequences transposed in memory as the linear leaves them."""
    torch.manual_seed(0)
    length, batch, eps = 7, 2, 1e-5
    angles = torch.outer(torch.arange(length), 100.0 ** -(torch.arange(dim // 2) / (dim // 2))).to(device)
    qkv = torch.randn(batch, length, (heads + 2 * groups) * dim, device=device).to(dtype).transpose(0, 1)
    weights = [(1 + 0.1 * torch.randn(dim, device=device)).to(dtype) for _ in range(2)] if normed else []

    def turned(x):
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.double().cos()[:, None, None], angles.double().sin()[:, None, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def exact(qkv, *weights):
        by_group = qkv.reshape(length, batch, groups, -1, dim)
        parts = [by_group[..., :-2, :], by_group[..., -2:-1, :], by_group[..., -1:, :]]
        q, k, v = (part.reshape(length, batch, -1, dim) for part in parts)
        if weights:
            q, k = (
                x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w for x, w in zip((q, k), weights, strict=True)
            )
        return turned(q), turned(k), v

    leaves = [value.detach().requires_grad_() for value in (qkv, *weights)]
    wide = [value.detach().double().requires_grad_() for value in (qkv, *weights)]
    found = split_heads(leaves[0], angles, heads, groups, tuple(leaves[1:]) or None, eps)
    expected = exact(*wide)
    grads = [torch.randn(value.shape, device=device).to(dtype) for value in found]
    near = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, other in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape) == (dtype, other.shape)
        assert apart(mine, other) < near
    mine = torch.autograd.grad(found, leaves, grads)
    for one, other in zip(mine, torch.autograd.grad(expected, wide, [g.double() for g in grads]), strict=True):
        assert one.dtype == dtype
        assert apart(one, other) < near
