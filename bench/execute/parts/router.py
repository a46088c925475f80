"""The top-k router: megatron-core's scores, choice and losses, without its global state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.execute.parts.linear import DeferredLinear
from bench.execute.parts.megatron import (
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)
from bench.models import Model


class Routing(NamedTuple):
    """Expert ids int64 [T, k], their weights fp32 [T, k], and the auxiliary losses, an fp32 scalar."""

    expert_ids: Tensor
    weights: Tensor
    aux: Tensor


class _Choice:
    """megatron-core's hook into the top-k: notes the ids of one call, or takes given ones."""

    def __init__(self, replay_ids: Tensor | None) -> None:
        self.ids = replay_ids
        self.replayed = replay_ids is not None
        self.values: Tensor | None = None

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, choose: Any) -> Any:
        if not self.replayed:
            _, self.ids = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        assert self.ids is not None
        self.values = scores.gather(1, self.ids)
        return self.values, self.ids


class Router(nn.Module):
    """Logits in fp32, whatever the activations' dtype.

    The load-balancing loss is that of every sequence by itself (DeepSeek-V3, arXiv 2412.19437, equations 17
    to 20: E / (k S^2) sum_e count_e sum_t p_te), with the counts of the ids in use; the z-loss is a token's
    squared log-sum-exp of its logits (ST-MoE, arXiv 2202.08906). Both are divided by the sequences and tokens
    of the global batch, so that their sum over micro-batches and ranks is the global mean, however sequences
    are laid out.
    """

    def __init__(self, model: Model, *, global_sequences: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.global_sequences = global_sequences
        self.gate = DeferredLinear(
            model.hidden_size, model.num_experts, device=device, dtype=dtype, compute_dtype=torch.float32
        )

    def forward(self, u: Tensor, num_sequences: int, replay_ids: Tensor | None = None) -> Routing:
        """u [T, H] of ``num_sequences`` sequences, one after another."""
        model = self.model
        logits = self.gate(u)
        choice = _Choice(replay_ids)
        softmax = model.router_score == "softmax"
        # A softmax over all experts, normalised over the chosen ones, is a softmax over the chosen ones.
        over_all = softmax and not (model.router_softmax_after_topk or model.router_normalize)
        dense, _ = topk_routing_with_score_function(
            logits,
            model.top_k,
            use_pre_softmax=over_all,
            scaling_factor=model.router_scale if model.router_scale != 1.0 else None,
            score_function=model.router_score,
            router_replay=choice,
        )
        assert choice.ids is not None
        assert choice.values is not None
        if softmax or model.router_normalize:
            weights = dense.gather(1, choice.ids)
        else:  # megatron-core always normalises sigmoid scores
            weights = choice.values * model.router_scale
        return Routing(choice.ids, weights, self._losses(logits, choice.ids, num_sequences))

    def _losses(self, logits: Tensor, expert_ids: Tensor, num_sequences: int) -> Tensor:
        model = self.model
        share = num_sequences / self.global_sequences
        aux = logits.new_zeros(())
        if model.aux_loss_coeff:
            aux = aux + self._load_balancing(logits, expert_ids, num_sequences)
        if model.z_loss_coeff:
            aux = aux + z_loss_func(logits, model.z_loss_coeff) * share
        return aux

    def _load_balancing(self, logits: Tensor, expert_ids: Tensor, num_sequences: int) -> Tensor:
        """Sum over the sequences; experts of different sequences stand side by side, as if all were one
        sequence's.
        """
        num_experts = self.model.num_experts
        tokens = logits.shape[0] // num_sequences
        if self.model.router_score == "softmax":
            scores = torch.softmax(logits, dim=-1)
        else:
            scores = torch.sigmoid(logits)
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        by_position = scores.view(num_sequences, tokens, num_experts).transpose(0, 1).flatten(1)
        chosen = expert_ids.reshape(num_sequences, -1)
        counts = torch.zeros(num_sequences, num_experts, device=logits.device)
        counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        loss: Tensor = switch_load_balancing_loss_func(
            by_position, counts.flatten(), tokens, self.model.top_k, num_experts, self.model.aux_loss_coeff
        )
        return loss / self.global_sequences
