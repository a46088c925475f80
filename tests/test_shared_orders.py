"""What layouts share is what each would have alone."""

import random

import numpy as np
import pytest

from bench.case import Case, Layout
from bench.errors import BadInput
from bench.kept import Kept
from bench.lower import lower
from bench.plan import Plan
from bench.system import get_system, plan_of
from experiments import fig7
from systems.baselines import colocated
from systems.baselines.colocated import Colocated, Stage
from systems.baselines.ep import ExpertParallel

SHARING = tuple(system for system in fig7.SYSTEMS if isinstance(get_system(system), Colocated))


def drawn(system: str, number: int) -> list[Case]:
    spec = fig7.spec_of("deepseek-moe-16b", 32768, system)
    layouts = list(dict.fromkeys(get_system(system).space(spec)))
    return [spec.with_layout(layout) for layout in random.Random(0).sample(layouts, number)]


def planned(case: Case) -> Plan | None:
    try:
        return plan_of(case)
    except BadInput:
        return None


@pytest.mark.parametrize("system", SHARING)
def test_queues_that_layouts_share_are_those_of_each_alone(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = drawn(system, 24)
    together = [planned(case) for case in cases]
    # Of what is kept nothing is found again.
    monkeypatch.setattr(colocated, "_known_queues", Kept(most=0))
    alone = [planned(case) for case in cases]
    assert together == alone
    assert any(plan is not None for plan in alone)


@pytest.mark.parametrize("system", SHARING)
def test_layouts_of_one_order_share_their_queues_and_their_program(system: str) -> None:
    for case in drawn(system, 24):
        one = planned(case)
        if one is None:
            continue
        other = plan_of(case.model_copy(update={"layout": case.layout.model_copy(update={"offload": "state"})}))
        assert all(one.queues[key] is other.queues[key] for key in one.queues)
        assert lower(one, case.model).deps is lower(other, case.model).deps
        return
    raise AssertionError("no layout that was drawn can be")


def test_groups_of_other_sizes_share_what_is_lowered_and_keep_their_own_ranks() -> None:
    spec = fig7.spec_of("deepseek-moe-16b", 32768, "ep")
    layouts = [layout for layout in get_system("ep").space(spec) if (layout.pp, layout.vpp) == (2, 1)]
    cases = [spec.with_layout(layout) for layout in layouts if layout.recompute == "none"]
    programs = [lower(plan_of(case), case.model) for case in cases]
    by_order = {}
    for program in programs:
        assert program.plan.placement.groups[0].size in {case.layout.ep for case in cases}
        known = by_order.setdefault(program.plan.num_microbatches, program)
        np.testing.assert_array_equal(known.deps, program.deps)
        assert known.deps is program.deps
    assert len(by_order) < len(programs)
    sizes = {program.plan.placement.size for program in programs}
    assert sizes == {2 * case.layout.ep for case in cases}


def test_a_system_that_overrides_the_work_shares_nothing() -> None:
    class Slow(ExpertParallel):
        def work(self, stage: Stage, number: int, case: Case, num_microbatches: int):  # type: ignore[no-untyped-def]
            written = super().work(stage, number, case, num_microbatches)
            return written if case.layout.mbs == 1 else {**written, "compute": written["compute"][::-1]}

    assert Slow.order_fields is None
    spec = fig7.spec_of("deepseek-moe-16b", 32768, "ep")
    with_as_many_microbatches = Layout(ep=4, pp=1, replicas=1, mbs=1), Layout(ep=2, pp=1, replicas=1, mbs=2)
    one, two = (Slow().plan(spec.with_layout(layout)) for layout in with_as_many_microbatches)
    assert one.queues != two.queues


def test_what_is_kept_has_a_limit_and_what_was_asked_for_last_stays() -> None:
    kept: Kept[str] = Kept(most=10)
    kept.put("a", "A", 4)
    kept.put("b", "B", 4)
    assert kept.get("a") == "A"
    kept.put("c", "C", 4)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == ("A", None, "C")
    kept.put("d", "D", 11)
    assert kept.get("d") is None
    kept.put("a", "A2", 6)
    assert (kept.get("a"), kept.get("c")) == ("A2", "C")
