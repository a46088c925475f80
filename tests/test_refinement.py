"""The planner's refined plan against a whole search: on a small cell, on cells of Figure 7, and the figure of it."""

import pandas as pd
import pytest

from bench.case import CaseSpec, Workload
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.evaluate import CostModel, simulate_trial
from bench.models import get_model
from experiments import refinement
from paper_figs.refinement import draw

COSTS = CostModel.named()


def cell(spec: CaseSpec) -> refinement.Cell:
    return refinement.planned(spec, simulate_trial(spec, COSTS, budget=None), COSTS)


def small(model: str = "tiny", cluster: str = "h800x4gpu") -> CaseSpec:
    work = Workload(seq_len=64, global_batch_tokens=512)
    return CaseSpec(model=get_model(model), cluster=get_cluster(cluster), workload=work, system="disagmoe")


def test_every_cell_of_figure_7_is_checked() -> None:
    cells = {(spec.model.name, spec.workload.seq_len) for spec in refinement.specs()}
    assert len(cells) == len(refinement.specs()) == 12
    assert set(refinement.specs(quick=True)) < set(refinement.specs())


def test_a_small_cell_is_as_good_as_its_whole_search() -> None:
    found = refinement.evidence([cell(small())])
    (row,) = found.data.to_dict("records")
    assert found.failures == []
    assert row["refined_over_whole"] <= 1 + refinement.WITHIN
    assert row["refined_over_whole"] == row["refined_step_s"] / row["whole_step_s"]
    assert 0 < row["num_simulated"] < row["num_searched"]


def test_a_plan_that_is_slower_is_a_failure() -> None:
    good = cell(small())
    metrics = {**good.whole.metrics, "step_time_s": (good.whole.metrics["step_time_s"] or 0.0) / 1.5}
    found = refinement.evidence([good._replace(whole=good.whole.model_copy(update={"metrics": metrics}))])
    assert len(found.failures) == 1 and "% slower than the best of the whole search" in found.failures[0]


def test_a_cell_where_nothing_fits_is_a_result() -> None:
    found = refinement.evidence([cell(small("deepseek-v3"))])
    assert found.failures == []
    assert found.data["refined_over_whole"].isna().all()


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="the walk ends 3.8 % from the search's best here: docs/planner.md, Refinement")
def test_a_cell_of_figure_7_is_within_what_is_said() -> None:
    found = refinement.evidence([cell(spec) for spec in refinement.specs(quick=True)[:1]])
    assert found.failures == []
    assert found.data["refined_over_whole"].notna().all()


def test_the_figure_shows_both_and_where_nothing_fits() -> None:
    rows = [
        {"model": "m", "seq_len": 4096, "source": "simulated", "programme_over_whole": 1.3, "refined_over_whole": 1.01}
        | {"num_searched": 500, "num_simulated": 20},
        {"model": "m", "seq_len": 8192, "source": "simulated", "programme_over_whole": None, "refined_over_whole": None}
        | {"num_searched": 500, "num_simulated": None},
    ]
    frame = pd.DataFrame(rows)
    ax = draw(frame).axes[0]
    texts = [text.get_text() for text in ax.texts]
    assert {"+2 %", "20 of\n500", "nothing\nfits", "m"} <= set(texts)
    marks = {str(line.get_label()): line.get_ydata() for line in ax.lines}
    assert marks["refined plan"][0] == 1.01 and marks["the programme's split"][0] == 1.3
    assert "no diamond" not in draw(frame).texts[-1].get_text()
    assert "no diamond" in draw(frame.assign(programme_over_whole=None)).texts[-1].get_text()
    with pytest.raises(BadInput, match="columns"):
        draw(frame.drop(columns="refined_over_whole"))
