"""The search's lower bound on a step: below every simulated step, and by hand where it is exact."""

from dataclasses import replace

import pytest
from cases import cases, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulate import ROUTINGS, ChosenCosts, lowered

from bench.action import Kind, Pass
from bench.assumptions import get_assumptions
from bench.bound import bound_s
from bench.case import Case, CaseSpec, Workload
from bench.clusters import get_cluster
from bench.errors import BadInput
from bench.least import fill_s, least_step_s
from bench.limits import Limits
from bench.models import get_model
from bench.predict import quick_step
from bench.simulate import simulate
from bench.system import get_system
from systems.baselines.ep import ExpertParallel

ASSUMED = get_assumptions()
COLOCATED = ("megatron", "ep", "tutel", "comet", "megatron-overlap", "dualpipe", "dualpipe-v")


@given(cases(), st.sampled_from(ROUTINGS), st.sampled_from(["datasheet", "h200-measured"]))
@settings(max_examples=40, deadline=None)
def test_between_the_bound_and_the_step(case: Case, routing: str, assumed: str) -> None:
    program, costs = lowered(case, routing, assumed)
    least = least_step_s(program.plan.placement, costs, program.plan.num_microbatches)
    assert bound_s(program, costs) * (1 - 1e-9) <= least <= simulate(program, costs).step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("system", [*COLOCATED, "disagmoe"])
@pytest.mark.parametrize("routing", ["balanced", "zipf:1.2", "half-idle"])
def test_no_layout_of_a_space_takes_less(system: str, routing: str) -> None:
    work = Workload(seq_len=64, global_batch_tokens=1024, routing=routing)
    spec = CaseSpec(model=get_model("tiny"), cluster=get_cluster("h800x4gpu"), workload=work, system=system)
    limits, compared = Limits(spec, ASSUMED), 0
    for layout in list(get_system(system).space(spec))[::3]:
        case = spec.with_layout(layout)
        try:
            least, step_s = limits.of(case).step_s, quick_step(case, ASSUMED).step_time_s
        except BadInput:
            continue
        assert least is not None and step_s is not None
        assert least <= step_s * (1 + 1e-9)
        compared += 1
    assert compared > 5


@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 3), (2, 1, 4), (4, 1, 8), (2, 2, 8)])
def test_fill_of_a_pipeline_by_hand(p: int, v: int, m: int) -> None:
    """Stage s begins behind s chunks; with forwards of 1 s and backwards of 2 s a layer, the last stage decides."""
    program, costs = lowered(make_case("ep", ep=1, pp=p, vpp=v, microbatches=m))
    placement = program.plan.placement
    layers = placement.num_layers // (p * v)
    takes = ((Kind.ATTENTION, Pass.F, 1.0), (Kind.ATTENTION, Pass.B, 2.0))
    chosen = ChosenCosts(**{name: getattr(costs, name) for name in costs.__dataclass_fields__}, chosen=takes)
    assert fill_s(placement, chosen) == {f"S{stage}": stage * layers for stage in range(p)}
    assert least_step_s(placement, chosen, m) == pytest.approx((p - 1) * layers + 3 * m * v * layers)


def test_a_gradient_sum_comes_behind_the_work() -> None:
    """Replicas add their sum to the step, which the busiest resource alone does not."""
    program, costs = lowered(make_case("ep", ep=1, pp=2, vpp=1, microbatches=4))
    placement = program.plan.placement
    of_replicas = [replace(costs, num_replicas=n).without_overheads() for n in (1, 2)]
    least = [least_step_s(placement, each, 4) for each in of_replicas]
    updates, sums = (
        [max(of(each, group.name) for group in placement.groups) for each in of_replicas]
        for of in (lambda each, name: each.update_s(name), lambda each, name: each.sync_s(name))
    )
    assert sums[0] == 0 < sums[1]
    assert least[1] - updates[1] == pytest.approx(least[0] - updates[0] + sums[1])


@pytest.mark.parametrize("system", ["ep", "megatron"])
def test_what_is_serial_pays_for_its_exchanges(system: str) -> None:
    """On one stage of one layer kind the bound is all that the compute stream does, which is the whole step."""
    program, costs = lowered(make_case("ep", ep=4, microbatches=3, seq_len=1 << 16), assumed="datasheet")
    placement = program.plan.placement
    least = {serial: least_step_s(placement, costs, 3, serial=serial) for serial in (False, True)}
    step_s = simulate(program, costs).step_time_s
    assert least[False] < 0.99 * least[True] <= 0.99 * step_s * (1 + 1e-9)
    assert least[True] >= 0.95 * step_s
    assert get_system(system).serial


def test_a_class_of_ones_own_is_not_taken_for_serial() -> None:
    class Mine(ExpertParallel):
        """It may hide what it likes."""

    assert ExpertParallel.serial and not Mine.serial and not get_system("tutel").serial
