"""Layouts one move away: they differ in one choice, or GPUs move between two of them, and tile batch and cluster."""

from collections.abc import Iterator, Mapping

from bench.case import CaseSpec, Layout
from bench.system import beside, divisors, worthwhile_offloads, worthwhile_shares
from systems.disagmoe.orders import (
    in_order_of,
    in_whole_rounds,
    num_microbatches,
    num_weight_gradients,
    reordered,
    rounds,
)
from systems.disagmoe.placement import expert_depth, replica_size
from systems.disagmoe.shift import shift_of, spreads


def neighbours(spec: CaseSpec, layout: Layout) -> Iterator[tuple[Layout, str]]:
    """Layouts one move away that tile the batch and the cluster, each with the move in words."""
    seen = {layout}
    for change in _moves(spec, layout):
        near = _tiled(spec, layout.model_copy(update=change), layout)
        if near is not None and near not in seen:
            seen.add(near)
            yield near, " ".join(f"{key}={value}" for key, value in change.items())


def leaner(spec: CaseSpec, layout: Layout) -> tuple[Layout, dict[str, int]] | None:
    """The layout with twice the ranks to a sequence, each of which then holds half of it, and what changes; None where
    so many are not worth trying."""
    change = {"cp": 2 * layout.cp}
    if (layout.tp, 2 * layout.cp) not in worthwhile_shares(spec, layout.attention_ranks):
        return None
    near = _tiled(spec, layout.model_copy(update=change), layout)
    return None if near is None or near.replicas != layout.replicas else (near, change)


def _moves(spec: CaseSpec, layout: Layout) -> Iterator[Mapping[str, object]]:
    m, n, p = layout.attention_ranks, layout.expert_ranks, layout.groups
    yield from reordered(spec, layout)
    # Shorter rounds leave room for more that waits.
    all_of, lengths = num_weight_gradients(spec, layout), rounds(p, num_microbatches(spec, layout))
    for shorter in beside(lengths, layout.round_length):
        if shorter < layout.round_length and layout.deferred_w < all_of:
            yield {"round_length": shorter, "deferred_w": all_of}
    for recompute in ("none", "full", "redispatch"):
        yield {"recompute": recompute}
    for offload in worthwhile_offloads(spec, 1):
        yield {"offload": offload}
    for tp, cp in worthwhile_shares(spec, m):
        yield {"tp": tp, "cp": cp}
    for copies in ("rank", "node"):
        yield {"copies": copies}
    if spec.model.num_shared_experts:
        yield from ({"shared_on": side} for side in ("attention", "expert"))
    for mbs in (layout.mbs * 2, layout.mbs // 2):
        yield {"mbs": mbs}
    yield {"mbs": layout.mbs * 2, "attention_ranks": m // 2}
    yield {"mbs": layout.mbs // 2, "attention_ranks": m * 2}
    for chunk in (layout.layers_per_chunk * 2, layout.layers_per_chunk // 2):
        yield {"layers_per_chunk": chunk, **_homes(spec, p, chunk)}
    if spreads(spec.model):
        yield _homes(spec, p, layout.layers_per_chunk)
        yield {"head_group": None, "shift_at": None}
    lanes, expert = divisors(spec.workload.num_sequences), divisors(spec.model.num_experts)
    data = [layout.sequence_ranks * each for each in lanes]
    for more in beside(data, m):
        yield {"attention_ranks": more}
    for more in beside(expert, n):
        yield {"expert_ranks": more}
    for groups in (p - 1, p + 1, p * 2, p // 2):
        yield {"groups": groups, **_homes(spec, groups, layout.layers_per_chunk)}
    for depth in (expert_depth(layout) - 1, expert_depth(layout) + 1):
        yield {"expert_groups": None if depth == p else depth}
    for factor in (2, 0.5, 4, 0.25, 8, 0.125):
        both = {"attention_ranks": int(m * factor), "expert_ranks": int(n * factor)}
        yield both
        groups = int(p / factor)
        yield {**both, "groups": groups, **_homes(spec, groups, layout.layers_per_chunk)}


def _homes(spec: CaseSpec, groups: int, chunk: int) -> dict[str, int | None]:
    """Of head and layers on other groups."""
    head: dict[str, int | None] = {"head_group": None}
    shift = {"shift_at": shift_of(spec.model, spec.workload.seq_len, groups, chunk)}
    return head | shift if spreads(spec.model) else head


def _tiled(spec: CaseSpec, layout: Layout, before: Layout) -> Layout | None:
    """The layout with as many replicas as fit and divide the batch, and rounds in proportion; None if there is none."""
    numbers = (layout.attention_ranks, layout.expert_ranks, layout.groups, layout.mbs, layout.layers_per_chunk)
    if min(numbers) < 1 or spec.model.num_experts % layout.expert_ranks:
        return None
    if expert_depth(layout) < 1 or layout.expert_groups == layout.groups:
        return None
    if max(layout.groups, expert_depth(layout)) * layout.layers_per_chunk > spec.model.num_layers:
        return None
    fit = spec.cluster.num_gpus // replica_size(layout)
    shared = layout.sequence_ranks
    lanes, left = divmod(spec.workload.num_sequences * shared, layout.attention_ranks * layout.mbs)
    if left or layout.attention_ranks % shared or not fit or not lanes:
        return None
    update: dict[str, object] = {"replicas": max(r for r in divisors(lanes) if r <= fit)}
    tiled = layout.model_copy(update=update)
    return in_whole_rounds(spec, tiled if tiled.groups == before.groups else in_order_of(tiled, before))
