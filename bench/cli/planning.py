"""`moebench plan` and `moebench simulate`: a schedule, and what it costs on a cluster that nobody has to own."""

import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import options
from bench.cli.asking import Asked, asks, best
from bench.cli.options import PairsCommand

if TYPE_CHECKING:
    from bench.case import Case
    from bench.evaluate import CostModel
    from bench.plan import Plan
    from bench.predict import Prediction


def add_verbs(app: typer.Typer) -> None:
    example = (
        "moebench plan ep --model tiny --cluster h800x1 --seq-len 64 --global-batch-tokens 1024 --layout ep=4 pp=2"
    )
    app.command("plan", cls=PairsCommand, epilog=f"Example: {example}")(plan)
    example = "moebench simulate ep --model gpt-oss-120b --cluster h800x16 --seq-len 8192 --json"
    app.command("simulate", cls=PairsCommand, epilog=f"Example: {example}")(simulate)


def plan(
    system: options.System_,
    model: options.Model_,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            help="Cluster: a name, GPUxNODES such as h800x16, or a file with its fields; of --refine run as for run.",
            show_default=False,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len", metavar="TOKENS", parser=options.whole_number, help="Sequence length.", show_default=False
        ),
    ] = None,
    global_batch_tokens: options.Batch = None,
    layout: options.Layout_ = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="bf16|fp32", help="Default: bf16; fp32 for --refine run on a CPU.", show_default=False
        ),
    ] = None,
    assumptions: options.AssumptionSet = None,
    set_: options.Setting = None,
    seq_len_schedule: Annotated[
        str | None,
        typer.Option(
            "--seq-len-schedule",
            metavar="TEXT",
            help="Instead of --seq-len: lengths with steps, 4096:2000,16384:500, or a mixture, 4096@0.8,32768@0.2. "
            "Plans every phase and prices the moves between.",
            show_default=False,
        ),
    ] = None,
    refine: Annotated[
        str,
        typer.Option(
            "--refine",
            metavar="simulate|run|none",
            help="How a planner of its own times the neighbours of its split: simulated, or run on this machine.",
        ),
    ] = "simulate",
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget",
            metavar="NUMBER",
            parser=options.whole_number,
            help="Most layouts that --refine times. Default: 32.",
            show_default=False,
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            parser=options.seconds,
            help="Of each programme that a planner of its own solves; then its best so far is taken. Default: 10.",
            show_default=False,
        ),
    ] = None,
    ranks: options.Ranks = 4,
    device: options.Device = "cpu",
    steps: Annotated[
        int,
        typer.Option(
            "--steps", metavar="NUMBER", parser=options.whole_number, help="Optimizer steps of a layout that is run."
        ),
    ] = 8,
    results: options.Results = None,
    print_schedule: Annotated[
        bool, typer.Option("--print-schedule", help="Print the plan's text and nothing else.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show and check a system's schedule: placement, counts, whether it can run.

    Without a layout it is tuned; a system that has a planner of its own plans instead, and says why. With --refine run
    the neighbours of its split are trained on processes of this machine, and every trial is kept.
    """
    from bench.cli.choosing import Refining, explain_choice, explained, explained_phases
    from bench.evaluate import CostModel
    from bench.system import get_system

    costs = CostModel.named(assumptions, options.words_of(set_))
    length = _first_length(seq_len, seq_len_schedule)
    refining = Refining.of(refine, ranks, device, steps, budget, time_limit, results)
    given = options.layout_of(system, layout)
    refining.require_planned(system, given, seq_len_schedule, print_schedule)
    spec = refining.spec(system, model, cluster, length, global_batch_tokens, dtype)
    if seq_len_schedule is not None:
        explain_choice(explained_phases(spec, seq_len_schedule, costs, refining), json)
        return
    if given is None and hasattr(get_system(system), "explain"):
        reasons = explained(spec, costs, refining)
        if not print_schedule:
            explain_choice(reasons, json)
            if json:
                return
        given = reasons.layout
    _show(spec.with_layout(given) if given is not None else best(spec, costs)[0].case, print_schedule, json)


def _show(case: "Case", print_schedule: bool, json: bool) -> None:
    """Checks the case's plan and says what it is. Raises BadInput (PlanError) where it cannot run."""
    from bench.check import check
    from bench.cli.output import print_json
    from bench.lower import lower
    from bench.system import plan_of

    schedule = plan_of(case)
    program = lower(schedule, case.model)
    check(program)
    if json:
        text = {"schedule": str(schedule)} if print_schedule else {}
        print_json({**_described(case, schedule), "num_operations": program.num_ops, "check": "ok", **text})
    elif print_schedule:
        sys.stdout.write(str(schedule))
    else:
        _show_plan(case, schedule, program.num_ops)


def _first_length(seq_len: int | None, schedule: str | None) -> int:
    """The length to begin with. Raises BadInput unless exactly one of the two is given."""
    from bench.errors import BadInput

    if (seq_len is None) == (schedule is None):
        raise BadInput("--seq-len", seq_len, "a value: a number of tokens, or --seq-len-schedule instead of it")
    if seq_len is not None:
        return seq_len
    words = re.split("[:@,]", schedule or "")
    if not re.fullmatch(r"\s*[1-9][0-9]{0,8}\s*", words[0], re.ASCII):
        raise BadInput("--seq-len-schedule", schedule, "lengths with steps (4096:2000,16384:500) or shares (4096@0.8)")
    return int(words[0])


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
    facts |= _marked(found.program.plan) | {"folded": fold_of(found)}
    facts |= simulation_metrics(found)
    facts |= {"assumptions": costs.label, "case": case.id}
    print_facts(f"simulated: {case.system} for {case.model.name} on {case.cluster.name}", facts)


def _marked(schedule: "Plan") -> dict[str, object]:
    """What sets a plan apart, where something does."""
    return {"traits": ", ".join(schedule.traits)} if schedule.traits else {}


def _described(case: "Case", schedule: "Plan") -> dict[str, Any]:
    from bench.case import batch_of

    dealt = batch_of(case, schedule.placement)
    counts: Counter[str] = Counter()
    for queue in schedule.queues.values():
        counts.update(_kind_and_pass(queue.codes))
    return {
        "kind": "plan",
        "case_id": case.id,
        "system": case.system,
        "layout": layout_fields(case),
        "traits": list(schedule.traits),
        "num_replicas": dealt.num_replicas,
        "num_microbatches": dealt.num_microbatches,
        "num_gpus_used": dealt.num_replicas * schedule.placement.size,
        "num_gpus": case.cluster.num_gpus,
        "groups": {group.name: [group.first, group.first + group.size - 1] for group in schedule.placement.groups},
        "layers": _layers(schedule),
        "actions": dict(sorted(counts.items())),
        "num_actions": schedule.num_actions,
    }


def _kind_and_pass(codes: Any) -> dict[str, int]:
    import numpy as np

    from bench.action import END_OF_STEP, Action, Kind, Pass, unpack

    columns = unpack(codes)
    pairs, counts = np.unique(np.stack([columns.kind, columns.pass_]), axis=1, return_counts=True)
    found = {}
    for kind, pass_, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
        action = Action(Kind(kind), Pass(pass_))
        found[action.word if action.kind in END_OF_STEP else f"{action.word}:{action.pass_.name}"] = count
    return found


def _layers(schedule: "Plan") -> dict[str, list[str]]:
    """Parts of the model that each group holds."""
    from bench.action import Kind

    at = schedule.placement
    parts = [(Kind.EMBED, 0, "embedding")]
    for layer, expert in enumerate(at.expert):
        parts.append((Kind.ATTENTION, layer, f"attention {layer}"))
        parts += [] if expert is None else [(Kind.EXPERT, layer, f"experts {layer}")]
    parts.append((Kind.HEAD, 0, "head"))
    held: dict[str, list[str]] = {group.name: [] for group in at.groups}
    for kind, layer, words in parts:
        for group in at.homes(kind, layer):
            held[group].append(words)
    return held


def layout_fields(case: "Case") -> dict[str, Any]:
    """The layout fields that the case's system uses."""
    from bench.system import get_system

    return {key: getattr(case.layout, key) for key in sorted(get_system(case.system).fields)}


def _show_plan(case: "Case", schedule: "Plan", num_operations: int) -> None:
    from bench.cli.output import print_facts, print_table

    facts = _described(case, schedule)
    print_facts(
        f"plan of {case.system} for {case.model.name} on {case.cluster.name}",
        {
            "layout": str(case.layout) or "defaults",
            **_marked(schedule),
            "case": case.id,
            "replicas x GPUs": f"{facts['num_replicas']} x {schedule.placement.size} of {case.cluster.num_gpus}",
            "micro-batches": facts["num_microbatches"],
            "actions": schedule.num_actions,
            "operations": num_operations,
            "check": "complete, free of deadlock",
        },
    )
    rows = [
        (name, f"{first}..{last}", _spans(facts["layers"][name])) for name, (first, last) in facts["groups"].items()
    ]
    print_table("placement of one replica", ["group", "ranks", "holds"], rows)
    print_table("actions of one replica", ["action", "number"], list(facts["actions"].items()))


def _spans(parts: list[str]) -> str:
    """Parts with their layers drawn together: ``attention 0-3 8, experts 0-3 8``."""
    layers: dict[str, list[int]] = {}
    for part in parts:
        word, _, layer = part.partition(" ")
        layers.setdefault(word, []).extend([int(layer)] if layer else [])
    return ", ".join(f"{word} {_ranges(numbers)}".strip() for word, numbers in layers.items())


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return " ".join(f"{low}-{high}" if high > low else str(low) for low, high in spans)
