"""Whether the planner's refined plan is as good as the best of `disagmoe`'s whole space of layouts. Simulated.

For every cell of Figure 7: the plan of `moebench plan disagmoe`, and the best of a search without a budget, which
simulates every layout of the declared space that a lower bound does not rule out. The refinement may leave that space
(deferred weight gradients, chunks of layers, unequal depth), so it can be faster than the best of it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.case import CaseSpec
from bench.evaluate import CostModel, predicted_trial
from bench.predict import predict
from bench.trial import Trial
from experiments import Evidence, Request, Table, fig7
from experiments._sweep import sweep
from systems.disagmoe.planner.explain import Explanation, explain

if TYPE_CHECKING:
    from pandas import DataFrame

SUMMARY = "the planner's refined plan beside a whole search of disagmoe's layouts, on Figure 7's cells (simulated)"
WITHIN = 0.02
"""A refined plan may be slower than the best of the whole space by this share."""


class Cell(NamedTuple):
    """One cell: the best of the whole search as a trial, and the plan; None where the cluster is too small for any."""

    whole: Trial
    plan: Explanation | None


def specs(quick: bool = False) -> list[CaseSpec]:
    return [spec for spec in fig7.specs(quick) if spec.system == fig7.OURS]


def run(request: Request) -> Evidence:
    """Searches what is missing and plans every cell anew; keeps a trial of each plan as well."""
    model, store, wanted = CostModel.named(request.assumptions), request.store(), specs(request.quick)
    searched = sweep(wanted, model, store, request.progress, budget=None)
    cells = []
    for number, (spec, whole) in enumerate(zip(wanted, searched, strict=True)):
        request.progress(number, len(wanted), f"planning {spec.model.name} {spec.workload.seq_len}")
        cells.append(planned(spec, whole, model))
        best = cells[-1].plan and cells[-1].plan.best
        if best:
            found = predict(spec.with_layout(best.layout), model.values)
            store.write(predicted_trial(found, model, {"planned": True, "fixed": [], "budget": None}))
    return evidence(cells)


def planned(spec: CaseSpec, whole: Trial, model: CostModel) -> Cell:
    """The plan of a cell. Where nothing fits the planner says so as well, or it is an error."""
    from bench.errors import BadInput

    try:
        return Cell(whole, explain(spec, model.values))
    except BadInput:
        if whole.status == "ok":
            raise
        return Cell(whole, None)


def evidence(cells: Sequence[Cell]) -> Evidence:
    """What the cells show together; a plan that is too slow is a failure."""
    import pandas as pd

    data = pd.DataFrame([_row(cell) for cell in cells])
    slow = data[data["refined_over_whole"] > 1 + WITHIN]
    failures = [
        f"{row['model']} {row['seq_len']}: the refined plan is {100 * (row['refined_over_whole'] - 1):.1f} % slower "
        f"than the best of the whole search, allowed {100 * WITHIN:g} %"
        for row in slow.to_dict("records")
    ]
    failures += [
        f"{cell.whole.case.model.name} {cell.whole.case.workload.seq_len}: a layout fits and no plan was found"
        for cell in cells
        if cell.whole.status == "ok" and (cell.plan is None or cell.plan.best is None)
    ]
    drawn = {"frame": data, "within": WITHIN}
    return Evidence(drawn, data, [_table(data)], failures)


def _row(cell: Cell) -> dict[str, object]:
    case, whole = cell.whole.case, cell.whole.metrics.get("step_time_s") if cell.whole.status == "ok" else None
    seed = cell.plan.seed if cell.plan else None
    best = cell.plan.best if cell.plan else None
    own = seed.step_time_s if seed is not None and seed.status == "ok" else None
    refined = best.step_time_s if best is not None else None
    return {
        "model": case.model.name,
        "seq_len": case.workload.seq_len,
        "source": "simulated",
        "whole_step_s": whole,
        "programme_step_s": own,
        "refined_step_s": refined,
        "programme_over_whole": own / whole if own and whole else None,
        "refined_over_whole": refined / whole if refined and whole else None,
        "num_searched": sum(cell.whole.search["candidates"].values()),
        "num_simulated": cell.plan.refinement.num_evaluated if cell.plan and cell.plan.refinement else None,
        "refined_layout": str(best.layout) if best else None,
        "whole_layout": cell.whole.layout if whole else None,
    }


def _table(data: "DataFrame") -> Table:
    columns = ["model", "tokens", "whole s", "refined s", "refined / whole", "layouts", "simulated", "refined layout"]
    fields = ["model", "seq_len", "whole_step_s", "refined_step_s", "refined_over_whole", "num_searched"]
    rows = data[[*fields, "num_simulated", "refined_layout"]].astype(object)
    return Table(
        "the refined plan and the best of the whole search (simulated)",
        columns,
        rows.where(rows.notna(), None).to_numpy().tolist(),
    )
