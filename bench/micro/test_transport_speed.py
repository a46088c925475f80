"""M-to-N dispatch and all-to-all between real ranks: gloo on the CPU, NCCL where there are GPUs enough.

``bytes_per_s`` counts what leaves a source for *other* ranks, per source: nothing that a rank sends to itself.
"""

from __future__ import annotations

from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 5
CASES = {
    "m2n-2-2": ((0, 1), (2, 3)),
    "m2n-1-3": ((0,), (1, 2, 3)),
    "all-to-all-4": ((0, 1, 2, 3), (0, 1, 2, 3)),
}


@pytest.mark.parametrize("num_bytes", [1 << 14, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_exchange(benchmark: BenchmarkFixture, device: Any, name: str, num_bytes: int) -> None:
    import torch

    from bench.execute.pool import RankPool
    from bench.micro.exchanges import exchange

    sources, targets = CASES[name]
    if device == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    with RankPool(4, device, timeout_s=120) as pool:
        arguments = (exchange, sources, targets, num_bytes, ROUNDS)
        seconds: list[float] = []
        pool.run(*arguments)  # starts the ranks
        benchmark.pedantic(lambda: seconds.append(pool.run(*arguments)[0]), rounds=3 if benchmark.enabled else 1)
    sent = sum(target != sources[0] for target in targets) * num_bytes
    benchmark.extra_info["bytes_per_s"] = sent * ROUNDS / min(seconds)
    benchmark.extra_info["seconds_per_exchange"] = min(seconds) / ROUNDS
