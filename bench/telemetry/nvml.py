"""Readings of one GPU through NVML (package nvidia-ml-py); none of them changes anything on the device.

Power: ``power_w`` is what NVML calls the power usage, which from Ampere on is an average over a second;
``power_instant_w`` is the instantaneous one, where the driver has it. ``energy_j`` counts from the driver's start.
PCIe and NVLink bytes are counters where the device has them; else PCIe is a rate over NVML's own 20 ms.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench.telemetry.sampler import Probe

SLOW_EVERY = 10  # samples between readings that take milliseconds
ALL_LINKS = 0xFFFFFFFF
KIB = 1024
WEIGHT = 4.0  # of what energies are made of
# Field numbers of nvml.h; older versions of nvidia-ml-py do not name them all.
POWER_INSTANT, NVLINK_TX, NVLINK_RX, PCIE_TX, PCIE_RX = 186, 138, 139, 197, 198
# Of nvml.h, nvmlClocksEventReasons.
THERMAL_OR_BRAKE = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
POWER_CAP = {0x04: "software power cap"}
OTHER_REASONS = {0x01: "idle", 0x02: "clock setting", 0x10: "sync boost", 0x100: "display clock setting"}
REASONS = {**THERMAL_OR_BRAKE, **POWER_CAP, **OTHER_REASONS}

GPU_FIELDS = (
    "power_w", "power_instant_w", "energy_j", "temperature_c", "sm_clock_mhz", "memory_clock_mhz", "gpu_utilisation",
    "memory_utilisation", "memory_used_bytes", "event_reasons", "pcie_tx_bytes", "pcie_rx_bytes",
    "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "nvlink_tx_bytes", "nvlink_rx_bytes", "other_processes",
)  # fmt: skip


class Gpu(NamedTuple):
    """Probes of one GPU, what cannot be read and why, and facts that do not change."""

    probes: list[Probe]
    absent: dict[str, str]
    facts: dict[str, Any]


class NotShownError(RuntimeError):
    """A value that NVML has but does not tell here."""


def open_gpu(index: int, uuid: str | None = None) -> Gpu:
    """Probes of GPU `index` of this machine, or of the one with that UUID, which CUDA's own numbering may differ on.

    Never raises: where NVML, the driver or the device is missing, every field is absent with that reason.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:
        return no_gpu(f"NVML: {error}")
    probes = _single(pynvml, handle) + _counters(pynvml, handle)
    probes.append(Probe(("other_processes",), lambda: [_other_processes(pynvml, handle)], SLOW_EVERY))
    absent: dict[str, str] = {}
    working = [probe for probe in probes if _works(probe, absent)]
    have = {name for probe in working for name in probe.fields}
    if "pcie_tx_bytes" in have:
        working = [probe for probe in working if "pcie_tx_bytes_per_s" not in probe.fields]
        absent["pcie_tx_bytes_per_s"] = absent["pcie_rx_bytes_per_s"] = "the counters are read"
    return Gpu(working, absent, _facts(pynvml, handle))


def no_gpu(reason: str) -> Gpu:
    """Every field of a GPU absent for one reason."""
    return Gpu([], dict.fromkeys(GPU_FIELDS, " ".join(reason.split())), {})


def reasons_of(bits: int) -> list[str]:
    """Names of the event reasons in a bit mask."""
    return [name for bit, name in REASONS.items() if bits & bit]


def _works(probe: Probe, absent: dict[str, str]) -> bool:
    try:
        probe.read()
    except Exception as error:
        absent.update(dict.fromkeys(probe.fields, " ".join(str(error).split())))
        return False
    return True


def _single(nvml: Any, handle: Any) -> list[Probe]:
    """Readings with a function of their own."""

    def utilisation() -> Sequence[float]:
        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        return rates.gpu / 100, rates.memory / 100

    def reasons() -> Sequence[float]:
        name = "nvmlDeviceGetCurrentClocksEventReasons"  # older drivers have it under its former name only
        try:
            return [getattr(nvml, name)(handle)]
        except nvml.NVMLError_FunctionNotFound:
            return [nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)]

    def pcie() -> Sequence[float]:
        kinds = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        return [nvml.nvmlDeviceGetPcieThroughput(handle, kind) * KIB for kind in kinds]

    def one(read: Callable[[], float], scale: float = 1.0) -> Callable[[], Sequence[float]]:
        return lambda: [read() * scale]

    return [
        Probe(("energy_j",), one(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle), 1e-3), weight=WEIGHT),
        Probe(("power_w",), one(lambda: nvml.nvmlDeviceGetPowerUsage(handle), 1e-3)),
        Probe(("temperature_c",), one(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        Probe(("sm_clock_mhz",), one(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        Probe(("memory_clock_mhz",), one(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
        Probe(("gpu_utilisation", "memory_utilisation"), utilisation),
        Probe(("memory_used_bytes",), one(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)),
        Probe(("event_reasons",), reasons),
        Probe(("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"), pcie, SLOW_EVERY),
    ]


def _counters(nvml: Any, handle: Any) -> list[Probe]:
    """Readings by field number; fields that share a fate share a call."""

    def fields(scale: float, *numbers: tuple[int, int]) -> Callable[[], Sequence[float]]:
        return lambda: [_value(nvml, one) * scale for one in nvml.nvmlDeviceGetFieldValues(handle, list(numbers))]

    return [
        Probe(("power_instant_w",), fields(1e-3, (POWER_INSTANT, 0)), weight=WEIGHT),
        Probe(
            ("nvlink_tx_bytes", "nvlink_rx_bytes"),
            fields(
                KIB,
                (NVLINK_TX, ALL_LINKS),
                (NVLINK_RX, ALL_LINKS),
            ),
        ),
        Probe(
            ("pcie_tx_bytes", "pcie_rx_bytes"),
            fields(1, (PCIE_TX, 0), (PCIE_RX, 0)),
        ),
    ]


_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by value type


def _value(nvml: Any, one: Any) -> float:
    if one.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(one.nvmlReturn)
    return float(getattr(one.value, _VALUES[one.valueType]))


def _other_processes(nvml: Any, handle: Any) -> float:
    """Processes with a context on the GPU that are neither this one nor its parent.

    Raises NotShownError where NVML does not list this process, as it does not in another PID namespace.
    """
    pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    own = {os.getpid(), os.getppid()}
    if os.getpid() in pids:
        return len(set(pids) - own)
    if len(pids) > 1:
        return len(pids) - 1
    raise NotShownError("NVML does not list this process: it uses no GPU, or has another PID namespace")


def _facts(nvml: Any, handle: Any) -> dict[str, Any]:
    """Limits and settings that do not change in a run; those that can be read."""
    reads: dict[str, Callable[[], Any]] = {
        "name": lambda: nvml.nvmlDeviceGetName(handle),
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "max_sm_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "max_memory_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "driver": nvml.nvmlSystemGetDriverVersion,
    }
    found = {}
    for name, read in reads.items():
        try:
            found[name] = read()
        except nvml.NVMLError:
            continue
    return found
