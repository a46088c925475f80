"""`moebench simulate`: what a step costs on a cluster that nobody has to own."""

from typing import TYPE_CHECKING, Any

import typer

from bench.cli import options
from bench.cli.asking import Asked, asks
from bench.cli.describing import layout_fields, marked
from bench.cli.pairs import PairsCommand

if TYPE_CHECKING:
    from bench.evaluate import CostModel
    from bench.predict import Prediction


def add_verbs(app: typer.Typer) -> None:
    example = "moebench simulate ep --model gpt-oss-120b --cluster h800x16 --seq-len 8192 --json"
    app.command("simulate", cls=PairsCommand, epilog=f"Example: {example}")(simulate)


@asks
def simulate(asked: Asked, json: options.Json = False) -> None:
    """Simulate one optimizer step of a system on a cluster. Without a layout it is tuned."""
    from bench.cli.output import print_json
    from bench.evaluate import predicted_trial, simulation_metrics

    costs = asked.costs()
    found, search = asked.found(costs)
    if json:
        print_json(
            {
                "kind": "simulated",
                "system": asked.system,
                "layout": layout_fields(found.case),
                "traits": list(found.program.plan.traits),
                **simulation_metrics(found),
                "assumptions": costs.label,
                "case_id": found.case.id,
                "search": search,
                "command": predicted_trial(found, costs).command,
            }
        )
    else:
        _show_simulation(found, costs, search)


def _show_simulation(found: "Prediction", costs: "CostModel", search: dict[str, Any]) -> None:
    from bench.cli.output import print_facts
    from bench.evaluate import fold_of, simulation_metrics

    case = found.case
    chosen = "given"
    if search:
        whole = "" if search["complete"] else f", not complete: at most {search['budget']} simulated"
        tried = ", ".join(f"{number} {status}" for status, number in search["candidates"].items())
        chosen = f"tuned ({tried}{whole})"
    facts: dict[str, object] = {"layout": str(case.layout) or "defaults", "chosen": chosen}
    facts |= marked(found.program.plan) | {"folded": fold_of(found)}
    facts |= simulation_metrics(found)
    facts |= {"assumptions": costs.label, "case": case.id}
    print_facts(f"simulated: {case.system} for {case.model.name} on {case.cluster.name}", facts)
