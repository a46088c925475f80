"""Schedules of the colocated baselines: phase, pair and warm-up counts against their published formulas, and order."""

from itertools import pairwise

import pytest

from bench.action import Action, Kind, Pass, view
from bench.assumptions import get_assumptions
from bench.check import check
from bench.errors import BadInput
from bench.lower import lower
from bench.models import get_model
from bench.plan import Plan
from bench.predict import predict
from bench.program import Op
from bench.system import KnowsInFlight, KnowsMoves, default_layout, get_system, plan_of
from systems.baselines.interleaved import num_warmup, order
from tests.cases import make_case

LAYERS16 = get_model("tiny").model_copy(update={"num_layers": 16})


def plan(system: str, microbatches: int, **layout: int) -> Plan:
    case = make_case(system, LAYERS16, "h800x2", microbatches=microbatches, **layout)
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
        assert len(turns.warmup.each()) == min(expected, m * vpp)
        assert len(turns.cooldown.each()) == len(turns.warmup.each())
        assert len(turns.flat().each()) == 2 * m * vpp


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2)])
def test_megatron_has_the_order_of_ep_with_a_row_per_token_and_expert(pp: int, vpp: int) -> None:
    made = plan("megatron", 4, ep=2, pp=pp, vpp=vpp, copies="expert")
    assert made.queues == plan("ep", 4, ep=2, pp=pp, vpp=vpp).queues
    assert (made.system, made.copies) == ("megatron", "expert")


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"copies": "rank"}, "layout.copies.*'rank'.*one row per token and expert"),
        ({"copies": "node"}, "layout.copies.*'node'.*one row per token and expert"),
        ({"copies": "expert", "recompute": "full"}, "layout.recompute.*'full'.*whole layers"),
        ({"copies": "expert", "chunks": 2}, "layout.chunks.*not used by megatron"),
    ],
)
def test_megatron_refuses_what_megatron_core_does_not_offer(layout: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        plan_of(make_case("megatron", ep=2, **layout))


def test_megatrons_space_is_what_it_offers() -> None:
    spec = make_case("megatron", LAYERS16, "h800x2", microbatches=16)
    megatron = get_system("megatron")
    layouts = list(megatron.space(spec))
    assert len(layouts) == len(set(layouts))
    assert {(layout.copies, layout.recompute) for layout in layouts} == {("expert", "none"), ("expert", "redispatch")}
    assert {layout.vpp for layout in layouts} == {1, 2, 4}
    for layout in layouts:
        plan_of(spec.with_layout(layout))
    assert default_layout(megatron).copies == "expert"


@pytest.mark.parametrize(("pp", "vpp", "m", "group"), [(2, 2, 8, 4), (2, 3, 6, 3), (4, 2, 11, 7), (2, 2, 6, 6)])
def test_groups_of_more_microbatches_warm_up_longer(pp: int, vpp: int, m: int, group: int) -> None:
    """w = 2 (P - p - 1) + (v - 1) G, at most m v; every chunk passes every micro-batch once, G at a time."""
    made = plan("megatron", m, pp=pp, vpp=vpp, microbatch_group=group, copies="expert")
    for stage in range(pp):
        expected = min(2 * (pp - stage - 1) + (vpp - 1) * group, m * vpp)
        assert num_warmup(stage, pp, vpp, m, group=group) == expected
        turns = order(stage, pp, vpp, m, group=group)
        assert len(turns.warmup.each()) == expected
        forwards = [t for t in turns.flat().each() if t.pass_ is Pass.F]
        assert [t.microbatch for t in forwards[:group]] == list(range(group))
        assert {t.chunk for t in forwards[:group]} == {0}
        assert passes(made, f"S{stage}").startswith("F" * (expected * 16 // (pp * vpp)))
        assert len(set(turns.flat().each())) == len(turns.flat().each()) == 2 * m * vpp


@pytest.mark.parametrize(("layout", "m"), [({"pp": 2, "vpp": 2}, 7), ({"pp": 4, "vpp": 2}, 8), ({"pp": 4}, 8)])
def test_groups_that_megatron_core_does_not_take_are_refused(layout: dict[str, int], m: int) -> None:
    """Of 7, 3 leave 1; of 8 in 4 stages, 3 are too few, as are groups where nothing is interleaved."""
    with pytest.raises(BadInput, match="microbatch_group"):
        plan("megatron", m, microbatch_group=3, copies="expert", **layout)


def test_interleaving_goes_through_chunks_in_groups_of_pp() -> None:
    turns = order(0, 2, 2, 4)
    forwards = [(t.chunk, t.microbatch) for t in turns.flat().each() if t.pass_ is Pass.F]
    assert forwards == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    backwards = [(t.chunk, t.microbatch) for t in turns.flat().each() if t.pass_ is Pass.B]
    assert backwards == [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (1, 3), (0, 2), (0, 3)]


@pytest.mark.parametrize(("pp", "vpp", "m"), [(1, 1, 4), (2, 2, 4), (4, 4, 8)])
def test_combined_1f1b_pairs_all_but_one_warmup_more(pp: int, vpp: int, m: int) -> None:
    """mv - w pairs, with w one more than interleaved 1F1B's."""
    for stage in range(pp):
        plain, combined = order(stage, pp, vpp, m), order(stage, pp, vpp, m, ahead=1)
        warmup = len(combined.warmup.each())
        assert warmup == min(len(plain.warmup.each()) + 1, m * vpp)
        assert [len(turns.each()) for turns in combined.pairs] == [m * vpp - warmup] * 2


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
    """Woven layer pairs: experts' forwards right behind another's wgrad, before whose dgrad attention.F stands."""
    queue = list(made.queues[group, "compute"])
    place = {action: i for i, action in enumerate(queue)}
    woven = 0
    for sooner, later in pairwise(action for action in queue if action.kind is Kind.EXPERT):
        if sooner.pass_ is Pass.W and later.pass_ is Pass.F:
            before = queue[place[sooner._replace(pass_=Pass.B)] - 1]
            woven += before.kind is Kind.ATTENTION and before.pass_ is Pass.F
    return woven


def of_layer(made: Plan, stream: str, layer: int, pass_: Pass) -> list[str]:
    queue = made.queues["S0", stream]
    chosen = [a for a in queue if a.layer == layer and a.pass_ is pass_ and a.kind not in (Kind.SYNC, Kind.UPDATE)]
    return [f"{a.word}.{a.chunk}" for a in chosen]


def test_tutel_sends_all_then_gathers_all_and_reverses_the_backward() -> None:
    made = plan("tutel", 1, ep=2, chunks=3, mbs=3)
    sent, gathered = [f"dispatch.{c}" for c in range(3)], [f"combine.{c}" for c in range(3)]
    assert of_layer(made, "all-to-all", 5, Pass.F) == sent + gathered
    assert of_layer(made, "all-to-all", 5, Pass.B) == gathered[::-1] + sent[::-1]
    assert of_layer(made, "compute", 5, Pass.F) == ["attn.0", "expert.0", "expert.1", "expert.2"]
    assert of_layer(made, "compute", 5, Pass.B) == ["expert.2", "expert.1", "expert.0", "attn.0"]
    # An input gradient and its weight gradient stand together.
    backward = [(a.pass_.name, a.chunk) for a in made.queues["S0", "compute"] if a.kind is Kind.EXPERT and a.layer == 5]
    assert backward[3:] == [("B", 2), ("W", 2), ("B", 1), ("W", 1), ("B", 0), ("W", 0)]


@pytest.mark.parametrize("system", ["tutel", "comet"])
def test_slices_overlap_with_nothing_outside_their_layer(system: str) -> None:
    """In the compute stream a layer's experts stand between its attention and the next layer's, as in ep."""
    fused = {"comm_sms": 20} if system == "comet" else {}
    made, plain = plan(system, 4, ep=2, pp=2, vpp=2, chunks=4, **fused), plan("ep", 4, ep=2, pp=2, vpp=2)
    for group in ("S0", "S1"):
        whole = [a for a in plain.queues[group, "compute"] if a.kind not in (Kind.DISPATCH, Kind.COMBINE)]
        assert list(dict.fromkeys(a._replace(chunk=0) for a in made.queues[group, "compute"])) == whole
        assert made.queues[group, "hops"] == plain.queues[group, "hops"]


def test_comet_dispatches_the_next_slice_beside_the_experts_of_this_one() -> None:
    made = plan("comet", 1, ep=2, chunks=4, comm_sms=20)
    assert made.traits == ("modelled-only",)
    assert of_layer(made, "to-experts", 3, Pass.F) == [f"dispatch.{c}" for c in range(4)]
    assert of_layer(made, "from-experts", 3, Pass.F) == [f"combine.{c}" for c in range(4)]
    case = make_case("comet", "mixtral-8x7b", ep=8, seq_len=8192, microbatches=1, chunks=4, comm_sms=20)
    timeline = predict(case, get_assumptions()).timeline
    at = {
        (str(view(int(code))), Op(op)): (start, end)
        for code, op, start, end in zip(timeline.code, timeline.op, timeline.start_s, timeline.end_s, strict=True)
    }
    for c in (1, 2):
        begins, ends = at[f"expert:F3.0.{c}", Op.COMPUTE]
        assert at[f"dispatch:F3.0.{c + 1}", Op.RECV][0] < ends
        assert begins < at[f"combine:F3.0.{c - 1}" if c > 1 else "combine:F3.0", Op.RECV][1]


def test_a_space_has_slices_that_divide_and_moves_reach_the_others() -> None:
    """A sequence of 12 tokens is cut in 4; shared by two ranks, the 6 of each in 2."""
    for name, found in (("tutel", {(1, 4), (1, 2), (2, 4)}), ("comet", {(1, 4), (1, 2), (2, 8)})):
        spec, system = make_case(name, seq_len=12, microbatches=16), get_system(name)
        assert isinstance(system, KnowsMoves)
        space = list(system.space(spec))
        assert {(layout.mbs, layout.chunks) for layout in space} == found
        near = {move.chunks for layout in space if layout.mbs == 2 for move in system.moves(spec, layout)}
        chunks = max(chunks for _, chunks in found)
        assert {chunks // 2, chunks, 2 * chunks} <= near if name == "tutel" else {chunks, 2 * chunks} <= near
    sms = {move.comm_sms for layout in space for move in system.moves(spec, layout)}
    assert {16, 20, 24} <= sms


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


@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (2, 6), (4, 8), (4, 12), (8, 16), (8, 20)])
def test_dualpipe_counts(ranks: int, m: int) -> None:
    """M - 2P + 2h + 2 + (H - h - 1) woven pairs, less one on the two middle ranks; every chunk has its F, B and W."""
    made = plan("dualpipe", m, ep=1, pp=ranks)
    per_chunk, half = 16 // ranks, ranks // 2
    for rank in range(ranks):
        h = min(rank, ranks - 1 - rank)
        expected = m - 2 * ranks + 2 * h + 2 + (half - h - 1) - (h == half - 1)
        assert pairs_of(made, f"S{rank}") == expected * per_chunk
        # Steps 1 and 2: P chunks of forwards, of the own end's direction P - h - 1 and of the other h + 1.
        first = [a for a in made.queues[f"S{rank}", "compute"] if a.kind is Kind.ATTENTION][: ranks * per_chunk]
        assert {a.pass_ for a in first} == {Pass.F}
        own_end = sum(a.microbatch % 2 == (rank >= half) for a in first)
        assert own_end == (ranks - h - 1) * per_chunk
        # Steps 7 and 8: the first backwards put off are made good one by one, the last after everything else.
        assert passes(made, f"S{rank}").endswith("W" * per_chunk)
        for pass_ in "FBW":
            assert passes(made, f"S{rank}").count(pass_) == m * per_chunk


@pytest.mark.parametrize(
    ("ranks", "m", "least", "most"),
    [(8, 16, 0.31, 0.44), (8, 20, 0.45, 0.55), (8, 64, 0.83, 0.86), (16, 32, 0.28, 0.47), (16, 64, 0.64, 0.73)],
)
def test_dualpipe_weaves_most_pairs_only_with_many_microbatches(ranks: int, m: int, least: float, most: float) -> None:
    made = plan("dualpipe", m, ep=1, pp=ranks)
    woven = [pairs_of(made, f"S{rank}") / (m * (16 // ranks)) for rank in range(ranks)]
    assert (round(min(woven), 2), round(max(woven), 2)) == (least, most)


def test_dualpipe_mirrors_itself() -> None:
    """Rank P - 1 - r does in direction 1 what rank r does in direction 0."""
    made = plan("dualpipe", 12, ep=2, pp=4)
    for r in range(4):
        for stream in ("compute", "all-to-all", "hops"):
            other = [a._replace(microbatch=a.microbatch ^ 1) for a in made.queues[f"S{3 - r}", stream]]
            end = [Action(Kind.SYNC), Action(Kind.UPDATE)] if stream == "compute" else []
            assert [*made.queues[f"S{r}", stream]] == (other[: len(other) - len(end)] + end)


def test_dualpipe_with_one_stage_is_the_order_of_a_pair() -> None:
    made, plain = plan("dualpipe", 3, ep=2), plan("megatron-overlap", 3, ep=2)
    assert (made.traits, plan("dualpipe", 4, ep=1, pp=2).traits) == (("pair-order",), ("two-copies",))
    assert made.directions == 1
    assert dict(made.queues) == dict(plain.queues)


@pytest.mark.parametrize(
    ("m", "layout", "says"),
    [
        (8, {"pp": 3}, "layout.pp: 3 is not valid; allowed: an even number of stages"),
        (9, {"pp": 4}, "micro-batches: 9 is not valid; allowed: an even number"),
        (6, {"pp": 4}, "layout.pp: 4 is not valid; allowed: at most half of the 6 micro-batches"),
        (8, {"pp": 2, "vpp": 2}, "layout.vpp: 2 is not valid; allowed: not used by dualpipe"),
    ],
)
def test_dualpipe_refuses_what_it_has_no_order_for(m: int, layout: dict[str, int], says: str) -> None:
    with pytest.raises(BadInput) as refused:
        plan("dualpipe", m, ep=1, **layout)
    assert str(refused.value).startswith(says)


def test_dualpipes_space_is_what_it_can_plan() -> None:
    spec = make_case("dualpipe", microbatches=64)
    layouts = list(get_system("dualpipe").space(spec))
    assert {layout.pp for layout in layouts} == {2, 4}
    for layout in layouts:
        plan_of(spec.with_layout(layout))


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_what_dualpipe_says_is_in_flight_is_so(pp: int) -> None:
    """Micro-batches whose forward stands before the first backward; one of each direction counts as one."""
    case = make_case("dualpipe", LAYERS16, microbatches=16, ep=1, pp=pp)
    system = get_system("dualpipe")
    assert isinstance(system, KnowsInFlight)
    queues = plan_of(case).queues
    for group, number in system.in_flight(case).items():
        work = [a for a in queues[group, "compute"] if a.kind is Kind.ATTENTION]
        before = next(i for i, a in enumerate(work) if a.pass_ is Pass.B)
        layers = len({a.layer for a in work})
        # In a pair the forward's first layer stands before the backward's; at the middle so does a whole chunk.
        assert number * layers <= before <= (number + 1) * layers
