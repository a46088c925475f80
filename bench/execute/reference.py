"""The same model in plain torch, in one process: what every system must agree with.

Nothing here comes from the parts or from megatron-core. It shares with them the parameters' names, shapes and
initial values (`bench.execute.init`) and the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.errors import BadInput
from bench.execute.init import initial_value, parameter_shapes
from bench.execute.optimizer import AdamW, clip_scale, square_sum
from bench.execute.support import require_supported
from bench.models import Model

ExpertIds = dict[int, Tensor]  # layer -> int64 [sequences, S, k]


class LossAndGradients(NamedTuple):
    """Loss of the batch; gradients by global name in fp32 (fp64 of an fp64 model); ids where asked for."""

    loss: float
    grads: dict[str, Tensor]
    expert_ids: ExpertIds


class ReferenceModel:
    """Parameters by global name, and the loss with plain autograd.

    Args:
        seed: of the initial values.
        dtype: of parameters and activations; the router and the sums over experts are in fp32 at least.
    """

    def __init__(
        self,
        model: Model,
        seed: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        norm_jitter: float = 0.0,
    ) -> None:
        require_supported(model)
        self.model, self.dtype, self.device = model, dtype, torch.device(device)
        self.wide = torch.promote_types(dtype, torch.float32)
        self.parameters: dict[str, Tensor] = {}
        for name, shape in parameter_shapes(model).items():
            value = initial_value(name, shape, seed=seed, num_layers=model.num_layers, norm_jitter=norm_jitter)
            self.parameters[name] = value.to(device=self.device, dtype=dtype).requires_grad_()

    def loss_and_gradients(
        self,
        sequences: Tensor,
        *,
        replay_ids: Mapping[int, Tensor] | None = None,
        collect_ids: bool = False,
        sequences_per_chunk: int = 1,
    ) -> LossAndGradients:
        """Loss and gradients of a global batch: mean cross-entropy, plus the router's losses.

        Args:
            sequences: int64 [B, S + 1]; token t predicts token t + 1.
            replay_ids: layer -> int64 [B, S, k], experts to take instead of the router's choice.
            sequences_per_chunk: sequences whose activations are held at a time.
        """
        if sequences.dim() != 2 or sequences.shape[0] == 0 or sequences.shape[1] < 2:
            raise BadInput("sequences", tuple(sequences.shape), "[B, S + 1] with B and S at least 1")
        num_sequences = sequences.shape[0]
        weights = list(self.parameters.values())
        totals = [torch.zeros(weight.shape, dtype=self.wide, device=self.device) for weight in weights]
        loss = 0.0
        collected: dict[int, list[Tensor]] = {}
        for start in range(0, num_sequences, sequences_per_chunk):
            chunk = slice(start, start + sequences_per_chunk)
            replay = {layer: ids[chunk].to(self.device) for layer, ids in (replay_ids or {}).items()}
            part, ids = self._loss(sequences[chunk].to(self.device), num_sequences, replay)
            grads = torch.autograd.grad(part, weights, allow_unused=True)
            for total, grad in zip(totals, grads, strict=True):
                if grad is not None:  # an expert without tokens has no gradient
                    total += grad
            loss += part.item()
            for layer, chosen in ids.items() if collect_ids else ():
                collected.setdefault(layer, []).append(chosen)
        return LossAndGradients(
            loss,
            dict(zip(self.parameters, totals, strict=True)),
            {layer: torch.cat(chosen) for layer, chosen in collected.items()},
        )

    def _loss(self, sequences: Tensor, num_sequences: int, replay: ExpertIds) -> tuple[Tensor, ExpertIds]:
        """The share of these sequences in the loss of a batch of ``num_sequences``."""
        tokens, labels = sequences[:, :-1], sequences[:, 1:]
        x = self.parameters["embed.weight"][tokens]
        loss = torch.zeros((), dtype=self.wide, device=self.device)
        ids: ExpertIds = {}
        for layer in range(self.model.num_layers):
            at = f"layers.{layer}."
            h = x + self._attention(at + "attention.", self._norm(at + "attention.norm.weight", x), layer)
            u = self._norm(at + "ffn.norm.weight", h)
            if self.model.is_dense(layer):
                x = h + self._feed_forward(at + "ffn", u)
                continue
            scores, ids[layer], weights, logits = self._route(at, u, replay.get(layer))
            loss = loss + self._router_losses(scores, ids[layer], logits) / num_sequences
            y = self._mixture(at, u, ids[layer], weights)
            if self.model.num_shared_experts:
                y = y + self._feed_forward(at + "shared", u)
            x = (h + y).to(self.dtype)
        logits = functional.linear(self._norm("final_norm.weight", x), self.parameters["head.weight"])
        total = functional.cross_entropy(logits.to(self.wide).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss + total / (num_sequences * tokens.shape[1]), ids

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.to(self.wide)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.model.norm_eps)
        return (wide * scale * self.parameters[name]).to(self.dtype)

    def _feed_forward(self, at: str, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, self.parameters[f"{at}.fc1"]).to(self.wide).chunk(2, dim=-1)
        return functional.linear((functional.silu(gate) * up).to(self.dtype), self.parameters[f"{at}.fc2"])

    def _attention(self, at: str, x: Tensor, layer: int) -> Tensor:
        """[b, S, H] -> [b, S, H]."""
        q, k, v = self._queries_keys_values(at, x) if self.model.mla is None else self._latent(at, x)
        window = self.model.window(layer)
        if window:
            positions = torch.arange(x.shape[1], device=self.device)
            behind = positions[:, None] - positions
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind < window))
        else:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.linear(out.transpose(1, 2).flatten(2), self.parameters[at + "proj.weight"])

    def _queries_keys_values(self, at: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, S, H] -> three [b, heads, S, head dim]."""
        model = self.model
        groups, share = model.num_kv_heads, model.num_heads // model.num_kv_heads
        qkv = functional.linear(x, self.parameters[at + "qkv.weight"])
        qkv = qkv.unflatten(-1, (groups, share + 2, model.head_dim))
        q, k, v = qkv[..., :share, :], qkv[..., share : share + 1, :], qkv[..., share + 1 :, :]
        if model.qk_norm:
            q, k = self._norm(at + "q_norm.weight", q), self._norm(at + "k_norm.weight", k)
        q, k = self._rotate(q), self._rotate(k)
        # Every query head has its own copy of its group's key and value: [b, heads, S, head dim].
        q, k, v = (part.expand_as(q).flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        return q, k, v

    def _latent(self, at: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Multi-head latent attention (arXiv 2405.04434, equations 9 to 19): [b, S, H] -> three [b, heads, S, .]."""
        mla, heads = self.model.mla, self.model.num_heads
        assert mla is not None
        q_latent = x
        if mla.q_lora_rank:
            q_latent = self._norm(at + "q_norm.weight", functional.linear(x, self.parameters[at + "q_down.weight"]))
        q = functional.linear(q_latent, self.parameters[at + "q_up.weight"]).unflatten(-1, (heads, mla.qk_head_dim))
        latent = functional.linear(x, self.parameters[at + "kv_down.weight"])
        k_rope = self._rotate(latent[..., None, None, mla.kv_lora_rank :])[:, :, 0]
        kv_latent = self._norm(at + "kv_norm.weight", latent[..., : mla.kv_lora_rank])
        kv = functional.linear(kv_latent, self.parameters[at + "kv_up.weight"])
        kv = kv.unflatten(-1, (heads, mla.qk_nope_head_dim + mla.v_head_dim))
        plain = mla.qk_nope_head_dim
        q = torch.cat((q[..., :plain], self._rotate(q[..., None, plain:])[:, :, :, 0]), dim=-1)
        k = torch.cat((kv[..., :plain], k_rope.expand(-1, -1, heads, -1)), dim=-1)
        return q.transpose(1, 2), k.transpose(1, 2), kv[..., plain:].transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary positions (arXiv 2104.09864): dimension i turns with i + head dim / 2; x [b, S, ., ., head
        dim].
        """
        half = x.shape[-1] // 2
        exponents = torch.arange(half, dtype=self.wide, device=self.device) / half
        positions = torch.arange(x.shape[1], dtype=self.wide, device=self.device)
        angles = torch.outer(positions, self.model.rope_theta**-exponents)[:, None, None, :]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _route(self, at: str, u: Tensor, replay: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores over all experts [b, S, E], ids and weights [b, S, k], logits [b, S, E]."""
        model = self.model
        logits = functional.linear(u.to(self.wide), self.parameters[at + "router.weight"].to(self.wide))
        softmax = model.router_score == "softmax"
        scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        ids = scores.topk(model.top_k, dim=-1).indices if replay is None else replay
        weights = scores.gather(-1, ids)
        if model.router_softmax_after_topk:
            weights = logits.gather(-1, ids).softmax(dim=-1)
        elif model.router_normalize and (softmax or model.top_k > 1):
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if not softmax:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return scores, ids, weights * model.router_scale, logits

    def _router_losses(self, scores: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        """Load-balancing loss of every sequence, and its tokens' mean z-loss; summed over the sequences."""
        model, length = self.model, ids.shape[1]
        total = torch.zeros((), dtype=self.wide, device=self.device)
        for of_one, chosen in zip(scores, ids, strict=True):
            counts = torch.bincount(chosen.flatten(), minlength=model.num_experts).to(self.wide)
            fraction = counts / (length * model.top_k)
            total = total + model.aux_loss_coeff * model.num_experts * (fraction * of_one.mean(dim=0)).sum()
        return total + model.z_loss_coeff * logits.logsumexp(dim=-1).square().mean(dim=1).sum()

    def _mixture(self, at: str, u: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of every token's experts, in fp32 at least: [b, S, H]."""
        rows = u.flatten(0, 1)
        ids, weights = ids.flatten(0, 1), weights.flatten(0, 1)
        y = torch.zeros(rows.shape, dtype=self.wide, device=self.device)
        for expert in range(self.model.num_experts):
            token, slot = torch.where(ids == expert)
            if token.numel():
                out = self._feed_forward(f"{at}experts.{expert}", rows[token]).to(self.wide)
                y = y.index_add(0, token, out * weights[token, slot, None])
        return y.view_as(u)


class StepResult(NamedTuple):
    """Loss before the update, and the gradients' global norm before clipping."""

    loss: float
    grad_norm: float


def reference_step(reference: ReferenceModel, optimizer: AdamW, sequences: Tensor, *, max_norm: float) -> StepResult:
    """One optimizer step on a global batch [B, S + 1], gradients clipped to ``max_norm``."""
    loss, grads, _ = reference.loss_and_gradients(sequences)
    for name, parameter in reference.parameters.items():
        parameter.main_grad = grads[name]  # type: ignore[attr-defined]
    norm = square_sum(list(grads.values()), reference.device).sqrt()
    optimizer.step(clip_scale(norm, max_norm))
    return StepResult(loss, norm.item())
