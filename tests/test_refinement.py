"""The planner's refined plan against a whole search: on a small cell, on cells of Figure 7, and the figure of it."""

import pandas as pd
import pytest

from bench.case import CaseSpec, Layout, Workload
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.evaluate import CostModel, simulate_trial
from bench.models import get_model
from experiments import refinement
from paper_figs.refinement import draw
from systems.disagmoe.planner.fitting import Steps
from systems.disagmoe.planner.neighbours import leaner
from systems.disagmoe.planner.refine import MORE_THAN_NOTHING, refine

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


MOST_OFF = {"round_length": 4, "deferred_w": 128}
"""Of the search's best on Figure 7's first cell; all of them put off do not fit in rounds of 4."""


def test_the_walk_puts_off_what_fits_and_not_only_all_or_nothing() -> None:
    """What is put off is lessened in the same rounds before rounds are shortened, and one row says so."""
    spec = refinement.specs(quick=True)[0]
    start = Layout.make(replicas=4, attention_ranks=16, expert_ranks=16, round_length=4, copies="node")
    steps = Steps(COSTS.values)
    found = refine(spec, [start], COSTS.values, simulate=steps.timed, within=lambda near: near.attention_ranks == 16)
    best = steps.timed(spec.with_layout(start.model_copy(update=MOST_OFF))).step_time_s
    assert best is not None and found.best is not None and found.best.step_time_s is not None
    assert found.best.step_time_s <= best * (1 + MORE_THAN_NOTHING)
    assert found.path[1].change == "deferred_w=128" and found.path[1].layout.round_length == 4
    too_heavy = [each.layout for each in found.tried if each.status == "infeasible"]
    assert [n for n in (256, 464) if start.model_copy(update={"deferred_w": n}) in too_heavy] == [256, 464]


def test_the_walk_shares_sequences_where_nothing_else_makes_a_step_fit() -> None:
    """On qwen3-235b at 4K one large group of each kind fits only where four ranks share a sequence, not two."""
    (spec,) = [s for s in refinement.specs() if (s.model.name, s.workload.seq_len) == ("qwen3-235b", 4096)]
    held = {"copies": "node", "offload": "state", "cp": 2, "round_length": 4, "deferred_w": 8}
    start = Layout.make(replicas=2, attention_ranks=16, expert_ranks=16, groups=2, **held)
    near, changed = leaner(spec, start) or (None, {})
    assert near is not None and changed == {"cp": 4} and near.replicas == 2
    assert leaner(spec, start.model_copy(update={"cp": 8})) is None
    timed = Steps(COSTS.values).timed
    beside = start.model_copy(update={"groups": 4, "replicas": 1, "round_length": 8, "deferred_w": 16})
    allowed = ({"groups": 2, "cp": 2}, {"groups": 2, "cp": 4})
    those = [start.model_copy(update=ways) for ways in allowed]

    def within(each: Layout) -> bool:
        return any(each.model_copy(update={"round_length": 4, "deferred_w": 8}) == one for one in those)

    found = refine(spec, [beside], COSTS.values, simulate=timed, within=within, budget=8)
    assert len(found.path) > 1
    step = found.path[1]
    assert step.layout.groups == 2 and step.layout.cp == 4 and "groups=2" in step.change and "cp=4" in step.change


@pytest.mark.slow
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
