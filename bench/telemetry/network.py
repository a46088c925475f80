"""Byte counters of InfiniBand ports and Ethernet interfaces, which belong to the host and not to a process.

InfiniBand counts in words of four bytes (``port_xmit_data``; IBTA specification, PortCountersExtended).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.telemetry.sampler import Probe

SYS = Path("/sys/class")
IB_WORD_BYTES = 4


def network_probes(root: Path = SYS) -> tuple[list[Probe], dict[str, str]]:
    """Probes of all ports of a kind together, and what cannot be read with the reason.

    Fields: ``ib_tx_bytes``, ``ib_rx_bytes``; ``eth_tx_bytes``, ``eth_rx_bytes`` of interfaces with a device behind
    them; ``lo_tx_bytes``, ``lo_rx_bytes`` of the loopback, over which ranks of one host talk on CPUs.
    """
    ports = sorted((root / "infiniband").glob("*/ports/*/counters"))
    net = root / "net"
    # Virtual interfaces carry again what a device carries.
    devices = sorted(path.parent / "statistics" for path in net.glob("*/device")) if net.is_dir() else []
    loopback = [net / "lo" / "statistics"] if (net / "lo" / "statistics").is_dir() else []
    probes: list[Probe] = []
    absent: dict[str, str] = {}
    for kind, folders, names, scale, missing in (
        ("ib", ports, ("port_xmit_data", "port_rcv_data"), IB_WORD_BYTES, "no InfiniBand port"),
        ("eth", devices, ("tx_bytes", "rx_bytes"), 1, "no Ethernet interface with a device"),
        ("lo", loopback, ("tx_bytes", "rx_bytes"), 1, "no loopback interface"),
    ):
        fields = (f"{kind}_tx_bytes", f"{kind}_rx_bytes")
        if folders:
            probes.append(Probe(fields, _sums(folders, names, scale)))
        else:
            absent.update(dict.fromkeys(fields, missing))
    return probes, absent


def _sums(folders: list[Path], names: tuple[str, str], scale: int) -> Callable[[], Sequence[float]]:
    return lambda: [sum(int((folder / name).read_text()) for folder in folders) * scale for name in names]
