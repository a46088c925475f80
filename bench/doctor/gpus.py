"""Checks of GPUs and of the links between them."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.devices import active_links, gpu_facts
from bench.doctor.check import Check
from bench.doctor.training import summed


def nvml() -> Check:
    facts = gpu_facts()
    if "absent" in facts:
        advice = "an NVIDIA driver, and for a container its libraries; without them runs have no telemetry of GPUs"
        return Check("nvml", "absent", facts["absent"], advice)
    found = f"driver {facts['driver']} (CUDA {facts['driver_cuda']}), {len(facts['gpus'])} GPUs"
    return Check("nvml", "ok", found)


def gpus() -> Check:
    cuda = _cuda()
    if cuda is None:
        return Check("gpus", "absent", "torch sees no CUDA device", "a driver, and a torch that is built for CUDA")
    from bench.clusters import GPUS

    names = [cuda.get_device_name(i) for i in range(cuda.device_count())]
    for i in range(len(names)):
        _multiplies(i)
    unknown = sorted({name for name in names if not any(gpu in name.lower().split() for gpu in GPUS)})
    found = f"{len(names)} x {', '.join(sorted(set(names)))}; each multiplied matrices"
    advice = f"declare the peak of {', '.join(unknown)} in a cluster file (--cluster FILE)" if unknown else ""
    return Check("gpus", "ok", found, advice)


def _cuda() -> Any:
    """torch.cuda where it has a device, else None."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda if torch.cuda.is_available() and torch.cuda.device_count() else None


def _multiplies(index: int) -> None:
    import torch

    a = torch.eye(256, device=f"cuda:{index}")
    if (a @ a).trace().item() != 256.0:
        raise ArithmeticError(f"GPU {index} multiplied wrongly")


@contextmanager
def _nvml_handles() -> Iterator[tuple[Any, list[Any]]]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def gpu_clocks() -> Check:
    if "absent" in gpu_facts():
        return Check("gpu clocks", "absent", "no NVML", "see nvml")
    from bench.telemetry.nvml import POWER_CAP, THERMAL_OR_BRAKE, reasons_of

    words, held = [], set()
    with _nvml_handles() as (nvml, handles):
        for handle in handles:
            now, most = (
                read(handle, nvml.NVML_CLOCK_SM)
                for read in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
            )
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            held |= set(reasons_of(reasons & (sum(THERMAL_OR_BRAKE) | sum(POWER_CAP))))
            words.append(f"{now} of {most} MHz")
    advice = f"slowed down by {', '.join(sorted(held))}: cool it, or raise its limit" if held else ""
    return Check("gpu clocks", "broken" if held else "ok", ", ".join(words), advice)


def nccl() -> Check:
    cuda = _cuda()
    if cuda is None:
        return Check("nccl", "absent", "no CUDA device", "see gpus")
    tried = summed("cuda", min(2, cuda.device_count()))
    version = ".".join(str(part) for part in cuda.nccl.version())
    return Check("nccl", tried.state, f"{version}; {tried.found}", tried.advice)


def peers() -> Check:
    cuda = _cuda()
    count = 0 if cuda is None else cuda.device_count()
    if count < 2:
        return Check("peer access", "absent", f"{count} GPUs", "")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a}-{b}" for a, b in pairs if not cuda.can_device_access_peer(a, b)]
    advice = "messages go through the host; look at IOMMU, ACS and the container's settings" if without else ""
    found = f"not between {', '.join(without[:8])}" if without else f"between all {count} GPUs"
    return Check("peer access", "broken" if without else "ok", found, advice)


def nvlink() -> Check:
    if "absent" in gpu_facts():
        return Check("nvlink", "absent", "no NVML", "see nvml")
    with _nvml_handles() as (nvml, handles):
        links = [active_links(nvml, handle) for handle in handles]
    found = f"{', '.join(map(str, links))} links up; topology {gpu_facts()['topology']}"
    return Check("nvlink", "ok" if any(links) else "absent", found, "" if any(links) else "messages go over PCIe")


