"""An explanation's tables, for people."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.case import Layout
from bench.predict import QuickStep
from systems.disagmoe.placement import replica_size
from systems.disagmoe.planner.allocation import Allocation, Outcome
from systems.disagmoe.planner.busy import PlannedStep
from systems.disagmoe.planner.refine import Refinement, Try
from systems.disagmoe.planner.what_ifs import WhatIf
from systems.disagmoe.planner.words import GIB, changed_in_words

SHOWN_FIELDS = ("mbs", "round_length", "deferred_w", "recompute", "copies", "shared_on", "tp", "cp", "offload")
OTHER_CHOICES = ("copies", "shared_on", "tp", "cp", "offload")


class Table(NamedTuple):
    """Rows for people and for JSON."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


class Side(NamedTuple):
    """A layout, what the programme estimates, its simulated step, and what the refinement found of it."""

    layout: Layout
    estimate_s: float | None
    step: QuickStep | None
    tried: Try | None


def side_by_side(programme: Side, plan: Side, source: str | None) -> Table:
    """The programme's split and the plan. `source`: what the refinement's times are, None where nothing was refined."""
    sides = (programme, plan)
    ways = [side.layout for side in sides]
    rows: list[list[object]] = [
        ["groups p", *(layout.groups for layout in ways)],
        ["M:N", *(f"{layout.attention_ranks}:{layout.expert_ranks}" for layout in ways)],
        ["replicas", *(layout.replicas for layout in ways)],
        ["GPUs used", *((layout.replicas or 1) * replica_size(layout) for layout in ways)],
        *([field, *(getattr(layout, field) for layout in ways)] for field in SHOWN_FIELDS),
    ]
    if any(layout.expert_groups for layout in ways):
        rows.insert(1, ["expert groups", *(layout.expert_groups or layout.groups for layout in ways)])
    rows.append(["step s, by the programme", *(side.estimate_s for side in sides)])
    if source == "measured":
        rows.append(["step s, measured", *(side.tried and side.tried.step_time_s for side in sides)])
    rows.append(["step s, simulated", *(side.step and side.step.step_time_s for side in sides)])
    fullest = [side.step and side.step.peak_memory_bytes / GIB for side in sides]
    rows.append(["GiB of the fullest GPU, simulated", *fullest])
    name = "plan" if source is None else f"plan, refined ({source})"
    return Table("the programme's split and the plan", ["", "programme", name], rows)


def busy(chosen: Allocation, split: PlannedStep | None, plan: PlannedStep | None) -> Table:
    """Seconds of every resource in a step: of the programme's split by its estimates and by the cost model, and of the
    plan by the cost model."""
    rows: list[list[object]] = []
    for name, seconds in chosen.seconds.items():
        own, made = (each.busy_s.get(name) if each else None for each in (plan, split))
        if seconds or own or made:
            binds = "yes" if name in chosen.binding else "no"
            estimated = [seconds, f"{100 * seconds / chosen.step_s:.0f} %", binds]
            rows.append([name, *estimated, made, _share(made, split), own, _share(own, plan)])
    columns = ["resource", "programme's split, estimated s", "of its estimated step", "binds the estimate"]
    columns += ["programme's split, simulated s", "of its simulated step", "plan, simulated s", "of its simulated step"]
    return Table("what a step keeps busy", columns, rows)


def _share(seconds: float | None, of: PlannedStep | None) -> str | None:
    step_s = of.step.step_time_s if of else None
    return f"{100 * seconds / step_s:.0f} %" if seconds and step_s else None


def splits(chosen: Outcome, others: Sequence[Outcome]) -> Table:
    """The split and the next best ones."""
    assert chosen.allocation is not None
    columns = ["p", "M:N", "replicas", "GPUs", "recompute", "other choices", "round", "step s", "longer by", "bound by"]
    rows = [_split_row(each, chosen.allocation) for each in (chosen, *others) if each.allocation]
    return Table("splits, by the programme", [*columns, "proven", "step s, simulated", "GiB, simulated"], rows)


def conditions(found: Sequence[WhatIf]) -> Table:
    """The plan and the programme's split under every other condition."""
    columns = ["if", "this plan, step s, simulated", "programme's p", "M:N", "replicas", "step s, by the programme"]
    rows = [[each.condition, _kept(each), *_what_if_row(each)] for each in found]
    return Table("what would change the answer", [*columns, "proven", "step s, simulated", "busiest, simulated"], rows)


def walk(found: Refinement, source: str) -> Table:
    """The refinement's path."""
    columns = ["move", "step s", "bound s", "GiB a GPU", "layout"]
    return Table(
        f"refinement ({source})",
        columns,
        [_try_row(*each) for each in zip(found.path, [None, *found.path[:-1]], strict=True)],
    )


def _split_row(found: Outcome, chosen: Allocation) -> list[object]:
    each = found.allocation
    assert each is not None
    layout = each.layout
    longer = f"{100 * (each.step_s / chosen.step_s - 1):.1f} %"
    ratio = f"{layout.attention_ranks}:{layout.expert_ranks}"
    chosen_too = {name: getattr(layout, name) for name in OTHER_CHOICES}
    others = " ".join(f"{name}={value}" for name, value in chosen_too.items() if value not in (1, "none"))
    row: list[object] = [layout.groups, ratio, layout.replicas, each.num_gpus, layout.recompute, others]
    row += [layout.round_length, each.step_s, longer, ", ".join(each.binding), _proven(each)]
    step = found.step
    return [*row, *((None, None) if step is None else (step.step_time_s, step.peak_memory_bytes / GIB))]


def _kept(each: WhatIf) -> object:
    if each.kept is None or each.kept.status == "ok":
        return each.kept and each.kept.step_time_s
    return "does not fit" if each.kept.status == "infeasible" else "cannot be"


def _what_if_row(what: WhatIf) -> list[object]:
    outcome, each = what.outcome, what.outcome.allocation
    if each is None:
        return [None, None, None, None, "no time" if outcome.timed_out else "nothing fits", None, None]
    layout = each.layout
    ratio = f"{layout.attention_ranks}:{layout.expert_ranks}"
    simulated_s = outcome.step and outcome.step.step_time_s
    row = [layout.groups, ratio, layout.replicas, each.step_s, _proven(each)]
    return [*row, simulated_s, what.split and what.split.busiest]


def _proven(each: Allocation) -> str:
    return "yes" if each.proven else "no"


def _try_row(each: Try, before: Try | None) -> list[object]:
    """A seed says in what it differs from the one before it, as a move does by itself."""
    peak = None if each.peak_memory_bytes is None else each.peak_memory_bytes / GIB
    change = each.change
    if before is not None and change.startswith("seed"):
        change = f"{change} ({changed_in_words(before.layout, each.layout)})"
    return [change, each.step_time_s, each.bound_s, peak, str(each.layout)]
