"""Orders of the same work: rounds, weight gradients put off, and how far recomputation runs ahead.

Longer rounds and more deferral hold more and leave fewer gaps. Both end where there is nothing more of them: at the
micro-batches of a replica, and at the weight gradients of a group.
"""

from collections.abc import Iterator, Mapping

from bench.case import CaseSpec, Layout
from bench.system import beside
from systems.disagmoe.shift import shift_of

FIELDS = ("round_length", "deferred_w", "lookahead")


def num_microbatches(spec: CaseSpec, layout: Layout) -> int:
    """Of a replica; 1 where the batch cannot be dealt."""
    lanes = (layout.replicas or 1) * layout.attention_ranks * layout.mbs
    return max(1, spec.workload.num_sequences * layout.sequence_ranks // lanes)


def num_weight_gradients(spec: CaseSpec, layout: Layout) -> int:
    """Of a group in a step, at the most: a group has so many layers, and may have the head."""
    turns = -(-spec.model.num_layers // min(layout.groups, layout.expert_groups or layout.groups))
    return num_microbatches(spec, layout) * (turns + layout.layers_per_chunk)


def rounds(groups: int, most: int) -> list[int]:
    """Lengths worth trying: a pipeline is about full at 4 p, and longer ones help where transfers come in bursts."""
    return sorted({1, most, *(n for n in (groups // 2, *_doublings(groups, most)) if 1 <= n <= most)})


def deferrals(groups: int, most: int) -> list[int]:
    """None, p, 2p, 4p, ... up to all."""
    return [0, *_doublings(groups, most), most]


def in_whole_rounds(spec: CaseSpec, layout: Layout) -> Layout:
    """Rounds of no more micro-batches than a replica has: longer ones are the same schedule under another name."""
    most = num_microbatches(spec, layout)
    return layout if layout.round_length <= most else layout.model_copy(update={"round_length": most})


def reordered(spec: CaseSpec, layout: Layout) -> Iterator[Mapping[str, int]]:
    """What changes one step away, likeliest first: what holds more and takes less time comes before its opposite."""
    all_of = num_weight_gradients(spec, layout)
    if layout.deferred_w < all_of:
        yield {"deferred_w": all_of}
    for deferred in beside(deferrals(layout.groups, all_of), layout.deferred_w):
        yield {"deferred_w": deferred}
    for length in beside(rounds(layout.groups, num_microbatches(spec, layout)), layout.round_length):
        yield {"round_length": length}
    if layout.recompute != "none":
        for ahead in (layout.lookahead * 2, layout.lookahead // 2):
            if ahead:
                yield {"lookahead": ahead}


def in_order_of(layout: Layout, other: Layout) -> Layout:
    """A layout with the rounds, deferral and lookahead of another, per group."""
    per_group = other.round_length / other.groups
    order = {
        "round_length": max(1, round(per_group * layout.groups)),
        "deferred_w": round(other.deferred_w / other.groups * layout.groups),
        "lookahead": other.lookahead,
    }
    return layout.model_copy(update=order)


def regrouped(spec: CaseSpec, layout: Layout) -> Iterator[Layout]:
    """Twice and half the ranks of every group, of half and twice the groups or replicas."""
    m, n, p = layout.attention_ranks, layout.expert_ranks, layout.groups
    for ranks, groups in ((2, 0.5), (0.5, 2), (2, 1), (0.5, 1), (1, 0.5), (1, 2)):
        to = {"attention_ranks": int(m * ranks), "expert_ranks": int(n * ranks), "groups": int(p * groups)}
        if layout.expert_groups is None and min(to.values()) >= 1:
            to["replicas"] = spec.cluster.num_gpus // (to["groups"] * (to["attention_ranks"] + to["expert_ranks"]))
            near = layout.model_copy(update=to)
            if near.replicas:
                yield in_whole_rounds(spec, in_order_of(near, layout).model_copy(update=_homes(spec, near)))


def _homes(spec: CaseSpec, layout: Layout) -> dict[str, int | None]:
    """Of head and layers on other groups."""
    return {"head_group": None, "shift_at": shift_of(spec.model, spec.workload.seq_len, layout.groups)}


def _doublings(groups: int, most: int) -> list[int]:
    found, number = [], groups
    while number < most:
        found.append(number)
        number *= 2
    return found
