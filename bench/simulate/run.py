"""From a program and its costs to columns for the loop, and from its answer to a timeline."""

from functools import reduce
from math import gcd, inf

import numpy as np
from numpy.typing import NDArray

from bench.action import COMPUTE, Action, Kind, view
from bench.check import PlanError, check
from bench.cost import Costs
from bench.edges import ends
from bench.errors import BadInput
from bench.program import Op, Program
from bench.simulate import engine
from bench.simulate.memory import net_bytes
from bench.timeline import Timeline

Floats = NDArray[np.float64]


def simulate(program: Program, costs: Costs, *, fold: bool | None = None, allocations: bool = True) -> Timeline:
    """One optimizer step of one replica, every operation on every rank.

    Semantics. Queues run in order. All COMPUTE of a rank shares its SMs; a SEND takes the sending ports of its rank for
    its bytes over their rate; a RECV is known when all its senders have started, begins a latency after the first
    of them or when the receiving ports are free, takes these for its bytes over their rate, and ends no earlier
    than a latency after its last sender. SEND and RECV next to each other in one queue are one exchange: they run side
    by side. A SYNC starts together on all ranks of its group and takes all their ports; an UPDATE waits for every SYNC.
    Resources are given first come, first served.

    Args:
        fold: whether one rank stands for several of its group, which needs `costs.uniform`; by default, where it may.
        allocations: whether the timeline says what each operation allocates; 0 otherwise.
    Raises:
        PlanError: the plan does not end (see `bench.check`). BadInput: `fold` where ranks differ.
    """
    if fold is None:
        fold = costs.uniform
    elif fold and not costs.uniform:
        raise BadInput("fold", fold, "False where the ranks of a group differ")
    groups = program.plan.placement.groups
    stands_for = reduce(gcd, (group.size for group in groups)) if fold else 1
    sizes = np.array([group.size // stands_for for group in groups])
    table = _Table(program, costs, sizes)
    ops = _ops(program, sizes, table.row_of)
    state = _state(program, ops, sizes)
    done = engine.run(len(ops.task_op), ops, table.durations, state)
    if done != len(ops.task_op):
        check(program)
        raise PlanError("plan", f"{done} of {len(ops.task_op)} tasks", "a plan that ends", "")
    task_op = ops.task_op
    place = np.arange(len(task_op)) - ops.base[task_op]
    row, op = ops.row[task_op], program.op[task_op]
    first = np.array([group.first for group in groups], dtype=np.int32)
    return Timeline(
        source="simulated",
        queues=program.queues,
        rank=(first[program.group[task_op]] + place).astype(np.int32),
        queue=program.queue_of()[task_op],
        op=op,
        code=program.code[task_op],
        ready_s=state.tasks[:, engine.READY].copy(),
        start_s=state.tasks[:, engine.START].copy(),
        end_s=state.tasks[:, engine.END].copy(),
        bytes=np.where(op == Op.RECV, table.bytes_in[row, place], table.bytes_out[row, place]),
        flops=table.flops[row, place],
        alloc_bytes=net_bytes(program, costs, ops.base, sizes) if allocations else np.zeros(len(task_op)),
        stands_for=stands_for,
    )


class _Table:
    """Costs by row and rank. Rows: templates that cost differently, then SYNC and UPDATE of every group; `row_of` each
    template."""

    def __init__(self, program: Program, costs: Costs, sizes: NDArray[np.int64]) -> None:
        self.placement = program.plan.placement
        different, self.row_of = costs.alike(program.templates)
        shape = (len(different) + 2 * len(sizes), int(sizes.max()))
        first, second, first_in, second_in, latency, self.flops, self.bytes_out, self.bytes_in = np.zeros((8, *shape))
        self.durations = engine.Durations(first, second, first_in, second_in, latency)
        index = self.placement.index
        for row, template in enumerate(different):
            action = view(int(program.templates[template]))
            if action.kind in COMPUTE:
                n = sizes[index[self.placement.home(action.kind, action.layer, action.microbatch)]]
                first[row, :n] = costs.seconds(action)[:n]
                self.flops[row, :n] = costs.flops(action)[:n]
            elif program.volumes[template].terms:
                self._transfer(row, action, costs, sizes)
        for g, group in enumerate(self.placement.groups):
            sync, update = (len(different) + 2 * g + offset for offset in (0, 1))
            first[sync], first[update] = costs.sync_s(group.name), costs.update_s(group.name)
            self.bytes_out[sync] = costs.sync_bytes(group.name)

    def _transfer(self, row: int, action: Action, costs: Costs, sizes: NDArray[np.int64]) -> None:
        source, target = (sizes[self.placement.index[name]] for name in ends(self.placement, action))
        ports, crossing = costs.ports(action), costs.message(action).crossing
        d = self.durations
        d.first[row, :source], d.second[row, :source] = ports.nic_send_s[:source], ports.nvlink_send_s[:source]
        d.first_in[row, :target] = ports.nic_receive_s[:target]
        d.second_in[row, :target] = ports.nvlink_receive_s[:target]
        d.latency[row, :target] = ports.latency_s[:target]
        self.bytes_out[row, :source] = crossing.sum(axis=1)[:source]
        self.bytes_in[row, :target] = crossing.sum(axis=0)[:target]


def _ops(program: Program, sizes: NDArray[np.int64], row_of: NDArray[np.int64]) -> engine.Ops:
    group = program.group.astype(np.int64)
    of_op = sizes[group]
    base = np.concatenate([[0], np.cumsum(of_op)])
    numbers = np.arange(program.num_ops, dtype=np.int32)
    first_rank = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    kinds = program.templates[program.template] & 31
    to_same_rank = np.isin(kinds, [int(Kind.RESIDUAL), int(Kind.HOP)])
    next_op = np.where(_follows(program), numbers + 1, -1)[: program.num_ops]
    depender = np.repeat(numbers, np.diff(program.dep_ptr))
    order = np.argsort(program.deps, kind="stable")
    num_users = np.bincount(program.deps, minlength=program.num_ops)
    sends = program.op == Op.SEND
    num_messages = np.where(sends, np.where(to_same_rank, of_op, 1), 0)
    message = np.cumsum(num_messages) - num_messages
    receives = program.op == Op.RECV
    message[receives] = message[program.partner[receives]]
    row = row_of[program.template]
    for offset, op in enumerate((Op.SYNC, Op.UPDATE)):
        row = np.where(program.op == op, int(row_of.max()) + 1 + 2 * group + offset, row)
    return engine.Ops(
        op=program.op,
        base=base,
        task_op=np.repeat(numbers, of_op),
        first_rank=first_rank[group],
        next_op=next_op.astype(np.int32),
        user_ptr=np.concatenate([[0], np.cumsum(num_users)]),
        users=depender[order],
        partner=program.partner,
        message=message,
        to_same_rank=to_same_rank,
        row=row,
        updates=np.flatnonzero(program.op == Op.UPDATE),
    )


def _follows(program: Program) -> NDArray[np.bool_]:
    """Whether the end of operation k lets operation k + 1 go: same queue, and not the two halves of one exchange."""
    follows = np.ones(program.num_ops, dtype=bool)
    follows[program.queue_ptr[1:] - 1] = False
    halves = (program.op == Op.SEND) & (program.partner == np.arange(program.num_ops) + 1)
    return follows & ~halves


def _state(program: Program, ops: engine.Ops, sizes: NDArray[np.int64]) -> engine.State:
    conditions = np.diff(program.dep_ptr)
    conditions[1:] += _follows(program)[:-1]
    conditions[(program.op == Op.RECV) | (program.op == Op.UPDATE)] += 1
    tasks = np.zeros((len(ops.task_op), engine.NUM_FIELDS))
    tasks[:, engine.PENDING] = conditions[ops.task_op]
    of_op = np.diff(ops.base)
    # A message to all ranks of a group has all ranks as its senders, one to the same-numbered rank has one.
    sends = np.flatnonzero(program.op == Op.SEND)
    one_each = ops.to_same_rank[sends]
    messages = np.zeros((int(np.where(one_each, of_op[sends], 1).sum()), 4))
    messages[:, engine.FIRST_START] = inf
    messages[:, engine.UNSENT] = np.repeat(np.where(one_each, 1, of_op[sends]), np.where(one_each, of_op[sends], 1))
    # In a queue, one task of a rank is on the heap at a time; the two halves of an exchange may make it two.
    most_waiting = 2 * int(of_op[program.queue_ptr[:-1]].sum()) + 1
    return engine.State(
        tasks=tasks,
        messages=messages,
        unready=np.where(program.op == Op.SYNC, of_op, 0).astype(np.int32),
        together=np.zeros(program.num_ops),
        free=np.zeros((int(sizes.sum()), engine.NUM_RESOURCES)),
        keys=np.zeros(most_waiting),
        heap=np.zeros(most_waiting, dtype=np.int64),
        unsummed=np.array([of_op[program.op == Op.SYNC].sum()]),
    )
