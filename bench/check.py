"""Is a plan right? Complete (`require_complete`), free of deadlock (`check`). Errors show the queues around the fault.

`check` runs the program with zero durations and blocking rendezvous: a send and its receive finish together, when both
stand at the head of their queues and all that either waits for is done. What finishes here cannot deadlock on a
transport that buffers more.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from bench.action import END_OF_STEP, TRANSFERS, Action, Codes, Kind, at_microbatch, pack, templates_of, unpack, view
from bench.edges import ends
from bench.errors import BadInput
from bench.graph import Graph, ends_of
from bench.plan import ActionColumn, Plan
from bench.program import Op, Program

SHOWN_AROUND_FAULT = 4
COMPILED_FROM = 20_000
"""Operations from which on a program is run by compiled code; what is wrong is then said by the other."""


class PlanError(BadInput):
    """A plan that cannot be run.

    `grid` shows the queues around the fault, the marker under it; `actions` are those at fault, none where one is
    missing.
    """

    def __init__(self, field: str, value: object, allowed: str, grid: str, actions: tuple[Action, ...] = ()) -> None:
        super().__init__(field, value, allowed)
        self.grid = grid
        self.actions = actions


def require_complete(plan: Plan, graph: Graph) -> None:
    """Every action the model needs stands exactly once, in a queue of its group, for every micro-batch; nothing else.

    Raises PlanError naming the first fault.
    """
    needed = graph.actions
    homes, _ = ends_of(plan.placement, needed)
    for key, queue in plan.queues.items():
        bases = templates_of(queue.codes, plan.directions)
        found = np.unique(bases)
        found = found[~_ends_step(found)]
        number = np.minimum(np.searchsorted(needed, found), len(needed) - 1)
        known = needed[number] == found
        strange = ~known | (homes[number] != plan.placement.index[key[0]])
        for i in np.flatnonzero(strange)[:1]:
            first = int(np.flatnonzero(bases == found[i])[0])
            home = _home(plan, view(int(found[i]))) if known[i] else None
            raise _fault(plan, key, first, f"on group {home}" if home else "an action of this model and placement")
        for place in np.flatnonzero(unpack(queue.codes).microbatch >= plan.num_microbatches)[:1]:
            raise _fault(plan, key, int(place), f"micro-batches 0 to {plan.num_microbatches - 1}")
    _require_once(plan, needed)
    for group in plan.placement.groups:
        _require_end_of_step(plan, group.name)


def _ends_step(codes: Codes) -> NDArray[np.bool_]:
    return np.isin(unpack(codes).kind, [int(kind) for kind in END_OF_STEP])


def _require_once(plan: Plan, needed: Codes) -> None:
    """Nothing twice, nothing missing."""
    every = np.concatenate([pack([]), *(queue.codes for queue in plan.queues.values())])
    every = every[~_ends_step(every)]
    codes, first, times = np.unique(every, return_index=True, return_counts=True)
    twice = np.flatnonzero(times > 1)
    if len(twice):
        raise _fault(plan, *_where(plan, int(codes[twice[first[twice].argmin()]]), 1), "once")
    if len(codes) == len(needed) * (plan.num_microbatches // plan.directions):
        return
    columns = unpack(needed)
    in_order = needed[np.lexsort((columns.pass_, columns.layer))]
    later = np.arange(0, plan.num_microbatches, plan.directions)
    wanted = at_microbatch(in_order[:, None], later).ravel()
    raise _missing(plan, [view(int(code)) for code in wanted[~np.isin(wanted, codes)]])


def _home(plan: Plan, action: Action) -> str | None:
    if action.kind in END_OF_STEP:
        return None
    return (
        ends(plan.placement, action)[0]
        if action.kind in TRANSFERS
        else plan.placement.home(action.kind, action.layer, action.microbatch)
    )


def _require_end_of_step(plan: Plan, group: str) -> None:
    """One sync, then one update, behind every computation of their queue."""
    for kind in (Kind.SYNC, Kind.UPDATE):
        found = [
            (key, place)
            for key, queue in plan.queues.items()
            if key[0] == group
            for place in np.flatnonzero(unpack(queue.codes).kind == kind).tolist()
        ]
        if len(found) != 1:
            raise PlanError(
                f"plan: group {group}",
                f"{len(found)} x {Action(kind)}",
                "exactly one",
                _queues_of(plan, group),
            )
        key, place = found[0]
        rest = unpack(plan.queues[key].codes[place + 1 :]).kind
        if len(rest) and not np.isin(rest, [int(k) for k in END_OF_STEP]).all():
            raise _fault(plan, key, place, "after every computation of its queue")


def _where(plan: Plan, code: int, nth: int) -> tuple[tuple[str, str], int]:
    places = [(key, int(p)) for key, queue in plan.queues.items() for p in np.flatnonzero(queue.codes == code)]
    return places[nth]


def _fault(plan: Plan, key: tuple[str, str], place: int, allowed: str) -> PlanError:
    queue = plan.queues[key]
    grid = around(key, queue, place)
    return PlanError(f"plan: queue {key[0]} {key[1]}", str(queue[place]), allowed, grid, (queue[place],))


def _missing(plan: Plan, missing: list[Action]) -> PlanError:
    """The first that is missing, with the queue where its neighbours stand."""
    action, others = missing[0], len(missing) - 1
    home = _home(plan, action)
    what = f"{action} is missing" + (f", and {others} more" if others else "")
    near = _neighbour(plan, action, str(home))
    grid = around(*near) if near else _queues_of(plan, str(home))
    return PlanError("plan", what, f"once, on group {home}" + (", near the marker" if near else ""), grid)


def _neighbour(plan: Plan, action: Action, home: str) -> tuple[tuple[str, str], ActionColumn, int] | None:
    """Where the action of its group stands that has most in common with one that is missing; None without any."""
    best, found = 0.0, None
    moves = action.kind in TRANSFERS
    for key, queue in plan.queues.items():
        if key[0] != home or not len(queue):
            continue
        columns = unpack(queue.codes)
        kind, pass_ = columns.kind == action.kind, columns.pass_ == action.pass_
        away = abs(columns.microbatch - action.microbatch)
        siblings = kind & pass_ & (columns.layer == action.layer)
        # Of a part another pass, of a transfer what goes with it: first that of its layer and micro-batch, then the
        # same of the nearest micro-batch; a transfer in the stream that has its like.
        alike = 4 * ((columns.layer == action.layer) & (away == 0)) + (kind + 4 * pass_ if moves else 2 * kind + pass_)
        alike = alike + siblings / (2 + away) + 8 * (moves and siblings.any())
        place = int(alike.argmax())
        if alike[place] > best:
            best, found = float(alike[place]), (key, queue, place)
    return found


def _queues_of(plan: Plan, group: str) -> str:
    lines = [around(key, queue, len(queue), "") for key, queue in plan.queues.items() if key[0] == group]
    return "\n".join(lines) or f"group {group} has no queue"


def around(key: tuple[str, str], queue: ActionColumn, place: int, mark: str = "^") -> str:
    """The queue near `place`, with a marker under it."""
    low, high = max(0, place - SHOWN_AROUND_FAULT), min(len(queue), place + SHOWN_AROUND_FAULT + 1)
    words = [str(action) for action in queue[low:high]]
    head = f"{key[0]:>4} {key[1]:<8} [{low}] " + ("... " if low else "")
    tail = " ..." if high < len(queue) else ""
    line = head + " ".join(words) + tail
    if not mark or place >= high:
        return line
    at = len(head) + sum(len(word) + 1 for word in words[: place - low])
    return f"{line}\n{' ' * at}{mark * len(words[place - low])}"


def check(program: Program) -> None:
    """Run with zero durations and blocking rendezvous. Raises PlanError showing every blocked queue."""
    if program.num_ops >= COMPILED_FROM and _ends(program):
        return
    run = _Rendezvous(program)
    run.run()
    if run.num_done != program.num_ops:
        blocked = run.blocked()
        raise PlanError(
            "plan",
            f"deadlock after {run.num_done} of {program.num_ops} operations",
            "an order that ends",
            blocked,
            run.heads(),
        )


def _ends(program: Program) -> bool:
    from bench.rendezvous import num_finished  # which needs what this module has

    return num_finished(program) == program.num_ops


class _Rendezvous:
    """The zero-duration run: a worklist of queues whose head may have become ready."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.head = program.queue_ptr[:-1].astype(np.int64).tolist()
        self.end = program.queue_ptr[1:].tolist()
        self.queue_of = program.queue_of().tolist()
        self.done = [False] * program.num_ops
        self.num_done = 0
        self.op, self.partner = program.op.tolist(), program.partner.tolist()
        self.dep_ptr, self.deps = program.dep_ptr.tolist(), program.deps.tolist()
        self.syncs = [int(k) for k in np.flatnonzero(program.op == Op.SYNC)]
        self.waiting: dict[int, set[int]] = {}  # operation -> queues to look at again once it is done

    def run(self) -> None:
        work = deque(range(len(self.head)))
        while work:
            q = work.popleft()
            while self.head[q] < self.end[q]:
                k = self.head[q]
                obstacle = self._obstacle(k)
                if obstacle is not None:
                    self.waiting.setdefault(obstacle, set()).add(q)
                    break
                for finished in self._finish(k):
                    work.extend(self.waiting.pop(finished, ()))
                    work.append(self.queue_of[finished])

    def _waits_for(self, k: int) -> list[int]:
        if self.op[k] == Op.UPDATE:
            return self.syncs
        return self.deps[self.dep_ptr[k] : self.dep_ptr[k + 1]]

    def _obstacle(self, k: int) -> int | None:
        """An operation that has to finish before `k` can, or None."""
        for d in self._waits_for(k):
            if not self.done[d]:
                return d
        other = self.partner[k]
        if other < 0 or self.done[other]:
            return None
        q = self.queue_of[other]
        # In one queue, the receiving half follows its sending half at once.
        if self.head[q] != other and not (q == self.queue_of[k] and other == k + 1):
            return other - 1
        for d in self._waits_for(other):
            if not self.done[d]:
                return d
        return None

    def _finish(self, k: int) -> list[int]:
        both = [k] if self.partner[k] < 0 or self.done[self.partner[k]] else [k, self.partner[k]]
        for each in both:
            self.done[each] = True
            self.num_done += 1
        for each in both:
            q = self.queue_of[each]
            while self.head[q] < self.end[q] and self.done[self.head[q]]:
                self.head[q] += 1
        return both

    def heads(self) -> tuple[Action, ...]:
        """The action at which each queue stands still."""
        standing = (head for head, end in zip(self.head, self.end, strict=True) if head < end)
        return tuple(dict.fromkeys(self.program.action(head) for head in standing))

    def blocked(self) -> str:
        """Every queue that stands, with what it waits for and where that is; first those that wait for themselves."""
        own: list[str] = []
        others: list[str] = []
        for q, (group, stream) in enumerate(self.program.queues):
            k = self.head[q]
            if k < self.end[q]:
                obstacle = self._obstacle(k)
                why = "nothing" if obstacle is None else self.program.describe(obstacle) + self._stands(obstacle, q)
                left = " ".join(self._ahead(k, self.end[q])[:SHOWN_AROUND_FAULT])
                shown = f"{group:>4} {stream:<8} at {k - self.program.queue_ptr[q]}: {left}\n{'':14}^ waits for {why}"
                (own if obstacle is not None and self.queue_of[obstacle] == q else others).append(shown)
        return "\n".join(own + others)

    def _ahead(self, low: int, high: int) -> list[str]:
        """Actions of a queue from one operation to another; the two halves of an exchange are one."""
        ahead = range(low, high)
        return [str(self.program.action(k)) for k in ahead if k == low or self.partner[k] != k - 1]

    def _stands(self, k: int, queue: int) -> str:
        """Where an operation stands that `queue` waits for."""
        own = self.queue_of[k]
        ahead = len(self._ahead(self.head[own], k))
        if own == queue:
            return f", which stands {ahead} further on in this same queue"
        group, stream = self.program.queues[own]
        return f", {ahead} further on in {group} {stream}" if ahead else f", at which {group} {stream} stands"
