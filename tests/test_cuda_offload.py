"""Offload on a GPU: pinned memory, the same values, less on the device, and a verified step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_cuda import case_of
from test_island_offload import KINDS, TINY, data

from bench.execute.pool import RankPool

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bench.execute import optimizer as module  # noqa: E402
from bench.execute.host_activations import HostLink  # noqa: E402
from bench.execute.init import initialise, named_global  # noqa: E402
from bench.execute.island import Island  # noqa: E402
from bench.execute.optimizer import AdamW  # noqa: E402
from bench.execute.parts import AttentionPart, ExpertPart  # noqa: E402
from bench.execute.verify import verify  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="there is no CUDA device"),
]

GPU = torch.device("cuda", 0)
SHAPES = [(257, 1024), (1023,), (3, 129, 64), (1, 50_000)]


def updated(dtype: torch.dtype, offload: bool) -> tuple[list[torch.Tensor], AdamW]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(GPU, dtype) for shape in SHAPES]
    optimizer = AdamW(params, lr=0.1, offload=offload)
    for step in range(4):
        for param in params:
            param.main_grad = param.float().sin() + step  # type: ignore[attr-defined]
        optimizer.step(torch.tensor(0.5, dtype=torch.float64, device=GPU))
    torch.cuda.synchronize()
    return params, optimizer


@pytest.mark.parametrize("limit", [2**12, 2**18, 2**26])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_streams_pinned_state_and_is_the_same(
    dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of a few kilobytes: buffers go round many times."""
    expected, resident = updated(dtype, offload=False)
    monkeypatch.setattr(module, "FETCHED_BYTES", limit)
    params, optimizer = updated(dtype, offload=True)
    assert {tensor.device.type for tensor in resident.state} == {"cuda"}
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in optimizer.state)
    ulp = 4 * torch.finfo(torch.float32).eps  # of values up to 4; a slice's kernel fuses other products
    for one, other in zip(params, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=4 * ulp if dtype == torch.float32 else 1e-2)
    for one, other in zip(optimizer.state, resident.state, strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-6, atol=ulp)


def passes(kind: str, link: HostLink | None) -> tuple[list[torch.Tensor], int]:
    """All gradients of three micro-batches in flight, and the bytes that their forwards left on the device."""
    part: AttentionPart | ExpertPart
    if kind == "attention":
        part = AttentionPart(TINY, 0, global_sequences=8, device=GPU, dtype=torch.bfloat16)
    else:
        part = ExpertPart(TINY, 0, first_expert=0, num_local_experts=4, device=GPU, dtype=torch.bfloat16)
    initialise(part, 0, norm_jitter=0.1)
    island = Island(part, link)

    def here(values: tuple[object, ...]) -> list[object]:
        return [
            (value.to(GPU, torch.bfloat16 if value.dim() > 1 and value.shape[1] > 8 else value.dtype))
            if isinstance(value, torch.Tensor)
            else value
            for value in values
        ]

    inputs, options, grads = data(kind)
    keys = range(3)
    at_first = torch.cuda.memory_allocated()
    for key in keys:
        island.forward(key, *here(inputs), **options)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - at_first
    found = []
    for key in keys:
        island.fetch(key)
        found += [grad for grad in island.backward(key, *here(grads)) if grad is not None]
        island.weight_gradient(key)
    torch.cuda.synchronize()
    return [*found, *(grad for _, _, grad in named_global(part))], kept


@pytest.mark.parametrize("kind", KINDS)
def test_activations_leave_the_device_and_come_back(kind: str) -> None:
    expected, kept = passes(kind, None)
    found, left = passes(kind, HostLink(GPU))
    assert left < 0.4 * kept
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture(scope="module")
def two_on_one() -> Iterator[RankPool]:
    with RankPool(2, "cuda", transport="host", timeout_s=120) as pool:
        yield pool


@pytest.mark.parametrize("offload", ["state", "activations", "all"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("system", ["ep", "disagmoe"])
def test_a_step_equals_the_reference(system: str, dtype: str, offload: str, two_on_one: RankPool) -> None:
    layout = {"offload": offload, **({"ep": 2} if system == "ep" else {"round_length": 2})}
    report = verify(case_of(system, layout, dtype), two_on_one)
    assert report.ok, str(report)
