"""Activations with the host: the same gradients, and nothing of them left where they were made."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from torch import Tensor  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from bench.execute.host_activations import HostLink  # noqa: E402
from bench.execute.init import initialise, named_global  # noqa: E402
from bench.execute.island import Island  # noqa: E402
from bench.execute.parts import AttentionPart, ExpertPart  # noqa: E402
from bench.models import MODELS  # noqa: E402

TINY = MODELS["tiny-sigmoid"]
CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
TOKENS = 64
KINDS = ["attention", "expert"]


class Made(TorchDispatchMode):
    """Storages that operators make while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive_bytes(self, island: Island) -> int:
        """What still is there of it, parameters aside."""
        own = {param.untyped_storage().data_ptr() for param in island.part.parameters()}
        found = [size for at, (ref, size) in self.storages.items() if at not in own and not ref.expired()]
        return sum(found)


def island_of(kind: str, link: HostLink | None) -> Island:
    part: Any
    if kind == "attention":
        part = AttentionPart(TINY, 0, global_sequences=8, **CPU)
    else:
        part = ExpertPart(TINY, 0, first_expert=0, num_local_experts=4, **CPU)
    initialise(part, 0, norm_jitter=0.1)
    return Island(part, link)


def data(kind: str) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Inputs and output gradients of a pass over some tokens."""
    generator = torch.Generator().manual_seed(7)
    x, g, other = (torch.randn(TOKENS, TINY.hidden_size, generator=generator) for _ in range(3))
    if kind == "attention":
        return (x, 4), {}, (g, other, None, torch.randn(TOKENS, TINY.top_k, generator=generator))
    counts = [20, 5, 32, 7]
    weights = torch.rand(TOKENS, generator=generator)
    return (x, torch.arange(TOKENS), weights, counts), {}, (g,)


def passes(kind: str, link: HostLink | None) -> tuple[list[Tensor | None], dict[str, Tensor], int, int]:
    """Input gradients, weight gradients, bytes that are alive between F and B, and how many of them with the host."""
    island = island_of(kind, link)
    inputs, options, grads = data(kind)
    with Made() as made:
        island.forward("key", *inputs, **options)
    del inputs
    alive, away = made.alive_bytes(island), island.host_bytes
    input_grads = island.backward("key", *grads)
    island.weight_gradient("key")
    assert island.keys == ()
    return list(input_grads), {name: grad for name, _, grad in named_global(island.part)}, alive, away


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_and_what_was_kept_is_gone(kind: str) -> None:
    grads, weights, kept, none_away = passes(kind, None)
    same_grads, same_weights, alive, away = passes(kind, HostLink(torch.device("cpu")))
    assert none_away == 0
    for one, other in zip(grads, same_grads, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]
    for name, weight in weights.items():
        assert weight.any(), name
        assert torch.equal(weight, same_weights[name]), name
    # On this device the host's memory is the same: what is left besides are choices of experts and scalars.
    integers = TOKENS * TINY.top_k * 8 * 4
    assert away > 0.6 * kept
    assert 0 <= alive - away <= integers < 0.4 * kept


@pytest.mark.parametrize("kind", KINDS)
def test_live_bytes_are_those_that_are_not_with_the_host(kind: str) -> None:
    here, away = island_of(kind, None), island_of(kind, HostLink(torch.device("cpu")))
    inputs, options, grads = data(kind)
    for island in (here, away):
        island.forward("key", *inputs, **options)
    assert away.live_bytes < 0.2 * here.live_bytes
    assert away.host_bytes > 0.7 * here.live_bytes  # outputs of the pass are kept for nothing else
    for island in (here, away):
        island.backward("key", *grads)
    # What the weight gradients need is here.
    assert away.host_bytes == 0
    assert away.live_bytes == here.live_bytes
