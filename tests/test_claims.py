"""The paper's claims: judged by trials and by nothing else, and the table of the README is what the command prints."""

import re
from pathlib import Path

import pytest

from bench.assumptions import ASSUMPTIONS, DEFAULT_ASSUMPTIONS
from bench.case import Layout
from bench.errors import BadInput
from bench.evaluate import CostModel
from bench.results import Store
from bench.trial import Trial
from experiments import _claims, fig7, virtual_stages
from experiments._claims import Finding, Ground, judge, markdown, overall, published_ground, with_table
from experiments._paper import Claim, claims, read_claims

ROOT = Path(__file__).parents[1]
MODEL = CostModel.named()


def trial(system: str, seq_len: int, rate: float | None, layout: str = "", model: str = "gpt-oss-120b") -> Trial:
    """A record with that rate; None for one that does not fit."""
    return Trial.make(
        case=fig7.spec_of(model, seq_len, system).with_layout(Layout.from_pairs(layout.split())),
        source="simulated",
        status="infeasible" if rate is None else "ok",
        message="too big" if rate is None else "",
        metrics={} if rate is None else {"tokens_per_s_per_gpu": rate},
        search={"fixed": [], "budget": 32},
        assumptions=MODEL.name,
        assumption_values=MODEL.values.model_dump(mode="json"),
        code_digest="0" * 16,
        command="moebench",
        provenance={},
    )


def claim(name: str) -> Claim:
    return next(found for found in claims() if found.name == name)


def cells(factors: list[float | None], system: str = "megatron") -> Ground:
    """`disagmoe` faster than `system` by these factors; None: the other does not fit."""
    trials = []
    for seq_len, factor in zip((4096, 8192, 16384, 32768), factors, strict=False):
        trials += [trial("disagmoe", seq_len, 1000.0), trial(system, seq_len, factor and 1000.0 / factor)]
    return Ground(trials, [])


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ([1.6, 1.7, 1.8], "comes out"),
        ([1.52, 1.89], "comes out"),  # within 5 %
        ([1.7, 2.5], "comes out, and more"),
        ([1.7, 1.2, 0.9], "in part: 1 of 3 cells reach it"),
        ([0.9, 1.4], "does not"),
        ([], "no trials"),
    ],
)
def test_a_claimed_span(factors: list[float | None], verdict: str) -> None:
    assert judge(claim("over-megatron"), "x", cells(factors)).verdict == verdict


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ([0.8, 1.3], "comes out"),
        ([0.9, 1.5], "comes out, and more"),
        ([0.8, 1.1], "in part: faster, by less"),
        ([0.8, 1.0], "does not"),
    ],
)
def test_a_claim_of_up_to(factors: list[float | None], verdict: str) -> None:
    assert judge(claim("over-best-overlap"), "x", cells(factors, "comet")).verdict == verdict


def test_of_several_systems_the_fastest_of_a_cell_counts() -> None:
    trials = [trial("disagmoe", 4096, 1000.0), trial("tutel", 4096, 500.0), trial("comet", 4096, 800.0)]
    found = judge(claim("over-best-overlap"), "x", Ground(trials, []))
    assert found.cells == {"gpt-oss-120b 4K": pytest.approx(1.25)}


def test_cells_where_one_side_does_not_fit_are_counted_apart() -> None:
    found = judge(claim("over-megatron"), "x", cells([1.6, None, 1.8]))
    assert found.value == "1.60x to 1.80x over 2 cells, 1 where one side has no layout"


def test_a_cell_without_a_trial_of_one_side_says_nothing() -> None:
    ground = Ground([*cells([1.6, 1.8]).throughput, trial("megatron", 16384, 100.0)], [])
    assert judge(claim("over-megatron"), "x", ground).value == "1.60x to 1.80x over 2 cells"


@pytest.mark.parametrize(
    ("ranks", "verdict"), [([(4, 8), (8, 8), (16, 8)], "comes out"), ([(8, 8), (8, 8)], "does not"), ([], "no trials")]
)
def test_share_of_gpus_for_attention(ranks: list[tuple[int, int]], verdict: str) -> None:
    trials = [
        trial("disagmoe", 4096 << i, 1000.0, f"attention_ranks={m} expert_ranks={n}") for i, (m, n) in enumerate(ranks)
    ]
    assert judge(claim("longer-takes-attention"), "x", Ground(trials, [])).verdict == verdict


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ([100.0, 120.0, None, None], "comes out"),
        ([100.0, 120.0, 119.9, 130.0], "comes out"),
        ([100.0, 120.0, 90.0, None], "does not"),
        ([100.0, None, 120.0, 130.0], "does not"),
    ],
)
def test_virtual_stages(rates: list[float | None], verdict: str) -> None:
    mine = [c for c in virtual_stages.cells() if c.spec.system == "disagmoe" and c.panel == "gpt-oss-120b"]
    stages = [(c, trial("disagmoe", 8192, rate)) for c, rate in zip(mine, rates, strict=True)]
    assert judge(claim("virtual-stages"), "x", Ground([], stages)).verdict == verdict


def test_a_verdict_that_differs_between_sets_says_on_what_it_depends() -> None:
    one = claim("over-megatron")
    findings = [Finding(one, "a", "", "comes out", {}), Finding(one, "b", "", "does not", {})]
    assert overall(findings) == "depends on the assumptions: comes out under a; does not under b"
    assert overall(findings[:1]) == "comes out"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (("does not", "does not", "does not"), "does not"),
        (("no trials", "does not", "does not"), "does not"),
        (
            ("in part: 3 of 12", "does not", "in part: 4 of 12"),
            "depends on communication_sms: in part: 3 of 12 under h200-measured; does not under sm-exchange; "
            "in part: 4 of 12 under nccl-all-to-all",
        ),
        (
            ("does not", "comes out", "comes out"),
            "depends on communication_sms and nic_all_to_all: does not under h200-measured; "
            "comes out under sm-exchange, nccl-all-to-all",
        ),
        (
            ("in part: 3 of 12", "in part: 2 of 12", "in part: 3 of 12"),
            "in part: 3 of 12 under h200-measured, nccl-all-to-all; in part: 2 of 12 under sm-exchange",
        ),
    ],
)
def test_a_verdict_names_the_assumption_by_which_its_sets_differ(verdicts: tuple[str, ...], expected: str) -> None:
    one = claim("over-megatron")
    names = ("h200-measured", "sm-exchange", "nccl-all-to-all")
    findings = [Finding(one, name, "", verdict, {}) for name, verdict in zip(names, verdicts, strict=True)]
    assert overall(findings) == expected
    table = markdown(findings).splitlines()
    assert table[2].startswith(f"| **{one.says}** ({one.source}) | `h200-measured` |")
    differ = len({*verdicts} - {"no trials"}) > 1
    assert table[-1].endswith(f"| **{expected}** |" if differ else f"| {verdicts[-1]} |")
    assert len(table) == 5 + differ


def test_every_set_is_published_by_make() -> None:
    """The Makefile names them, the default first and elsewhere than in a folder of its own."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (sets,) = re.findall(r"^SETS := (.*)$", text, re.MULTILINE)
    assert sets.split()[0] == DEFAULT_ASSUMPTIONS
    assert sorted(sets.split()) == sorted(ASSUMPTIONS)
    assert f"$(filter-out {DEFAULT_ASSUMPTIONS},$(SET))" in text


def test_published_trials_are_taken_by_spec_and_assumptions(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(trial("megatron", 4096, 100.0))
    store.write(trial("disagmoe", 4096, 170.0))
    found = published_ground(MODEL.name, tmp_path)
    assert [t.case.system for t in found.throughput] == ["megatron", "disagmoe"]
    assert judge(claim("over-megatron"), MODEL.name, found).value == "1.70x to 1.70x over 1 cells"
    assert published_ground("datasheet", tmp_path) == Ground([], [])
    assert _claims.published_sets(tmp_path) == [MODEL.name]


def test_the_readme_has_the_table_that_the_command_prints() -> None:
    names = _claims.published_sets() or [MODEL.name]
    table = markdown(_claims.judge_all({name: published_ground(name) for name in names}))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_table(text, table) == text


def test_a_text_without_marks_gets_no_table() -> None:
    assert with_table("no marks", "table\n") is None
    assert with_table(f"a {_claims.BEGIN} old {_claims.END} b", "new\n") == f"a {_claims.BEGIN}\nnew\n{_claims.END} b"


def test_every_claim_has_its_source_and_none_has_a_value_of_ours() -> None:
    assert len(claims()) >= 5
    for one in claims():
        assert one.source.startswith("arXiv 2605.11005")
        assert set(one.over) <= set(fig7.SYSTEMS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[claim]\n", "a TOML file of"),
        ("", "one or more"),
        ('[[claim]]\nname = "a"\nsays = "b"\nsource = "c"\nmeasure = "speed"\n', "claim.measure"),
        ('[[claim]]\nname = "a"\nsays = "b"\nsource = "c"\nmeasure = "speedup"\n', "claim a"),
        ('[[claim]]\nname = "a"\nsays = "b"\nsource = ""\nmeasure = "virtual stages"\n', "claim.source"),
        ('claim = "x"\n', "a TOML file of"),
    ],
)
def test_a_bad_file_of_claims_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "claims.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=said):
        read_claims(file)
    with pytest.raises(BadInput, match="a TOML file of"):
        read_claims(tmp_path / "none.toml")
