"""In the steady state a host waits for its GPU for counts only, and where a queue's window is full."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from test_cuda import case_of

from bench.program import Op

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from bench.execute.job import Job  # noqa: E402
from bench.execute.pool import RankPool  # noqa: E402
from bench.execute.sync import OptimizerSettings  # noqa: E402
from bench.execute.trainer import RankTrainer  # noqa: E402

WARM_UP_STEPS = 3
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("nccl", "ep", {"ep": 1}),  # one GPU sends nothing over links, and waits for counts all the same
    *(
        (transport, system, layout)
        for transport in ("nccl", "copy")
        for system, layout in [("disagmoe", {"round_length": 2}), ("ep", {"ep": 2}), ("megatron-overlap", {"ep": 2})]
    ),
]
SYNCHRONISING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="there is no CUDA device"),
]


class Waits(NamedTuple):
    """Of one rank and one step: calls that wait for the GPU by name, torch's own warnings; what may be waited for."""

    calls: dict[str, int]
    warned: list[str]
    counts: int
    transfers: int
    losses: int


def waits_of_a_step(job: Job) -> Waits:
    trainer = RankTrainer(job, OptimizerSettings())
    for step in range(WARM_UP_STEPS):
        trainer.step(step)
    torch.cuda.synchronize()
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        trainer.step(WARM_UP_STEPS)
        torch.cuda.set_sync_debug_mode("default")
    warned = [str(one.message) for one in caught if "called a synchronizing" in str(one.message)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.step(WARM_UP_STEPS + 1)
    calls = Counter(event.name for event in profile.events() if event.name in SYNCHRONISING)
    program, group = job.program, trainer.worker.home.group.name
    mine = program.group == program.plan.placement.index[group]
    actions = [program.action(k).kind.name for k in range(program.num_ops) if mine[k] and program.op[k] == Op.COMPUTE]
    passes = [program.action(k).pass_.name for k in range(program.num_ops) if mine[k] and program.op[k] == Op.COMPUTE]
    forward = Counter(kind for kind, pass_ in zip(actions, passes, strict=True) if pass_ == "F")
    transfers = int((mine & ((program.op == Op.SEND) | (program.op == Op.RECV))).sum())
    losses = int(forward["ATTENTION"] + forward["HEAD"] > 0)
    return Waits(dict(calls), warned, forward["ATTENTION"], transfers, losses)


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    with RankPool(min(2, torch.cuda.device_count()), "cuda", timeout_s=60) as pool:
        yield pool


@pytest.mark.parametrize(("transport", "system", "layout"), CASES)
def test_hosts_wait_for_counts_only(gpus: RankPool, transport: str, system: str, layout: dict[str, Any]) -> None:
    case = case_of(system, layout, "bf16")
    if (needed := Job.of(case).world_size) > gpus.world_size:
        pytest.skip(f"there are not {needed} CUDA devices")
    job = Job.of(case, carrier=gpus.carrier_of(transport))
    found = gpus.run(waits_of_a_step, job, world_size=needed)
    for waits in found:
        # The loss is read when the step is over, the step begins with an idle GPU, and so does a profile.
        assert len(waits.warned) <= waits.losses, waits.warned
        assert waits.calls.get("cudaDeviceSynchronize", 0) <= 4, waits.calls
        assert waits.calls.get("cudaStreamSynchronize", 0) <= waits.losses, waits.calls
        assert waits.calls.get("cudaMemcpy", 0) == 0, waits.calls
        # One for every set of counts, which is read once, and one where a transfer gives its place in the window back.
        assert waits.calls.get("cudaEventSynchronize", 0) <= waits.counts + waits.transfers, waits.calls
