"""An allocation and its refinement in sentences."""

from bench.case import CaseSpec, Layout
from systems.disagmoe.placement import replica_size
from systems.disagmoe.planner.allocation import Allocation, Outcome
from systems.disagmoe.planner.refine import Refinement, Try

GIB = 2**30


def short(allocation: Allocation) -> str:
    return short_of(allocation.layout)


def short_of(layout: Layout) -> str:
    depth = str(layout.groups) if layout.expert_groups is None else f"{layout.groups}:{layout.expert_groups}"
    return f"p={depth} M:N={layout.attention_ranks}:{layout.expert_ranks}"


def counted(number: float, thing: str) -> str:
    """``1 group``, ``2 groups``."""
    return f"{number:.0f} {thing}{'s' * (number != 1)}"


def percent(share: float) -> str:
    """A positive share, never said to be nothing."""
    return f"{100 * share:.2g} %" if share >= 1e-4 else "less than 0.01 %"


def split_in_words(layout: Layout, spec: CaseSpec) -> str:
    m, n, p = layout.attention_ranks, layout.expert_ranks, layout.groups
    replicas = layout.replicas or 1
    used = replicas * replica_size(layout)
    p_f = layout.expert_groups
    groups = counted(p, "group") if p_f is None else f"{p} attention and {p_f} expert groups"
    microbatches = spec.workload.num_sequences * layout.sequence_ranks // (replicas * m * layout.mbs)
    rounds = counted(min(layout.round_length, microbatches), "micro-batch").replace("batchs", "batches")
    return (
        f"{m} attention and {n} expert GPUs in each of {groups}, {counted(replicas, 'replica')}: "
        f"{used} of {spec.cluster.num_gpus} GPUs, rounds of {rounds} (of {microbatches}), "
        f"recompute={layout.recompute}, copies={layout.copies}{_also(layout)}."
    )


def _also(layout: Layout) -> str:
    """Ranks that share a sequence, and state that lives elsewhere, where it is so."""
    said = f", {layout.sequence_ranks} attention GPUs to a sequence" if layout.sequence_ranks > 1 else ""
    said += f" (tp={layout.tp} cp={layout.cp})" if layout.sequence_ranks > 1 else ""
    return said + (", optimizer state with the host" if layout.offloads_state else "")


def origin_in_words(programme: Layout, refinement: Refinement | None, given: Layout | None, source: str) -> str:
    """Where the plan comes from: the programme's split, or another seed that was faster, and what became of it.

    given: the layout of the case that was planned, where it has one.
    """
    if refinement is None:
        return "it is the programme's split; nothing was refined."
    start, best = refinement.start, refinement.best
    if start is None or best is None:
        return f"it is the programme's split; of what was {source} near it, nothing fits in memory."
    changed = changed_in_words(start.layout, best.layout)
    became = f"refined in {changed}" if changed else "as it is"
    if start.layout == programme:
        return f"it is the programme's split, {became}."
    split = f"{short_of(start.layout)} with {counted(start.layout.replicas or 1, 'replica')}"
    if not refinement.from_seed:
        where = f"no split of the programme fits in memory, {source}; near them {split} does"
    elif start.layout == given:
        where = f"the layout that was given is faster than the programme's splits, {source}"
    else:
        where = f"of the programme's splits, {split} is the fastest that fits, {source}"
    return f"{where}; the plan is that, {became}."


def programme_in_words(chosen: Allocation) -> str:
    """What the solver has proven: of the programme's own estimates, not of steps."""
    said = f"its split, {short(chosen)}, is estimated at {chosen.step_s:.4g} s a step; "
    if not chosen.proven:
        return said + (
            f"the solver ran out of time, this is its best so far: by the same estimates a split may be up to "
            f"{percent(chosen.gap)} faster ({1 / chosen.most_steps_per_s:.4g} s)."
        )
    gap = f"gap {100 * round(chosen.gap, 9):.2g} %"
    fewest = "" if chosen.settled else "; the solver ran out of time before it knew whether fewer GPUs would do"
    return said + f"by the same estimates no split that it may choose is faster (proven, {gap}){fewest}."


def not_proven(chosen: Allocation, other: Allocation) -> str:
    """What a comparison of the two has to be followed by."""
    if not other.proven:
        return " (not proven: the solver ran out of time)"
    return "" if chosen.proven else " (compared with a split that is not proven)"


def next_in_words(other: Outcome, chosen: Allocation) -> str:
    if other.allocation is None:
        return "what the next best split loses is not known: the solver found none in its time."
    loss = 100 * (other.allocation.step_s / chosen.step_s - 1)
    lost = f"and loses {loss:.1f} %" if loss >= 0 else f"and gains {-loss:.1f} %, as the solver was stopped before it"
    return f"the next best split is {short(other.allocation)} {lost}{not_proven(chosen, other.allocation)}."


def binding_in_words(chosen: Allocation) -> list[str]:
    busy = chosen.seconds
    said = []
    for side in ("attention", "expert"):
        own = {name.removeprefix(f"{side} "): s for name, s in busy.items() if name.startswith(side) and s}
        first = max(own, key=lambda name: own[name])
        rest = ", ".join(f"{name} {s:.4g} s" for name, s in own.items() if name != first)
        who = "attention" if side == "attention" else "experts"
        are = "is" if side == "attention" else "are"
        said.append(f"{who} {are} bound by {first} ({own[first]:.4g} s a step{'; ' + rest if rest else ''}).")
    said.append(f"what binds the step: {' and '.join(chosen.binding)}.")
    return said


def changed_in_words(before: Layout, after: Layout) -> str:
    """Fields in which two layouts differ: ``round_length 8 -> 4, recompute none -> full``."""
    fields = (name for name in Layout.model_fields if getattr(before, name) != getattr(after, name))
    return ", ".join(f"{name} {getattr(before, name)} -> {getattr(after, name)}" for name in fields)


def refined_in_words(refinement: Refinement, seed: Try | None, chosen: Allocation, source: str) -> str:
    """How long the refined step takes, beside the programme's own split timed in the same way."""
    tried = refinement.num_evaluated
    ended = "no neighbour is faster" if refinement.complete else "the budget ended the search"
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
        ratio = chosen.step_s / best.step_time_s
        said += f" That is {100 * ratio:.0f} % of the rate that the programme estimates for its split."
        if ratio > 1:
            said += " An estimate is no bound: fill and latency are approximate, and refinement has more choices."
        if best.bound_s is not None:
            said += f" The busiest resource of the plan alone takes {best.bound_s:.4g} s."
    return said


def depth_in_words(refinement: Refinement, source: str) -> str | None:
    """What unequal depth gains or loses in steps: the best of both kinds that were looked at; None without both."""
    times: dict[bool, float] = {}
    for each in refinement.tried:
        if each.status == "ok" and each.step_time_s is not None:
            unequal = each.layout.expert_groups is not None
            times[unequal] = min(each.step_time_s, times.get(unequal, each.step_time_s))
    if len(times) < 2:
        return None
    rate = times[False] / times[True]
    how = f"gains {100 * (rate - 1):.1f} %" if rate > 1 else f"loses {100 * (1 / rate - 1):.1f} %"
    return (
        f"of what was {source}, the best with different numbers of attention and expert groups takes "
        f"{times[True]:.4g} s and the best with as many takes {times[False]:.4g} s: unequal depth {how}."
    )


def memory_in_words(chosen: Allocation, best: Try | None) -> str:
    have = chosen.problem.spec.cluster.gpu.memory_bytes / GIB
    left = [have - held / GIB for held in chosen.memory_bytes]
    count = chosen.layout.round_length
    said = (
        f"on this split, one micro-batch in flight leaves {left[0]:.1f} GiB of an attention "
        f"GPU and {left[1]:.1f} GiB of an expert GPU, of {have:.1f}; that holds {count} in flight."
    )
    if best is not None and best.peak_memory_bytes:
        said += f" The plan's fullest GPU has {have - best.peak_memory_bytes / GIB:.1f} GiB left."
    return said


def what_if_in_words(condition: str, outcome: Outcome, chosen: Allocation) -> str:
    other = outcome.allocation
    if other is None:
        return f"{condition}: {'the solver found nothing in its time' if outcome.timed_out else 'nothing fits'}."
    split = "the split stays" if short(other) == short(chosen) else f"the split becomes {short(other)}"
    bound = f"bound by {' and '.join(other.binding)}"
    return f"{condition}: {split}, {other.step_s:.4g} s a step, {bound}{not_proven(chosen, other)}."


def unequal_in_words(other: Allocation, chosen: Allocation) -> str:
    gain, proof = chosen.step_s / other.step_s - 1, not_proven(chosen, other)
    depths = "different numbers of attention and expert groups"
    if gain > 1e-3:
        return f"{depths} would gain {100 * gain:.1f} % by the programme ({short(other)}){proof}."
    loss = 100 * (other.step_s / chosen.step_s - 1)
    longer = f"{short(other)}, takes {f'{loss:.1f} % longer' if loss >= 0.05 else 'as long'}"
    if proof:
        return f"no gain of {depths} is known: the best so far, {longer}{proof}."
    return f"{depths} gain nothing by the programme: the best of them, {longer}."


def sets_in_words(sets: Allocation, chosen: Allocation) -> str:
    gain, proof = chosen.step_s / sets.step_s - 1, not_proven(chosen, sets)
    if gain <= 1e-3:
        said = "dealing the NICs of a node to its attention and expert GPUs otherwise than one each gains nothing"
        return said + (f", as far as is known{proof}." if proof else ".")
    a, f = sets.nics
    return (
        f"NICs dealt {a:.0f}:{f:.0f} to a pair of groups of {short(sets)} would gain {100 * gain:.1f} % (simulated "
        f"only: no transport here gives a rank a set of NICs){proof}."
    )
