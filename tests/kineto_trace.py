"""Small profiler traces written by hand, for tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from bench.kineto import Analysis
from bench.kineto.times import Busy

Event = dict[str, Any]
US = 1e-6
GEMM, NCCL = "nvjet_tst_128x128", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


def work(
    name: str, start: float, end: float, stream: int = 7, *, cat: str = "kernel", device: int = 0, **args: Any
) -> Event:
    """A kernel, copy or memset from `start` to `end`, in microseconds."""
    details = {"device": device, "stream": stream, **args}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": start,
        "dur": end - start,
        "args": details,
    }


def cpu(cat: str, name: str, start: float, end: float, thread: int = 100, **args: Any) -> Event:
    """An event of a CPU thread."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": end - start, "args": args}


def launch(at: float, correlation: int, thread: int = 100) -> Event:
    return cpu("cuda_runtime", "cudaLaunchKernel", at, at + 1, thread, correlation=correlation)


def document(
    events: list[Event], rank: int | None = None, world_size: int | None = None, **header: Any
) -> dict[str, Any]:
    about: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H800"}], **header}
    if rank is not None:
        about["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
    return {**about, "traceEvents": events, "traceName": "trace.json"}


def write(
    path: Path, events: list[Event], rank: int | None = None, world_size: int | None = None, **header: Any
) -> Path:
    """A trace file; compressed where the name ends in .gz."""
    text = json.dumps(document(events, rank, world_size, **header), indent=1).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path


def gpu_of(analysis: Analysis) -> Any:
    ((gpu,),) = (rank.gpus for rank in analysis.ranks)
    return gpu


def in_us(time: Busy) -> tuple[float, ...]:
    """busy, compute, communication, overlapped, exposed, idle."""
    seconds = (time.busy_s, time.compute_s, time.communication_s, time.overlapped_s, time.exposed_s, time.idle_s)
    return tuple(round(value / US, 6) for value in seconds)


# Two streams and a third; all numbers below are by hand, in microseconds.
#   compute        gemm [0, 100)  attention [120, 160)  elementwise [150, 170)   union 150
#   communication  all-reduce [80, 140)  dispatch [200, 230)                     union 90
#   host copy      [180, 190)
#   both at once   [80, 100) and [120, 140): 40; communication alone 50; span 230, busy 210
BY_HAND = [
    work("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_cublas", 0, 100),
    work("void flash::flash_fwd_kernel<T>(flash::Flash_fwd_params)", 120, 160),
    work("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)", 150, 170, 9),
    work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 80, 140, 20),
    work("void deep_ep::internode::dispatch<false, 2, false>(int4*, float*)", 200, 230, 20),
    work("Memcpy HtoD (Pinned -> Device)", 180, 190, cat="gpu_memcpy"),
]
