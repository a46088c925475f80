"""Readings of the host: this process's processor time, memory and page faults (psutil), and the machine's."""

import resource
from collections.abc import Sequence

from bench.telemetry.sampler import Probe

HOST_FIELDS = (
    "process_cpu_s", "process_rss_bytes", "process_major_faults", "process_minor_faults", "host_cpu_fraction",
    "host_available_bytes",
)  # fmt: skip


def host_probes() -> tuple[list[Probe], dict[str, str]]:
    """Probes, and what cannot be read with the reason. Counters count from the process's start."""
    try:
        import psutil
    except ImportError as error:
        return [], dict.fromkeys(HOST_FIELDS, f"psutil: {error}")
    process = psutil.Process()

    def own() -> Sequence[float]:
        times = process.cpu_times()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return times.user + times.system, process.memory_info().rss, usage.ru_majflt, usage.ru_minflt

    def machine() -> Sequence[float]:
        return psutil.cpu_percent() / 100, psutil.virtual_memory().available

    psutil.cpu_percent()  # the fraction is of the time since the call before
    return [Probe(HOST_FIELDS[:4], own), Probe(HOST_FIELDS[4:], machine)], {}
