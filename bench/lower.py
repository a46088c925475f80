"""Lowering: from a plan and the edges of its model to a `Program`.

Adds what a schedule does not have to say: the receiving end of every transfer, what each operation waits for, and how
long values live. The order in which a group receives on a channel (kind, pass, sending group) is the order in which
the sender sends on it, so the two ends cannot disagree.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import COMPUTE, Codes, Kind, Pass, pack_columns, templates_of, unpack, view
from bench.check import require_complete
from bench.edges import Volume
from bench.errors import BadInput
from bench.graph import NONE, Graph, ends_of, graph_of, is_transfer
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
    graph = graph_of(model, plan.placement, plan.recompute, plan.chunks)
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
    dep_ptr, deps = _csr([*_edge_waits(graph, places), *_sync_waits(plan, queues)], len(op))
    peer, partner = _partners(plan, places, len(op))
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
        volumes=_volumes(graph, places),
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
    """The transfers of one queue: their places, and the groups that each leaves and reaches, by index."""

    places: NDArray[np.int64]
    codes: Codes
    source: NDArray[np.int64]
    target: NDArray[np.int64]

    @classmethod
    def of(cls, plan: Plan, codes: Codes) -> "_Transfers":
        places = np.flatnonzero(is_transfer(codes))
        return cls(places, codes[places], *ends_of(plan.placement, codes[places]))

    def blocks(self, stream: str) -> NDArray[np.bool_]:
        """Which are transfers inside their own group that the queue has to wait for."""
        return (self.source == self.target) & (stream == COMPUTE_STREAM)


def _own_queues(plan: Plan) -> list[_Queue]:
    queues = []
    for (group, stream), column in plan.queues.items():
        codes = column.codes
        kinds = unpack(codes).kind
        found = _Transfers.of(plan, codes)
        op = np.full(len(codes), Op.COMPUTE, dtype=np.int8)
        op[found.places] = Op.SEND
        op[kinds == Kind.SYNC] = Op.SYNC
        op[kinds == Kind.UPDATE] = Op.UPDATE
        # The receiving half of a blocking exchange follows its sending half.
        after = found.places[found.blocks(stream)] + 1
        queues.append(_Queue(group, stream, np.insert(op, after, Op.RECV), np.insert(codes, after, codes[after - 1])))
    return queues


def _receive_queues(plan: Plan) -> list[_Queue]:
    channels: dict[tuple[str, str], Codes] = {}
    senders: dict[tuple[str, str], str] = {}
    names = [group.name for group in plan.placement.groups]
    for (group, stream), column in plan.queues.items():
        found = _Transfers.of(plan, column.codes)
        beside = ~found.blocks(stream)
        columns = unpack(found.codes)
        # A channel: receiving group, kind, pass. In the order of the first transfer of each.
        channel = (found.target * len(Kind) + columns.kind) * len(Pass) + columns.pass_
        _, first, which = np.unique(channel, return_index=True, return_inverse=True)
        for number in np.argsort(first):
            mine = found.codes[beside & (which == number)]
            if not len(mine):
                continue
            action = view(int(mine[0]))
            key = (names[found.target[first[number]]], f"recv/{action.word}:{action.pass_.name}/{group}")
            if senders.setdefault(key, stream) != stream:
                allowed = f"in {senders[key]}, with its channel's other sends"
                raise BadInput(f"queue {group} {stream}", str(action), allowed)
            channels[key] = mine
    return [
        _Queue(group, stream, np.full(len(codes), Op.RECV, dtype=np.int8), codes)
        for (group, stream), codes in channels.items()
    ]


class _Places:
    """Where each action stands: operation numbers by template and turn (number of the micro-batch in its direction),
    own end and receiving end apart."""

    def __init__(self, templates: Codes, template: Ints, op: NDArray[np.int8], turn: Codes, num_turns: int) -> None:
        self.templates = templates
        shape = (len(templates), num_turns)
        self.own = np.full(shape, -1, dtype=np.int32)
        self.received = np.full(shape, -1, dtype=np.int32)
        numbers = np.arange(len(op), dtype=np.int32)
        arrives = op == Op.RECV
        self.own[template[~arrives], turn[~arrives]] = numbers[~arrives]
        self.received[template[arrives], turn[arrives]] = numbers[arrives]

    def rows(self, actions: Codes) -> NDArray[np.int64]:
        """Of each action, its number among the templates."""
        return np.searchsorted(self.templates, actions)

    def of(self, actions: Codes) -> Ints:
        """[actions x turns]: operation number of the action, or of a transfer's sending end."""
        return self.own[self.rows(actions)].ravel()

    def arrival(self, actions: Codes) -> Ints:
        return self.received[self.rows(actions)].ravel()


def _edge_waits(graph: Graph, places: _Places) -> list[tuple[Ints, Ints]]:
    """Pairs of columns (operation, the operation of its group that it waits for)."""
    moves = graph.via != NONE
    src, dst, via = graph.src[moves], graph.dst[moves], graph.via[moves]
    waits = [
        (places.of(graph.dst[~moves]), places.of(graph.src[~moves])),
        (places.of(via), places.of(src)),
        (places.of(dst), places.arrival(via)),
    ]
    columns = unpack(via)
    # Rows that come once more are laid out by the counts of the first time.
    again = via[columns.pass_ == Pass.R]
    waits.append((places.arrival(again), places.arrival(_of_pass(again, Pass.F))))
    # Expert outputs can only be laid out once the row map is there; it comes with the residual.
    outputs = via[(columns.kind == Kind.COMBINE) & (columns.pass_ == Pass.F)]
    row_maps = _row_maps(outputs)
    beside = np.isin(row_maps, via)
    waits.append((places.arrival(outputs[beside]), places.arrival(row_maps[beside])))
    return waits


def _of_pass(codes: Codes, pass_: Pass) -> Codes:
    columns = unpack(codes)
    return pack_columns(columns.kind, np.full_like(codes, pass_), columns.layer, columns.microbatch, columns.chunk)


def _row_maps(outputs: Codes) -> Codes:
    """The residuals that come beside expert outputs."""
    columns = unpack(outputs)
    kind, chunk = np.full_like(outputs, Kind.RESIDUAL), np.zeros_like(outputs)
    return pack_columns(kind, columns.pass_, columns.layer, columns.microbatch, chunk)


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
    moved = places.templates[is_transfer(places.templates)]
    source, target = (np.repeat(ends, places.own.shape[1]) for ends in ends_of(plan.placement, moved))
    sends, arrivals = places.of(moved), places.arrival(moved)
    peer[sends], peer[arrivals] = target, source
    partner[sends], partner[arrivals] = arrivals, sends
    return peer, partner


def _volumes(graph: Graph, places: _Places) -> tuple[Volume, ...]:
    """Of every template; nothing for what is no transfer."""
    number = np.full(len(places.templates), len(graph.volumes))
    moves = graph.via != NONE
    number[places.rows(graph.via[moves])] = graph.volume[moves]
    known = (*graph.volumes, Volume(()))
    return tuple(known[n] for n in number)


def _lifetimes(graph: Graph, places: _Places) -> Lifetimes:
    moves = graph.via != NONE
    src, dst, via = graph.src[moves], graph.dst[moves], graph.via[moves]
    columns = [(Held.SENT, places.of(src), places.of(via)), (Held.RECEIVED, places.arrival(via), places.of(dst))]
    first, last = unpack(graph.src), unpack(graph.dst)
    same = ~moves & (first.kind == last.kind) & (first.layer == last.layer)
    for (maker, user), held in KEPT.items():
        mine = same & (first.pass_ == maker) & (last.pass_ == user)
        columns.append((held, places.of(graph.src[mine]), places.of(graph.dst[mine])))
    return Lifetimes(
        np.concatenate([np.full(len(first), held, dtype=np.int8) for held, first, _ in columns]),
        np.concatenate([first for _, first, _ in columns]),
        np.concatenate([last for _, _, last in columns]),
    )
