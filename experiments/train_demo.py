"""Trains `reference`, `ep` and `disagmoe` on real text on 4 CPU processes, and verifies them.

What it shows: the three follow one loss curve, since they compute the same; and of each one executed step beside the
same plan simulated. The cost model has no measured CPU: the simulated steps use nominal costs, and tell the order of
things and not their seconds.
"""

from collections.abc import Callable
from typing import Any

from bench.case import Case, CaseSpec, Layout, Workload
from bench.clusters import CLUSTERS, Cluster
from bench.evaluate import CostModel
from bench.measured import Measured, measure
from bench.models import get_model
from bench.predict import predict
from bench.results import Store
from bench.system import plan_of
from bench.timeline import Timeline
from experiments import Evidence, Request, Table

SUMMARY = "reference, ep and disagmoe trained on real text on 4 CPU processes, verified and traced (measured)"
NUM_RANKS = 4
STEPS, QUICK_STEPS = 50, 5
TRACED, QUICK_TRACED = 5, 3
SEQ_LEN = 64
GLOBAL_BATCH_TOKENS = 16 * SEQ_LEN
LAYOUTS = {
    "reference": Layout(replicas=1),
    "ep": Layout(ep=2, pp=2),
    "disagmoe": Layout(attention_ranks=2, expert_ranks=2, round_length=2),
}
# Rounding differs between systems and steps magnify it; without an error in the mathematics it stays far below this.
SAME_CURVE = 1e-3


def cases() -> dict[str, Case]:
    """One case a system, all with the same model, batch and seed."""
    fields = {**CLUSTERS["cpu"].model_dump(), "gpus_per_node": NUM_RANKS, "nics_per_node": NUM_RANKS}
    workload = Workload(seq_len=SEQ_LEN, global_batch_tokens=GLOBAL_BATCH_TOKENS, dtype="fp32", routing="learned")
    model, cluster = get_model("tiny"), Cluster.from_fields(fields)
    return {
        name: CaseSpec(model=model, cluster=cluster, workload=workload, system=name).with_layout(layout)
        for name, layout in LAYOUTS.items()
    }


def run(request: Request) -> Evidence:
    """Trains all systems anew and keeps the trials. A run that fails, differs or misses a tolerance is a failure."""
    import pandas as pd

    from bench.execute.pool import RankPool
    from bench.execute.train import executed_timeline
    from bench.execute.verify import verify

    store, steps = Store(request.results), QUICK_STEPS if request.quick else STEPS
    traced = QUICK_TRACED if request.quick else TRACED
    progress = _Progress(request, len(LAYOUTS) * (steps + 2))
    runs: dict[str, Measured] = {}
    panels, reports, failures = [], {}, []
    with RankPool(NUM_RANKS) as pool:
        for name, case in cases().items():
            progress.advance(f"training {name}", 0)
            runs[name] = measure(case, steps=steps, pool=pool, on_step=progress.on_step(name))
            store.write(runs[name].trial)
            progress.advance(f"tracing {name}")
            steps_done = [executed_timeline(case, pool=pool) for _ in range(traced)]
            panels += _panels(case, median_step(steps_done), traced)
            progress.advance(f"verifying {name}")
            reports[name] = verify(case, pool)
            failures += [f"{name}: {problem}" for problem in reports[name].problems]
    failures += [f"{name}: {run.trial.message}" for name, run in runs.items() if run.trial.status != "ok"]
    losses = {name: run.trial.samples["loss"] for name, run in runs.items()}
    failures += apart(losses)
    data = pd.DataFrame({"step": range(1, 1 + max(map(len, losses.values()))), **losses})
    return Evidence({"losses": losses, "timelines": panels}, data, [_table(runs, reports)], failures)


def apart(losses: dict[str, list[float]]) -> list[str]:
    """What keeps the curves from being one falling curve; a line each."""
    found = []
    for name, curve in losses.items():
        if not curve[-1] < curve[0]:
            found.append(f"{name}: loss did not fall, {curve[0]:.4f} to {curve[-1]:.4f}")
        errors = [abs(a - b) / abs(b) for a, b in zip(curve, losses["reference"], strict=False)]
        if not max(errors) <= SAME_CURVE:
            found.append(f"{name}: loss leaves the reference's by {max(errors):.1e}, allowed {SAME_CURVE:.0e}")
    return found


def median_step(steps: list[Timeline]) -> Timeline:
    """The step whose time is the median of all, of an even number the shorter one in the middle."""
    return sorted(steps, key=lambda step: step.step_time_s)[(len(steps) - 1) // 2]


def _panels(case: Case, executed: Timeline, num_traced: int) -> list[tuple[str, Timeline, Any]]:
    placement = plan_of(case).placement
    simulated = predict(case, CostModel.named().values).timeline
    return [
        (f"{case.system}\nmedian of {num_traced} steps", executed, placement),
        (f"{case.system}\nnominal CPU costs", simulated, placement),
    ]


def _table(runs: dict[str, Measured], reports: dict[str, Any]) -> Table:
    rows = []
    for name, run in runs.items():
        losses, report = run.trial.samples["loss"], reports[name]
        rows.append(
            [
                name,
                run.trial.layout,
                f"{losses[0]:.4f}",
                f"{losses[-1]:.4f}",
                run.trial.metrics.get("tokens_per_s"),
                "ok" if report.ok else "FAILED",
                f"{report.loss_error:.1e}",
                f"{report.worst.gradient_error:.1e}",
            ]
        )
    title = f"measured: tiny, {NUM_RANKS} CPU processes, {GLOBAL_BATCH_TOKENS} tokens a step"
    columns = [
        "system",
        "layout",
        "first loss",
        "last loss",
        "tokens/s",
        "verify",
        "loss error",
        "worst gradient error",
    ]
    return Table(title, columns, rows)


class _Progress:
    def __init__(self, request: Request, total: int) -> None:
        self.request, self.done, self.total = request, 0, total

    def advance(self, what: str, by: int = 1) -> None:
        self.done += by
        self.request.progress(self.done, self.total, what)

    def on_step(self, name: str) -> Callable[[object], None]:
        return lambda _: self.advance(f"training {name}")
