"""An explanation's tables, for people."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.case import Layout
from systems.disagmoe.placement import replica_size
from systems.disagmoe.planner.allocation import Allocation, Outcome
from systems.disagmoe.planner.refine import Refinement, Try
from systems.disagmoe.planner.what_ifs import WhatIf
from systems.disagmoe.planner.words import GIB

SHOWN_FIELDS = ("mbs", "round_length", "deferred_w", "recompute", "copies", "shared_on", "tp", "cp", "offload")
OTHER_CHOICES = ("copies", "shared_on", "tp", "cp", "offload")


class Table(NamedTuple):
    """Rows for people and for JSON."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def side_by_side(chosen: Allocation, plan: Layout, seed: Try | None, best: Try | None, source: str | None) -> Table:
    """The programme's split and the plan. `source`: what the refinement's times are, None where nothing was refined."""
    ways = (chosen.layout, plan)
    timed = (seed, best)
    fullest = [each.peak_memory_bytes / GIB if each and each.peak_memory_bytes else None for each in timed]
    rows: list[list[object]] = [
        ["groups p", *(layout.groups for layout in ways)],
        ["M:N", *(f"{layout.attention_ranks}:{layout.expert_ranks}" for layout in ways)],
        ["replicas", *(layout.replicas for layout in ways)],
        ["GPUs used", *((layout.replicas or 1) * replica_size(layout) for layout in ways)],
        *([field, *(getattr(layout, field) for layout in ways)] for field in SHOWN_FIELDS),
        ["step s, by the programme", chosen.step_s, None],
    ]
    if any(layout.expert_groups for layout in ways):
        rows.insert(1, ["expert groups", *(layout.expert_groups or layout.groups for layout in ways)])
    if source is not None:
        rows.append([f"step s, {source}", *(each and each.step_time_s for each in timed)])
    if any(fullest):
        rows.append(["GiB of the fullest GPU, simulated", *fullest])
    name = "plan" if source is None else f"plan, refined ({source})"
    return Table("the programme's split and the plan", ["", "programme", name], rows)


def busy(chosen: Allocation) -> Table:
    """Seconds of every resource in a step."""
    rows = [
        [name, seconds, f"{100 * seconds / chosen.step_s:.0f} %", "yes" if name in chosen.binding else "no"]
        for name, seconds in chosen.seconds.items()
        if seconds
    ]
    return Table("what a step keeps busy, by the programme", ["resource", "seconds", "of the step", "binding"], rows)


def splits(chosen: Allocation, others: Sequence[Outcome]) -> Table:
    """The split and the next best ones."""
    found = [chosen, *(each.allocation for each in others if each.allocation)]
    columns = ["p", "M:N", "replicas", "GPUs", "recompute", "other choices", "step s", "loses", "bound by", "proven"]
    return Table("splits, by the programme", columns, [_split_row(each, chosen) for each in found])


def conditions(found: Sequence[WhatIf]) -> Table:
    """The split under every other condition."""
    columns = ["if", "p", "M:N", "replicas", "step s", "bound by", "proven"]
    rows = [[each.condition, *_what_if_row(each.outcome)] for each in found]
    return Table("what would change the answer, by the programme", columns, rows)


def walk(found: Refinement, source: str) -> Table:
    """The refinement's path."""
    columns = ["move", "step s", "bound s", "GiB a GPU", "layout"]
    return Table(f"refinement ({source})", columns, [_try_row(each) for each in found.path])


def _split_row(each: Allocation, chosen: Allocation) -> list[object]:
    layout = each.layout
    loses = f"{100 * (each.step_s / chosen.step_s - 1):.1f} %"
    ratio = f"{layout.attention_ranks}:{layout.expert_ranks}"
    chosen_too = {name: getattr(layout, name) for name in OTHER_CHOICES}
    others = " ".join(f"{name}={value}" for name, value in chosen_too.items() if value not in (1, "none"))
    row: list[object] = [layout.groups, ratio, layout.replicas, each.num_gpus, layout.recompute, others]
    return [*row, each.step_s, loses, ", ".join(each.binding), _proven(each)]


def _what_if_row(outcome: Outcome) -> list[object]:
    each = outcome.allocation
    if each is None:
        return [None, None, None, None, "no time" if outcome.timed_out else "nothing fits", None]
    layout = each.layout
    ratio = f"{layout.attention_ranks}:{layout.expert_ranks}"
    return [layout.groups, ratio, layout.replicas, each.step_s, ", ".join(each.binding), _proven(each)]


def _proven(each: Allocation) -> str:
    return "yes" if each.proven else "no"


def _try_row(each: Try) -> list[object]:
    peak = None if each.peak_memory_bytes is None else each.peak_memory_bytes / GIB
    return [each.change, each.step_time_s, each.bound_s, peak, str(each.layout)]
