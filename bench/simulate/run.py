"""From a program and its costs to columns for the loop, and from its answer to a timeline."""

from functools import reduce
from math import gcd, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.action import COMPUTE, Action, view
from bench.check import PlanError, check
from bench.cost import Costs
from bench.edges import ends
from bench.errors import BadInput
from bench.program import Op, Program
from bench.simulate import engine
from bench.simulate.ahead import ahead_of_each
from bench.simulate.memory import Moved, held_bytes, highest_bytes
from bench.simulate.wiring import Sizes, Wiring
from bench.timeline import Timeline

Floats = NDArray[np.float64]
ROUNDING = 1e-9


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
    stage = _Stage.of(program, costs, fold)
    moved = Moved.of(program, costs, stage.ops.base, stage.sizes) if allocations else None
    return _timeline(program, stage, _whole(program, stage), moved)


def simulate_with_peaks(program: Program, costs: Costs, *, allocations: bool = True) -> tuple[Timeline, Floats]:
    """What `simulate` and `peak_bytes` say of a step."""
    stage = _Stage.of(program, costs)
    moved = Moved.of(program, costs, stage.ops.base, stage.sizes)
    timeline = _timeline(program, stage, _whole(program, stage), moved if allocations else None)
    return timeline, highest_bytes(program, costs, stage.sizes, moved, timeline.start_s, timeline.end_s)


def _timeline(program: Program, stage: "_Stage", tasks: Floats, moved: Moved | None) -> Timeline:
    """Of `engine.State.tasks` at the end; without `moved`, tasks allocate nothing."""
    _, table, ops, sizes = stage
    task_op = ops.task_op
    place = np.arange(len(task_op)) - ops.base[task_op]
    row, op = ops.row[task_op], program.op[task_op]
    groups = program.plan.placement.groups
    first = np.array([group.first for group in groups], dtype=np.int32)
    return Timeline(
        source="simulated",
        queues=program.queues,
        rank=(first[program.group[task_op]] + place).astype(np.int32),
        queue=program.queue_of()[task_op],
        op=op,
        code=program.code[task_op],
        ready_s=tasks[:, engine.READY].copy(),
        start_s=tasks[:, engine.START].copy(),
        end_s=tasks[:, engine.END].copy(),
        bytes=np.where(op == Op.RECV, table.bytes_in[row, place], table.bytes_out[row, place]),
        flops=table.flops[row, place],
        alloc_bytes=np.zeros(len(task_op)) if moved is None else moved.taken - moved.given,
        stands_for=groups[0].size // int(sizes[0]),
    )


class Step(NamedTuple):
    """Of a step, its time and [timed ranks, in the order of the placement's groups] the most bytes held at once."""

    step_time_s: float
    peak_bytes: Floats


def time_step(program: Program, costs: Costs, limit_s: float = inf) -> Step | None:
    """What `simulate` and `peak_bytes` say of a step, without its timeline.

    None where the step takes longer than `limit_s`: found from its longest chain of operations before anything is
    played, or on the way as soon as what is left takes too long even with nothing in its way.
    """
    stage = _Stage.of(program, costs)
    ahead_s = np.zeros(program.num_ops)
    if limit_s < inf:
        ahead_s = stage.ahead_s(program)
        if ahead_s.max(initial=0.0) > limit_s * (1 + ROUNDING):
            return None
    tasks = _play(program, stage, ahead_s, limit_s)
    if tasks is None:
        return None
    start_s, end_s = tasks[:, engine.START], tasks[:, engine.END]
    step_s = float(end_s.max(initial=0.0))
    return None if step_s > limit_s else Step(step_s, held_bytes(program, costs, stage.sizes, start_s, end_s))


def least_ahead_s(program: Program, costs: Costs) -> Floats:
    """[operations]: seconds from the start of each to the end of the step, at the least; see `bench.simulate.ahead`."""
    return _Stage.of(program, costs).ahead_s(program)


class _Stage(NamedTuple):
    """What a program is played on."""

    wiring: Wiring
    table: "_Table"
    ops: engine.Ops
    sizes: Sizes

    @classmethod
    def of(cls, program: Program, costs: Costs, fold: bool | None = None) -> "_Stage":
        """`fold` as in `simulate`."""
        if fold is None:
            fold = costs.uniform
        elif fold and not costs.uniform:
            raise BadInput("fold", fold, "False where the ranks of a group differ")
        groups = program.plan.placement.groups
        stands_for = reduce(gcd, (group.size for group in groups)) if fold else 1
        sizes = np.array([group.size // stands_for for group in groups])
        table, wiring = _Table(program, costs, sizes), Wiring.of(program, sizes)
        return cls(wiring, table, wiring.ops_at(program, table.row_of), sizes)

    def ahead_s(self, program: Program) -> Floats:
        return ahead_of_each(program, self.wiring, self.ops, *self.table.least())


def _whole(program: Program, stage: _Stage) -> Floats:
    """`_play` to the end of the step."""
    tasks = _play(program, stage, np.zeros(program.num_ops), inf)
    assert tasks is not None  # no limit to be longer than
    return tasks


def _play(program: Program, stage: _Stage, ahead_s: Floats, limit_s: float) -> Floats | None:
    """`engine.State.tasks` at the end; None where the step is sure to take longer than `limit_s`."""
    state = stage.wiring.state(stage.sizes)
    # Sums come out a little different in another order.
    num_tasks, limit_s = len(stage.ops.task_op), limit_s * (1 + ROUNDING)
    done = engine.run(num_tasks, stage.ops, stage.table.durations, state, ahead_s, limit_s)
    if done < 0:
        return None
    if done != num_tasks:
        check(program)
        raise PlanError("plan", f"{done} of {num_tasks} tasks", "a plan that ends", "")
    return state.tasks


class _Table:
    """Costs by row and rank. Rows: templates that cost differently, then SYNC and UPDATE of every group; `row_of` each
    template."""

    def __init__(self, program: Program, costs: Costs, sizes: Sizes) -> None:
        self.placement = program.plan.placement
        different, self.row_of = costs.alike(program.templates)
        shape = (len(different) + 2 * len(sizes), int(sizes.max()))
        first, second, first_in, second_in, latency, self.flops, self.bytes_out, self.bytes_in = np.zeros((8, *shape))
        self.durations = engine.Durations(first, second, first_in, second_in, latency)
        self._ranks = np.full((2, shape[0]), shape[1])  # of the sending end, or the only one, and of the receiving
        index = self.placement.index
        for row, template in enumerate(different):
            action = view(int(program.templates[template]))
            if action.kind in COMPUTE:
                n = sizes[index[self.placement.home(action.kind, action.layer, action.microbatch)]]
                self._ranks[:, row] = n
                first[row, :n] = costs.seconds(action)[:n]
                self.flops[row, :n] = costs.flops(action)[:n]
            elif program.volumes[template].terms:
                self._transfer(row, action, costs, sizes)
        for g, group in enumerate(self.placement.groups):
            sync, update = (len(different) + 2 * g + offset for offset in (0, 1))
            first[sync], first[update] = costs.sync_s(group.name), costs.update_s(group.name)
            self.bytes_out[sync] = costs.sync_bytes(group.name)

    def _transfer(self, row: int, action: Action, costs: Costs, sizes: Sizes) -> None:
        source, target = (sizes[self.placement.index[name]] for name in ends(self.placement, action))
        self._ranks[:, row] = source, target
        ports, crossing = costs.ports(action), costs.message(action).crossing
        d = self.durations
        d.first[row, :source], d.second[row, :source] = ports.nic_send_s[:source], ports.nvlink_send_s[:source]
        d.first_in[row, :target] = ports.nic_receive_s[:target]
        d.second_in[row, :target] = ports.nvlink_receive_s[:target]
        d.latency[row, :target] = ports.latency_s[:target]
        self.bytes_out[row, :source] = crossing.sum(axis=1)[:source]
        self.bytes_in[row, :target] = crossing.sum(axis=0)[:target]

    def least(self) -> tuple[Floats, Floats]:
        """By row, on the rank where it is least: seconds of an operation, or of a transfer's sending end; [2, rows] of
        its receiving end, and of its latency."""
        d = self.durations
        takes, receives = np.maximum(d.first, d.second), np.maximum(d.first_in, d.second_in)
        own, there = (np.arange(takes.shape[1]) < each[:, None] for each in self._ranks)
        least = [
            column.min(axis=1, where=ranks, initial=inf)
            for column, ranks in ((takes, own), (receives, there), (d.latency, there))
        ]
        return least[0], np.stack(least[1:])
