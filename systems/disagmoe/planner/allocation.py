"""The best allocation of a problem, by the programme of `systems.disagmoe.planner.programme`, and what proves it."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.case import Layout
from bench.errors import BadInput
from bench.predict import QuickStep
from systems.disagmoe.planner.counting import counted
from systems.disagmoe.planner.problem import RESOURCES, Problem
from systems.disagmoe.planner.programme import ATTENTION_NICS, EXPERT_NICS, RATE_TOLERANCE, Programme

DEFAULT_LIMIT_S = 10.0
TIME_LIMIT = "time_limit_s"
"""The field of the error where the limit came before any allocation."""
_TIME_LIMIT = 1  # scipy's status


@dataclass(frozen=True, eq=False)
class Allocation:
    """A solution.

    Args:
        candidate: its number in the problem.
        nics: NICs of an attention and of an expert group; fractions where a NIC serves several GPUs.
        steps_per_s: r.
        most_steps_per_s: what the solver has proven that no allocation exceeds.
        proven: whether nothing is faster, by the programme; if not, this is the incumbent at the time limit.
        settled: whether it is also proven that no other of this rate has fewer GPUs, or as many and less work for NICs.
        solve_s: seconds in the solver, over all its objectives.
    """

    problem: Problem
    candidate: int
    nics: tuple[float, float]
    steps_per_s: float
    most_steps_per_s: float
    proven: bool
    settled: bool
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
        own = (int(self.problem.data_ranks[self.candidate]), int(self.problem.expert_ranks[self.candidate]))
        for row, nics, ranks in zip((ATTENTION_NICS, EXPERT_NICS), self.nics, own, strict=True):
            caps[row] *= nics / (ranks * self.problem.nics_per_gpu)
        return {name: 0.0 if np.isinf(cap) else float(1.0 / cap) for name, cap in zip(RESOURCES, caps, strict=True)}

    @property
    def binding(self) -> tuple[str, ...]:
        """The resources that cap the rate."""
        return tuple(name for name, busy in self.seconds.items() if busy >= self.step_s * (1 - 1e-3))

    @property
    def memory_of_gpu(self) -> int:
        return self.problem.spec.cluster.gpu.memory_bytes

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


class Cut(NamedTuple):
    """A split that fits by the programme's estimates, and whose plan does not: its fullest GPU needs so many bytes."""

    layout: Layout
    peak_memory_bytes: float


class Outcome(NamedTuple):
    """An allocation that was looked for: None where there is none, or (`timed_out`) none was found in time.

    step: of its plan, where it was simulated; cuts: what came before it, and was cut off.
    """

    allocation: Allocation | None
    timed_out: bool = False
    step: QuickStep | None = None
    cuts: tuple[Cut, ...] = ()


def attempt(
    problem: Problem, *, time_limit_s: float = DEFAULT_LIMIT_S, excluded: NDArray[np.bool_] | None = None
) -> Outcome:
    """`allocate` where having none is an answer."""
    try:
        return Outcome(allocate(problem, time_limit_s=time_limit_s, excluded=excluded))
    except BadInput as error:
        return Outcome(None, error.field == TIME_LIMIT)


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
    programme = Programme(problem, excluded, without)
    found = programme.solve(programme.rate, time_limit_s)
    if found.x is None:
        if found.status == _TIME_LIMIT:
            raise BadInput(TIME_LIMIT, time_limit_s, "more: no allocation was found in that time")
        raise infeasible(problem, excluded, without)
    bound = -found.fun if found.mip_dual_bound is None else max(-found.fun, -found.mip_dual_bound)
    bound = min(bound, float(programme.tight.max()))  # which a solver that was stopped early has not found out yet
    proven = found.status == 0 or -found.fun >= bound * (1 - RATE_TOLERANCE)
    settled = proven
    kept = found.fun * (1 - RATE_TOLERANCE)
    solution, last = found.x, programme.rate
    for objective in (programme.gpus, programme.nic_load) if proven else ():
        programme.keep(last, kept)
        left_s = time_limit_s - (time.monotonic() - began)
        next_ = programme.solve(objective, max(left_s, 1e-3))
        settled = settled and next_.status == 0
        if next_.x is None:
            break
        solution, last, kept = next_.x, objective, next_.fun + 1e-9
    candidate, nics = programme.read(solution)
    if not all(nics):  # a solver that was stopped before it dealt any out
        raise BadInput(TIME_LIMIT, time_limit_s, "more: no allocation was found in that time")
    chosen = Allocation(problem, candidate, nics, 1.0, 1.0, proven, settled, time.monotonic() - began)
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
        need = f"at least {counted(gpus.min(), 'GPU')} for {problem.spec.model.name}"
        return BadInput("cluster", f"{cluster.name} ({counted(cluster.num_gpus, 'GPU')})", need)
    within = open_ & (problem.num_gpus <= cluster.num_gpus)
    needs = np.maximum(problem.attention_bytes, problem.expert_bytes)[within]
    least = within.nonzero()[0][int(np.argmin(needs))]
    side = "attention" if problem.attention_bytes[least] > problem.expert_bytes[least] else "expert"
    least_gib, have = float(needs.min()) / 2**30, cluster.gpu.memory_bytes / 2**30
    fewer = problem.layout(int(least))
    return BadInput(
        "cluster",
        cluster.name,
        f"more memory or more GPUs: the {side} memory constraint cannot hold; the least that any of "
        f"{counted(within.sum(), 'split')} of {counted(cluster.num_gpus, 'GPU')} needs by the programme's estimates is "
        f"{least_gib:.1f} GiB a GPU ({fewer}), {least_gib - have:.1f} GiB more than its {have:.1f}",
    )
