"""How fast profiler traces are read, and in how much memory: ``pytest bench/micro --benchmark-enable -s -k kineto``.

The traces are laid out as Kineto writes them, 2.5 GPU operations in every 20 events; the largest has 5 million events.
"""

import gzip
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.kineto import analyze_traces

EVENTS_A_ROUND = 20
# Processor seconds and the most memory that a process which does nothing else takes.
MEASURE = """
import sys, time
from bench.kineto import analyze_traces
analyze_traces([sys.argv[1]])
print(time.process_time(), next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
_EVENT = """
  {{
    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},
    "ts": {ts}.{ns:03d}, "dur": {dur}.250,
    "args": {{
      {args}
    }}
  }},"""
_FLOW = """
  {{
    "ph": "{ph}", "id": {id}, "pid": {pid}, "tid": {tid}, "ts": {ts}.{ns:03d},
    "cat": "ac2g", "name": "ac2g"
  }},"""
_KERNEL_ARGS = """"External id": {id}, "queued": 0, "device": 0, "context": 1,
      "stream": {stream}, "correlation": {id}, "registers per thread": 168, "shared memory": 213248,
      "blocks per SM": 1.000000, "warps per SM": 12.000000,
      "grid": [132, 1, 1], "block": [384, 1, 1], "est. achieved occupancy %": 18"""
_OP_ARGS = """"External id": {id}, "Record function id": 0, "Concrete Inputs": ["", "", ""],
      "Input type": ["c10::BFloat16"], "Input Strides": [[7168, 1], [1, 7168], []],
      "Input Dims": [[4096, 7168], [7168, 2048], []], "Ev Idx": {id}"""
_KERNELS = (
    ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", 7),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add(c10::BFloat16)>(int)", 7),
    ("void deep_ep::internode::dispatch<false, 8, false, 8>(int4*, float*, long*, float*, int4 const*)", 27),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 31),
    ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits<128, 64, 128, 8>, true>(Params)", 7),
)


def write_trace(path: Path, num_events: int) -> int:
    """A trace of `num_events` (a multiple of 20) and one. Compressed where the name ends in .gz. Its unpacked bytes."""
    size = 0
    with open(path, "wb") as raw, _packed(raw) if path.suffix == ".gz" else nullcontext(raw) as out:
        size += out.write(b'{\n  "schemaVersion": 1,\n')
        size += out.write(b'  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 64},\n')
        size += out.write(b'  "baseTimeNanoseconds": 1767225600000000000,\n  "traceEvents": [')
        for i in range(num_events // EVENTS_A_ROUND):
            size += out.write(_round(i).encode())
        end = '\n  {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 1}\n'
        size += out.write(f'{end}  ],\n  "traceName": "trace.json"\n}}\n'.encode())
    return size


def _packed(raw: BinaryIO) -> gzip.GzipFile:
    return gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1)


def _round(i: int) -> str:
    """Twenty events: an operator with its children, two or three launches and what they launched."""
    parts, ts = [], 5_000_000_000 + 40 * i
    num_work = 2 + i % 2
    for j in range(EVENTS_A_ROUND - 4 * num_work):
        number = i * EVENTS_A_ROUND + j
        args = _OP_ARGS.format(id=number) + (', "Sequence number": 1, "Fwd thread id": 0' if j % 6 == 0 else "")
        parts.append(_EVENT.format(cat="cpu_op", name="aten::mm", pid=99, tid=99, ts=ts + j, ns=j, dur=3, args=args))
    for j in range(num_work):
        number = 1_000_000_000 + i * EVENTS_A_ROUND + j
        name, stream = _KERNELS[(i + j) % len(_KERNELS)]
        args = f'"External id": {number}, "cbid": 211, "correlation": {number}'
        call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 99, "tid": 99}
        parts.append(_EVENT.format(**call, ts=ts + 2 * j, ns=1, dur=2, args=args))
        parts.append(_FLOW.format(ph="s", id=number, pid=99, tid=99, ts=ts + 2 * j, ns=1))
        details = _KERNEL_ARGS.format(id=number, stream=stream)
        parts.append(
            _EVENT.format(cat="kernel", name=name, pid=0, tid=stream, ts=ts + 12 * j, ns=7, dur=11, args=details)
        )
        parts.append(_FLOW.format(ph="f", id=number, pid=0, tid=stream, ts=ts + 12 * j, ns=7))
    return "".join(parts)


@pytest.mark.parametrize(("num_events", "suffix"), [(480_000, ".json"), (480_000, ".json.gz"), (5_000_000, ".json")])
def test_megabytes_per_second(benchmark: BenchmarkFixture, tmp_path: Path, num_events: int, suffix: str) -> None:
    if benchmark.disabled:
        num_events = 2000
    path = tmp_path / f"trace{suffix}"
    size = write_trace(path, num_events)
    (rank,) = analyze_traces([path]).ranks
    assert rank.num_events == num_events + 1
    benchmark.pedantic(analyze_traces, args=([path],), rounds=3)
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.min
        measured = subprocess.check_output([sys.executable, "-c", MEASURE, str(path)], text=True).split()
        cpu_s, peak_mib = float(measured[0]), int(measured[1]) / 1024
        benchmark.extra_info.update(megabytes_per_s=size / 1e6 / seconds, cpu_s=cpu_s, peak_rss_mib=peak_mib)
        print(
            f"\n{suffix} {num_events:,} events, {size / 1e6:.0f} MB: {seconds:.2f} s, {size / 1e6 / seconds:.0f} MB/s, "
            f"{num_events / 1e6 / seconds:.2f} M events/s; alone {cpu_s:.2f} CPU s and {peak_mib:.0f} MiB at the most"
        )
    path.unlink()  # it is large, and pytest would keep it
