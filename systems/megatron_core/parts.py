"""Modules of this harness in the places where megatron-core's layer specs let others in."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from bench.execute.fused import swiglu
from bench.execute.wgrad import grouped_linear, linear, to_device

ForcedIds = Callable[[int, int], Tensor]
"""(layer, micro-batch) -> int64 [T, k], token t of sequence j being row t x sequences + j."""


class Passes:
    """Which micro-batch a layer's forward is of: they come in order, once, and once more where it is recomputed.

    The first forward of a recomputed layer runs without gradients, and the backward goes through the micro-batches of
    a chunk in the order of the forward.
    """

    def __init__(self) -> None:
        self.done = {False: 0, True: 0}

    def next(self) -> tuple[int, bool]:
        """Number of the micro-batch, and whether this is the forward that counts: the one with gradients."""
        counts = torch.is_grad_enabled()
        self.done[counts] += 1
        return self.done[counts] - 1, counts


class Choices:
    """A router's choice of experts in one step, noted or given: megatron-core's hook into its top-k.

    Args:
        layer: number of the layer.
        forced: experts to take; the router chooses where not given.
        keep: whether what was chosen is kept.

    Attributes:
        chosen: micro-batch -> int64 [T, k], where they are kept.
    """

    def __init__(self, layer: int, forced: ForcedIds | None, *, keep: bool) -> None:
        self.layer, self._forced, self._keep = layer, forced, keep
        self._passes = Passes()
        self.chosen: dict[int, Tensor] = {}

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Any
    ) -> tuple[Tensor, Tensor]:
        microbatch, counts = self._passes.next()
        if self._forced is not None:
            ids = self._forced(self.layer, microbatch)
        else:
            _, ids = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._keep and counts:
            self.chosen[microbatch] = ids
        return scores.gather(1, ids), ids


class Router(TopKRouter):
    """megatron-core's router, its logits by this harness's linear.

    Its own call a function that only TransformerEngine defines. Its attribute `router_replay` is a `Choices` in a step.
    """

    def gating(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, torch.float32)


class Experts(nn.Module):
    """Local experts as grouped GEMMs; what megatron-core asks of its own experts.

    Weights are uninitialised: fc1 [E, 2 x width, H], gate first; fc2 [E, H, width].

    Attributes:
        load: pairs that each expert had in this step.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None) -> None:
        super().__init__()
        hidden, width, dtype = config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype
        self.fc1 = nn.Parameter(torch.empty(num_local_experts, 2 * width, hidden, dtype=dtype))
        self.fc2 = nn.Parameter(torch.empty(num_local_experts, hidden, width, dtype=dtype))
        for weight in (self.fc1, self.fc2):
            # What DDP and the optimizer tell by that other ranks have other experts.
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
        self.load = [0] * num_local_experts

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """[P, H] sorted by local expert, int64 [E] on the host, fp32 [P] -> [P, H], no bias."""
        counts = tokens_per_expert.tolist()
        if torch.is_grad_enabled():  # once a micro-batch, see `Passes`
            self.load = [before + now for before, now in zip(self.load, counts, strict=True)]
        offsets = to_device(list(accumulate(counts)), torch.int32, rows.device)
        hidden = grouped_linear(rows, self.fc1, counts, offsets)
        return grouped_linear(swiglu(hidden, weights), self.fc2, counts, offsets), None


class SwiGLU(nn.Module):
    """The activation of dense layers and shared experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        """[..., 2 x width] -> [..., width]."""
        return swiglu(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], -1)
