"""An allocation and its refinement in sentences."""

from bench.case import Layout
from systems.disagmoe.placement import replica_size
from systems.disagmoe.planner.allocation import Allocation
from systems.disagmoe.planner.refine import Refinement, Try

GIB = 2**30


def short(allocation: Allocation) -> str:
    layout = allocation.layout
    depth = str(layout.groups) if layout.expert_groups is None else f"{layout.groups}:{layout.expert_groups}"
    return f"p={depth} M:N={layout.attention_ranks}:{layout.expert_ranks}"


def split_in_words(layout: Layout, num_gpus: int) -> str:
    m, n, p = layout.attention_ranks, layout.expert_ranks, layout.groups
    replicas = layout.replicas or 1
    used = replicas * replica_size(layout)
    p_f = layout.expert_groups
    groups = f"{p} group{'s' * (p > 1)}" if p_f is None else f"{p} attention and {p_f} expert groups"
    return (
        f"{m} attention and {n} expert GPUs in each of {groups}, {replicas} replica{'s' * (replicas > 1)}: "
        f"{used} of {num_gpus} GPUs, rounds of {layout.round_length} micro-batches, recompute={layout.recompute}, "
        f"copies={layout.copies}{_also(layout)}."
    )


def _also(layout: Layout) -> str:
    """Ranks that share a sequence, and state that lives elsewhere, where it is so."""
    said = f", {layout.sequence_ranks} attention GPUs to a sequence" if layout.sequence_ranks > 1 else ""
    said += f" (tp={layout.tp} cp={layout.cp})" if layout.sequence_ranks > 1 else ""
    return said + (", optimizer state with the host" if layout.offloads_state else "")


def programme_in_words(chosen: Allocation) -> str:
    """What the solver has proven: of the programme's own estimates, not of steps."""
    said = f"its split, {short(chosen)}, is estimated at {chosen.step_s:.4g} s a step; "
    if not chosen.proven:
        return said + (
            f"the solver ran out of time, this is its best so far: by the same estimates a split may be up to "
            f"{100 * chosen.gap:.2g} % faster ({1 / chosen.most_steps_per_s:.4g} s)."
        )
    return said + (
        f"by the same estimates no split that it may choose is faster (proven, gap {100 * round(chosen.gap, 9):.2g} %)."
    )


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
        said += f" That is {100 * ratio:.0f} % of the rate that the programme estimates."
        if ratio > 1:
            said += " An estimate is no bound: fill and latency are approximate, and refinement has more choices."
        if best.bound_s is not None:
            said += f" The busiest resource of the plan alone takes {best.bound_s:.4g} s."
    return said


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


def what_if_in_words(condition: str, other: Allocation | None, timed_out: bool, chosen: Allocation) -> str:
    if other is None:
        return f"{condition}: {'the solver found nothing in its time' if timed_out else 'nothing fits'}."
    same = short(other) == short(chosen)
    split = "the split stays" if same else f"the split becomes {short(other)}"
    proof = "" if other.proven else " (the best so far when the solver ran out of time)"
    return f"{condition}: {split}, {other.step_s:.4g} s a step{proof}, bound by {' and '.join(other.binding)}."


def unequal_in_words(other: Allocation, chosen: Allocation) -> str:
    gain = 100 * (chosen.step_s / other.step_s - 1)
    if gain <= 0.1:
        return f"different numbers of attention and expert groups gain nothing (best: {short(other)}, {-gain:.1f} %)."
    return (
        f"different numbers of attention and expert groups would gain {gain:.1f} % by the programme ({short(other)})."
    )


def sets_in_words(sets: Allocation, chosen: Allocation) -> str:
    gain = chosen.step_s / sets.step_s - 1
    if gain <= 1e-3:
        return "dealing the NICs of a node to its attention and expert GPUs otherwise than one each gains nothing."
    a, f = sets.nics
    return (
        f"NICs dealt {a:.0f}:{f:.0f} to a pair of groups of {short(sets)} would gain {100 * gain:.1f} % (simulated "
        "only: no transport here gives a rank a set of NICs)."
    )
