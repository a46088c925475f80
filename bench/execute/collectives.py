"""Sums and gathers over a process group; where the group is gloo's and the tensor on a GPU, through host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, group: Any = None) -> None:
    """Sums over the group, in place."""
    _staged(lambda whole: dist.all_reduce(whole, group=group), tensor, tensor, group)


def reduce_scatter(own: Tensor, whole: Tensor, group: Any) -> None:
    """Sums `whole` over the group; this rank's slice of it into `own`, which may be a view of `whole`."""
    # Renamed in torch 2.13, where the older name warns.
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    _staged(lambda out, given: function(out, given, group=group), own, whole, group)


def all_gather(whole: Tensor, own: Tensor, group: Any) -> None:
    """Every rank's slice `own`, which may be a view of `whole`, into `whole`."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    _staged(lambda out, given: function(out, given, group=group), whole, own, group)


def _staged(collective: Callable[..., None], out: Tensor, given: Tensor, group: Any) -> None:
    """Calls `collective` with `out` and `given`, or with one of them where they are the same."""
    through_host = given.is_cuda and "nccl" not in str(dist.get_backend_config(group))
    tensors = [out] if out is given else [out, given]
    if not through_host:
        collective(*tensors)
        return
    host = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
    host[-1].copy_(given)
    collective(*host)
    out.copy_(host[0])
