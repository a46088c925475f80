"""Throughput against top-k: dispatched bytes and expert FLOPs grow with it, attention does not. Simulated.

One model, qwen3-30b on 4 x 8 H800, with its top-k changed and nothing else: parameters stay the same.
"""

from bench.models import Model, get_model
from experiments import Evidence, Request
from experiments._study import COMPARED, Axis, Cell, spec, study

SUMMARY = "throughput and speed-up against top-k, one model on 4 x 8 H800 (simulated)"
MODEL, CLUSTER, GLOBAL_BATCH_TOKENS = "qwen3-30b", "h800x4", 1 << 20
TOP_KS = (1, 2, 4, 8, 16)


def with_top_k(top_k: int) -> Model:
    """The model with another top-k; under its own name where that is its own."""
    base = get_model(MODEL)
    if top_k == base.top_k:
        return base
    return Model.from_fields({**base.model_dump(), "name": f"{MODEL}-top{top_k}", "top_k": top_k})


def cells(quick: bool = False) -> list[Cell]:
    return [
        Cell(MODEL, k, spec(system, with_top_k(k), CLUSTER, 8192, GLOBAL_BATCH_TOKENS))
        for k in (TOP_KS[1:3] if quick else TOP_KS)
        for system in COMPARED
    ]


def run(request: Request) -> Evidence:
    return study(request, cells(request.quick), Axis("experts a token (top-k)"))
