"""A schedule for people and for JSON: placement, counts, what every group holds."""

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.case import Case
    from bench.plan import Plan


def marked(schedule: "Plan") -> dict[str, object]:
    """What sets a plan apart, where something does."""
    return {"traits": ", ".join(schedule.traits)} if schedule.traits else {}


def described(case: "Case", schedule: "Plan") -> dict[str, Any]:
    """Counts, placement and what every group holds."""
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


def show_plan(case: "Case", schedule: "Plan", num_operations: int) -> None:
    """What a checked schedule is, on stdout."""
    from bench.cli.output import print_facts, print_table

    facts = described(case, schedule)
    print_facts(
        f"plan of {case.system} for {case.model.name} on {case.cluster.name}",
        {
            "layout": str(case.layout) or "defaults",
            **marked(schedule),
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
