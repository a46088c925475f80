"""The same on GPUs: ranks with NCCL, verified in fp32 and bf16, and a few steps of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import make_case

from bench.case import Case
from bench.execute.pool import RankPool
from bench.models import get_model

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from bench.execute.rank import process_group, rank_device  # noqa: E402
from bench.execute.train import train  # noqa: E402
from bench.execute.verify import verify  # noqa: E402

NUM_GPUS = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < NUM_GPUS, reason=f"there are not {NUM_GPUS} CUDA devices"),
]

MODEL = get_model("tiny-shared")
SYSTEMS: list[tuple[str, dict[str, Any]]] = [
    ("ep", {"ep": 2}),
    ("ep", {"ep": 1, "pp": 2}),
    ("ep", {"ep": 1, "replicas": 2}),
    ("dualpipe", {"ep": 1, "pp": 2}),
    ("dualpipe", {"ep": 2}),
    ("disagmoe", {"round_length": 2}),
    ("disagmoe", {"shared_on": "expert", "copies": "expert", "recompute": "full"}),
]


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    with RankPool(NUM_GPUS, "cuda", timeout_s=60) as pool:
        yield pool


def case_of(system: str, layout: dict[str, Any], dtype: str, sequences: int = 8) -> Case:
    data_ranks = layout.get("ep", 1) * layout.get("replicas", 1)
    case = make_case(system, MODEL, seq_len=64, microbatches=sequences // data_ranks, **layout)
    changes = {"dtype": dtype, "routing": "learned"}
    return case.model_copy(update={"workload": case.workload.model_copy(update=changes)})


def sums() -> tuple[int, str, list[float]]:
    """A rank's device, and sums over NCCL and over gloo."""
    group = process_group([0, 1])
    found = []
    for device in (rank_device(), torch.device("cpu")):
        x = torch.tensor(float(dist.get_rank() + 1), device=device)
        dist.all_reduce(x, group=group)
        found.append(x.item())
    return rank_device().index, torch.cuda.get_device_name(), found


def test_every_rank_owns_the_gpu_of_its_number(gpus: RankPool) -> None:
    for rank, (index, name, found) in enumerate(gpus.run(sums)):
        assert index == rank
        assert name
        assert found == [3.0, 3.0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("system", "layout"), SYSTEMS)
def test_systems_equal_the_reference(gpus: RankPool, system: str, layout: dict[str, Any], dtype: str) -> None:
    report = verify(case_of(system, layout, dtype), gpus)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("system", "layout"), SYSTEMS)
def test_training_follows_the_reference(gpus: RankPool, system: str, layout: dict[str, Any], dtype: str) -> None:
    result = train(case_of(system, layout, dtype), steps=10, pool=gpus, timeline_step=-1)
    reference = train(case_of("reference", {}, dtype), steps=10, pool=gpus)
    near = 1e-4 if dtype == "fp32" else 1e-2
    assert np.array(result.losses) == pytest.approx(np.array(reference.losses), rel=near)
    assert result.timeline is not None
    assert (result.timeline.start_s <= result.timeline.end_s).all()
    assert result.clock_error_s > 0
