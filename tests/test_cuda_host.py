"""Several ranks on one GPU, over host memory: unequal groups and p = 2 on as few GPUs as there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import make_case
from test_cuda import case_of

from bench.execute.pool import RankPool
from bench.measured import measure
from bench.models import get_model

torch = pytest.importorskip("torch")

from bench.execute.verify import verify  # noqa: E402

NUM_RANKS = 6
UNEQUAL: list[tuple[str, dict[str, Any]]] = [
    ("disagmoe", {"groups": 2, "attention_ranks": 2, "expert_ranks": 1, "round_length": 2}),
    ("disagmoe", {"groups": 2, "attention_ranks": 1, "expert_ranks": 2, "recompute": "redispatch"}),
    ("ep", {"ep": 2, "pp": 2, "shard_state": True}),
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="there is no CUDA device"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(NUM_RANKS, "cuda", transport="host", timeout_s=120) as pool:
        yield pool


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("system", "layout"), UNEQUAL)
def test_unequal_groups_equal_the_reference(ranks: RankPool, system: str, layout: dict[str, Any], dtype: str) -> None:
    report = verify(case_of(system, layout, dtype), ranks)
    assert report.ok, str(report)


def test_more_ranks_than_gpus_go_through_host_memory_by_themselves() -> None:
    num_ranks = torch.cuda.device_count() + 1
    case = make_case("disagmoe", attention_ranks=num_ranks - 1, expert_ranks=1, microbatches=2)
    found = measure(case, steps=2, device="cuda")
    assert found.trial.status == "ok", found.trial.message
    facts = found.trial.provenance["execution"]
    assert facts.items() >= {"transport": "host", "ranks": num_ranks, "gpus": num_ranks - 1}.items()


def test_no_memory_left_on_a_gpu_is_a_record() -> None:
    """Logits of two million words for 65,536 tokens are 256 GiB."""
    model = get_model("tiny").model_copy(update={"vocab_size": 1 << 21})
    too_large = make_case("ep", model, seq_len=4096, microbatches=1, mbs=16)
    trial = measure(too_large, steps=1, device="cuda", data="synthetic", weights="device").trial
    assert trial.status == "oom", trial.message
    assert "memory" in trial.message
