"""`moebench list`: what there is to name."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from bench.cli.options import Json

Rows = list[dict[str, Any]]


def add_verbs(app: typer.Typer) -> None:
    app.command("list", epilog="Example: moebench list models --json")(list_things)


def list_things(
    what: Annotated[
        str, typer.Argument(help="systems, models, clusters, experiments or assumptions.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """List systems, models, clusters, experiments or assumptions by name."""
    from bench.cli.output import print_json, print_table
    from bench.errors import unknown

    if what not in _ROWS:
        raise unknown("what", what, _ROWS)
    rows = _ROWS[what]()
    if json:
        print_json({"kind": "list", what: rows} | (_reasons() if what == "assumptions" else {}))
        return
    if what == "assumptions":  # many fields, few sets
        rows = _by_field(rows)
    print_table(what, list(rows[0]), [list(row.values()) for row in rows])
    if what == "assumptions":
        _print_departures()


def _reasons() -> dict[str, Any]:
    from bench.assumptions import DEPARTURES, REASONS

    return {"reasons": REASONS, "departures": {name: each._asdict() for name, each in DEPARTURES.items()}}


def _print_departures() -> None:
    """What sets have otherwise than the default, and why."""
    from bench.assumptions import DEFAULT_ASSUMPTIONS, DEPARTURES
    from bench.cli.output import print_table

    rows = [[name, f"{each.field}={each.value:g}", each.why] for name, each in DEPARTURES.items()]
    print_table(f"as {DEFAULT_ASSUMPTIONS}, but for one thing", ["set", "otherwise", "why"], rows)


def _by_field(sets: Rows) -> Rows:
    """A row a field: its value in each set, and where the default set's comes from."""
    from bench.assumptions import DEFAULT_ASSUMPTIONS, REASONS

    why = f"why ({DEFAULT_ASSUMPTIONS})"
    fields = [field for field in sets[0] if field != "name"]
    return [{"field": f, **{each["name"]: each[f] for each in sets}, why: REASONS[f]} for f in fields]


def _systems() -> Rows:
    from bench.system import systems, trainers_of

    return [
        {
            "name": system.name,
            "summary": system.summary,
            "trainers": ", ".join(trainers_of(system)),
            "layout fields": ", ".join(sorted(system.fields)),
        }
        for system in systems().values()
    ]


def _models() -> Rows:
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


def _clusters() -> Rows:
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


def _experiments() -> Rows:
    from experiments import get_experiment, names

    return [{"name": name, "summary": get_experiment(name).SUMMARY} for name in names()]


def _assumptions() -> Rows:
    from bench.assumptions import ASSUMPTIONS

    return [{"name": name, **values.model_dump(mode="json")} for name, values in ASSUMPTIONS.items()]


_ROWS: dict[str, Callable[[], Rows]] = {
    "systems": _systems,
    "models": _models,
    "clusters": _clusters,
    "experiments": _experiments,
    "assumptions": _assumptions,
}
