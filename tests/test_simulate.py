from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cases import cases, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.action import COMPUTE, Action, Codes, Kind, Pass, unpack
from bench.assumptions import get_assumptions
from bench.bound import bound, bound_s, placement_bound_s
from bench.case import Case
from bench.check import PlanError
from bench.cost import Costs
from bench.edges import edges
from bench.errors import BadInput
from bench.load import Ports
from bench.lower import lower
from bench.metrics import bubble_fraction, exposed_by_free_comm_s, exposed_comm_s
from bench.models import get_model
from bench.plan import ActionColumn, Plan
from bench.predict import costs_of
from bench.program import Held, Op, Program
from bench.simulate import peak_bytes, simulate
from bench.system import plan_of
from bench.timeline import Timeline

ROUTINGS = ["balanced", "zipf:1.2", "hot-rank", "empty-expert"]
PORTS = ("nic out", "nvlink out", "nic in", "nvlink in")


def lowered(case: Case, routing: str = "balanced", assumed: str = "h200-measured") -> tuple[Program, Costs]:
    case = case.model_copy(update={"workload": case.workload.model_copy(update={"routing": routing})})
    program = lower(plan_of(case), case.model)
    return program, costs_of(case, program.plan.placement, get_assumptions(assumed))


@dataclass(frozen=True, eq=False)
class ChosenCosts(Costs):
    """Costs of which seconds of compute actions are chosen by kind and pass; nothing else takes time."""

    chosen: tuple[tuple[Kind, Pass, float], ...] = ()

    def seconds(self, action: Action) -> np.ndarray:
        known = {(kind, pass_): seconds for kind, pass_, seconds in self.chosen}
        return np.full(len(super().seconds(action)), known.get((action.kind, action.pass_), 0.0))

    def ports(self, action: Action) -> Ports:
        return Ports(*(np.zeros_like(column) for column in super().ports(action)))

    def sync_s(self, group: str) -> float:
        return 0.0

    def update_s(self, group: str) -> float:
        return 0.0


def tasks_of(program: Program, timeline: Timeline) -> dict[tuple[int, int], tuple[float, float, float]]:
    """(operation, number of the rank in its group) -> ready, start, end."""
    groups = program.plan.placement.groups
    sizes = [groups[g].size // timeline.stands_for for g in program.group]
    keys = [(k, i) for k, size in enumerate(sizes) for i in range(size)]
    columns = (timeline.ready_s, timeline.start_s, timeline.end_s)
    return dict(zip(keys, zip(*(column.tolist() for column in columns), strict=True), strict=True))


# Hand-made plans and known step times


@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 3), (2, 1, 1), (2, 1, 4), (4, 1, 8), (2, 2, 4), (2, 2, 8)])
def test_bubble_of_1f1b_is_p_minus_1_over_m_v(p: int, v: int, m: int) -> None:
    """A backward takes two forwards, its weight gradient included; nothing else takes time."""
    program, costs = lowered(make_case("ep", ep=1, pp=p, vpp=v, microbatches=m))
    layer = ((Kind.ATTENTION, Pass.F, 1.0), (Kind.ATTENTION, Pass.B, 2.0))
    timeline = simulate(program, ChosenCosts(costs.case, costs.placement, chosen=layer))
    bubble = bubble_fraction(timeline)
    assert bubble / (1 - bubble) == pytest.approx((p - 1) / (m * v))
    assert timeline.step_time_s == pytest.approx((1 + (p - 1) / (m * v)) * m * 3 * 4 / p)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_without_overlap_the_step_is_the_sum_of_all_that_a_rank_does(ep: int) -> None:
    # Long enough that a message takes longer than its latency, so that one of the two ports is always busy.
    program, costs = lowered(make_case("ep", ep=ep, microbatches=3, seq_len=1 << 16), assumed="datasheet")
    once = 0.0
    for action in actions_of(costs):
        if action.kind in COMPUTE:
            once += float(costs.seconds(action)[0])
        else:
            once += costs.transfer_s(action)
    expected = 3 * once + costs.sync_s("S0") + costs.update_s("S0")
    timeline = simulate(program, costs)
    assert timeline.step_time_s == pytest.approx(expected)
    assert exposed_comm_s(timeline) == pytest.approx(bubble_fraction(timeline) * timeline.step_time_s)


def test_free_communication_leaves_the_compute_bound() -> None:
    program, costs = lowered(make_case("ep", ep=4, microbatches=3), assumed="datasheet")
    free = costs.with_free_communication()
    assert simulate(program, free).step_time_s == pytest.approx(bound(program, free).compute_s)
    step = simulate(program, costs).step_time_s
    hidden = step - simulate(program, free).step_time_s
    assert exposed_by_free_comm_s(program, costs, step) == pytest.approx(hidden)
    assert exposed_by_free_comm_s(program, costs) == pytest.approx(hidden)
    assert hidden > 0


def test_a_hot_rank_gates_the_step() -> None:
    case = make_case("disagmoe", "qwen3-30b", seq_len=4096, attention_ranks=2, expert_ranks=4, cluster="h800x1")
    even, hot = (simulate(*lowered(case, routing)).step_time_s for routing in ("balanced", "hot-rank"))
    _, costs = lowered(case, "hot-rank")
    busy = 4 * sum(float(costs.seconds(a)[0]) for a in actions_of(costs) if a.kind is Kind.EXPERT)
    assert hot > even
    assert hot > busy


def test_a_plan_that_locks_is_refused_with_its_queues() -> None:
    case = make_case("ep", ep=1, pp=2, microbatches=2)
    plan = plan_of(case)
    queue = plan.queues["S0", "compute"].codes
    # The first stage wants its first gradient before it has sent anything on.
    turned = np.concatenate([queue[unpack(queue).pass_ != Pass.F], queue[unpack(queue).pass_ == Pass.F]])
    program, costs = lowered(case)
    locked = lower(_with_queue(plan, _end_last(turned)), case.model)
    with pytest.raises(PlanError, match="deadlock") as error:
        simulate(locked, costs)
    assert "S0" in error.value.grid
    assert simulate(program, costs).step_time_s > 0


def _end_last(codes: Codes) -> Codes:
    ends = np.isin(unpack(codes).kind, [int(Kind.SYNC), int(Kind.UPDATE)])
    return np.concatenate([codes[~ends], codes[ends]])


def _with_queue(plan: Plan, codes: Codes) -> Plan:
    return replace(plan, queues={**plan.queues, ("S0", "compute"): ActionColumn(codes)})


def actions_of(costs: Costs) -> set[Action]:
    graph = edges(costs.case.model, costs.placement, costs.recompute, costs.chunks)
    return {end for edge in graph for end in (edge.src, edge.dst, edge.via) if end is not None}


# Properties over random small layouts of both systems


@given(cases(), st.sampled_from(ROUTINGS), st.sampled_from(["datasheet", "h200-measured"]))
@settings(max_examples=40, deadline=None)
def test_never_below_the_bound(case: Case, routing: str, assumed: str) -> None:
    program, costs = lowered(case, routing, assumed)
    step = simulate(program, costs).step_time_s
    assert step >= bound_s(program, costs) * (1 - 1e-9)
    assert step >= simulate(program, costs.with_free_communication()).step_time_s * (1 - 1e-9)
    placed = placement_bound_s(program.plan.placement, costs, program.plan.num_microbatches)
    assert placed == bound_s(program, costs)


@given(cases(), st.sampled_from(ROUTINGS))
@settings(max_examples=30, deadline=None)
def test_work_is_conserved_and_resources_are_used_once_at_a_time(case: Case, routing: str) -> None:
    program, costs = lowered(case, routing)
    timeline = simulate(program, costs, fold=False)
    used: dict[tuple[int, str], list[tuple[float, float]]] = {}
    place = timeline.rank - np.array([program.plan.placement.groups[g].first for g in _groups(program, timeline)])
    for row in range(len(timeline)):
        start, end, rank = timeline.start_s[row], timeline.end_s[row], int(timeline.rank[row])
        assert timeline.ready_s[row] <= start <= end
        for resource, taken in _taken(costs, timeline, row, int(place[row])).items():
            assert end - start >= taken * (1 - 1e-9)
            if taken > 0:
                used.setdefault((rank, resource), []).append((start, start + taken))
    for intervals in used.values():
        for (_, earlier_end), (later_start, _) in pairwise(sorted(intervals)):
            assert later_start >= earlier_end - 1e-12
    computed = timeline.op == Op.COMPUTE
    each_way = program.plan.num_microbatches / program.plan.directions
    seconds = sum(float(costs.seconds(a).sum()) for a in actions_of(costs) if a.kind in COMPUTE)
    assert (timeline.end_s - timeline.start_s)[computed].sum() == pytest.approx(seconds * each_way)
    crossing = sum(float(costs.message(a).crossing.sum()) for a in actions_of(costs) if a.kind not in COMPUTE)
    for op in (Op.SEND, Op.RECV):
        moved = timeline.bytes[timeline.op == op].sum()
        assert moved == pytest.approx(crossing * each_way)


def _groups(program: Program, timeline: Timeline) -> list[int]:
    index = program.plan.placement.index
    return [index[program.queues[q][0]] for q in timeline.queue]


def _taken(costs: Costs, timeline: Timeline, row: int, place: int) -> dict[str, float]:
    """Seconds that a task takes each resource of its rank for, from its start on."""
    columns = unpack(timeline.code[row : row + 1])
    part = Kind(int(columns.kind[0])), Pass(int(columns.pass_[0])), int(columns.layer[0])
    action = Action(*part, int(columns.microbatch[0]))
    group = timeline.queues[timeline.queue[row]][0]
    match Op(timeline.op[row]):
        case Op.COMPUTE:
            return {"sms": float(costs.seconds(action)[place])}
        case Op.UPDATE:
            return {"sms": costs.update_s(group)}
        case Op.SYNC:
            return dict.fromkeys(PORTS, costs.sync_s(group))
        case Op.SEND:
            ports = costs.ports(action)
            return {"nic out": float(ports.nic_send_s[place]), "nvlink out": float(ports.nvlink_send_s[place])}
    ports = costs.ports(action)
    return {"nic in": float(ports.nic_receive_s[place]), "nvlink in": float(ports.nvlink_receive_s[place])}


@given(cases(), st.sampled_from(ROUTINGS))
@settings(max_examples=30, deadline=None)
def test_nothing_starts_before_what_it_waits_for(case: Case, routing: str) -> None:
    program, costs = lowered(case, routing)
    tasks = tasks_of(program, simulate(program, costs, fold=False))
    num_ranks = {k: len([1 for key in tasks if key[0] == k]) for k in range(program.num_ops)}
    syncs_end = max(end for (k, _), (_, _, end) in tasks.items() if program.op[k] == Op.SYNC)
    for (k, i), (_, start, end) in tasks.items():
        assert all(start >= tasks[d, i][2] for d in program.waits_for(k))
        if program.op[k] == Op.UPDATE:
            assert start >= syncs_end
        if program.op[k] == Op.RECV:
            partner = int(program.partner[k])
            same = program.action(k).kind in (Kind.RESIDUAL, Kind.HOP)
            senders = [i] if same else range(num_ranks[partner])
            assert start >= min(tasks[partner, s][1] for s in senders)
            assert end >= max(tasks[partner, s][2] for s in senders)
    for low, high in pairwise(program.queue_ptr.tolist()):
        for k in range(low, high - 1):
            if program.partner[k] != k + 1:
                assert all(tasks[k + 1, i][1] >= tasks[k, i][2] for i in range(num_ranks[k]))


@given(cases())
@settings(max_examples=30, deadline=None)
def test_one_rank_stands_for_several_where_they_are_alike(case: Case) -> None:
    program, costs = lowered(case)
    if not costs.uniform:
        with pytest.raises(BadInput, match="fold"):
            simulate(program, costs, fold=True)
        return
    folded, whole = simulate(program, costs), simulate(program, costs, fold=False)
    assert len(folded) * folded.stands_for == len(whole)
    every = tasks_of(program, whole)
    for key, times in tasks_of(program, folded).items():
        assert every[key] == pytest.approx(times)
    peaks, all_peaks = peak_bytes(program, costs, folded), peak_bytes(program, costs, whole)
    assert np.repeat(peaks, folded.stands_for) == pytest.approx(all_peaks)


def test_unlike_group_sizes_fold_by_their_common_divisor() -> None:
    program, costs = lowered(
        make_case("disagmoe", cluster="h800x8", attention_ranks=16, expert_ranks=8, model="qwen3-30b")
    )
    timeline = simulate(program, costs)
    assert timeline.stands_for == 8
    assert sorted(set(timeline.rank.tolist())) == [0, 1, 16]
    assert timeline.step_time_s == pytest.approx(simulate(program, costs, fold=False).step_time_s)


def test_folding_what_differs_is_refused() -> None:
    program, costs = lowered(make_case("ep", ep=4), "zipf:1")
    with pytest.raises(BadInput, match="fold"):
        simulate(program, costs, fold=True)
    assert simulate(program, costs).stands_for == 1


# A second simulator, in plain Python


class Brute:
    """Plays a program by looking, again and again, through everything that has not run for what comes next.

    Written from the semantics in `simulate`'s docstring: no heap, no counters, no columns.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.costs = costs
        self.groups = program.plan.placement.groups
        self.times: dict[tuple[int, int], tuple[float, float, float]] = {}
        self.free: dict[tuple[int, str], float] = {}
        self.syncs = [k for k in range(program.num_ops) if program.op[k] == Op.SYNC]
        self.queue_start = set(program.queue_ptr.tolist())
        self.todo = [(k, i) for k in range(program.num_ops) for i in range(self.size(k))]
        self.sync_ready: dict[tuple[int, int], float] = {}

    def size(self, k: int) -> int:
        return self.groups[self.program.group[k]].size

    def run(self) -> dict[tuple[int, int], tuple[float, float, float]]:
        while self.todo:
            known = [(key, task) for task in self.todo if (key := self.known_at(*task)) is not None]
            _, task = min(known)
            self.todo.remove(task)
            self.start(*task)
        return self.times

    def senders(self, k: int, i: int) -> list[tuple[int, int]]:
        partner = int(self.program.partner[k])
        same = self.program.action(k).kind in (Kind.RESIDUAL, Kind.HOP)
        return [(partner, i)] if same else [(partner, s) for s in range(self.size(partner))]

    def ready_at(self, k: int, i: int) -> float | None:
        """When everything that it waits for is there; None where that is not known."""
        waits = [(d, i) for d in self.program.waits_for(k)]
        exchange = self.program.op[k] == Op.RECV and self.program.partner[k] == k - 1
        if k not in self.queue_start and not exchange:
            waits.append((k - 1, i))
        if self.program.op[k] == Op.UPDATE:
            waits += [(s, r) for s in self.syncs for r in range(self.size(s))]
        needed = [*waits, *(self.senders(k, i) if self.program.op[k] == Op.RECV else [])]
        if any(task not in self.times for task in needed):
            return None
        ready = max((self.times[task][2] for task in waits), default=0.0)
        if self.program.op[k] == Op.RECV:
            ready = max(ready, min(self.times[s][1] for s in self.senders(k, i)) + self.latency(k, i))
        return ready

    def known_at(self, k: int, i: int) -> float | None:
        if (k, i) in self.sync_ready:
            return None
        ready = self.ready_at(k, i)
        if ready is not None and self.program.op[k] == Op.RECV:
            return max(ready, *(self.times[s][1] for s in self.senders(k, i)))
        return ready

    def latency(self, k: int, i: int) -> float:
        return float(self.costs.ports(self.program.action(k)).latency_s[i])

    def needs(self, k: int, i: int) -> dict[str, float]:
        action, name = self.program.action(k), self.groups[self.program.group[k]].name
        match Op(self.program.op[k]):
            case Op.COMPUTE:
                return {"sms": float(self.costs.seconds(action)[i])}
            case Op.UPDATE:
                return {"sms": self.costs.update_s(name)}
            case Op.SYNC:
                return dict.fromkeys(PORTS, self.costs.sync_s(name))
        ports = self.costs.ports(action)
        if self.program.op[k] == Op.SEND:
            return {"nic out": float(ports.nic_send_s[i]), "nvlink out": float(ports.nvlink_send_s[i])}
        return {"nic in": float(ports.nic_receive_s[i]), "nvlink in": float(ports.nvlink_receive_s[i])}

    def take(self, k: int, i: int, ready: float) -> float:
        """The first moment from which all resources it needs are free."""
        rank = self.groups[self.program.group[k]].first + i
        busy = [self.free.get((rank, name), 0.0) for name, seconds in self.needs(k, i).items() if seconds > 0]
        return max([ready, *busy])

    def occupy(self, k: int, i: int, start: float) -> float:
        rank = self.groups[self.program.group[k]].first + i
        needs = self.needs(k, i)
        for name, seconds in needs.items():
            if seconds > 0:
                self.free[rank, name] = start + seconds
        return start + max(needs.values())

    def start(self, k: int, i: int) -> None:
        ready = self.ready_at(k, i)
        assert ready is not None
        if self.program.op[k] == Op.SYNC:
            self.sync_ready[k, i] = ready
            self.todo.append((k, i))
            ranks = range(self.size(k))
            if all((k, r) in self.sync_ready for r in ranks):
                together = max(self.take(k, r, self.sync_ready[k, r]) for r in ranks)
                for r in ranks:
                    self.times[k, r] = (self.sync_ready[k, r], together, self.occupy(k, r, together))
                    self.todo.remove((k, r))
            return
        start = self.take(k, i, ready)
        end = self.occupy(k, i, start)
        if self.program.op[k] == Op.RECV:
            end = max(end, max(self.times[s][2] for s in self.senders(k, i)) + self.latency(k, i))
        self.times[k, i] = (ready, start, end)


SMALL: list[tuple[str, dict[str, Any]]] = [
    ("ep", {"ep": 2, "microbatches": 2}),
    ("ep", {"ep": 2, "pp": 2, "microbatches": 2, "replicas": 2}),
    ("ep", {"ep": 4, "cluster": "h800x1", "microbatches": 1, "model": "tiny-shared"}),
    ("dualpipe", {"ep": 2, "pp": 2, "microbatches": 4}),
    ("disagmoe", {"attention_ranks": 2, "expert_ranks": 2, "microbatches": 2}),
    ("disagmoe", {"attention_ranks": 1, "expert_ranks": 2, "groups": 2, "round_length": 2, "microbatches": 2}),
    ("disagmoe", {"attention_ranks": 3, "expert_ranks": 1, "groups": 2, "microbatches": 1, "replicas": 2}),
]


@pytest.mark.parametrize("routing", ["balanced", "zipf:1.2"])
@pytest.mark.parametrize(("system", "layout"), SMALL)
@pytest.mark.parametrize("per_node", [8, 3])
def test_equals_a_simulator_in_plain_python(system: str, layout: dict[str, Any], routing: str, per_node: int) -> None:
    model = get_model(layout.get("model", "tiny")).model_copy(update={"num_layers": 2})
    case = make_case(system, **{"cluster": "h800x2", "seq_len": 1024, **layout, "model": model})
    cluster = case.cluster.model_copy(update={"gpus_per_node": per_node, "nics_per_node": per_node, "num_nodes": 6})
    program, costs = lowered(case.model_copy(update={"cluster": cluster}), routing)
    tasks = tasks_of(program, simulate(program, costs, fold=False))
    for key, times in Brute(program, costs).run().items():
        assert tasks[key] == pytest.approx(times, rel=1e-12)


# Memory


@given(cases(), st.sampled_from(ROUTINGS))
@settings(max_examples=15, deadline=None)
def test_peak_memory_is_the_largest_sum_of_open_lifetimes(case: Case, routing: str) -> None:
    program, costs = lowered(case, routing)
    timeline = simulate(program, costs, fold=False)
    tasks = tasks_of(program, timeline)
    groups = program.plan.placement.groups
    expected = []
    for group in groups:
        for i in range(group.size):
            spans = _spans(program, costs, tasks, group.name, i)
            most = max(sum(b for low, high, b in spans if low <= at < high) for at, _, _ in spans)
            expected.append(costs.static_bytes(group.name) + most)
    assert peak_bytes(program, costs, timeline) == pytest.approx(expected)


def _spans(
    program: Program, costs: Costs, tasks: dict[tuple[int, int], tuple[float, float, float]], group: str, i: int
) -> list[tuple[float, float, float]]:
    """(from, to, bytes) of everything that a rank holds."""
    found = []
    lifetimes = program.lifetimes
    for held, first, last in zip(
        lifetimes.held.tolist(), lifetimes.first.tolist(), lifetimes.last.tolist(), strict=True
    ):
        if program.plan.placement.groups[program.group[first]].name == group:
            what = program.action(last if held == Held.SENT else first)
            found.append((tasks[first, i][1], tasks[last, i][2], float(costs.held_bytes(Held(held), what)[i])))
    for (k, rank), (_, start, end) in tasks.items():
        if rank == i and program.op[k] == Op.COMPUTE and program.plan.placement.groups[program.group[k]].name == group:
            found.append((start, end, float(costs.working_bytes(program.action(k))[i])))
    return found


@given(cases())
@settings(max_examples=15, deadline=None)
def test_what_is_allocated_is_given_back(case: Case) -> None:
    program, costs = lowered(case)
    timeline = simulate(program, costs)
    left = np.bincount(timeline.rank, timeline.alloc_bytes)
    assert np.abs(left).max() <= 1e-9 * np.abs(timeline.alloc_bytes).sum()
    assert timeline.alloc_bytes.max() > 0


def test_more_micro_batches_in_flight_hold_more() -> None:
    """1F1B: the first of four stages holds four micro-batches' activations, the third one two."""
    program, costs = lowered(make_case("ep", ep=1, pp=4, microbatches=8, seq_len=4096))
    static = np.array([costs.static_bytes(group.name) for group in program.plan.placement.groups])
    above = peak_bytes(program, costs, simulate(program, costs)) - static
    assert above[0] > above[1] > above[2]
    assert above[0] > 1.5 * above[2]
