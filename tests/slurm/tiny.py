"""An experiment for tests: small cases that differ in their seed. Their number and size come from the environment."""

import os

from bench.case import Case, Layout, Workload
from bench.clusters import CLUSTERS, Cluster
from bench.models import get_model

# Two nodes of two ranks that compute on the CPU.
CLUSTER = Cluster.from_fields(
    {**CLUSTERS["cpu"].model_dump(), "name": "cpu2x2", "num_nodes": 2, "gpus_per_node": 2, "nics_per_node": 2}
)


def specs(quick: bool = False) -> list[Case]:
    systems = os.environ.get("TINY_SYSTEMS", "ep").split(",")
    ranks = int(os.environ.get("TINY_RANKS", "1"))
    return [
        Case(
            model=get_model("tiny"),
            cluster=CLUSTER,
            workload=Workload(seq_len=16, global_batch_tokens=64 * ranks, dtype="fp32", routing="learned", seed=seed),
            system=system,
            layout=_layout(system, ranks),
        )
        for system in systems
        for seed in range(int(os.environ.get("TINY_CASES", "24")))
    ]


def _layout(system: str, ranks: int) -> Layout:
    if system == "disagmoe":
        return Layout(replicas=1, attention_ranks=ranks // 2, expert_ranks=ranks // 2)
    return Layout(replicas=1, ep=ranks)
