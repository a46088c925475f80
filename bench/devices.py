"""The GPUs of this machine as NVML sees them: names, driver, and how each pair is connected."""

from functools import cache
from typing import Any

# Of nvml.h, nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo`.
LEVELS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
MAX_LINKS = 18


@cache
def gpu_facts() -> dict[str, Any]:
    """Driver, CUDA version of the driver, GPUs by name, and topology; or ``{"absent": why}``.

    Topology: one word if all pairs are connected alike, else rows of a matrix: ``NV18`` for 18 NVLinks, else the
    nearest common ancestor on PCIe as `nvidia-smi topo` names it.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception as error:
        return {"absent": f"NVML: {' '.join(str(error).split())}"}
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "nvml": nvml.nvmlSystemGetNVMLVersion(),
            "gpus": [nvml.nvmlDeviceGetName(handle) for handle in handles],
            "topology": _topology(nvml, handles),
        }
    except nvml.NVMLError as error:
        return {"absent": f"NVML: {error}"}
    finally:
        nvml.nvmlShutdown()


def _topology(nvml: Any, handles: list[Any]) -> str | list[str] | None:
    if len(handles) < 2:
        return None
    rows = [[_connection(nvml, a, b) if a is not b else "X" for b in handles] for a in handles]
    kinds = {word for row in rows for word in row} - {"X"}
    return kinds.pop() if len(kinds) == 1 else [" ".join(row) for row in rows]


def _connection(nvml: Any, a: Any, b: Any) -> str:
    try:
        if nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return f"NV{active_links(nvml, a)}"
    except nvml.NVMLError:
        pass
    try:
        return LEVELS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b), "?")
    except nvml.NVMLError:
        return "?"


def active_links(nvml: Any, handle: Any) -> int:
    """NVLinks of a GPU that are up."""
    count = 0
    for link in range(MAX_LINKS):
        try:
            count += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:
            break
    return count
