"""The allocation as a mixed-integer linear programme, solved by HiGHS.

Minimising max(T_A, T_F) is not linear in the numbers of GPUs: T_A = max(C_A / (P M), V_A / (B NICs)). Its inverse, the
rate r, is: every resource caps r by a number of GPUs or NICs times a constant. So r is maximised:

    max  r
    s.t. r <= sum_j cap_kj x_j                     each resource k: p R M / C_A, p R N / C_F, ... of candidate j
         r <= sum_j (min_k cap_kj) x_j             implied, as x is integral; makes the relaxation tight
         sum_j x_j = 1                             one candidate
         sum_j gpus_j x_j <= W                     GPUs of the cluster
         sum_j bytes_j x_j <= memory               attention ranks; expert ranks
         x_j in {0, 1},  r >= 0

With NIC sets, integers a_j and f_j count the NICs of a pair of groups, a_j + f_j <= NICs (M + N) x_j, and the two NIC
rows are r <= sum_j (p R / V_A) a_j and r <= sum_j (p R / V_F) f_j. M and N run over the divisors that the batch and the
experts allow, which is why candidates are binaries: to divide is no linear constraint on an integer.

Second, at that rate, the fewest GPUs: it is then that model FLOPs over the peak of the GPUs used (MFU) is largest.
Third, the least work for the busier side's NICs.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.case import Layout
from bench.errors import BadInput
from systems.disagmoe.planner.problem import RESOURCES, Problem

Floats = NDArray[np.float64]

CONSTRAINTS = ("GPUs", "attention memory", "expert memory")
DEFAULT_LIMIT_S = 10.0
TIME_LIMIT = "time_limit_s"
"""The field of the error where the limit came before any allocation."""
RATE_TOLERANCE = 1e-6
"""Rates are equal within this share: the solver's own tolerance is of that order."""
_ATTENTION_NICS, _EXPERT_NICS = RESOURCES.index("attention NICs"), RESOURCES.index("expert NICs")
_TIME_LIMIT, _INFEASIBLE = 1, 2  # scipy's status


@dataclass(frozen=True, eq=False)
class Allocation:
    """A solution.

    Args:
        candidate: its number in the problem.
        nics: NICs of an attention and of an expert group; fractions where a NIC serves several GPUs.
        steps_per_s: r.
        most_steps_per_s: what the solver has proven that no allocation exceeds.
        proven: whether the search ended; if not, this is the incumbent at the time limit.
        solve_s: seconds in the solver, over all its objectives.
    """

    problem: Problem
    candidate: int
    nics: tuple[float, float]
    steps_per_s: float
    most_steps_per_s: float
    proven: bool
    solve_s: float

    @property
    def layout(self) -> Layout:
        return self.problem.layout(self.candidate)

    @property
    def step_s(self) -> float:
        """max(T_A, T_F), with the pipeline's fill."""
        return 1.0 / self.steps_per_s

    @property
    def gap(self) -> float:
        """How much faster an allocation could still be, as far as the solver knows."""
        return max(0.0, self.most_steps_per_s / self.steps_per_s - 1.0)

    @property
    def num_gpus(self) -> int:
        return int(self.problem.num_gpus[self.candidate])

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds that each resource is busy in a step; the longest decide."""
        caps = self.problem.caps[:, self.candidate].copy()
        shape = self.problem.shapes[self.problem.shape[self.candidate]]
        own = (int(self.problem.data_ranks[self.candidate]), shape.option.expert_ranks)
        for row, nics, ranks in zip((_ATTENTION_NICS, _EXPERT_NICS), self.nics, own, strict=True):
            caps[row] *= nics / (ranks * self.problem.nics_per_gpu)
        return {name: 0.0 if np.isinf(cap) else float(1.0 / cap) for name, cap in zip(RESOURCES, caps, strict=True)}

    @property
    def binding(self) -> tuple[str, ...]:
        """The resources that cap the rate."""
        return tuple(name for name, busy in self.seconds.items() if busy >= self.step_s * (1 - 1e-3))

    @property
    def memory_bytes(self) -> tuple[float, float]:
        """Of an attention and of an expert rank, with one micro-batch in flight."""
        where = self.candidate
        return float(self.problem.attention_bytes[where]), float(self.problem.expert_bytes[where])

    def mfu(self, num_gpus: int | None = None) -> float:
        """Model FLOPs over the dense peak of `num_gpus` (those used, if not given)."""
        spec = self.problem.spec
        peak = spec.cluster.peak_flops(spec.workload.dtype) * (num_gpus or self.num_gpus)
        return self.problem.step_flops * self.steps_per_s / peak


def allocate(
    problem: Problem,
    *,
    time_limit_s: float = DEFAULT_LIMIT_S,
    excluded: NDArray[np.bool_] | None = None,
    without: Collection[str] = (),
) -> Allocation:
    """The best allocation: fastest, then with the fewest GPUs, then with the least work for its NICs.

    Args:
        excluded: candidates that may not be chosen.
        without: members of `CONSTRAINTS` to leave out.
    Raises:
        BadInput: no allocation is possible, with the constraint that cannot hold; or the time limit came first.
    """
    if not time_limit_s > 0:
        raise BadInput(TIME_LIMIT, time_limit_s, "more than 0")
    began = time.monotonic()
    programme = _Programme(problem, excluded, without)
    found = programme.solve(programme.rate, time_limit_s)
    if found.x is None:
        if found.status == _TIME_LIMIT:
            raise BadInput(TIME_LIMIT, time_limit_s, "more: no allocation was found in that time")
        raise infeasible(problem, excluded, without)
    proven = found.status == 0
    bound = -found.fun if found.mip_dual_bound is None else max(-found.fun, -found.mip_dual_bound)
    bound = min(bound, float(programme.tight.max()))  # which a solver that was stopped early has not found out yet
    kept = found.fun * (1 - RATE_TOLERANCE)
    solution, last = found.x, programme.rate
    for objective in (programme.gpus, programme.nic_load) if proven else ():
        programme.keep(last, kept)
        left_s = time_limit_s - (time.monotonic() - began)
        next_ = programme.solve(objective, max(left_s, 1e-3))
        if next_.x is None:
            break
        solution, last, kept = next_.x, objective, next_.fun + 1e-9
    candidate, nics = programme.read(solution)
    if not all(nics):  # a solver that was stopped before it dealt any out
        raise BadInput(TIME_LIMIT, time_limit_s, "more: no allocation was found in that time")
    chosen = Allocation(problem, candidate, nics, 1.0, 1.0, proven, time.monotonic() - began)
    rate = 1.0 / max(chosen.seconds.values())
    # Within the tolerance, a candidate with fewer GPUs may be a trifle slower than what was proven.
    most = max(bound * programme.scale, rate)
    return replace(chosen, steps_per_s=rate, most_steps_per_s=most)


def infeasible(problem: Problem, excluded: NDArray[np.bool_] | None = None, without: Collection[str] = ()) -> BadInput:
    """Says which constraint cannot hold, alone or with the others, and by how much."""
    open_ = np.ones(len(problem), dtype=bool) if excluded is None else ~excluded
    cluster = problem.spec.cluster
    if not open_.any():
        return BadInput("layout", "every candidate", "a candidate that is not excluded")
    gpus = problem.num_gpus[open_]
    if "GPUs" not in without and gpus.min() > cluster.num_gpus:
        need = f"at least {gpus.min()} GPUs for {problem.spec.model.name}"
        return BadInput("cluster", f"{cluster.name} ({cluster.num_gpus} GPUs)", need)
    within = open_ & (problem.num_gpus <= cluster.num_gpus)
    needs = np.maximum(problem.attention_bytes, problem.expert_bytes)[within]
    least = within.nonzero()[0][int(np.argmin(needs))]
    side = "attention" if problem.attention_bytes[least] > problem.expert_bytes[least] else "expert"
    least_gib, have = float(needs.min()) / 2**30, cluster.gpu.memory_bytes / 2**30
    fewer = problem.layout(int(least))
    return BadInput(
        "cluster",
        cluster.name,
        f"more memory or more GPUs: the {side} memory constraint cannot hold; the least that any of {within.sum()} "
        f"splits of {cluster.num_gpus} GPUs needs is {least_gib:.1f} GiB a GPU ({fewer}), {least_gib - have:.1f} GiB "
        f"more than its {have:.1f}",
    )


LEAST_SHARE = 0.5
"""Candidates with a smaller share of the rate of one that fits are left out before the solver: none is ever best."""
PICKS = 64
"""Candidates that all others are held against before the solver sees them."""


def _unbeaten(problem: Problem, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of candidates that all fit, those that may be best: presolve, as HiGHS's own takes longer than the rest.

    Left out is what has a much lower rate than another, and what one of the fastest equals or beats in every resource
    with no more GPUs.
    """
    rates = problem.caps[:, candidates].min(axis=0)
    candidates = candidates[rates >= LEAST_SHARE * rates.max(initial=0.0)]
    columns = np.vstack([problem.caps[:, candidates], -problem.num_gpus[candidates]])
    left = np.argsort(-problem.caps[:, candidates].min(axis=0), kind="stable")
    kept = np.zeros(len(candidates), dtype=bool)
    for _ in range(PICKS):
        if not len(left):
            break
        kept[left[0]] = True
        left = left[~(columns[:, left] <= columns[:, left[:1]]).all(axis=0)]
    kept[left] = True
    return candidates[kept]


class _Programme:
    """Variables: r, x of every candidate, and with NIC sets a and f of every candidate."""

    def __init__(self, problem: Problem, excluded: NDArray[np.bool_] | None, without: Collection[str]) -> None:
        self.problem = problem
        cluster = problem.spec.cluster
        memory = float(cluster.gpu.memory_bytes)
        limits = {
            "GPUs": problem.num_gpus / cluster.num_gpus,
            "attention memory": problem.attention_bytes / memory,
            "expert memory": problem.expert_bytes / memory,
        }
        self.sets = problem.choices.nics == "sets"
        open_ = problem.mixed.copy() if self.sets else np.ones(len(problem), dtype=bool)
        if excluded is not None:
            open_ &= ~excluded
        held = [column for name, column in limits.items() if name not in without]
        for column in held:
            # One candidate is chosen, so one that breaks a limit by itself needs no variable.
            open_ &= column <= 1.0
        self.candidates = np.flatnonzero(open_)
        if not self.sets:
            self.candidates = _unbeaten(problem, self.candidates)
        self.num = len(self.candidates)
        self.limits = [column[self.candidates] for column in held]
        caps = problem.caps[:, self.candidates]
        self.scale = float(caps.min(axis=0).max()) if self.num else 1.0  # rates near 1 suit the solver's tolerances
        finite = np.where(np.isfinite(caps), caps, 0.0)
        # A resource that a candidate does not use may cap it at the highest cap of all: others are lower.
        self.caps = np.where(np.isfinite(caps), caps, finite.max(initial=1.0)) / self.scale
        shapes = np.array([(shape.option.expert_ranks) for shape in problem.shapes])
        self.ranks = (problem.data_ranks[self.candidates], shapes[problem.shape[self.candidates]])
        self.size = 1 + self.num * (3 if self.sets else 1)
        self.places = [1 + k * self.num + np.arange(self.num) for k in range(3 if self.sets else 1)]
        self.rate = np.zeros(self.size)
        self.rate[0] = -1.0
        self.gpus = np.zeros(self.size)
        self.gpus[self.places[0]] = problem.num_gpus[self.candidates] / cluster.num_gpus
        self.nic_load = self._nic_load()
        self.most = np.full(self.size, np.inf)
        self.most[self.places[0]] = 1.0
        self.tight = self._tight_caps()
        self.rows: list[Any] = [self._common_rows()] if self.num else []

    def _nic_load(self) -> Floats:
        """Share of the step in which the busier side's NICs work, for a tie between candidates of one rate."""
        load = np.zeros(self.size)
        load[self.places[0]] = 1.0 / self.caps[[_ATTENTION_NICS, _EXPERT_NICS]].min(axis=0, initial=np.inf)
        return load

    def _per_nic(self, side: int) -> Floats:
        """Rate that each NIC of an attention (0) or an expert group (1) adds."""
        row = (_ATTENTION_NICS, _EXPERT_NICS)[side]
        return self.caps[row] / (self.ranks[side] * self.problem.nics_per_gpu)

    def _nics_of_pair(self) -> Floats:
        return np.floor((self.ranks[0] + self.ranks[1]) * self.problem.nics_per_gpu)

    def _tight_caps(self) -> Floats:
        """[candidates]: rate of each if it is chosen; with NIC sets, if NICs could be cut into parts."""
        caps = self.caps.copy()
        if self.sets:
            dealt = self._nics_of_pair() / (1 / self._per_nic(0) + 1 / self._per_nic(1))
            caps[[_ATTENTION_NICS, _EXPERT_NICS]] = dealt
        return caps.min(axis=0, initial=np.inf)

    def _common_rows(self) -> Any:
        """The rows that hold for every objective."""
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array, vstack

        def row(*terms: tuple[NDArray[np.int64], Floats], rate: float = 0.0) -> Any:
            line = np.zeros((1, self.size))
            line[0, 0] = rate
            for places, weights in terms:
                line[0, places] = weights
            return csr_array(line)

        x = self.places[0]
        lines = [row((x, np.ones(self.num)))]
        low, high = [1.0], [1.0]
        for column in self.limits:
            lines.append(row((x, column)))
            low.append(-np.inf)
            high.append(1.0)
        for resource in range(len(RESOURCES)):
            side = {_ATTENTION_NICS: 0, _EXPERT_NICS: 1}.get(resource)
            if self.sets and side is not None:
                lines.append(row((self.places[1 + side], -self._per_nic(side)), rate=1.0))
            else:
                lines.append(row((x, -self.caps[resource]), rate=1.0))
            low.append(-np.inf)
            high.append(0.0)
        lines.append(row((x, -self.tight), rate=1.0))
        low.append(-np.inf)
        high.append(0.0)
        if self.sets:
            each = csr_array((-self._nics_of_pair(), (np.arange(self.num), x)), shape=(self.num, self.size))
            for places in self.places[1:]:
                each = each + csr_array((np.ones(self.num), (np.arange(self.num), places)), shape=each.shape)
            lines.append(each)
            low += [-np.inf] * self.num
            high += [0.0] * self.num
        return LinearConstraint(vstack(lines).tocsr(), np.array(low), np.array(high))

    def solve(self, objective: Floats, time_limit_s: float) -> Any:
        from scipy.optimize import Bounds, OptimizeResult, milp

        if not self.num:
            return OptimizeResult(x=None, status=_INFEASIBLE)
        integral = np.ones(self.size)
        integral[0] = 0
        return milp(
            objective,
            constraints=self.rows,
            integrality=integral,
            bounds=Bounds(np.zeros(self.size), self.most),
            # The rows are tight as they are; HiGHS's presolve takes 40 times as long as the rest on 4,000 candidates.
            options={"time_limit": time_limit_s, "mip_rel_gap": RATE_TOLERANCE / 10, "presolve": False},
        )

    def keep(self, objective: Floats, most: float) -> None:
        """Later objectives may not make this one worse."""
        from scipy.optimize import LinearConstraint

        self.rows.append(LinearConstraint(objective[None, :], -np.inf, most))
        if objective is self.rate:
            self.most[self.places[0]] = self.tight >= -most  # the others cannot reach this rate

    def read(self, solution: Floats) -> tuple[int, tuple[float, float]]:
        """The candidate, and the NICs of a group of each kind."""
        chosen = int(np.argmax(solution[self.places[0]]))
        if self.sets:
            a, f = (round(float(solution[places[chosen]])) for places in self.places[1:])
            return int(self.candidates[chosen]), (float(a), float(f))
        own = [float(ranks[chosen] * self.problem.nics_per_gpu) for ranks in self.ranks]
        return int(self.candidates[chosen]), (own[0], own[1])
