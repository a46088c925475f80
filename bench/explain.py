"""What bounds a simulated step: its critical path, the busiest resource, the way from the bound to the step, and what
would help. Every number is of the simulation; nothing is fitted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from bench.action import END_OF_STEP, view
from bench.assumptions import Assumptions
from bench.bound import Bound, bound
from bench.case import Case
from bench.cost import Costs
from bench.critical import LATENCY, PORT, SMS, CriticalPath, Piece
from bench.errors import BadInput
from bench.predict import GIB, Prediction, predict
from bench.program import Op
from bench.routing import Routing

ENDLESS_BYTES_PER_S = 1e15
"""The fastest link that a cluster may have: a byte takes no time beside anything else."""


@dataclass(frozen=True)
class Part:
    """A share of the critical path: what it was, seconds, number of pieces."""

    what: str
    seconds: float
    times: int


@dataclass(frozen=True)
class Use:
    """Seconds for which the fullest rank of a group uses each of `Explanation.RESOURCES`."""

    group: str
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Change:
    """The step without one cost; `note` says what was changed, and whether the layout would fit in memory."""

    without: str
    step_time_s: float
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """What bounds a step.

    Attributes:
        path: parts of the critical path, the longest first; their seconds sum to the step time.
        uses: of every group.
        rank: the rank with most work on the resource that gives the bound; `gap` is that rank's.
        gap: causes and their seconds, from an even share of the work to the step time, to which they sum.
        changes: the step simulated again, the best first; only those that help.
    """

    RESOURCES: ClassVar[tuple[str, ...]] = ("sending NIC", "sending NVLink", "receiving NIC", "receiving NVLink", "SMs")

    case: Case
    step_time_s: float
    bound_s: float
    bound_by: str
    path: tuple[Part, ...]
    uses: tuple[Use, ...]
    rank: int
    gap: tuple[tuple[str, float], ...]
    changes: tuple[Change, ...]

    @property
    def busiest(self) -> tuple[str, str, float]:
        """Group, resource and share of the step of the most used resource."""
        uses = [(use.group, name, s) for use in self.uses for name, s in zip(self.RESOURCES, use.seconds, strict=True)]
        group, resource, seconds = max(uses, key=lambda each: each[2])
        return group, resource, seconds / self.step_time_s

    def described(self) -> dict[str, Any]:
        """For JSON."""
        group, resource, share = self.busiest
        return {
            "kind": "explanation",
            "system": self.case.system,
            "layout": str(self.case.layout),
            "case_id": self.case.id,
            "step_time_s": self.step_time_s,
            "bound_s": self.bound_s,
            "bound_by": self.bound_by,
            "critical_path": [vars(part) for part in self.path],
            "busiest": {"group": group, "resource": resource, "share": share},
            "uses": {use.group: dict(zip(self.RESOURCES, use.seconds, strict=True)) for use in self.uses},
            "rank": self.rank,
            "gap": [{"cause": cause, "seconds": seconds} for cause, seconds in self.gap],
            "changes": [vars(change) | {"speedup": self.step_time_s / change.step_time_s} for change in self.changes],
        }


def explain(found: Prediction, assumptions: Assumptions) -> Explanation:
    """Explains a simulated step. Simulates it again for every change, so it takes several times as long."""
    path = CriticalPath(found.program, found.costs, found.timeline)
    least = bound(found.program, found.costs)
    uses = _uses(path)
    rank, resource = _reference(path, least)
    return Explanation(
        case=found.case,
        step_time_s=found.timeline.step_time_s,
        bound_s=least.seconds,
        bound_by=_bound_by(least),
        path=tuple(_parts(path, path.whole)),
        uses=uses,
        rank=rank,
        gap=tuple(_gap(path, rank, resource, least)),
        changes=tuple(changes(found, assumptions)),
    )


def _bound_by(least: Bound) -> str:
    return max(zip(("computation", "NIC", "NVLink"), least, strict=True), key=lambda pair: pair[1])[0]


def _parts(path: CriticalPath, pieces: Iterable[Piece]) -> list[Part]:
    seconds: dict[str, float] = {}
    times: dict[str, int] = {}
    for piece in pieces:
        word = _word(path, piece)
        seconds[word] = seconds.get(word, 0.0) + piece.seconds
        times[word] = times.get(word, 0) + 1
    return sorted((Part(word, s, times[word]) for word, s in seconds.items()), key=lambda part: -part.seconds)


def _word(path: CriticalPath, piece: Piece) -> str:
    """Kind of action and pass, such as ``attn:F``; what held a transfer up is named beside it."""
    action = view(int(path.program.code[path.operation(piece.task)]))
    word = action.word if action.kind in END_OF_STEP else f"{action.word}:{action.pass_.name}"
    return f"{word} {piece.what}" if piece.what else word


def _uses(path: CriticalPath) -> tuple[Use, ...]:
    placement, timeline = path.program.plan.placement, path.timeline
    seconds = np.zeros((placement.size, len(Explanation.RESOURCES)))
    for rank in np.unique(timeline.rank).tolist():
        for resource in range(len(Explanation.RESOURCES)):
            seconds[rank, resource] = _busy_s(path, rank, resource)
    return tuple(
        Use(group.name, tuple(seconds[group.first : group.first + group.size].max(axis=0).tolist()))
        for group in placement.groups
    )


def _busy_s(path: CriticalPath, rank: int, resource: int) -> float:
    return sum(path.resource_s(task)[resource] for task in path.users(rank, resource))


def _reference(path: CriticalPath, least: Bound) -> tuple[int, int]:
    """The rank with most work on the resource that gives the bound, and that resource."""
    kinds = {"computation": (SMS,), "NIC": (0, 2), "NVLink": (1, 3)}[_bound_by(least)]
    ranks = np.unique(path.timeline.rank).tolist()
    return max(((rank, kind) for kind in kinds for rank in ranks), key=lambda pair: _busy_s(path, *pair))


# From the bound to the step


def _gap(path: CriticalPath, rank: int, resource: int, least: Bound) -> Iterator[tuple[str, float]]:
    """Seconds by cause, from an even share of the work over the ranks to the step time, on one rank's resource."""
    busy_s = {r: _busy_s(path, r, resource) for r in np.unique(path.timeline.rank).tolist()}
    even_s = least.seconds * (sum(busy_s.values()) / len(busy_s)) / busy_s[rank]
    yield "work, dealt evenly over the ranks", even_s
    yield "imbalance: more work on this rank than on the mean one", least.seconds - even_s
    yield "overheads of kernels and transfers; SMs lent to transfers", busy_s[rank] - least.seconds
    idle: dict[str, float] = {}
    tasks = path.users(rank, resource)
    free_s = 0.0
    for number, task in enumerate(tasks):
        begin = float(path.timeline.start_s[task])
        if begin > free_s:
            last = path.program.op[path.operation(task)] in (Op.SYNC, Op.UPDATE)
            where = "tail: " if last else "fill: " if number == 0 else ""
            for piece in path.before(task, free_s):
                cause = where + _cause(path, piece, rank)
                idle[cause] = idle.get(cause, 0.0) + piece.seconds
        free_s = max(free_s, begin + path.resource_s(task)[resource])
    tail = [piece for piece in path.whole if piece.end_s > free_s]
    for piece in tail:
        cause = "tail: " + _cause(path, piece, rank)
        idle[cause] = idle.get(cause, 0.0) + piece.end_s - max(piece.start_s, free_s)
    yield from sorted(idle.items(), key=lambda item: -item[1])


def _cause(path: CriticalPath, piece: Piece, rank: int) -> str:
    """What a rank waited for while it was idle."""
    k = path.operation(piece.task)
    op, action = Op(int(path.program.op[k])), view(int(path.program.code[k]))
    if piece.what == LATENCY:
        return "latency of transfers"
    if piece.what == PORT:
        return "transfers waiting for a port"
    if op is Op.SYNC:
        return "gradient sums"
    if op in (Op.SEND, Op.RECV):
        return f"waiting for {action.word} on its way"
    if op is Op.UPDATE:
        return "optimizer step"
    own = int(path.timeline.rank[piece.task]) == rank
    return "own computation" if own else "waiting for other ranks' computation"


# What would help


def changes(found: Prediction, assumptions: Assumptions) -> list[Change]:
    """The step simulated again without each cost, those that make it shorter, the shortest first.

    The order of the plan stays as it is, but where recomputation is left out: then the system plans anew.
    """
    from bench.simulate import simulate

    step_s = found.timeline.step_time_s
    made = [
        Change(without, simulate(found.program, costs).step_time_s, note)
        for without, costs, note in _cheaper(found.costs)
    ]
    made += _without_recomputation(found, assumptions)
    return sorted((c for c in made if c.step_time_s < step_s * (1 - 1e-6)), key=lambda change: change.step_time_s)


def _cheaper(costs: Costs) -> Iterator[tuple[str, Costs, str]]:
    yield "communication", costs.with_free_communication(), "transfers and gradient sums take no time"
    yield "overheads", costs.without_overheads(), "of kernels and transfers; all SMs compute"
    yield "gradient sums", _SumsForFree(**_fields(costs)), "sums and weight gathers take no time"
    cluster = costs.case.cluster
    if cluster.num_nodes > 1:
        yield "NIC limit", _on(costs, nic_bytes_per_s=ENDLESS_BYTES_PER_S), "NICs without end"
    nvlink = cluster.gpu.model_copy(update={"nvlink_bytes_per_s": ENDLESS_BYTES_PER_S})
    yield "NVLink limit", _on(costs, gpu=nvlink), "NVLink without end"
    if costs.case.layout.offload != "none":
        host = cluster.gpu.model_copy(update={"host_bytes_per_s": ENDLESS_BYTES_PER_S})
        yield "host link limit", _on(costs, gpu=host), "the way to the host's memory without end"
    bare = costs.assumed.model_copy(update={"transfer_s": 0.0})
    instant = _on(costs, nic_latency_s=0.0, nvlink_latency_s=0.0)
    yield "latency", replace(instant, assumptions=bare), "links and transfers begin at once"
    if not costs.routes.even:
        even = costs.case.workload.model_copy(update={"routing": "balanced", "recorded": None})
        routing = Routing.of(even, costs.case.model, costs.routes.num_ranks)
        yield "uneven routing", replace(costs, routing=routing), "every expert gets as many tokens"


class _SumsForFree(Costs):
    """Costs without gradient sums."""

    def sync_s(self, group: str) -> float:
        return 0.0


def _fields(costs: Costs) -> dict[str, Any]:
    """The fields of costs, by name."""
    return {name: getattr(costs, name) for name in Costs.__dataclass_fields__}


def _on(costs: Costs, **fields: Any) -> Costs:
    """The same costs on a cluster with other fields; out of the bounds that a named cluster keeps."""
    cluster = costs.case.cluster.model_copy(update=fields)
    return replace(costs, case=costs.case.model_copy(update={"cluster": cluster}), assumptions=costs.assumed)


def _without_recomputation(found: Prediction, assumptions: Assumptions) -> list[Change]:
    layout = found.case.layout
    if layout.recompute == "none":
        return []
    case = found.case.model_copy(update={"layout": layout.model_copy(update={"recompute": "none"})})
    try:
        again = predict(case, assumptions)
    except BadInput:
        return []
    missing = again.missing_bytes / GIB
    note = f"would not fit: {missing:.1f} GiB missing" if missing else "fits in memory"
    return [Change("recomputation", again.metrics.step_time_s, note)]
