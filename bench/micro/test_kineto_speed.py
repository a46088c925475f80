"""How fast profiler traces are read, and in how much memory: ``pytest bench/micro --benchmark-enable -s -k kineto``.

The traces are laid out as Kineto writes them, 2.5 GPU operations in every 20 events; the largest has 5 million events.
"""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.kineto import analyze_traces

EVENTS_A_ROUND = 20
# What one process that does nothing else needs; VmHWM is the most memory that it held.
MEASURE = """
import sys
from bench.kineto import analyze_traces
analyze_traces([sys.argv[1]])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
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
_KERNEL_ARGS = (
    '"External id": {id}, "queued": 0, "device": 0, "context": 1, "stream": {stream}, "correlation": {id},\n      '
    '"registers per thread": 168, "shared memory": 213248, "blocks per SM": 1.000000, "warps per SM": 12.000000,\n      '
    '"grid": [132, 1, 1], "block": [384, 1, 1], "est. achieved occupancy %": 18'
)
_OP_ARGS = (
    '"External id": {id}, "Record function id": 0, "Concrete Inputs": ["", "", ""], "Input type": ["c10::BFloat16"],\n      '
    '"Input Strides": [[7168, 1], [1, 7168], []], "Input Dims": [[4096, 7168], [7168, 2048], []], "Ev Idx": {id}'
)
_KERNELS = (
    ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", 7),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add(c10::BFloat16)>(int)", 7),
    ("void deep_ep::internode::dispatch<false, 8, false, 8>(int4*, float*, long*, float*, int4 const*)", 27),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 31),
    ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits<128, 64, 128, 8>, true>(Params)", 7),
)


def write_trace(path: Path, num_events: int) -> Path:
    """A trace of about `num_events` events (a multiple of 20) on four streams; compressed where the name ends in .gz."""
    opened = gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else open(path, "wb")
    with opened as out:
        out.write(b'{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 64},\n')
        out.write(b'  "baseTimeNanoseconds": 1767225600000000000,\n  "traceEvents": [')
        for i in range(num_events // EVENTS_A_ROUND):
            out.write(_round(i).encode())
        end = '\n  {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 1}\n'
        out.write(f'{end}  ],\n  "traceName": "trace.json"\n}}\n'.encode())
    return path


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
    path = write_trace(tmp_path / f"trace{suffix}", num_events)
    (rank,) = analyze_traces([path]).ranks
    assert rank.num_events == num_events + 1
    benchmark.pedantic(analyze_traces, args=([path],), rounds=3)
    if benchmark.stats is not None:
        seconds = benchmark.stats.stats.min
        size = path.stat().st_size
        peak = int(subprocess.check_output([sys.executable, "-c", MEASURE, str(path)], text=True)) / 1024
        benchmark.extra_info.update(megabytes_per_s=size / 1e6 / seconds, peak_rss_mib=peak)
        print(
            f"\n{suffix} {num_events:,} events, {size / 1e6:.0f} MB: {seconds:.2f} s, {size / 1e6 / seconds:.0f} MB/s, "
            f"{num_events / 1e6 / seconds:.2f} M events/s, peak RSS {peak:.0f} MiB"
        )
