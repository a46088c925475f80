"""What would change a plan, in sentences: other conditions, unequal depth, NIC sets."""

from typing import TYPE_CHECKING

from bench.case import Layout
from bench.predict import GIB
from bench.timing import StepTime
from systems.disagmoe.planner.allocation import Allocation, Outcome
from systems.disagmoe.planner.words import compared, not_proven, short, simulated_in_words

if TYPE_CHECKING:
    from systems.disagmoe.planner.what_ifs import WhatIf

CHOICES = ("recompute", "copies", "shared_on", "offload")
"""What a split chooses beside its ranks and groups."""


def what_if_in_words(what: "WhatIf", chosen: Allocation) -> str:
    """How the plan does under another condition, and what the programme would choose instead of its own split."""
    other, kept = what.outcome.allocation, kept_in_words(what.kept, what.order)
    if other is None:
        nothing = "nothing fits" if not what.outcome.timed_out else "the solver found nothing in its time"
        if what.outcome.cuts:
            nothing = f"of the {len(what.outcome.cuts)} fastest splits none fits when simulated"
        return f"{what.condition}: {kept}by the programme, {nothing}."
    same = short(other) == short(chosen)
    split = (
        f"its own split {'stays' if same else 'becomes'} {short(other)}{_other_choices(other.layout, chosen.layout)}"
    )
    return f"{what.condition}: {kept}by the programme, {split}, {_estimated(what)}{not_proven(chosen, other)}."


def _estimated(what: "WhatIf") -> str:
    """What the programme's split is estimated to take, and what it takes and keeps busy simulated."""
    other, split = what.outcome.allocation, what.split
    assert other is not None
    if split is None:
        return f"estimated at {other.step_s:.4g} s, of which {' and '.join(other.binding)} decide"
    busiest = f"its busiest resource is {split.busiest}"
    return f"estimated at {other.step_s:.4g} s (simulated, not refined, {split.step.step_time_s:.4g} s: {busiest})"


def _other_choices(layout: Layout, before: Layout) -> str:
    """What a split chooses otherwise beside what names it."""
    names = (name for name in CHOICES if getattr(layout, name) != getattr(before, name))
    changed = ", ".join(f"{name} {getattr(before, name)} -> {getattr(layout, name)}" for name in names)
    return f" ({changed})" if changed else ""


def kept_in_words(kept: StepTime | None, order: Layout | None = None) -> str:
    if kept is None:
        return ""
    if kept.status == "ok" and order is not None:
        how = f"rounds of {order.round_length} and {order.deferred_w or 'no'} weight gradients put off"
        return f"this plan fits with {how}, and takes {kept.step_time_s:.4g} s a step, simulated; "
    if kept.status == "ok":
        return f"this plan, its order made anew, takes {kept.step_time_s:.4g} s a step, simulated; "
    if kept.peak_memory_bytes is not None:
        needs = f"{kept.peak_memory_bytes / GIB:.1f} GiB a GPU in its own order"
        return f"this plan does not fit in any order that was tried ({needs}, simulated); "
    return f"this plan cannot be ({kept.reason}); "


def unequal_in_words(found: Outcome, chosen: Allocation) -> str:
    """Of the programme's optimum of unequal depth beside its split of equal depth."""
    other = found.allocation
    assert other is not None
    gain, proof = 1 - other.step_s / chosen.step_s, not_proven(chosen, other)
    depths, timed = "different numbers of attention and expert groups", simulated_in_words(found)
    if gain > 1e-3:
        less = f"{short(other)}, would take {compared(other.step_s, chosen.step_s)} its split"
        return f"{depths} would gain time by the programme: the best of them, {less}{timed}{proof}."
    longer = f"{short(other)}, takes {compared(other.step_s, chosen.step_s)} its split"
    if proof:
        return f"no gain of {depths} is known to the programme: the best so far, {longer}{timed}{proof}."
    return f"{depths} gain nothing by the programme: the best of them, {longer}{timed}."


def sets_in_words(sets: Allocation, chosen: Allocation) -> str:
    gain, proof = 1 - sets.step_s / chosen.step_s, not_proven(chosen, sets)
    if gain <= 1e-3:
        said = (
            "by the programme, dealing a node's NICs to attention and expert GPUs otherwise than evenly gains nothing"
        )
        return said + (f", as far as is known{proof}." if proof else ".")
    a, f = sets.nics
    return (
        f"by the programme, NICs dealt {a:.0f}:{f:.0f} to a pair of groups of {short(sets)} would take "
        f"{compared(sets.step_s, chosen.step_s)} its split (simulated only: no transport here gives a rank a set of "
        f"NICs){proof}."
    )
