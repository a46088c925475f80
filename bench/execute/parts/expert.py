"""What an expert rank computes of one layer, between dispatch and combine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from bench.errors import BadInput
from bench.execute.fused import Pairs, gather, sum_pairs, swiglu
from bench.execute.parts.linear import FeedForward
from bench.execute.support import require_supported
from bench.execute.wgrad import grouped_linear, to_device
from bench.models import Model


class ExpertPart(nn.Module):
    """``num_local_experts`` routed experts of a layer from ``first_expert`` on, as grouped GEMMs.

    With ``shared_on_expert`` the shared experts are one more expert behind the routed ones, of their own width.
    Weights are uninitialised (see `bench.execute.init`): fc1 [E, 2 x width, H], gate first; fc2 [E, H, width].
    """

    def __init__(
        self,
        model: Model,
        layer: int,
        *,
        first_expert: int,
        num_local_experts: int,
        shared_on_expert: bool = False,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        require_supported(model)
        if not 0 <= first_expert <= first_expert + num_local_experts <= model.num_experts:
            raise BadInput("num_local_experts", num_local_experts, f"at most {model.num_experts - first_expert}")
        super().__init__()
        where: dict[str, Any] = {"device": torch.device(device), "dtype": dtype}
        self.model, self.layer = model, layer
        self.first_expert, self.num_local_experts = first_expert, num_local_experts
        hidden, width = model.hidden_size, model.expert_hidden_size
        self.fc1 = nn.Parameter(torch.empty(num_local_experts, 2 * width, hidden, **where))
        self.fc2 = nn.Parameter(torch.empty(num_local_experts, hidden, width, **where))
        self.shared: FeedForward | None = None
        if shared_on_expert and model.num_shared_experts:
            self.shared = FeedForward(hidden, model.shared_hidden_size, **where)

    @property
    def num_slots(self) -> int:
        """Length of ``counts``: local routed experts, and the shared experts where they are here."""
        return self.num_local_experts + (self.shared is not None)

    def forward(self, rows: Tensor, row_index: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        """y[r] = sum of w_p E_p(rows[r]) over the pairs p with row_index[p] = r, summed in fp32.

        Args:
            rows: [R, H] of u; each has a pair, or more.
            row_index: int64 [P], the row of every pair; sorted by local expert, the shared ones last.
            weights: fp32 [P].
            counts: pairs of every slot, on the host.
        Returns:
            [R, H] in the dtype of ``rows``.
        """
        if len(counts) != self.num_slots or sum(counts) != row_index.shape[0]:
            raise BadInput("counts", list(counts), f"{self.num_slots} counts that sum to {row_index.shape[0]}")
        routed = list(counts[: self.num_local_experts])
        num_routed = sum(routed)
        pairs = Pairs.of(row_index, rows.shape[0])
        x = gather(rows, pairs)
        offsets = to_device(list(accumulate(routed)), torch.int32, rows.device)
        if self.shared is None:
            return sum_pairs(pairs, self._routed(x, weights, routed, offsets))
        y = self._routed(x[:num_routed], weights[:num_routed], routed, offsets)
        return sum_pairs(pairs, y, self.shared(x[num_routed:], weights[num_routed:]))

    def _routed(self, x: Tensor, weights: Tensor, counts: Sequence[int], offsets: Tensor) -> Tensor:
        hidden = grouped_linear(x, self.fc1, counts, offsets)
        return grouped_linear(swiglu(hidden, weights), self.fc2, counts, offsets)
