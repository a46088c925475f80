"""What transfers cost: their bytes from rank to rank, and how long these take the ports of both ends."""

from dataclasses import dataclass
from math import inf

from bench.action import Action
from bench.edges import ends
from bench.family import Family
from bench.load import EXPERTS_RECEIVE, Link, Message, Ports


@dataclass(frozen=True, eq=False)
class TransferCosts(Family):
    """Bytes and seconds of transfers."""

    def message(self, action: Action) -> Message:
        """The bytes of a transfer. Raises BadInput for an action that is no transfer of this placement."""
        return self._once(("message", *self._likeness(action)), lambda: self._load.message(action))

    def ports(self, action: Action) -> Ports:
        """How long a transfer takes its ports, and its latency."""
        return self._once(("ports", *self._likeness(action)), lambda: self._ports(action))

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
