"""Layouts of a colocated system one step away from another, in fields of which a space lists few values."""

from collections.abc import Iterator, Mapping

from bench.case import CaseSpec, Layout
from bench.system import beside

MAX_GROUP = 4
"""Micro-batches that pass a chunk together are tried up to so many times the stages."""


USUAL_CHUNKS = 4
"""Chunks a stage where there was one stage."""


def moves(spec: CaseSpec, layout: Layout, fields: frozenset[str]) -> Iterator[Layout]:
    """Likeliest first. Some may not be possible."""
    seen = {layout}
    for change in _changes(spec, layout):
        if fields >= change.keys() and all(number is None or number >= 1 for number in change.values()):
            near = layout.model_copy(update=change)
            if near not in seen:
                seen.add(near)
                yield near


def _changes(spec: CaseSpec, layout: Layout) -> Iterator[Mapping[str, int | None]]:
    for chunks in beside(chunk_counts(spec.model.num_layers, layout.pp), layout.vpp):
        yield {"vpp": chunks}
    ep, pp = layout.ep, layout.pp
    yield from (_ranks(spec, layout, *to) for to in ((ep // 2, pp * 2), (ep * 2, pp // 2)))
    yield from (_ranks(spec, layout, *to) for to in ((ep // 2, pp), (ep, pp // 2), (ep * 2, pp), (ep, pp * 2)))
    yield from _shares(layout)
    if layout.vpp > 1:
        groups = [layout.pp * times for times in range(1, MAX_GROUP + 1)]
        yield from (
            {"microbatch_group": None if group == layout.pp else group}
            for group in beside(groups, layout.microbatch_group or layout.pp)
        )


def _ranks(spec: CaseSpec, layout: Layout, ep: int, pp: int) -> dict[str, int | None]:
    """What another number of ranks a stage, or of stages, makes of a layout: as many replicas as fill the cluster."""
    found: dict[str, int | None] = {"ep": ep, "pp": pp, "replicas": spec.cluster.num_gpus // max(1, ep * pp)}
    if pp < 2 or layout.pp < 2:
        most = [n for n in chunk_counts(spec.model.num_layers, max(1, pp)) if n <= USUAL_CHUNKS]
        found |= {"vpp": most[-1]} if layout.vpp > 1 or layout.pp == 1 else {}
    return found | ({"microbatch_group": None} if layout.microbatch_group else {})


def _shares(layout: Layout) -> Iterator[Mapping[str, int | None]]:
    tp, cp, mbs = layout.tp, layout.cp, layout.mbs
    yield {"tp": tp * 2, "cp": cp // 2}
    yield {"tp": tp // 2, "cp": cp * 2}
    yield from ({"cp": share} for share in (cp // 2, cp * 2))
    yield from ({"tp": share} for share in (tp // 2, tp * 2))
    # As many tokens a rank, or not.
    yield {"mbs": mbs * 2, "cp": cp * 2}
    yield {"mbs": mbs // 2, "cp": cp // 2}
    yield from ({"mbs": more} for more in (mbs * 2, mbs // 2))


def chunk_counts(num_layers: int, pp: int) -> list[int]:
    """Values of vpp, ascending: the fewest chunks that have at most so many layers each, for every number of layers."""
    return sorted({-(-num_layers // (pp * layers)) for layers in range(1, -(-num_layers // pp) + 1)}) if pp > 1 else [1]
