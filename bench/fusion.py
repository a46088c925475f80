"""What experts and their exchange cost where one kernel does both, tile by tile.

A plan stands for such a kernel by many chunks, which are no launches: costs are those of the whole micro-batch, cut
evenly. What remains of fixed costs is the latency of the first tile's arrival, and of the last one's.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bench.action import Action, Kind, Pass
from bench.cost import Costs
from bench.errors import BadInput
from bench.load import Ports

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FusedCosts(Costs):
    """Costs with an exchange that takes thread blocks from the GEMM beside it.

    Experts, forward and input gradient: seconds of the whole micro-batch / chunks x num_sms / (num_sms - comm_sms).
    Their weight gradients need no exchange and have all SMs. Everything else is done for the whole micro-batch at once.
    Dispatch and combine reach min(1, comm_sms / `saturating_sms`) of the links' usual shares.

    Args:
        comm_sms: SMs of a rank that the fused kernel's communication takes, 1 or more. Where the assumptions take
            `communication_sms` from every system's computation, a fused kernel has the larger of the two taken, once.
    """

    comm_sms: int = 1

    def _seconds(self, action: Action) -> Floats:
        if action.kind is not Kind.EXPERT:
            return self._whole.seconds(action)
        if action.pass_ is Pass.W:
            return self._whole.seconds(action) / self.chunks
        num_sms = self.case.cluster.gpu.num_sms
        taken = max(self.comm_sms, self.assumed.communication_sms)
        if taken >= num_sms:
            raise BadInput("layout.comm_sms", self.comm_sms, f"less than {num_sms} SMs")
        return self._with_all_sms.seconds(action) / self.chunks * (num_sms / (num_sms - taken))

    def _ports(self, action: Action) -> Ports:
        ports = super()._ports(action)
        if action.kind not in (Kind.DISPATCH, Kind.COMBINE):
            return ports
        share = min(1.0, self.comm_sms / self.assumed.saturating_sms)
        nic_out, nvlink_out, nic_in, nvlink_in = (column / share for column in ports[:4])
        return Ports(nic_out, nvlink_out, nic_in, nvlink_in, ports.latency_s)

    @cached_property
    def _whole(self) -> Costs:
        """The same case, its micro-batches in one piece and nothing fused."""
        same = {field.name: getattr(self, field.name) for field in fields(Costs)}
        return Costs(**{**same, "chunks": 1, "routing": self.routes})

    @cached_property
    def _with_all_sms(self) -> Costs:
        return replace(self._whole, assumptions=self.assumed.model_copy(update={"communication_sms": 0}))
