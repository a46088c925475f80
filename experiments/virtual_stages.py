"""Throughput against virtual stages: parts of the model that a group of a pipeline of four holds. Simulated.

The paper says that more of them help until activations run out of memory. Here the depth of the pipeline is held at
four and the rest is searched; `ep` has its `vpp`, `disagmoe` as many neighbouring layers a part as make up the number.
"""

import math

from bench.models import get_model
from experiments import Evidence, Request
from experiments._study import BASELINE, OURS, Axis, Cell, spec, study

SUMMARY = "throughput against virtual stages of a pipeline of four, 16 x 8 H800 (simulated)"
MODELS = ("gpt-oss-120b", "qwen3-235b")
STAGES = (1, 2, 4, 8)
DEPTH = 4


def fixed(system: str, model: str, stages: int) -> tuple[str, ...]:
    """Layout fields that give a group `stages` parts of the model."""
    if system != OURS:
        return (f"pp={DEPTH}", f"vpp={stages}")
    layers = math.ceil(get_model(model).num_layers / (DEPTH * stages))
    return (f"groups={DEPTH}", f"layers_per_chunk={layers}")


def cells(quick: bool = False) -> list[Cell]:
    return [
        Cell(model, stages, spec(system, model), fixed(system, model, stages))
        for model in (MODELS[:1] if quick else MODELS)
        for stages in (STAGES[:2] if quick else STAGES)
        for system in (BASELINE, OURS)
    ]


def run(request: Request) -> Evidence:
    return study(request, cells(request.quick), Axis("virtual stages a group"))
