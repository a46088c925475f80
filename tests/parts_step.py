"""A training step of the parts in one process, cut into shards, micro-batches and passes: what tests compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.execute.init import initialise, named_global
from bench.execute.island import Island
from bench.execute.parts import AttentionPart, EmbedPart, ExpertPart, HeadPart
from bench.models import Model

SEED = 7
NORM_JITTER = 0.1


class Layout(NamedTuple):
    """How the step is cut: expert shards, micro-batches of equal size, where the shared experts live."""

    num_shards: int = 2
    num_microbatches: int = 2
    shared_on_attention: bool = True
    recompute: bool = False


class Pairs(NamedTuple):
    """One shard's share of a micro-batch's dispatch: tokens that come, and (row, token, slot) sorted by expert."""

    tokens: Tensor
    row_index: Tensor
    token: Tensor
    slot: Tensor
    counts: list[int]


class Step:
    """Islands of every part of a model, all of one rank's making, and a step's passes over them."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        global_sequences: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.layout, self.device = model, layout, torch.device(device)
        where = {"device": device, "dtype": dtype}
        self.embed = Island(EmbedPart(model, **where))
        self.head = Island(HeadPart(model, **where))
        self.attention = [
            Island(
                AttentionPart(
                    model,
                    layer,
                    global_sequences=global_sequences,
                    shared_on_attention=layout.shared_on_attention,
                    **where,
                )
            )
            for layer in range(model.num_layers)
        ]
        per_shard = model.num_experts // layout.num_shards
        self.experts = {
            (layer, shard): Island(
                ExpertPart(
                    model,
                    layer,
                    first_expert=shard * per_shard,
                    num_local_experts=per_shard,
                    shared_on_expert=not layout.shared_on_attention,
                    **where,
                )
            )
            for layer in range(model.num_dense_layers, model.num_layers)
            for shard in range(layout.num_shards)
        }
        self.islands = [self.embed, *self.attention, *self.experts.values(), self.head]
        for island in self.islands:
            initialise(island.part, SEED, norm_jitter=NORM_JITTER)
        self.ops: dict[str, Counter[str]] = {"F": Counter(), "B": Counter(), "W": Counter()}
        self.expert_ids: dict[int, list[Tensor]] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}

    def run(
        self,
        sequences: Tensor,
        replay_ids: Mapping[int, Tensor] | None = None,
        watch: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> float:
        """All F, then all B in the opposite order, then all W: every micro-batch is in flight at once.

        `watch` gives what is entered around each of them.
        """
        sequences = sequences.to(self.device)
        batches = sequences.chunk(self.layout.num_microbatches)
        assert len(batches) == self.layout.num_microbatches
        scale = 1 / (sequences.shape[0] * (sequences.shape[1] - 1))
        loss = 0.0
        self.pairs: dict[tuple[int, int, int], Pairs] = {}
        with _Count(self.ops["F"]), watch("F"):
            for number, batch in enumerate(batches):
                first = sum(part.shape[0] for part in batches[:number])
                replay = {
                    layer: ids[first : first + batch.shape[0]].flatten(0, 1)
                    for layer, ids in (replay_ids or {}).items()
                }
                loss += self._forward(number, batch, scale, replay)
        with _Count(self.ops["B"]), watch("B"):
            for number in reversed(range(len(batches))):
                self._backward(number)
        with _Count(self.ops["W"]), watch("W"):
            for island in self.islands:
                for key in island.keys:
                    island.weight_gradient(key)
        return loss

    def grads(self) -> dict[str, Tensor]:
        """By global name; of parameters held by several shards the sum, of one shared expert for example."""
        total: dict[str, Tensor] = {}
        for island in self.islands:
            for name, _, grad in named_global(island.part):
                total[name] = total[name] + grad if name in total else grad
        return total

    def _forward(self, key: int, batch: Tensor, scale: float, replay: Mapping[int, Tensor]) -> float:
        recompute = self.layout.recompute
        loss = torch.zeros((), device=self.device)
        x = self.embed.forward(key, batch[:, :-1], recompute=recompute)
        for layer, island in enumerate(self.attention):
            options = {"replay_ids": replay[layer]} if layer in replay else {}
            out = island.forward(key, x, batch.shape[0], recompute=recompute, **options)
            x = out.h
            if out.u is None:
                continue
            loss += out.aux
            self.expert_ids.setdefault(layer, []).append(out.expert_ids)
            total = out.h.float()
            for shard in range(self.layout.num_shards):
                island = self.experts[layer, shard]
                pairs = self._dispatch(out.expert_ids, island.part, shard)
                self.pairs[key, layer, shard] = pairs
                weights = torch.cat((out.weights, torch.ones_like(out.weights[:, :1])), dim=1)
                y = island.forward(
                    key,
                    out.u[pairs.tokens],
                    pairs.row_index,
                    weights[pairs.token, pairs.slot],
                    pairs.counts,
                    recompute=recompute,
                )
                total = total.index_add(0, pairs.tokens, y.float())
            x = total.to(x.dtype)
        labels = batch[:, 1:].flatten()
        loss += self.head.forward(key, x, labels, scale, recompute=recompute)
        return loss.item()

    def _backward(self, key: int) -> None:
        grad = self.head.backward(key)[0]
        assert grad is not None
        for layer in reversed(range(self.model.num_layers)):
            if self.model.is_dense(layer):
                (grad, *_) = self.attention[layer].backward(key, grad)
                continue
            grad_u = torch.zeros_like(grad, dtype=torch.float32)
            grad_weights = torch.zeros(grad.shape[0], self.model.top_k + 1, device=self.device)
            for shard in range(self.layout.num_shards):
                pairs = self.pairs.pop((key, layer, shard))
                grad_rows, _, grad_pairs, _ = self.experts[layer, shard].backward(key, grad[pairs.tokens])
                grad_u.index_add_(0, pairs.tokens, grad_rows.float())
                grad_weights[pairs.token, pairs.slot] = grad_pairs
            (grad, *_) = self.attention[layer].backward(key, grad, grad_u.to(grad.dtype), None, grad_weights[:, :-1])
        assert self.embed.backward(key, grad) == (None,)

    def _dispatch(self, expert_ids: Tensor, part: ExpertPart, shard: int) -> Pairs:
        """Rows are sent once a shard; shared experts are slot k of the tokens dealt to the shard."""
        local = expert_ids - part.first_expert
        slots = torch.where((local >= 0) & (local < part.num_local_experts), local, -1)
        if part.shared is not None:
            dealt = torch.arange(slots.shape[0], device=self.device) % self.layout.num_shards == shard
            slots = torch.cat((slots, torch.where(dealt, part.num_local_experts, -1)[:, None]), dim=1)
        token, slot = torch.where(slots >= 0)
        order = torch.argsort(slots[token, slot], stable=True)
        token, slot = token[order], slot[order]
        tokens, row_index = token.unique(return_inverse=True)
        counts = torch.bincount(slots[token, slot], minlength=part.num_slots).tolist()
        return Pairs(tokens, row_index, token, slot, counts)


class _Count(TorchDispatchMode):
    """Counts the GEMMs among the operators that are run."""

    GEMMS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm"})

    def __init__(self, counter: Counter[str]) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name in self.GEMMS:
            self.counter[name] += 1
        return func(*args, **(kwargs or {}))


def assert_equal_grads(grads: Mapping[str, Tensor], expected: Mapping[str, Tensor], rel: float) -> None:
    """||g - r|| <= rel (||r|| + 1e-4 of the mean norm): a gradient may vanish, as a top-1 router's does."""
    assert grads.keys() == expected.keys()
    floor = 1e-4 * sum(grad.norm().item() for grad in expected.values()) / len(expected)
    errors = {
        name: ((grads[name].double() - grad.double()).norm() / (grad.double().norm() + floor)).item()
        for name, grad in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= rel, f"{worst}: {errors[worst]:.2e}, norm {expected[worst].norm().item():.2e}"
