"""Throughput against the number of ranks that share the experts: `ep`, and `expert_ranks` of `disagmoe`. Simulated.

More ranks hold fewer experts each and leave more memory, and send each token to more places. The paper uses 16.
"""

from experiments import Evidence, Request
from experiments._study import COMPARED, OURS, Axis, Cell, spec, study

SUMMARY = "throughput and speed-up against the ranks that share the experts, 16 x 8 H800 (simulated)"
MODELS = ("gpt-oss-120b", "qwen3-235b")
SIZES = (4, 8, 16, 32, 64)


def cells(quick: bool = False) -> list[Cell]:
    return [
        Cell(model, size, spec(system, model), (f"expert_ranks={size}" if system == OURS else f"ep={size}",))
        for model in (MODELS[:1] if quick else MODELS)
        for size in (SIZES[2:4] if quick else SIZES)
        for system in COMPARED
    ]


def run(request: Request) -> Evidence:
    return study(request, cells(request.quick), Axis("ranks that share the experts"))
