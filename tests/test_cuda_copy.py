"""Copy engines on two GPUs: every byte arrives, systems equal the reference, and no host waits beyond the counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_cuda import SYSTEMS, case_of

from bench.action import Kind, Pass

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from bench.execute.pool import RankPool, rank_device  # noqa: E402
from bench.execute.transport import Channel, Packet, open_transport  # noqa: E402
from bench.execute.verify import verify  # noqa: E402

NUM_GPUS = 2
LENGTHS = [1, 17, 4096, 3 * 2**20 + 5, 17 * 2**20, 140 * 2**20 + 3]  # bytes; the last is longer than the whole ring

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < NUM_GPUS, reason=f"there are not {NUM_GPUS} CUDA devices"),
]


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    with RankPool(NUM_GPUS, "cuda", transport="copy", timeout_s=90) as pool:
        yield pool


def content(sender: int, length: int) -> Any:
    generator = torch.Generator(rank_device()).manual_seed(1000 * sender + length % 1000)
    return torch.randint(256, (length,), dtype=torch.uint8, device=rank_device(), generator=generator)


def exchanged(sources: tuple[int, ...], targets: tuple[int, ...], rounds: int) -> int:
    """Messages of two tensors each, every round another length; returns how many arrived as they left."""
    rank, transport = dist.get_rank(), open_transport(rank_device())
    channel = Channel(Kind.DISPATCH, Pass.F, sources, targets)
    transport.open([channel])
    right = 0
    for number in range(rounds):
        lengths = LENGTHS[number % len(LENGTHS)], LENGTHS[(number + 2) % len(LENGTHS)]
        sends = [
            Packet(other, part, content(rank, length))
            for other in targets
            for part, length in enumerate(lengths)
            if rank in sources
        ]
        receives = [
            Packet(other, part, torch.zeros(length, dtype=torch.uint8, device=rank_device()))
            for other in sources
            for part, length in enumerate(lengths)
            if rank in targets
        ]
        transport.post(channel, sends, receives).wait()
        right += all(torch.equal(one.tensor, content(one.rank, one.tensor.numel())) for one in receives)
    return right


@pytest.mark.parametrize(("sources", "targets"), [((0,), (1,)), ((1,), (0,)), ((0, 1), (0, 1))])
def test_every_byte_arrives(gpus: RankPool, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
    rounds = 3 * len(LENGTHS)
    assert gpus.run(exchanged, sources, targets, rounds) == [rounds, rounds]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("system", "layout"), SYSTEMS)
def test_systems_equal_the_reference(gpus: RankPool, system: str, layout: dict[str, Any], dtype: str) -> None:
    report = verify(case_of(system, layout, dtype), gpus)
    assert report.ok, str(report)
