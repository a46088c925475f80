"""`moebench list`: what there is to name."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from bench.cli.options import Json


class Things(StrEnum):
    """What can be listed."""

    systems = "systems"
    models = "models"
    clusters = "clusters"
    experiments = "experiments"
    assumptions = "assumptions"


def add_verbs(app: typer.Typer) -> None:
    app.command("list", epilog="Example: moebench list models --json")(list_things)


def list_things(
    what: Annotated[Things, typer.Argument(help="What to list.", show_default=False)], json: Json = False
) -> None:
    """List systems, models, clusters, experiments or assumptions by name."""
    from bench.cli.output import print_json, print_table

    rows = _ROWS[what]()
    if json:
        print_json({"kind": "list", what.value: rows})
    else:
        columns = list(rows[0]) if rows else ["name"]
        print_table(what.value, columns, [[row[column] for column in columns] for row in rows])


def _systems() -> list[dict[str, Any]]:
    from bench.system import systems

    return [
        {"name": system.name, "summary": system.summary, "layout fields": ", ".join(sorted(system.fields))}
        for system in systems().values()
    ]


def _models() -> list[dict[str, Any]]:
    from bench.flops import num_parameters
    from bench.models import MODELS

    rows = []
    for model in MODELS.values():
        count = num_parameters(model)
        rows.append(
            {
                "name": model.name,
                "total parameters": count.total,
                "active parameters": count.active,
                "layers": model.num_layers,
                "dense layers": model.num_dense_layers,
                "hidden size": model.hidden_size,
                "experts": model.num_experts,
                "top-k": model.top_k,
                "expert hidden size": model.expert_hidden_size,
                "vocabulary": model.vocab_size,
            }
        )
    return rows


def _clusters() -> list[dict[str, Any]]:
    from bench.clusters import CLUSTERS

    return [
        {
            "name": cluster.name,
            "GPUs": cluster.num_gpus,
            "GPU": cluster.gpu.name,
            "nodes": cluster.num_nodes,
            "bf16 TFLOP/s": cluster.gpu.peak_tflops.get("bf16"),
            "memory GiB": round(cluster.gpu.memory_bytes / 2**30, 1),
            "NVLink GB/s": cluster.gpu.nvlink_bytes_per_s / 1e9,
            "NIC GB/s a GPU": cluster.nic_bytes_per_s_per_gpu / 1e9,
        }
        for cluster in CLUSTERS.values()
    ]


def _experiments() -> list[dict[str, Any]]:
    from experiments import get_experiment, names

    return [{"name": name, "summary": get_experiment(name).SUMMARY} for name in names()]


def _assumptions() -> list[dict[str, Any]]:
    from bench.assumptions import ASSUMPTIONS

    return [{"name": name, **values.model_dump(mode="json")} for name, values in ASSUMPTIONS.items()]


_ROWS = {
    Things.systems: _systems,
    Things.models: _models,
    Things.clusters: _clusters,
    Things.experiments: _experiments,
    Things.assumptions: _assumptions,
}
