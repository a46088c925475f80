"""What transfers cost: their bytes from rank to rank, and how long these take the ports of both ends."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from bench.action import Action
from bench.edges import ends
from bench.family import Family
from bench.load import EXPERTS_RECEIVE, Link, Message, Ports


@dataclass(frozen=True, eq=False)
class TransferCosts(Family):
    """Bytes and seconds of transfers."""

    def message(self, action: Action) -> Message:
        """The bytes of a transfer. Raises BadInput for an action that is no transfer of this placement."""
        return self._once(("message", *self._likeness(action)), lambda: self._message(action))

    def ports(self, action: Action) -> Ports:
        """How long a transfer takes its ports, and its latency."""
        return self._once(("ports", *self._likeness(action)), lambda: self._scaled_ports(action))

    def _message(self, action: Action) -> Message:
        if self._few is None:
            return self._load.message(action)
        return self._few.costs.message(action).times(self._few.times)

    def _scaled_ports(self, action: Action) -> Ports:
        if self._few is None:
            return self._ports(action)
        return self._few.costs.ports(action).times(self._few.times)

    @cached_property
    def _few(self) -> "_Few | None":
        """The same with the fewest tokens of which it has 2^n times as many; None where that is itself.

        Bytes, and the seconds that they take the ports, are linear in the tokens, and times 2^n is exact: to the last
        bit the same, and looked at once for all lengths of sequences, numbers of them and ways to share them.
        """
        times = (self._tokens & -self._tokens) // 2  # a sequence has two tokens at least
        layout = self.case.layout
        if times < 2 or not self.routes.even or layout.ranks_over_nodes == "strided":
            return None
        workload = self.case.workload.model_copy(update={"seq_len": self._tokens // times})
        one = layout.model_copy(update={"mbs": 1, "tp": 1, "cp": 1})
        return _Few(replace(self, case=self.case.model_copy(update={"workload": workload, "layout": one})), times)

    def transfer_s(self, action: Action) -> float:
        """Seconds of a transfer alone: of its busiest port, and the latency."""
        return float(self._cached(("transfer", *self._likeness(action)), lambda: self._transfer_s(self.ports(action))))

    def _transfer_s(self, ports: Ports) -> float:
        return max(float(column.max(initial=0.0)) for column in ports[:4]) + float(ports.latency_s.max(initial=0.0))

    def _ports(self, action: Action) -> Ports:
        cluster, assumed = self.case.cluster, self.assumed
        source, target = ends(self.placement, action)
        nic_share = assumed.nic_all_to_all if source == target else assumed.nic_many_to_many
        nic_rate, nic_latency = cluster.nic_bytes_per_s_per_gpu * nic_share, cluster.nic_latency_s + assumed.transfer_s
        nic = Link(nic_rate, nic_latency, assumed.cross_rail, assumed.incast)
        nvlink = Link(cluster.gpu.nvlink_bytes_per_s * assumed.nvlink, cluster.nvlink_latency_s + assumed.transfer_s)
        if self.free_communication:
            nic = nvlink = Link(inf, 0.0)
        relays_at_target = (action.kind, action.pass_) in EXPERTS_RECEIVE
        return self.message(action).ports(nic, nvlink, relays_at_target=relays_at_target)


class _Few(NamedTuple):
    costs: TransferCosts
    times: int
