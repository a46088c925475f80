"""Cases that are verified: a system, its layout, and a model as small as it can be with everything in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from cases import make_case

from bench.case import Case
from bench.execute.pool import RankPool
from bench.models import Model

torch = pytest.importorskip("torch")

from bench.execute.report import VerifyReport  # noqa: E402
from bench.execute.verify import verify  # noqa: E402

SMALL = Model(
    name="small",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    top_k=2,
    expert_hidden_size=24,
    vocab_size=64,
)
SHARED = {"num_shared_experts": 1, "shared_hidden_size": 40}
DENSE_FIRST = {"num_layers": 3, "num_dense_layers": 1, "dense_hidden_size": 48}
SIGMOID = {
    "qk_norm": True,
    "router_score": "sigmoid",
    "router_scale": 2.5,
    "aux_loss_coeff": 0.02,
    "z_loss_coeff": 0.01,
}
SIX_EXPERTS = {"num_experts": 6}


@dataclass(frozen=True)
class Trial:
    """A case to verify: system, layout, changes to the model, and how tokens choose experts."""

    system: str
    layout: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 2
    routing: str = "learned"
    dtype: str = "fp32"

    def case(self, seed: int = 0) -> Case:
        model = Model(**{**SMALL.model_dump(), **self.model})
        case = make_case(self.system, model, microbatches=self.microbatches, **self.layout)
        changes = {"routing": self.routing, "seed": seed, "dtype": self.dtype}
        return case.model_copy(update={"workload": case.workload.model_copy(update=changes)})

    def __str__(self) -> str:
        """For pytest."""
        words = [f"{key}={value}" for key, value in {**self.layout, **self.model}.items()]
        return " ".join([self.system, *words, f"m={self.microbatches}", self.routing, self.dtype])


def ep(**layout: Any) -> dict[str, Any]:
    return layout


def af(m: int, n: int, groups: int = 1, **layout: Any) -> dict[str, Any]:
    """M attention ranks and N expert ranks a group."""
    return {"attention_ranks": m, "expert_ranks": n, "groups": groups, **layout}


def check(trial: Trial, pool: RankPool, **options: Any) -> VerifyReport:
    report = verify(trial.case(), pool, **options)
    assert report.ok, str(report)
    # Clipping is active, and no comparison is empty.
    assert report.reference_grad_norm > 0
    assert len(report.parameters) > 10
    return report


FOUR_LAYERS = {"num_layers": 4}
