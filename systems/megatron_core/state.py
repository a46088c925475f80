"""megatron-core's main weights and moments as shards of global tensors, so that its checkpoints are free of layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from bench.execute.shards import STATE, Shard, boxes
from systems.megatron_core.model import global_views


class Piece(NamedTuple):
    """What an optimizer has of a parameter.

    Attributes:
        first: element of the flattened parameter from which on.
        tensors: of `STATE` each.
        sliced: whether other ranks that hold the parameter have other elements of it.
    """

    first: int
    tensors: tuple[Tensor, Tensor, Tensor]
    sliced: bool


def state_shards(chunks: Sequence[nn.Module], first_expert: int, optimizer: Any, *, share_out: bool) -> Iterator[Shard]:
    """What this rank keeps up to date; with `share_out`, of what several ranks hold the first one's alone."""
    held = {param: found for one in _optimizers(optimizer) for param, found in _held(one, chunks)}
    for name, param, expert in global_views(chunks, first_expert):
        if param not in held or (share_out and not _is_first(param, held[param])):
            continue
        first, tensors, _ = held[param]
        view = param if expert is None else param[expert]
        begin = 0 if expert is None else expert * view.numel()
        low, high = max(begin, first), min(begin + view.numel(), first + tensors[0].numel())
        for box in boxes(view.shape, low - begin, high - begin) if low < high else ():
            start = begin + box.start - first
            for state, tensor in zip(STATE, tensors, strict=True):
                piece = tensor.detach().view(-1)[start : start + math.prod(box.sizes)].view(box.sizes)
                yield Shard(f"{state}.{name}", tuple(view.shape), box.offsets, piece)


@torch.no_grad()
def after_loading(chunks: Sequence[Any], optimizer: Any, num_steps: int) -> None:
    """Makes parameters of the main weights that were loaded, and gives every rank the slices of the others.

    Args:
        chunks: wrapped in megatron-core's DDP.
        num_steps: that were done, by which moments are corrected.
    """
    for one in _optimizers(optimizer):
        for group in one.optimizer.param_groups:
            for param in group["params"]:
                one.optimizer.state[param]["step"] = torch.tensor(float(num_steps))
        if hasattr(one, "_copy_main_params_to_model_params"):
            one._copy_main_params_to_model_params()
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def _optimizers(optimizer: Any) -> list[Any]:
    """Those that have parameters: of experts, and of everything else."""
    each = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in each if not getattr(one, "is_stub_optimizer", False) and one.optimizer is not None]


def _held(one: Any, chunks: Sequence[nn.Module]) -> Iterator[tuple[nn.Parameter, Piece]]:
    """Every parameter of which an optimizer has a piece."""
    slices = getattr(one, "model_param_group_index_map", None)
    main_weights = {id(param) for group in one.optimizer.param_groups for param in group["params"]}
    for param in (param for chunk in chunks for param in chunk.parameters()):
        if slices is not None:
            if param not in slices:
                continue
            group, place = slices[param]
            first = one._get_model_param_range_map(param)["param"].start
            main = one.optimizer.param_groups[group]["params"][place]
        else:
            first, main = 0, getattr(param, "main_param", param)
            if id(main) not in main_weights:
                continue
        state = one.optimizer.state[main]
        for moment in ("exp_avg", "exp_avg_sq"):
            state.setdefault(moment, torch.zeros_like(main))
        state.setdefault("step", torch.tensor(0.0))
        yield param, Piece(first, (main, state["exp_avg"], state["exp_avg_sq"]), slices is not None)


def _is_first(param: nn.Parameter, piece: Piece) -> bool:
    """Whether no rank before this one holds the same."""
    if piece.sliced:
        return True
    if getattr(param, "allreduce", True):
        return parallel_state.get_data_parallel_rank() == 0
    return parallel_state.get_expert_data_parallel_rank() == 0
