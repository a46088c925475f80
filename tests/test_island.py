"""Islands: passes in any order, keys in flight, what is kept; and the deferred linears they collect."""

from __future__ import annotations

import itertools
import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from torch import nn  # noqa: E402

from bench.execute.init import initialise, named_global  # noqa: E402
from bench.execute.island import Island, IslandError  # noqa: E402
from bench.execute.parts import AttentionPart, EmbedPart, ExpertPart, HeadPart  # noqa: E402
from bench.execute.wgrad import (  # noqa: E402
    WeightGradStore,
    accumulate_in_backward,
    grouped_linear,
    linear,
    main_grad,
)
from bench.models import MODELS  # noqa: E402

TINY = MODELS["tiny-sigmoid"]
CPU = {"device": "cpu", "dtype": torch.float32}


def attention_island() -> Island:
    part = AttentionPart(TINY, 0, global_sequences=8, **CPU)
    initialise(part, 0, norm_jitter=0.1)
    return Island(part)


def data(key: int):
    generator = torch.Generator().manual_seed(key)
    x, h, u = (torch.randn(8, 64, generator=generator) for _ in range(3))
    return x, (h, u, None, torch.randn(8, 4, generator=generator))


def play(order, **options):
    """Runs (pass, key) in the order given; input gradients by key, and weight gradients by name."""
    island, grads = attention_island(), {}
    for pass_, key in order:
        x, output_grads = data(key)
        if pass_ == "F":
            island.forward(key, x, 2, **options)
        elif pass_ == "B":
            grads[key] = island.backward(key, *output_grads)[0]
        else:
            island.weight_gradient(key)
    assert island.keys == ()
    return grads, {name: grad for name, _, grad in named_global(island.part)}


def test_passes_of_several_keys_may_interleave_in_any_order():
    one_by_one, expected = play([(pass_, key) for key in range(3) for pass_ in "FBW"])
    orders = [
        "F0 F1 F2 B2 B1 B0 W2 W1 W0",
        "F2 F0 B0 F1 W0 B1 B2 W2 W1",
        "F0 B0 F1 B1 F2 B2 W1 W2 W0",
    ]
    for order, recompute in itertools.product(orders, [False, True]):
        grads, weights = play([(word[0], int(word[1])) for word in order.split()], recompute=recompute)
        for key, grad in one_by_one.items():
            assert torch.equal(grads[key], grad)
        for name, grad in weights.items():  # sums of the same terms in another order
            assert torch.allclose(grad, expected[name], rtol=1e-5, atol=1e-7), name


def test_threads_do_not_disturb_each_other():
    order = [(pass_, key) for key in range(4) for pass_ in "FBW"]
    results = {}

    def run(name: str) -> None:
        results[name] = play(order)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected, weights = play(order)
    for grads, sums in results.values():
        assert all(torch.allclose(grads[key], grad, rtol=1e-5, atol=1e-7) for key, grad in expected.items())
        assert all(torch.allclose(sums[name], grad, rtol=1e-4, atol=1e-6) for name, grad in weights.items())


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("F0 F0", "forward of key 0 while that key is in flight"),
        ("F0 B1", "backward of key 1, which is not in flight"),
        ("F0 B0 B0", "second backward of key 0"),
        ("F0 W0", "weight_gradient of key 0 before its backward"),
        ("F0 B0 W0 W0", "weight_gradient of key 0, which is not in flight"),
        ("F0 B0 F0", "forward of key 0 while that key is in flight"),
    ],
)
def test_passes_out_of_order_are_refused(order, message):
    with pytest.raises(IslandError, match=message):
        play([(word[0], int(word[1])) for word in order.split()])


def test_too_many_output_gradients_are_refused():
    island = attention_island()
    island.forward(0, data(0)[0], 2)
    with pytest.raises(IslandError, match="6 gradients for 5 outputs"):
        island.backward(0, *data(0)[1], None, None)


def test_a_forward_that_fails_leaves_no_key():
    island = attention_island()
    with pytest.raises(RuntimeError):
        island.forward(0, torch.zeros(7, 64), 2)  # 7 rows are no two sequences
    assert island.keys == ()


def test_outputs_and_inputs_are_cut_off_from_the_graph():
    island = attention_island()
    x = data(0)[0].requires_grad_()
    out = island.forward(0, x * 1, 2)
    assert all(value.grad_fn is None and not value.requires_grad for value in out)
    island.backward(0, *data(0)[1])
    assert x.grad is None


def test_losses_among_the_outputs_start_the_backward_themselves():
    """The head has no other output; the router's losses reach x without any gradient given."""
    head = HeadPart(TINY, **CPU)
    initialise(head, 0)
    island = Island(head)
    x = data(0)[0]
    island.forward(0, x, torch.arange(8), 1.0)
    grad, labels, scale = island.backward(0)
    assert grad.norm() > 0
    assert labels is None
    assert scale is None

    island = attention_island()
    island.forward(0, x, 2)
    grad, _ = island.backward(0)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(island.part(leaf, 2).aux, leaf)
    assert torch.equal(grad, expected)
    assert grad.norm() > 0


def test_the_embedding_has_no_pass_w():
    part = EmbedPart(TINY, **CPU)
    initialise(part, 0)
    island = Island(part)
    tokens = torch.tensor([[3, 5, 3]])
    assert torch.equal(island.forward(0, tokens), part.weight.detach()[[3, 5, 3]])
    assert island.backward(0, torch.ones(3, 64)) == (None,)
    assert island.keys == ()
    assert main_grad(part.weight)[[3, 5, 4], 0].tolist() == [2, 1, 0]
    assert part.weight.grad is None


def test_live_bytes_fall_from_pass_to_pass_and_with_recompute():
    kept, recomputed = attention_island(), attention_island()
    assert kept.live_bytes == 0
    x = data(0)[0]
    kept.forward(0, x, 2)
    one = kept.live_bytes
    kept.forward(1, data(1)[0], 2)
    assert one < kept.live_bytes <= 2 * one
    recomputed.forward(0, x, 2, recompute=True)
    ids_bytes = 8 * TINY.top_k * 8
    assert recomputed.live_bytes == x.nbytes + ids_bytes
    assert x.nbytes * 5 < one
    kept.backward(0, *data(0)[1])
    kept.backward(1, *data(1)[1])
    between = kept.live_bytes
    assert 0 < between < 2 * one
    kept.weight_gradient(0)
    assert 0 < kept.live_bytes < between
    kept.discard()
    assert kept.live_bytes == 0


def test_recompute_takes_the_experts_of_the_first_run():
    """Weights that change in between would change the choice: the ids are replayed, the rest is not."""
    island = attention_island()
    x, output_grads = data(0)
    first = island.forward(0, x, 2, recompute=True)
    with torch.no_grad():
        island.part.router.gate.weight.mul_(-1)
    assert not torch.equal(island.part(x, 2).expert_ids, first.expert_ids)
    leaf = x.clone().requires_grad_()
    out = island.part(leaf, 2, replay_ids=first.expert_ids)
    terms = (out.h * output_grads[0]).sum() + (out.u * output_grads[1]).sum()
    (expected,) = torch.autograd.grad(terms + (out.weights * output_grads[3]).sum() + out.aux, leaf)
    assert torch.allclose(island.backward(0, *output_grads)[0], expected, rtol=1e-4, atol=1e-6)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def test_a_linear_equals_torchs_and_keeps_the_layout_of_its_input():
    w = weight(5, 4)
    for x in (torch.randn(3, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 4).transpose(0, 1)):
        w.main_grad = torch.ones(5, 4)
        leaf, plain = x.clone(memory_format=torch.preserve_format).requires_grad_(), x.clone().requires_grad_()
        y = linear(leaf, w)
        grad = torch.randn(y.shape)
        expected = nn.functional.linear(plain, w)
        grads = torch.autograd.grad(expected, (plain, w), grad)
        y.backward(grad)
        assert torch.allclose(y, expected, atol=1e-6)
        assert y.transpose(0, 1).is_contiguous() == x.transpose(0, 1).is_contiguous()
        assert torch.allclose(leaf.grad, grads[0], atol=1e-6)
        assert torch.allclose(w.main_grad - 1, grads[1], atol=1e-5)  # added to what is there
        assert w.grad is None


def test_a_grouped_linear_equals_a_loop():
    w, counts = weight(4, 8, 4), [2, 0, 3, 0]
    offsets = torch.tensor(counts).cumsum(0).int()
    x, grad = torch.randn(5, 4, requires_grad=True), torch.randn(5, 8)
    y = grouped_linear(x, w, counts, offsets)
    y.backward(grad)
    plain = x.detach().clone().requires_grad_()
    expected = torch.cat([part @ w[e].T for e, part in enumerate(plain.split(counts))])
    grads = torch.autograd.grad(expected, (plain, w), grad)
    assert torch.allclose(y, expected, atol=1e-6)
    assert torch.allclose(x.grad, grads[0], atol=1e-6)
    assert torch.allclose(w.main_grad, grads[1], atol=1e-5)
    assert not w.main_grad[1].any()


def test_a_bf16_weight_gradient_is_summed_in_fp32():
    w = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    x = torch.ones(512, 1, dtype=torch.bfloat16)
    linear(x, w).backward(torch.ones_like(x) * 1.0078125)
    assert main_grad(w).item() == 516.0  # bf16 knows 516, but no sum of steps of 1.0078125 beyond 256


def test_the_store_of_the_forward_gets_the_gradient_whatever_thread_runs_the_backward():
    w, store = weight(3, 2), WeightGradStore()
    with store.collect():
        y = linear(torch.randn(4, 2, requires_grad=True), w)
    other = WeightGradStore()

    def run() -> None:
        with other.collect():
            y.sum().backward()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert (len(store), len(other)) == (1, 0)
    assert not hasattr(w, "main_grad")
    store.run()
    assert main_grad(w).abs().sum() > 0
    assert len(store) == 0


def test_gradients_of_other_parameters_move_to_main_grad_in_the_backward():
    w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    accumulate_in_backward(w)
    for _ in range(2):
        (w * torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)).sum().backward()
    assert w.grad is None
    assert main_grad(w).dtype == torch.float32
    assert main_grad(w).tolist() == [2, 4, 6]


def test_an_expert_island_returns_gradients_of_rows_and_weights_only():
    part = ExpertPart(TINY, 0, first_expert=0, num_local_experts=8, **CPU)
    initialise(part, 0)
    island = Island(part)
    counts = [3, 0, 0, 0, 0, 0, 0, 1]
    island.forward(0, torch.randn(2, 64), torch.tensor([0, 1, 1, 0]), torch.rand(4), counts)
    grads = island.backward(0, torch.randn(2, 64))
    assert [None if grad is None else tuple(grad.shape) for grad in grads] == [(2, 64), None, (4,), None]
