"""What lies between the GEMMs against formulas in fp64; on CUDA the kernels against the same."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from bench.execute.fused import Pairs, gather, rotate, sum_pairs, swiglu  # noqa: E402

DEVICES = ["cpu"] + [pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16]


def tolerance(dtype) -> dict[str, float]:
    return {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}


def check(function, exact, *inputs):
    """Values and input gradients of ``function`` against those of ``exact`` in fp64."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    wide = [value.detach().double().requires_grad_() for value in inputs]
    out, expected = function(*leaves), exact(*wide)
    assert out.dtype == inputs[0].dtype
    grad = torch.randn(out.shape, device=out.device).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, grad)
    expected_grads = torch.autograd.grad(expected, wide, grad.double())
    for mine, other in zip([out, *grads], [expected, *expected_grads], strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine.double(), other, **tolerance(out.dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 24), (3, 1408), (1, 1), (0, 8)])
def test_swiglu(device, dtype, shape):
    rows, width = shape
    torch.manual_seed(0)
    gate_up, weights = torch.randn(rows, 2 * width, device=device).to(dtype), torch.rand(rows, device=device)

    def exact(x, w=None):
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up * (1 if w is None else w[:, None])

    check(swiglu, exact, gate_up)
    if dtype == torch.float32:
        check(swiglu, exact, gate_up, weights)
        return
    leaves = gate_up.clone().requires_grad_(), weights.clone().requires_grad_()
    out = swiglu(*leaves)
    out.float().sum().backward()
    assert leaves[1].grad.dtype == torch.float32
    expected = exact(gate_up.double()).sum(dim=-1)
    torch.testing.assert_close(leaves[1].grad.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [[2, 0, 2, 2, 1, 0], [3, 3, 3], [], [0]], ids=str)
@pytest.mark.parametrize("width", [8, 2056])
def test_gather_and_sum_of_pairs(device, dtype, index, width):
    torch.manual_seed(0)
    row = torch.tensor(index, dtype=torch.int64, device=device)
    pairs = Pairs.of(row, 4)
    check(lambda x: gather(x, pairs), lambda x: x[row], torch.randn(4, width, device=device).to(dtype))
    values = torch.randn(len(index), width, device=device).to(dtype)

    def exact(*parts):
        total = torch.zeros(4, width, dtype=torch.float64, device=device)
        return total.index_add(0, row, torch.cat(parts))

    check(lambda y: sum_pairs(pairs, y), exact, values)
    split = len(index) // 2
    check(lambda y, z: sum_pairs(pairs, y, z), exact, values[:split], values[split:])


@pytest.mark.parametrize("device", DEVICES)
def test_a_sum_is_rounded_once(device):
    """1 + 1e-3 + 1e-3 ... : partial sums in bf16 would stay at 1."""
    values = torch.full((9, 8), 1e-3, dtype=torch.bfloat16, device=device)
    values[0] = 1
    total = sum_pairs(Pairs.of(torch.zeros(9, dtype=torch.int64, device=device), 1), values)
    assert torch.equal(total[0], values.double().sum(dim=0).bfloat16())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (1, 2), (4, 48)])
def test_rotary_positions(device, dtype, heads, dim):
    torch.manual_seed(0)
    frequencies = 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
    angles = torch.outer(torch.arange(7.0), frequencies).to(device)
    # A slice of a wider projection, with positions and sequences transposed, as attention hands it over.
    wide = torch.randn(2, 7, heads, dim + 4, device=device).to(dtype)
    x = wide[..., :dim].transpose(0, 1)

    def exact(x):
        turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones(()).double(), angles.double().cpu()).to(
            device
        ).view(7, 1, 1, dim // 2)
        return torch.cat((turned.real, turned.imag), dim=-1)

    check(lambda x: rotate(x, angles), exact, x)
