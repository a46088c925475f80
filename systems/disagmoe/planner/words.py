"""An allocation and its refinement in sentences."""

from typing import TYPE_CHECKING

from bench.case import CaseSpec, Layout
from bench.predict import GIB, QuickStep
from systems.disagmoe.placement import replica_size
from systems.disagmoe.planner.allocation import Allocation, Outcome
from systems.disagmoe.planner.counting import counted
from systems.disagmoe.planner.refine import Refinement, Try

if TYPE_CHECKING:
    from systems.disagmoe.planner.busy import PlannedStep


FAR = 0.1
"""An estimate that is off by a larger share is said to be far from what is simulated."""


def short(allocation: Allocation) -> str:
    return short_of(allocation.layout)


def short_of(layout: Layout) -> str:
    """``p=4 M:N=16:8 replicas=2``, with tp and cp where sequences are shared: what says which GPUs do what."""
    depth = str(layout.groups) if layout.expert_groups is None else f"{layout.groups}:{layout.expert_groups}"
    said = f"p={depth} M:N={layout.attention_ranks}:{layout.expert_ranks} replicas={layout.replicas or 1}"
    shares = (f" {name}={getattr(layout, name)}" for name in ("tp", "cp") if getattr(layout, name) != 1)
    return said + "".join(shares)


def percent(share: float) -> str:
    """A positive share, never said to be nothing."""
    return f"{100 * share:.2g} %" if share >= 1e-4 else "less than 0.01 %"


def compared(step_s: float, other_s: float) -> str:
    """One time beside another: ``4.3 % longer than``, ``4.1 % less than`` or ``as long as``."""
    share = step_s / other_s - 1
    if abs(share) < 5e-4:
        return "as long as"
    return f"{100 * abs(share):.1f} % {'longer' if share > 0 else 'less'} than"


def sooner(gap: float) -> str:
    """The most that a step may take less, of a gap of rates."""
    return percent(gap / (1 + gap))


def split_in_words(layout: Layout, spec: CaseSpec) -> str:
    m, n, p = layout.attention_ranks, layout.expert_ranks, layout.groups
    replicas = layout.replicas or 1
    used = replicas * replica_size(layout)
    p_f = layout.expert_groups
    groups = counted(p, "group") if p_f is None else f"{p} attention and {p_f} expert groups"
    microbatches = spec.workload.num_sequences * layout.sequence_ranks // (replicas * m * layout.mbs)
    rounds = counted(min(layout.round_length, microbatches), "micro-batch").replace("batchs", "batches")
    held = f" of {layout.mbs} sequences" if layout.mbs > 1 else ""
    return (
        f"{m} attention and {counted(n, 'expert GPU')} in each of {groups}, {counted(replicas, 'replica')}: "
        f"{used} of {counted(spec.cluster.num_gpus, 'GPU')}, rounds of {rounds}{held} (of {microbatches}), "
        f"recompute={layout.recompute}, copies={layout.copies}{_also(layout)}."
    )


def _also(layout: Layout) -> str:
    """Ranks that share a sequence, and state that lives elsewhere, where it is so."""
    said = f", {layout.sequence_ranks} attention GPUs to a sequence" if layout.sequence_ranks > 1 else ""
    said += f" (tp={layout.tp} cp={layout.cp})" if layout.sequence_ranks > 1 else ""
    said += f", weight gradients put off by up to {layout.deferred_w}" if layout.deferred_w else ""
    said += f", {layout.layers_per_chunk} layers at a time" if layout.layers_per_chunk > 1 else ""
    return said + (", optimizer state with the host" if layout.offloads_state else "")


def origin_in_words(programme: Layout, refinement: Refinement | None, given: Layout | None, source: str) -> str:
    """Where the plan comes from: the programme's split, or another seed that was faster, and what became of it.

    given: the layout of the case that was planned, where it has one.
    """
    if refinement is None:
        return "it is the programme's split, which fits when its order is made and simulated; nothing was refined."
    start, best = refinement.start, refinement.best
    if start is None or best is None:
        return f"it is the programme's split; of what was {source} near it, nothing fits in memory."
    changed = changed_in_words(start.layout, best.layout)
    became = f"refined in {changed}" if changed else "as it is"
    if start.layout == programme:
        return f"it is the programme's split, {became}."
    split = short_of(start.layout)
    if not refinement.from_seed:
        where = f"no split of the programme fits in memory, {source}; near them {split} does"
    elif start.layout == given:
        where = f"the layout that was given is faster than the programme's splits, {source}"
    else:
        where = f"of the programme's splits that were {source}, {split} is the fastest that fits"
    return f"{where}; the plan is that, {became}."


def programme_in_words(chosen: Allocation, fits: bool = True) -> str:
    """What the solver has proven: of the programme's own estimates, not of steps. `fits`: whether its plan does."""
    said = f"its split, {short(chosen)}, is estimated at {chosen.step_s:.4g} s a step; "
    if not chosen.proven:
        return said + (
            f"the solver ran out of time, this is its best so far: by the same estimates a split may take up "
            f"to {sooner(chosen.gap)} less ({1 / chosen.most_steps_per_s:.4g} s)."
        )
    gap = f"gap {100 * round(chosen.gap, 9):.2g} %"
    fewest = "" if chosen.settled else "; the solver ran out of time before it knew whether fewer GPUs would do"
    depth = "of unequal depth" if chosen.problem.choices.unequal else "with as many expert as attention groups"
    those = f"no split {depth}" + (" whose plan fits" if fits else "")
    return said + f"by the same estimates, of memory too, {those} is faster (proven, {gap}){fewest}."


def not_proven(chosen: Allocation, other: Allocation) -> str:
    """What a comparison of the two has to be followed by."""
    if not other.proven:
        return " (not proven: the solver ran out of time)"
    return "" if chosen.proven else " (compared with a split that is not proven)"


def next_in_words(other: Outcome, chosen: Allocation, step: QuickStep | None = None) -> str:
    """What the next best split takes beside the programme's own, by the estimates and simulated (`step`: its own)."""
    found = other.allocation
    if found is None:
        why = "the solver found none in its time"
        if not other.timed_out:
            why = f"of {len(other.cuts)} that were simulated none fits in memory"
        return f"what the next best split takes is not known: {why}."
    late = " (the solver was stopped before it came to that one)" if found.step_s < chosen.step_s else ""
    said = f"by the same estimates the next best split (of another p or M:N), {short(found)}, takes "
    said += f"{compared(found.step_s, chosen.step_s)} its own{late}"
    if other.step and other.step.step_time_s and step and step.step_time_s:
        both = f"{other.step.step_time_s:.4g} s beside {step.step_time_s:.4g} s"
        said += (
            f"; simulated, neither of them refined, {compared(other.step.step_time_s, step.step_time_s)} it ({both})"
        )
    else:
        said += simulated_in_words(other)
    return f"{said}{not_proven(chosen, found)}."


def simulated_in_words(other: Outcome) -> str:
    step = other.step
    return "" if step is None or step.step_time_s is None else f" ({step.step_time_s:.4g} s simulated, not refined)"


def binding_in_words(chosen: Allocation, split: "PlannedStep | None" = None) -> list[str]:
    """What the programme's split keeps busy by the estimates, what decides them, and what its simulated step says."""
    busy = chosen.seconds
    said = []
    for side, who in (("attention", "attention"), ("expert", "experts")):
        own = {name.removeprefix(f"{side} "): s for name, s in busy.items() if name.startswith(side) and s}
        first = max(own, key=lambda name: own[name])
        rest = ", ".join(f"{name} {s:.4g} s" for name, s in own.items() if name != first)
        also = f" ({rest})" if rest else ""
        said.append(f"{first} of {who} {'take' if first == 'NICs' else 'takes'} {own[first]:.4g} s{also}")
    binds = f"what binds its estimate of {chosen.step_s:.4g} s: {' and '.join(chosen.binding)}"
    if "micro-batches in flight" in chosen.binding:
        count = chosen.layout.round_length
        binds += f" (with {count} in flight, GPUs wait for each other: no resource is busy all the time)"
    told = [f"on its split, by its estimates, {'; '.join(said)}.", f"{binds}."]
    return told if split is None else [*told, f"{_estimate_beside(chosen, split)}."]


def _estimate_beside(chosen: Allocation, split: "PlannedStep") -> str:
    """What the simulated step of the programme's split keeps busy, and where its estimates are far from that."""
    busy, estimates = split.busy_s, chosen.seconds
    said = (
        f"simulated, that split takes {split.step.step_time_s:.4g} s and its busiest resource is {split.busiest}, for "
    )
    said += f"{busy[split.busiest]:.4g} s"
    far = [name for name, s in busy.items() if s and abs(estimates.get(name, 0.0) / s - 1) > FAR]
    if not far:
        return said
    each = ", ".join(f"{name} {busy[name]:.4g} s" for name in far)
    return f"{said}; its estimates, of attention and experts on nodes of their own, are far from {each}"


def busy_in_words(plan: "PlannedStep", spec: CaseSpec) -> str:
    """Of the plan's simulated step: how long its busiest GPUs work, and what memory is left."""
    step, have = plan.step, spec.cluster.gpu.memory_bytes
    assert step.step_time_s is not None
    sides = []
    for side, who in (("attention", "an attention GPU"), ("expert", "an expert GPU")):
        own = {name.removeprefix(f"{side} "): s for name, s in plan.busy_s.items() if name.startswith(side)}
        rest = ", ".join(f"{name} {s:.4g} s" for name, s in own.items() if name != "compute" and s)
        sides.append(f"{who} computes for {own['compute']:.4g} s{f' ({rest})' if rest else ''}")
    share = 100 * plan.busy_s[plan.busiest] / step.step_time_s
    left = f"{(have - step.peak_memory_bytes) / GIB:.1f} GiB of {have / GIB:.1f} are left on the fullest GPU"
    return (
        f"simulated, its step takes {step.step_time_s:.4g} s, in which {' and '.join(sides)}, of the busiest groups: "
        f"its busiest resource is {plan.busiest}, for {share:.0f} % of the step (the rest: fixed costs of kernels and "
        f"transfers, the pipeline's fill, gradient sums, and waiting for each other). {left}."
    )


def changed_in_words(before: Layout, after: Layout) -> str:
    """Fields in which two layouts differ: ``round_length 8 -> 4, recompute none -> full``."""
    fields = (name for name in Layout.model_fields if getattr(before, name) != getattr(after, name))
    return ", ".join(f"{name} {_field(before, name)} -> {_field(after, name)}" for name in fields)


def _field(layout: Layout, name: str) -> object:
    """A value as people read it: as many expert groups as attention groups are that number, and nothing is no None."""
    value = layout.groups if name == "expert_groups" and layout.expert_groups is None else getattr(layout, name)
    return "as by default" if value is None else value


def refined_in_words(refinement: Refinement, seed: Try | None, chosen: Allocation, source: str) -> str:
    """How long the refined step takes, beside the programme's own split timed in the same way."""
    tried = refinement.num_evaluated
    worth = "no neighbour is faster by more than 0.1 %" if source == "simulated" else "no neighbour is surely faster"
    ended = worth if refinement.complete else "the budget ended the search"
    looked = f"{tried} layout{'s were' if tried != 1 else ' was'} {source}, and {ended}"
    best = refinement.best
    if best is None or best.step_time_s is None:
        return f"nothing fits in memory; {looked}."
    own = "the programme's own split was not needed"
    if seed is not None and seed.step_time_s is not None:
        own = f"the programme's own split takes {seed.step_time_s:.4g} s"
        own += "" if seed.status == "ok" else " and does not fit in memory"
    said = f"{source}, the plan's step takes {best.step_time_s:.4g} s and {own}; {looked}."
    if source == "simulated":
        said += f" That is {compared(best.step_time_s, chosen.step_s)} the programme estimates for its split."
        if best.step_time_s < chosen.step_s:
            said += " An estimate is no bound: fill and latency are approximate, and refinement has more choices."
        if best.bound_s is not None:
            said += f" The busiest resource of the plan alone takes {best.bound_s:.4g} s."
    return said


def depth_in_words(refinement: Refinement, source: str) -> str | None:
    """What the best step of unequal depth takes beside the best of equal depth, of those tried; None without both."""
    times: dict[bool, float] = {}
    for each in refinement.tried:
        if each.status == "ok" and each.step_time_s is not None:
            unequal = each.layout.expert_groups is not None
            times[unequal] = min(each.step_time_s, times.get(unequal, each.step_time_s))
    if len(times) < 2:
        return None
    return (
        f"of what was {source}, the best with different numbers of attention and expert groups takes "
        f"{times[True]:.4g} s and the best with as many takes {times[False]:.4g} s: unequal depth takes "
        f"{compared(times[True], times[False])} equal depth."
    )
