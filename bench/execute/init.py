"""Every parameter's global name, and its value at the start: a function of name and seed alone.

Systems and placements hold a parameter at different places, an expert inside different shards; the name
decides the value, so that all of them start from the same model, and gradients are compared by name. Weights
are [out, in].

    embed.weight  final_norm.weight  head.weight
    layers.{l}.attention.norm.weight  .qkv.weight  .q_norm.weight  .k_norm.weight  .proj.weight
    of latent attention .q_down .q_norm .q_up .kv_down .kv_norm .kv_up .proj, each .weight
    layers.{l}.ffn.norm.weight, of a dense layer also .fc1 and .fc2
    layers.{l}.router.weight  layers.{l}.experts.{e}.fc1 and .fc2  layers.{l}.shared.fc1 and .fc2

The rows of ``qkv`` are grouped by KV head: the group's queries, its key, its value, head dim rows each. Those
of ``fc1`` are the gate's, then the up projection's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from bench.execute.wgrad import main_grad
from bench.models import Model

STD = 0.02

# Names inside a part -> names inside the layer.
_IN_LAYER = {
    "norm.weight": "attention.norm.weight",
    "attention.linear_qkv.weight": "attention.qkv.weight",
    "attention.q_layernorm.weight": "attention.q_norm.weight",
    "attention.k_layernorm.weight": "attention.k_norm.weight",
    "attention.linear_proj.weight": "attention.proj.weight",
    **{
        f"attention.{name}.weight": f"attention.{name}.weight"
        for name in ("q_down", "q_norm", "q_up", "kv_down", "kv_norm", "kv_up", "proj")
    },
    "ffn_norm.weight": "ffn.norm.weight",
    "ffn.fc1.weight": "ffn.fc1",
    "ffn.fc2.weight": "ffn.fc2",
    "router.gate.weight": "router.weight",
    "shared.fc1.weight": "shared.fc1",
    "shared.fc2.weight": "shared.fc2",
}
_IN_HEAD = {"norm.weight": "final_norm.weight", "head.weight": "head.weight"}


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of every parameter of the model, in the order of the forward pass."""
    hidden = model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_layers):
        at = f"layers.{layer}."
        shapes[at + "attention.norm.weight"] = (hidden,)
        shapes |= _attention(at + "attention.", model)
        shapes[at + "ffn.norm.weight"] = (hidden,)
        if model.is_dense(layer):
            shapes |= _feed_forward(at + "ffn", hidden, model.dense_hidden_size)
            continue
        shapes[at + "router.weight"] = (model.num_experts, hidden)
        for expert in range(model.num_experts):
            shapes |= _feed_forward(at + f"experts.{expert}", hidden, model.expert_hidden_size)
        if model.num_shared_experts:
            shapes |= _feed_forward(at + "shared", hidden, model.shared_hidden_size)
    shapes["final_norm.weight"] = (hidden,)
    shapes["head.weight"] = (model.vocab_size, hidden)
    return shapes


def _attention(at: str, model: Model) -> dict[str, tuple[int, ...]]:
    hidden, mla = model.hidden_size, model.mla
    shapes: dict[str, tuple[int, ...]] = {}
    if mla is None:
        shapes[at + "qkv.weight"] = (model.q_size + 2 * model.kv_size, hidden)
        if model.qk_norm:
            shapes |= {at + f"{which}_norm.weight": (model.head_dim,) for which in "qk"}
    else:
        if mla.q_lora_rank:
            shapes[at + "q_down.weight"] = (mla.q_lora_rank, hidden)
            shapes[at + "q_norm.weight"] = (mla.q_lora_rank,)
        shapes[at + "q_up.weight"] = (model.q_size, mla.q_lora_rank or hidden)
        shapes[at + "kv_down.weight"] = (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
        shapes[at + "kv_norm.weight"] = (mla.kv_lora_rank,)
        shapes[at + "kv_up.weight"] = (model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    shapes[at + "proj.weight"] = (hidden, model.attention_output_size)
    return shapes


def _feed_forward(at: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}.fc1": (2 * width, hidden), f"{at}.fc2": (hidden, width)}


def initial_value(name: str, shape: tuple[int, ...], *, seed: int, num_layers: int, norm_jitter: float = 0.0) -> Tensor:
    """The parameter at the start of training, fp32 on the CPU.

    Normal with standard deviation 0.02, of output projections 0.02 / sqrt(2 x layers) (GPT-2); norms are one,
    plus ``norm_jitter`` times a normal variate, which tests use so that no norm is the identity.
    """
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    if is_norm(name):
        value = torch.ones(shape)
        return value + norm_jitter * torch.randn(shape, generator=generator) if norm_jitter else value
    return torch.randn(shape, generator=generator) * _std(name, num_layers)


def is_norm(name: str) -> bool:
    """Whether a global name is that of a norm's weight, which is not decayed."""
    return name.endswith("norm.weight")


def initialise(part: nn.Module, seed: int, *, norm_jitter: float = 0.0, drawn_on: str = "host") -> None:
    """Sets every parameter of a part to its `initial_value`, cast to its dtype.

    Args:
        drawn_on: ``device`` draws from the same distributions where the parameters are: quickly, and equal on GPUs of
            one kind, but other numbers than on the host. For runs that are only timed.
    """
    num_layers = part.model.num_layers  # type: ignore[union-attr]
    assert isinstance(num_layers, int)
    for name, param, expert in _global_views(part):
        view = param if expert is None else param[expert]
        draw(name, view, seed=seed, num_layers=num_layers, norm_jitter=norm_jitter, drawn_on=drawn_on)


@torch.no_grad()
def draw(
    name: str, view: Tensor, *, seed: int, num_layers: int, norm_jitter: float = 0.0, drawn_on: str = "host"
) -> None:
    """Sets one parameter, or an expert's part of one, as `initialise` does."""
    if drawn_on == "device" and not is_norm(name):
        generator = torch.Generator(view.device).manual_seed(_seed_of(name, seed))
        view.normal_(0.0, _std(name, num_layers), generator=generator)
        return
    view.copy_(initial_value(name, tuple(view.shape), seed=seed, num_layers=num_layers, norm_jitter=norm_jitter))


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _std(name: str, num_layers: int) -> float:
    return STD / math.sqrt(2 * num_layers) if name.endswith((".proj.weight", ".fc2")) else STD


def named_global(part: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(global name, parameter, main_grad) of a part's parameters; of grouped experts one entry an expert.

    Both tensors are views that share memory with the part's own; missing gradient buffers are made, and zero.
    """
    for name, param, expert in _global_views(part):
        value, grad = param.detach(), main_grad(param)
        yield (name, value, grad) if expert is None else (name, value[expert], grad[expert])


def _global_views(part: nn.Module) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """(global name, parameter, index of the expert within it if it is grouped)."""
    layer, first = getattr(part, "layer", None), getattr(part, "first_expert", None)
    for name, param in part.named_parameters():
        if layer is None:
            yield _IN_HEAD.get(name, "embed.weight"), param, None
        elif first is not None and name in ("fc1", "fc2"):
            for expert in range(param.shape[0]):
                yield f"layers.{layer}.experts.{first + expert}.{name}", param, expert
        else:
            yield f"layers.{layer}.{_IN_LAYER[name]}", param, None
