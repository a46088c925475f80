"""How long a step of a case takes, for planners that compare layouts: simulated, or run on this machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from bench.assumptions import Assumptions
from bench.case import Case
from bench.measured import Device, measure
from bench.predict import does_not_fit, predict
from bench.trial import Trial


@dataclass(frozen=True)
class StepTime:
    """What came out of one case.

    status: ok; infeasible, which does not fit in memory; refused, which cannot be run or failed.
    low_s, high_s: between which the step time is known; of a simulated one they are equal.
    trial: name of the trial that measured it.
    """

    status: Literal["ok", "infeasible", "refused"]
    step_time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    bound_s: float | None = None
    peak_memory_bytes: float | None = None
    reason: str = ""
    trial: str | None = None


Evaluate = Callable[[Case], StepTime]
"""Times a step. Raises BadInput for a case that cannot be."""


def simulated(assumptions: Assumptions) -> Evaluate:
    """Times by simulation."""

    def evaluate(case: Case) -> StepTime:
        found = predict(case, assumptions)
        step_s, missing = found.step_time_s, found.missing_bytes > 0
        return StepTime(
            "infeasible" if missing else "ok",
            step_s,
            step_s,
            step_s,
            found.bound_s,
            found.peak_memory_bytes,
            does_not_fit(case, found.peak_memory_bytes) if missing else "",
        )

    return evaluate


@contextmanager
def running(num_ranks: int, device: Device, steps: int, keep: Callable[[Trial], object]) -> Iterator[Evaluate]:
    """Times by training on processes of this machine, all cases on the same ones; `keep` gets every trial.

    A step's time is the median of the steady state with its confidence interval, see `bench.steady`.
    """
    from bench.execute.pool import RankPool
    from bench.execute.support import require_supported
    from bench.fits import require_fits_here

    with RankPool(num_ranks, device) as pool:

        def evaluate(case: Case) -> StepTime:
            require_supported(case.model)
            require_fits_here(case, with_reference=False)
            trial = measure(case, steps=steps, device=device, pool=pool, telemetry_hz=None).trial
            keep(trial)
            if trial.status != "ok":
                status: Literal["infeasible", "refused"] = "infeasible" if trial.status == "oom" else "refused"
                return StepTime(status, reason=f"{trial.status}: {trial.message}", trial=trial.name)
            m = trial.metrics
            return StepTime("ok", m["step_time_s"], m["step_time_low_s"], m["step_time_high_s"], trial=trial.name)

        yield evaluate
