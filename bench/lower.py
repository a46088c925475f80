"""Lowering: from a plan and the edges of its model to a `Program`.

Adds what a schedule does not have to say: the receiving end of every transfer, what each operation waits for, and how
long values live. The order in which a group receives on a channel (kind, pass, sending group) is the order in which
the sender sends on it, so the two ends cannot disagree.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import COMPUTE, TRANSFERS, Action, Codes, Kind, Pass, templates_of, unpack, view
from bench.check import require_complete
from bench.edges import Edge, Volume, edges, ends
from bench.errors import BadInput
from bench.models import Model
from bench.plan import COMPUTE_STREAM, Plan
from bench.program import Held, Ints, Lifetimes, Op, Program

KEPT = {(Pass.F, Pass.B): Held.FORWARD, (Pass.B, Pass.W): Held.BACKWARD, (Pass.R, Pass.B): Held.AGAIN}
"""What one pass of a part keeps for another."""


class _Queue(NamedTuple):
    group: str
    stream: str
    op: NDArray[np.int8]
    code: Codes


def lower(plan: Plan, model: Model) -> Program:
    """The program of `plan` for `model`.

    Raises BadInput where an action is missing, stands twice or on the wrong group, showing the queue around the fault.
    """
    graph = list(edges(model, plan.placement, plan.recompute, plan.chunks))
    require_complete(plan, graph)
    queues = [*_own_queues(plan), *_receive_queues(plan)]
    op = np.concatenate([queue.op for queue in queues])
    code = np.concatenate([queue.code for queue in queues])
    sizes = [len(queue.code) for queue in queues]
    index = plan.placement.index
    group = np.repeat(np.array([index[queue.group] for queue in queues], dtype=np.int16), sizes)
    templates, template = np.unique(templates_of(code, plan.directions), return_inverse=True)
    turn = unpack(code).microbatch // plan.directions
    places = _Places(templates, template.astype(np.int32), op, turn, plan.num_microbatches // plan.directions)
    waits = [*_edge_waits(plan, graph, places), *_sync_waits(plan, queues)]
    dep_ptr, deps = _csr(waits, len(op))
    peer, partner = _partners(plan, places, len(op))
    volume_of = {edge.via: edge.volume for edge in graph if edge.via is not None}
    return Program(
        plan=plan,
        model=model,
        op=op,
        code=code,
        group=group,
        peer=peer,
        partner=partner,
        template=template.astype(np.int32),
        templates=templates,
        volumes=tuple(volume_of.get(view(int(t)), Volume(())) for t in templates),
        queues=tuple((queue.group, queue.stream) for queue in queues),
        queue_ptr=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        dep_ptr=dep_ptr,
        deps=deps,
        lifetimes=_lifetimes(graph, places),
    )


def parse_program(text: str) -> Program:
    """From `Program.to_text`. Raises BadInput."""
    head, _, rest = text.partition("\n")
    if not head.startswith("model "):
        raise BadInput("program text", head[:60], "a line 'model {...}', then the text of a plan")
    return lower(Plan.parse(rest), Model.parse(head.removeprefix("model ")))


class _Transfers(NamedTuple):
    """The transfers of one queue: their places, and for each template among them its two ends."""

    places: NDArray[np.int64]
    which: NDArray[np.int64]
    actions: tuple[Action, ...]
    ends: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, plan: Plan, codes: Codes) -> "_Transfers":
        columns = unpack(codes)
        places = np.flatnonzero(np.isin(columns.kind, [int(kind) for kind in TRANSFERS]))
        bases, which = np.unique(templates_of(codes[places], plan.directions), return_inverse=True)
        actions = tuple(view(int(code)) for code in bases)
        return cls(places, which, actions, tuple(ends(plan.placement, action) for action in actions))

    def blocking(self, stream: str) -> NDArray[np.int64]:
        """Places of transfers inside their own group that the queue has to wait for."""
        inside = np.array([source == target for source, target in self.ends], dtype=bool)
        return self.places[inside[self.which]] if stream == COMPUTE_STREAM and len(inside) else self.places[:0]


def _own_queues(plan: Plan) -> list[_Queue]:
    queues = []
    for (group, stream), column in plan.queues.items():
        codes = column.codes
        kinds = unpack(codes).kind
        op = np.full(len(codes), Op.COMPUTE, dtype=np.int8)
        op[np.isin(kinds, [int(kind) for kind in TRANSFERS])] = Op.SEND
        op[kinds == Kind.SYNC] = Op.SYNC
        op[kinds == Kind.UPDATE] = Op.UPDATE
        # The receiving half of a blocking exchange follows its sending half.
        after = _Transfers.of(plan, codes).blocking(stream) + 1
        queues.append(_Queue(group, stream, np.insert(op, after, Op.RECV), np.insert(codes, after, codes[after - 1])))
    return queues


def _receive_queues(plan: Plan) -> list[_Queue]:
    channels: dict[tuple[str, str], Codes] = {}
    senders: dict[tuple[str, str], str] = {}
    for (group, stream), column in plan.queues.items():
        found = _Transfers.of(plan, column.codes)
        blocking = np.isin(found.places, found.blocking(stream))
        keys = [
            (target, f"recv/{action.word}:{action.pass_.name}/{group}")
            for action, (_, target) in zip(found.actions, found.ends, strict=True)
        ]
        for key in dict.fromkeys(keys):
            mine = np.array([k == key for k in keys])[found.which] & ~blocking
            places = found.places[mine]
            if not len(places):
                continue
            if senders.setdefault(key, stream) != stream:
                first = view(int(column.codes[places[0]]))
                raise BadInput(
                    f"queue {group} {stream}",
                    str(first),
                    f"in {senders[key]}, with its channel's other sends",
                )
            channels[key] = column.codes[places]
    return [
        _Queue(group, stream, np.full(len(codes), Op.RECV, dtype=np.int8), codes)
        for (group, stream), codes in channels.items()
    ]


class _Places:
    """Where each action stands: operation numbers by template and turn (number of the micro-batch in its direction),
    own end and receiving end apart."""

    def __init__(self, templates: Codes, template: Ints, op: NDArray[np.int8], turn: Codes, num_turns: int) -> None:
        self.templates = {int(code): t for t, code in enumerate(templates)}
        shape = (len(templates), num_turns)
        self.own = np.full(shape, -1, dtype=np.int32)
        self.received = np.full(shape, -1, dtype=np.int32)
        numbers = np.arange(len(op), dtype=np.int32)
        arrives = op == Op.RECV
        self.own[template[~arrives], turn[~arrives]] = numbers[~arrives]
        self.received[template[arrives], turn[arrives]] = numbers[arrives]

        self.rows = {view(code): row for code, row in self.templates.items()}

    def _row(self, action: Action) -> int:
        return self.rows[action]

    def of(self, action: Action) -> Ints:
        """Operation number for each turn: of the action, or of a transfer's sending end."""
        return self.own[self._row(action)]

    def arrival(self, action: Action) -> Ints:
        return self.received[self._row(action)]


def _edge_waits(plan: Plan, graph: list[Edge], places: _Places) -> list[tuple[Ints, Ints]]:
    """Pairs of columns (operation, the operation of its group that it waits for)."""
    waits = []
    for edge in graph:
        if edge.via is None:
            waits.append((places.of(edge.dst), places.of(edge.src)))
            continue
        waits.append((places.of(edge.via), places.of(edge.src)))
        waits.append((places.of(edge.dst), places.arrival(edge.via)))
        if edge.via.pass_ is Pass.R:
            # Rows that come once more are laid out by the counts of the first time.
            waits.append((places.arrival(edge.via), places.arrival(edge.via._replace(pass_=Pass.F))))
        if edge.via.kind is Kind.COMBINE and edge.via.pass_ is Pass.F:
            # Expert outputs can only be laid out once the row map is there; it comes with the residual.
            residual = edge.via._replace(kind=Kind.RESIDUAL, chunk=0)
            source, target = ends(plan.placement, residual)
            if source != target:
                waits.append((places.arrival(edge.via), places.arrival(residual)))
    return waits


def _sync_waits(plan: Plan, queues: list[_Queue]) -> list[tuple[Ints, Ints]]:
    """A gradient sum waits for the last computation in each queue of the groups that it sums over; an update for its
    group's sum."""
    waits: list[tuple[Ints, Ints]] = []
    starts = np.concatenate([[0], np.cumsum([len(queue.code) for queue in queues])])
    last_compute: dict[str, list[int]] = {}
    for queue, start in zip(queues, starts[:-1], strict=True):
        computes = np.flatnonzero(np.isin(unpack(queue.code).kind, [int(kind) for kind in COMPUTE]))
        if len(computes):
            last_compute.setdefault(queue.group, []).append(int(start + computes[-1]))
    sync_of: dict[str, int] = {}
    for queue, start in zip(queues, starts[:-1], strict=True):
        for place in np.flatnonzero(queue.op == Op.SYNC):
            sync_of[queue.group] = int(start + place)
            for holder in plan.placement.holders(queue.group):
                for compute in last_compute.get(holder.name, []):
                    waits.append((np.array([start + place], np.int32), np.array([compute], np.int32)))
    for queue, start in zip(queues, starts[:-1], strict=True):
        for place in np.flatnonzero(queue.op == Op.UPDATE):
            waits.append((np.array([start + place], np.int32), np.array([sync_of[queue.group]], np.int32)))
    return waits


def _csr(waits: list[tuple[Ints, Ints]], num_ops: int) -> tuple[Ints, Ints]:
    who = np.concatenate([pair[0] for pair in waits])
    what = np.concatenate([pair[1] for pair in waits])
    order = np.argsort(who, kind="stable")
    dep_ptr = np.concatenate([[0], np.cumsum(np.bincount(who, minlength=num_ops))]).astype(np.int32)
    return dep_ptr, what[order].astype(np.int32)


def _partners(plan: Plan, places: _Places, num_ops: int) -> tuple[NDArray[np.int16], Ints]:
    peer = np.full(num_ops, -1, dtype=np.int16)
    partner = np.full(num_ops, -1, dtype=np.int32)
    index = plan.placement.index
    for code, row in places.templates.items():
        action = view(code)
        if action.kind in TRANSFERS:
            source, target = ends(plan.placement, action)
            sends, arrivals = places.own[row], places.received[row]
            peer[sends], peer[arrivals] = index[target], index[source]
            partner[sends], partner[arrivals] = arrivals, sends
    return peer, partner


def _lifetimes(graph: list[Edge], places: _Places) -> Lifetimes:
    columns: list[tuple[Held, Ints, Ints]] = []
    for edge in graph:
        if edge.via is None:
            same = edge.src.kind is edge.dst.kind and edge.src.layer == edge.dst.layer
            held = KEPT.get((edge.src.pass_, edge.dst.pass_)) if same else None
            if held is not None:
                columns.append((held, places.of(edge.src), places.of(edge.dst)))
        else:
            columns.append((Held.SENT, places.of(edge.src), places.of(edge.via)))
            columns.append((Held.RECEIVED, places.arrival(edge.via), places.of(edge.dst)))
    return Lifetimes(
        np.concatenate([np.full(len(first), held, dtype=np.int8) for held, first, _ in columns]),
        np.concatenate([first for _, first, _ in columns]),
        np.concatenate([last for _, _, last in columns]),
    )
