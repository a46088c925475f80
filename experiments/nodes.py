"""Throughput against the number of nodes at a constant batch a GPU. Simulated.

2^15 tokens a GPU and step: the pipeline of every size has as much to fill it. `scaling` goes further, with two systems.
"""

from bench.clusters import get_cluster
from experiments import Evidence, Request
from experiments._study import COMPARED, Axis, Cell, spec, study

SUMMARY = "throughput and speed-up against the number of nodes of 8 H800 (simulated)"
MODELS = ("gpt-oss-120b", "qwen3-235b")
NODES = (4, 8, 16, 32)
TOKENS_PER_GPU = 1 << 15


def cells(quick: bool = False) -> list[Cell]:
    found = []
    for model in MODELS[:1] if quick else MODELS:
        for nodes in NODES[:2] if quick else NODES:
            cluster = f"h800x{nodes}"
            tokens = TOKENS_PER_GPU * get_cluster(cluster).num_gpus
            found += [Cell(model, nodes, spec(system, model, cluster, 8192, tokens)) for system in COMPARED]
    return found


def run(request: Request) -> Evidence:
    return study(request, cells(request.quick), Axis("nodes of 8 GPUs"))
