"""megatron-core itself on two GPUs: verified in fp32 and bf16, trained, and timed beside `ep` from our plan."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import pytest
from cases import make_case

from bench.case import Case
from bench.execute.pool import RankPool
from bench.models import Model, get_model

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bench.execute.train import train  # noqa: E402
from bench.execute.verify import verify  # noqa: E402
from bench.measured import measure  # noqa: E402

NUM_GPUS = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < NUM_GPUS, reason=f"there are not {NUM_GPUS} CUDA devices"),
]

FOUR_LAYERS = get_model("tiny-shared").model_copy(update={"num_layers": 4})
LAYOUTS: list[dict[str, Any]] = [
    {"ep": 2},
    {"ep": 2, "recompute": "redispatch"},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"replicas": 2, "shard_state": False},
]
TIMED_STEPS, ROUNDS = 12, 2


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    with RankPool(NUM_GPUS, "cuda", timeout_s=120) as pool:
        yield pool


def case_of(system: str, model: Model, layout: dict[str, Any], dtype: str, **work: Any) -> Case:
    copies = {"copies": "expert"} if system in ("ep", "megatron") else {}
    case = make_case(system, model, "h200x2gpu", **{"seq_len": 64, "microbatches": 4, **work}, **layout, **copies)
    routing = "balanced" if work else "learned"
    return case.model_copy(update={"workload": case.workload.model_copy(update={"dtype": dtype, "routing": routing})})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(f"{k}={v}" for k, v in layout.items()))
def test_megatron_core_equals_the_reference(gpus: RankPool, layout: dict[str, Any], dtype: str) -> None:
    report = verify(case_of("megatron", FOUR_LAYERS, layout, dtype), gpus)
    assert report.ok, str(report)
    assert report.trainer == "native"


def test_training_follows_the_reference(gpus: RankPool) -> None:
    model = get_model("tiny-shared")
    result = train(case_of("megatron", model, {"ep": 2}, "fp32"), steps=10, pool=gpus)
    alone = case_of("reference", model, {}, "fp32").model_copy(
        update={"workload": case_of("megatron", model, {"ep": 2}, "fp32").workload}
    )
    reference = train(alone, steps=10, pool=gpus)
    assert np.array(result.losses) == pytest.approx(np.array(reference.losses), rel=1e-4)
    assert result.peak_memory_bytes > 0


def test_ep_from_our_plan_is_timed_beside_megatron_core(gpus: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    """Same kernels, layout, weights, sequences, experts and GPUs; in turn, so that drift is on both sides."""
    changes = {"num_layers": 4, "aux_loss_coeff": 0.0, "vocab_size": 32768}
    model = get_model("qwen3-30b").model_copy(update=changes)
    times: dict[str, list[float]] = {"ep": [], "megatron": []}
    for _ in range(ROUNDS):
        for system, seen in times.items():
            case = case_of(system, model, {"ep": 2}, "bf16", seq_len=4096, microbatches=4)
            trial = measure(case, steps=TIMED_STEPS, pool=gpus, data="synthetic", weights="device").trial
            assert trial.status == "ok", trial.message
            step_s = trial.metrics["step_time_s"]
            assert step_s is not None
            assert 0 < (trial.metrics["mfu"] or 0) < 1
            seen.append(step_s)
    ours, theirs = (median(seen) for seen in times.values())
    with capsys.disabled():
        print(f"\nep from our plan {ours * 1e3:.1f} ms, megatron-core {theirs * 1e3:.1f} ms: {ours / theirs:.3f}")
        print({system: [round(seconds * 1e3, 1) for seconds in seen] for system, seen in times.items()})
    assert ours > 0 and theirs > 0
