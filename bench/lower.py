"""Lowering: from a plan and the edges of its model to a `Program`.

Adds what a schedule does not have to say: the receiving end of every transfer, what each operation waits for, and how
long values live. The order in which a group receives on a channel (kind, pass, sending group) is the order in which
the sender sends on it, so the two ends cannot disagree.

All of it follows from the queues and the homes alone, whatever the ranks of a group: plans that differ in these share
what was found once.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import Codes, Kind, Pass, pack_columns, unpack
from bench.check import require_complete
from bench.edges import Volume
from bench.errors import BadInput
from bench.graph import NONE, Graph, graph_of
from bench.kept import Kept
from bench.models import Model
from bench.plan import Plan
from bench.program import Held, Ints, Lifetimes, Op, Program
from bench.queues import Given, Queues, is_complete, queues_of
from bench.templates import Templates

KEPT = {(Pass.F, Pass.B): Held.FORWARD, (Pass.B, Pass.W): Held.BACKWARD, (Pass.R, Pass.B): Held.AGAIN}
"""What one pass of a part keeps for another."""

_lowered: Kept[Program] = Kept(most=2_000_000)
"""Programs by what they follow from; two million operations, with what is found out of them, are several hundred MB."""


def lower(plan: Plan, model: Model) -> Program:
    """The program of `plan` for `model`.

    Raises BadInput where an action is missing, stands twice or on the wrong group, showing the queue around the fault.
    """
    queues = tuple(plan.queues.items())
    key = model, plan.placement.outline, plan.recompute, plan.chunks, plan.num_microbatches, queues
    found = _lowered.get(key)
    if found is None:
        found = _lower(plan, model)
        _lowered.put(key, found, found.num_ops)
    return replace(found, plan=plan)


def parse_program(text: str) -> Program:
    """From `Program.to_text`. Raises BadInput."""
    head, _, rest = text.partition("\n")
    if not head.startswith("model "):
        raise BadInput("program text", head[:60], "a line 'model {...}', then the text of a plan")
    return lower(Plan.parse(rest), Model.parse(head.removeprefix("model ")))


def _lower(plan: Plan, model: Model) -> Program:
    graph = graph_of(model, plan.placement.outline, plan.recompute, plan.chunks)
    templates = Templates(graph, plan.placement, plan.chunks)
    given = Given.of(plan, templates)
    if not is_complete(plan, given, templates):
        require_complete(plan, graph)
    queues = queues_of(plan, given, templates)
    places = _Places(templates, queues, plan.num_microbatches // plan.directions)
    dep_ptr, deps = _dependencies(graph, places, _sync_waits(plan, queues, templates))
    peer, partner = _partners(places)
    return Program(
        plan=plan,
        model=model,
        op=queues.op,
        code=queues.code,
        group=queues.group,
        peer=peer,
        partner=partner,
        template=queues.template,
        templates=templates.codes,
        volumes=_volumes(graph, templates),
        queues=queues.names,
        queue_ptr=queues.ptr,
        dep_ptr=dep_ptr,
        deps=deps,
        lifetimes=_lifetimes(graph, places),
    )


class _Places:
    """Where each action stands: operation numbers by template and turn (number of the micro-batch in its direction),
    own end and receiving end apart."""

    def __init__(self, templates: Templates, queues: Queues, num_turns: int) -> None:
        self.templates, self.queues = templates, queues
        self.ends = np.full((2, len(templates), num_turns), -1, dtype=np.int32)
        self.arrives = (queues.op == Op.RECV).astype(np.int64)
        self.ends[self.arrives, queues.template, queues.turn] = np.arange(len(queues.op), dtype=np.int32)

    def of(self, actions: Codes) -> Ints:
        """[actions x turns]: operation number of the action, or of a transfer's sending end."""
        return self.ends[0, self.templates.rows(actions)].ravel()

    def arrival(self, actions: Codes) -> Ints:
        return self.ends[1, self.templates.rows(actions)].ravel()


OWN, ARRIVAL = range(2)  # ends of an action


class _Wait(NamedTuple):
    """Operations of every turn that wait for operations of their group: ends of templates, by code."""

    who: Codes
    its_end: int
    what: Codes
    whose_end: int


def _edge_waits(graph: Graph) -> list[_Wait]:
    moves = graph.via != NONE
    src, dst, via = graph.src[moves], graph.dst[moves], graph.via[moves]
    waits = [
        _Wait(graph.dst[~moves], OWN, graph.src[~moves], OWN),
        _Wait(via, OWN, src, OWN),
        _Wait(dst, OWN, via, ARRIVAL),
    ]
    columns = unpack(via)
    # Rows that come once more are laid out by the counts of the first time.
    again = via[columns.pass_ == Pass.R]
    waits.append(_Wait(again, ARRIVAL, _of_pass(again, Pass.F), ARRIVAL))
    # Expert outputs can only be laid out once the row map is there; it comes with the residual.
    outputs = via[(columns.kind == Kind.COMBINE) & (columns.pass_ == Pass.F)]
    row_maps = _row_maps(outputs)
    beside = np.isin(row_maps, via)
    waits.append(_Wait(outputs[beside], ARRIVAL, row_maps[beside], ARRIVAL))
    return waits


def _of_pass(codes: Codes, pass_: Pass) -> Codes:
    columns = unpack(codes)
    return pack_columns(columns.kind, np.full_like(codes, pass_), columns.layer, columns.microbatch, columns.chunk)


def _row_maps(outputs: Codes) -> Codes:
    """The residuals that come beside expert outputs."""
    columns = unpack(outputs)
    kind, chunk = np.full_like(outputs, Kind.RESIDUAL), np.zeros_like(outputs)
    return pack_columns(kind, columns.pass_, columns.layer, columns.microbatch, chunk)


def _sync_waits(plan: Plan, queues: Queues, templates: Templates) -> list[tuple[int, int]]:
    """Pairs (operation, what it waits for): a gradient sum waits for the last computation in each queue of the groups
    that it sums over; an update for its group's sum."""
    waits: list[tuple[int, int]] = []
    last_compute: dict[str, list[int]] = {}
    for (group, _), start, end in zip(queues.names, queues.ptr[:-1].tolist(), queues.ptr[1:].tolist(), strict=True):
        computes = np.flatnonzero(queues.op[start:end] == Op.COMPUTE)
        if len(computes):
            last_compute.setdefault(group, []).append(start + int(computes[-1]))
    sync_of: dict[int, int] = {}
    for sync in np.flatnonzero(queues.op == Op.SYNC).tolist():
        number = int(queues.group[sync])
        sync_of[number] = sync
        for holder in plan.placement.holders(plan.placement.groups[number].name):
            waits += [(sync, compute) for compute in last_compute.get(holder.name, [])]
    return waits + [(k, sync_of[int(queues.group[k])]) for k in np.flatnonzero(queues.op == Op.UPDATE).tolist()]


def _dependencies(graph: Graph, places: _Places, at_the_end: list[tuple[int, int]]) -> tuple[Ints, Ints]:
    """`dep_ptr` and `deps` of a program. How many others an operation waits for, its template says."""
    waits, templates = _edge_waits(graph), places.templates
    who = np.concatenate([wait.its_end * len(templates) + templates.rows(wait.who) for wait in waits])
    what = np.concatenate([wait.whose_end * len(templates) + templates.rows(wait.what) for wait in waits])
    order = np.argsort(who, kind="stable")
    num_waits = np.bincount(who, minlength=2 * len(templates))
    # The how-manieth of its operation's waits each one is.
    nth = np.empty(len(who), dtype=np.int64)
    nth[order] = np.arange(len(who)) - np.repeat(np.cumsum(num_waits) - num_waits, num_waits)
    by_op = num_waits[places.arrives * len(templates) + places.queues.template]
    late, early = np.array(at_the_end, dtype=np.int64).reshape(-1, 2).T
    np.add.at(by_op, late, 1)
    dep_ptr = np.concatenate([[0], np.cumsum(by_op)]).astype(np.int32)
    deps = np.empty(dep_ptr[-1], dtype=np.int32)
    ends = places.ends.reshape(2 * len(templates), -1)
    deps[dep_ptr[ends[who]] + nth[:, None]] = ends[what]
    for op in np.unique(late):
        deps[dep_ptr[op] : dep_ptr[op + 1]] = early[late == op]
    return dep_ptr, deps


def _partners(places: _Places) -> tuple[NDArray[np.int16], Ints]:
    num_ops, templates = len(places.queues.op), places.templates
    peer = np.full(num_ops, -1, dtype=np.int16)
    partner = np.full(num_ops, -1, dtype=np.int32)
    sends, arrivals = places.ends[:, templates.moves]
    peer[sends], peer[arrivals] = templates.target[templates.moves, None], templates.source[templates.moves, None]
    partner[sends], partner[arrivals] = arrivals, sends
    return peer, partner


def _volumes(graph: Graph, templates: Templates) -> tuple[Volume, ...]:
    """Of every template; nothing for what is no transfer."""
    number = np.full(len(templates), len(graph.volumes))
    moves = graph.via != NONE
    number[templates.rows(graph.via[moves])] = graph.volume[moves]
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
