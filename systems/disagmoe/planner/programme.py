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

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from systems.disagmoe.planner.problem import RESOURCES, Problem

Floats = NDArray[np.float64]

CONSTRAINTS = ("GPUs", "attention memory", "expert memory")
RATE_TOLERANCE = 1e-6
"""Rates are equal within this share: the solver's own tolerance is of that order."""
ATTENTION_NICS, EXPERT_NICS = RESOURCES.index("attention NICs"), RESOURCES.index("expert NICs")
_INFEASIBLE = 2  # scipy's status
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


class Programme:
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
        self.ranks = (problem.data_ranks[self.candidates], problem.expert_ranks[self.candidates])
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
        load[self.places[0]] = 1.0 / self.caps[[ATTENTION_NICS, EXPERT_NICS]].min(axis=0, initial=np.inf)
        return load

    def _per_nic(self, side: int) -> Floats:
        """Rate that each NIC of an attention (0) or an expert group (1) adds."""
        row = (ATTENTION_NICS, EXPERT_NICS)[side]
        return self.caps[row] / (self.ranks[side] * self.problem.nics_per_gpu)

    def _nics_of_pair(self) -> Floats:
        return np.floor((self.ranks[0] + self.ranks[1]) * self.problem.nics_per_gpu)

    def _tight_caps(self) -> Floats:
        """[candidates]: rate of each if it is chosen; with NIC sets, if NICs could be cut into parts."""
        caps = self.caps.copy()
        if self.sets:
            dealt = self._nics_of_pair() / (1 / self._per_nic(0) + 1 / self._per_nic(1))
            caps[[ATTENTION_NICS, EXPERT_NICS]] = dealt
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
            side = {ATTENTION_NICS: 0, EXPERT_NICS: 1}.get(resource)
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
