"""Schedules of the colocated baselines: phase, pair and warm-up counts against their published formulas, and order."""

from itertools import pairwise

import pytest

from bench.action import Action, Kind, Pass
from bench.check import check
from bench.lower import lower
from bench.models import get_model
from bench.plan import Plan
from bench.system import plan_of
from systems.baselines.interleaved import num_warmup, order
from tests.cases import make_case

LAYERS16 = get_model("tiny").model_copy(update={"num_layers": 16})


def plan(system: str, microbatches: int, **layout: int) -> Plan:
    case = make_case(system, LAYERS16, microbatches=microbatches, **layout)
    made = plan_of(case)
    check(lower(made, case.model))
    return made


def passes(made: Plan, group: str, kind: Kind = Kind.ATTENTION) -> str:
    """The passes of a kind in order, e.g. FFBW..."""
    return "".join(a.pass_.name for a in made.queues[group, "compute"] if a.kind is kind)


@pytest.mark.parametrize(("pp", "vpp", "m"), [(4, 1, 8), (4, 2, 8), (2, 4, 6), (8, 2, 16), (4, 1, 2)])
def test_warmup_follows_megatron(pp: int, vpp: int, m: int) -> None:
    for stage in range(pp):
        expected = pp - stage - 1 if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp
        assert num_warmup(stage, pp, vpp, m) == min(expected, m * vpp)
        turns = order(stage, pp, vpp, m)
        assert len(turns.warmup) == min(expected, m * vpp)
        assert len(turns.pairs) == len(turns.cooldown) + len(turns.pairs) - len(turns.warmup)
        assert len(turns.flat()) == 2 * m * vpp


def test_interleaving_goes_through_chunks_in_groups_of_pp() -> None:
    turns = order(0, 2, 2, 4)
    forwards = [(t.chunk, t.microbatch) for t in turns.flat() if t.pass_ is Pass.F]
    assert forwards == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    backwards = [(t.chunk, t.microbatch) for t in turns.flat() if t.pass_ is Pass.B]
    assert backwards == [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (1, 3), (0, 2), (0, 3)]


@pytest.mark.parametrize(("pp", "vpp", "m"), [(1, 1, 4), (2, 2, 4), (4, 4, 8)])
def test_combined_1f1b_pairs_all_but_one_warmup_more(pp: int, vpp: int, m: int) -> None:
    """mv - w pairs, with w one more than interleaved 1F1B's."""
    for stage in range(pp):
        plain, combined = order(stage, pp, vpp, m), order(stage, pp, vpp, m, ahead=1)
        assert len(combined.warmup) == min(len(plain.warmup) + 1, m * vpp)
        assert len(combined.pairs) == m * vpp - len(combined.warmup)


def test_a_pair_is_issued_in_megatrons_order() -> None:
    """Layer i of the forward beside layer L-1-i of the backward."""
    made = plan("megatron-overlap", 2, ep=2)
    compute = [str(a) for a in made.queues["S0", "compute"]]
    start = compute.index("attn:F0.1")
    assert compute[start : start + 6] == [
        "attn:F0.1",
        "expert:B15.0",
        "expert:W15.0",
        "expert:F0.1",
        "attn:B15.0",
        "attn:W15.0",
    ]
    exchange = [str(a) for a in made.queues["S0", "all-to-all"]]
    start = exchange.index("combine:B15.0")
    assert exchange[start : start + 4] == ["combine:B15.0", "dispatch:F0.1", "dispatch:B15.0", "combine:F0.1"]


def pairs_of(made: Plan, group: str) -> int:
    """Woven layer pairs over layers per chunk: forwards of experts right behind a backward's wgrad of another chunk."""
    queue = [a for a in made.queues[group, "compute"] if a.kind is Kind.EXPERT]
    woven = sum(
        later.pass_ is Pass.F and sooner.pass_ is Pass.W and _neighbour_is_attention_f(made, group, sooner)
        for sooner, later in pairwise(queue)
    )
    return woven


def _neighbour_is_attention_f(made: Plan, group: str, wgrad: Action) -> bool:
    """In a pair attention.F stands right before the experts' dgrad."""
    queue = list(made.queues[group, "compute"])
    before = queue[queue.index(wgrad._replace(pass_=Pass.B)) - 1]
    return before.kind is Kind.ATTENTION and before.pass_ is Pass.F


@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (2, 8), (4, 8), (4, 10)])
def test_dualpipe_v_counts(ranks: int, m: int) -> None:
    """DualPipe's pairs 2(M/2 - P + h + 1) + (H - h - 1), less one on the middle ranks; folded, M/2 is M and P is 2H."""
    made = plan("dualpipe-v", m, ep=1, pp=ranks, vpp=2)
    per_chunk = 16 // (2 * ranks)
    for h in range(ranks):
        expected = 2 * (m - 2 * ranks + h + 1) + (ranks - h - 1) - (h == ranks - 1)
        assert pairs_of(made, f"S{h}") == expected * per_chunk
        assert passes(made, f"S{h}").startswith("F" * (2 * (ranks - h - 1) + 2 * (h + 1)) * per_chunk)
        # The last backwards put their weight gradients off: the step ends in them.
        assert passes(made, f"S{h}").endswith("W" * per_chunk)


def test_dualpipe_v_folds_the_stages() -> None:
    made = plan("dualpipe-v", 8, ep=1, pp=4, vpp=2)
    assert made.placement.attention[::2] == ("S0", "S1", "S2", "S3", "S3", "S2", "S1", "S0")
    assert made.placement.embed == made.placement.head == "S0"
