"""AdamW on main weights against torch's own, and the clip norm."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from bench.execute import optimizer as module  # noqa: E402
from bench.execute.host_state import HostState  # noqa: E402
from bench.execute.optimizer import AdamW, clip_scale, slices, square_sum  # noqa: E402

SHAPES = [(4, 3), (3,), (2, 3, 5)]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def test_it_follows_torchs_adamw_and_does_not_decay_norms():
    ours, theirs = parameters(), parameters()
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = AdamW(ours, weight_decay=0.1, **options)
    decayed = [param for param in theirs if param.dim() > 1]
    norms = [param for param in theirs if param.dim() == 1]
    expected = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], **options
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            grad = torch.randn(mine.shape, generator=generator)
            mine.main_grad, other.grad = grad.clone(), grad * 0.5
        optimizer.step(clip_scale=0.5)
        expected.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_bf16_parameters_are_roundings_of_main_weights_that_take_small_steps():
    params = parameters(torch.bfloat16)
    before = [param.detach().clone() for param in params]
    optimizer = AdamW(params, lr=1e-5, weight_decay=0.0)
    for _ in range(3):
        for param in params:
            param.main_grad = torch.ones(param.shape)
        optimizer.step()
    for param, old, main in zip(params, before, optimizer.main, strict=True):
        assert main.dtype == torch.float32
        assert torch.equal(param, main.bfloat16())
        assert torch.allclose(main, old.float() - 3e-5, atol=1e-6)


def test_an_update_in_slices_is_the_same_update(monkeypatch):
    def updated():
        params = parameters()
        optimizer = AdamW(params, lr=0.1)
        for step in range(3):
            for param in params:
                grad = param.detach().sin() + step
                param.main_grad = grad.mT.contiguous().mT if grad.dim() > 1 else grad  # as autograd may lay it out
            optimizer.step()
        return params

    whole = updated()
    monkeypatch.setattr(module, "SLICE_BYTES", 8)
    assert all(torch.equal(one, other) for one, other in zip(updated(), whole, strict=True))


@pytest.mark.parametrize("limit", [1, 4, 24, 32, 60, 10**9])
def test_slices_hold_every_element_once_and_no_more_than_the_limit(limit):
    tensors = [torch.zeros(shape) for shape in [*SHAPES, (), (0, 3)]]
    for _, views in slices((tensors, tensors), limit):
        assert sum(view.numel() * 4 for view in views) <= max(limit, 4)
        for view in views:
            view += 1
    assert all((tensor == 1).all() for tensor in tensors)


def test_pieces_of_a_vector_stay_vectors_and_others_do_not_become_any():
    """By this the optimizer tells what decays."""
    vector, matrix = torch.zeros(9), torch.zeros(1, 9)
    found = [view.dim() for (views,) in slices(([vector, matrix],), 8) for view in views]
    assert found == [1] * 5 + [2] * 5


def updated(dtype, offload):
    params = parameters(dtype)
    optimizer = AdamW(params, lr=0.1, offload=offload)
    for step in range(3):
        for param in params:
            param.main_grad = param.detach().float().sin() + step
        optimizer.step(0.5)
    return params, optimizer


@pytest.mark.parametrize("limit", [8, 32, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_with_the_host_comes_in_slices_and_the_update_is_the_same(monkeypatch, dtype, limit):
    whole, resident = updated(dtype, offload=False)
    monkeypatch.setattr(module, "FETCHED_BYTES", limit)
    handed_out = []
    through = HostState.through

    def listening(self, cut):
        for copies in through(self, cut):
            handed_out.append(sum(copy.numel() for copy in copies[0]))
            yield copies

    monkeypatch.setattr(HostState, "through", listening)
    params, optimizer = updated(dtype, offload=True)
    assert sum(handed_out) == 3 * sum(param.numel() for param in params)
    assert max(handed_out) * 4 <= limit
    assert len(handed_out) >= 3 * sum(param.numel() for param in params) * 4 / limit
    for ours, others in ((params, whole), (optimizer.main, resident.main), (optimizer.state, resident.state)):
        assert all(torch.equal(one, other) for one, other in zip(ours, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_state_is_not_on_the_parameters_device(dtype):
    """Shown with a device that every machine has: fp32 parameters are their own main weights, and stay."""
    params = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in SHAPES]
    here, there = (AdamW(params, lr=0.1, offload=offload) for offload in (False, True))
    assert {tensor.device.type for tensor in here.state} == {"meta"}
    assert {tensor.device.type for tensor in there.state} == {"cpu"}
    assert len(there.state) == (2 if dtype == torch.float32 else 3) * len(SHAPES)


def test_fp32_parameters_are_their_own_main_weights():
    params = parameters()
    optimizer = AdamW(params, lr=0.1)
    assert [main.data_ptr() for main in optimizer.main] == [param.data_ptr() for param in params]


def test_zero_grad_keeps_the_buffers():
    params = parameters()
    buffers = [torch.ones(param.shape) for param in params]
    for param, buffer in zip(params, buffers, strict=True):
        param.main_grad = buffer
    AdamW(params, lr=0.1).zero_grad()
    assert all(not buffer.any() for buffer in buffers)
    assert all(param.main_grad is buffer for param, buffer in zip(params, buffers, strict=True))


def test_a_rank_without_parameters_steps():
    optimizer = AdamW([], lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.num_steps == 1
    assert square_sum([], "cpu").item() == 0


def test_the_clip_norm_is_that_of_all_gradients_together():
    grads = [torch.full((2, 2), 3.0), torch.tensor([8.0])]
    norm = square_sum(grads, "cpu").sqrt()
    assert norm.item() == pytest.approx(10.0)
    assert clip_scale(norm, 1.0).item() == pytest.approx(0.1)
    assert clip_scale(norm, 20.0).item() == 1.0
