"""Simulated trials: a prediction, or the finding that nothing fits, as a record with all it rests on."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import provenance
from bench.assumptions import DEFAULT_ASSUMPTIONS, Assumptions, get_assumptions
from bench.case import Case, CaseSpec
from bench.check import PlanError
from bench.errors import BadInput
from bench.predict import GIB, Prediction, does_not_fit, predict
from bench.search import SLOWER
from bench.trial import Trial, command_for
from bench.tune import DEFAULT_BUDGET, TuneResult, tune


@dataclass(frozen=True)
class CostModel:
    """A named set of assumptions, with the ``key=value`` overrides that were put in."""

    name: str
    values: Assumptions
    overrides: tuple[str, ...] = ()

    @classmethod
    def named(cls, name: str | None = None, overrides: Sequence[str] = ()) -> "CostModel":
        """Raises BadInput for an unknown set, field or value."""
        chosen = DEFAULT_ASSUMPTIONS if name is None else name
        return cls(chosen, get_assumptions(chosen, overrides), tuple(overrides))

    @property
    def label(self) -> str:
        """The set's name, with what was changed in it."""
        return " ".join([self.name, *self.overrides])


def simulation_metrics(found: Prediction) -> dict[str, float | None]:
    """The numbers of a simulated step, by name with the unit in it."""
    step = found.metrics.step_time_s
    return {
        **{name: None if value is None else float(value) for name, value in asdict(found.metrics).items()},
        "bound_s": found.bound_s,
        "fraction_of_bound": found.bound_s / step,
        "load_imbalance": found.costs.load_imbalance,
        "gpus_per_timed_rank": float(found.timeline.stands_for),
        "replicas_per_timed_replica": float(found.batch.num_replicas),
        "peak_memory_bytes": found.peak_memory_bytes,
        **{f"{'_'.join(what.split())}_bytes": size for what, size in found.memory_parts.items()},
    }


def fold_of(found: Prediction) -> str:
    """In words, what of the cluster was timed and for what it stands."""
    ranks, replicas = found.timeline.stands_for, found.batch.num_replicas
    size = found.program.plan.placement.size
    one = f"each timed rank stands for {ranks} equal ones of its group" if ranks > 1 else "every rank timed"
    all_replicas = f"one replica for all {replicas}, coupled by the gradient sums" if replicas > 1 else "one replica"
    return f"{one}; {all_replicas} ({size // ranks} of {size * replicas} GPUs timed)"


def predicted_trial(found: Prediction, model: CostModel, search: dict[str, Any] | None = None) -> Trial:
    """A prediction as a trial; ``infeasible`` where it does not fit in memory."""
    missing = found.missing_bytes > 0
    return Trial.make(
        case=found.case,
        source="simulated",
        status="infeasible" if missing else "ok",
        message=does_not_fit(found.case, found.peak_memory_bytes) if missing else "",
        traits=found.program.plan.traits,
        metrics=simulation_metrics(found) | ({"missing_gib": found.missing_bytes / GIB} if missing else {}),
        search=search or {},
        **_rests_on(found.case, model),
    )


def tuned_trial(found: TuneResult, model: CostModel, fixed: Sequence[str], budget: int | None) -> Trial:
    """The winner of a search as a trial; ``infeasible``, with what misses least, where nothing fits."""
    search = _told(found) | {"fixed": list(fixed), "budget": budget, "complete": found.complete}
    if found.best is not None:
        return predicted_trial(found.best, model, search)
    closest = found.closest
    if closest is None:
        reasons = sorted({candidate.reason for candidate in found.candidates})
        message, case = f"no layout is possible: {'; '.join(reasons) or 'the space is empty'}", found.spec
        metrics: dict[str, float | None] = {}
    else:
        case = found.spec.with_layout(closest.layout)
        left = found.counts().get("budget", 0)
        none = f"no layout that was tried fits, {left} were not tried" if left else "no layout fits"
        message = f"{none}; the closest is {closest.layout or 'the default'}: {closest.reason}"
        peak = closest.peak_memory_bytes or 0.0
        metrics = {"peak_memory_bytes": peak, "missing_gib": (peak - case.cluster.gpu.memory_bytes) / GIB}
    return Trial.make(
        case=case,
        source="simulated",
        status="infeasible",
        message=message,
        metrics=metrics,
        search=search,
        **_rests_on(case, model),
    )


def _told(found: TuneResult) -> dict[str, Any]:
    """Of a search: how many layouts ended how, what came second, and of what was not simulated or did not fit, why.

    ``rejected`` has one layout of every kind: of those that do not fit, the one that misses least. ``left_at``: how
    many times as long as the winner's a step has to be sure to take to be left before its end.
    """
    second = found.runner_up
    first = {each.status: each for each in reversed(found.candidates) if each.status != "ok"}
    if found.closest is not None:
        first["infeasible"] = found.closest
    why = {
        "slower": f"sure, before its end, to be slower than the second best, and {SLOWER} times the best",
        "bound": "no order of it is faster than the winner",
        "budget": "not tried: the budget was spent",
    }
    return {
        "candidates": found.counts(),
        "runner_up": None if second is None else {"layout": str(second.layout), "step_time_s": second.step_time_s},
        "rejected": {
            status: {"layout": str(each.layout), "bound_s": each.bound_s, "why": each.reason or why.get(status, "")}
            for status, each in sorted(first.items())
        },
        "left_at": SLOWER,
    }


def nothing_fits(found: TuneResult, model: CostModel, fixed: Sequence[str] = ()) -> BadInput:
    """What to raise for a search that found no layout: why, and the fullest moment of the layout that misses least."""
    message = tuned_trial(found, model, fixed, None).message
    if found.closest is not None:
        try:
            closest = predict(found.spec.with_layout(found.closest.layout), model.values, rough=True)
        except BadInput:
            return BadInput("layout", "tuned", message)
        if closest.missing_bytes:
            fault = closest.memory_fault()
            return PlanError(fault.field, "tuned", message, fault.grid, fault.actions)
    return BadInput("layout", "tuned", message)


def simulate_trial(
    spec: CaseSpec, model: CostModel, *, fixed: Sequence[str] = (), budget: int | None = DEFAULT_BUDGET
) -> Trial:
    """Simulates a case, or the best layout that is found for a spec. Raises BadInput for a case that cannot be."""
    if isinstance(spec, Case):
        return predicted_trial(predict(spec, model.values), model)
    return tuned_trial(tune(spec, model.values, fixed=fixed, budget=budget), model, fixed, budget)


def _rests_on(case: CaseSpec, model: CostModel) -> dict[str, Any]:
    """Of a simulated trial: what made it, and how to get it again."""
    extra = ("--assumptions", model.name, *(("--set", *model.overrides) if model.overrides else ()))
    return {
        "assumptions": model.name,
        "assumption_values": model.values.model_dump(mode="json"),
        "code_digest": provenance.code_digest(case.system),
        "command": command_for("simulate", case, extra),
        "provenance": provenance.collect(),
    }


def failed_trial(spec: CaseSpec, model: CostModel, error: Exception) -> Trial:
    """What came instead of a simulation."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Trial.make(case=spec, source="simulated", status="error", message=message, **_rests_on(spec, model))
