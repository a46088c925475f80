"""Routing that a run recorded: counts that are exact, refused where they cannot be, and replayed as they were."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.assumptions import get_assumptions
from bench.case import Case, CaseSpec, Workload
from bench.cli import app
from bench.errors import BadInput
from bench.execute.pool import RankPool
from bench.models import get_model
from bench.predict import Prediction, predict
from bench.recorded import Recorded, RecordedRun, read_recorded, routing_fields
from bench.replay import expert_ids, sample
from bench.results.table import load
from bench.routing import Routing
from bench.trial import Trial, command_for

TOP_K = 2
"""Of the model `tiny`."""


@st.composite
def counts(draw: st.DrawFn) -> tuple[Recorded, int]:
    """Counts of three layers, and a sequence length; some experts get nothing, some every token."""
    seq_len, sequences, experts = draw(st.integers(1, 9)), draw(st.integers(1, 7)), draw(st.integers(2, 9))
    top_k, tokens = draw(st.integers(1, experts)), seq_len * sequences
    chance = np.random.default_rng(draw(st.integers(0, 99)))
    popularity = chance.exponential(size=(3, 1, experts)) ** draw(st.sampled_from([0, 1, 4]))
    drawn = np.argsort(chance.exponential(size=(3, tokens, experts)) / popularity, axis=2)[:, :, :top_k]
    rows = tuple(tuple(np.bincount(of_layer.ravel(), minlength=experts).tolist()) for of_layer in drawn)
    return Recorded(tokens=tokens, counts=rows), seq_len


@settings(max_examples=60)
@given(counts(), st.integers(0, 5))
def test_every_token_gets_different_experts_and_every_expert_its_tokens(made: tuple[Recorded, int], seed: int) -> None:
    recorded, seq_len = made
    for row, expected in enumerate(recorded.counts):
        ids = np.concatenate(
            [expert_ids(recorded, row, seed, number, seq_len) for number in range(recorded.tokens // seq_len)]
        )
        assert ids.shape == (recorded.tokens, recorded.top_k)
        assert all(len(set(chosen)) == recorded.top_k for chosen in ids.tolist())
        assert np.bincount(ids.ravel(), minlength=len(expected)).tolist() == list(expected)
        again = expert_ids(recorded, row, seed, 0, seq_len)
        assert np.array_equal(again, ids[:seq_len])


def test_seeds_and_layers_deal_differently() -> None:
    recorded = Recorded(tokens=64, counts=((16,) * 8,) * 2)
    ids = expert_ids(recorded, 0, 0, 0, 64)
    assert not np.array_equal(ids, expert_ids(recorded, 0, 1, 0, 64))
    assert not np.array_equal(ids, expert_ids(recorded, 1, 0, 0, 64))


def test_any_two_experts_may_meet() -> None:
    """What a token's first expert is says nothing of the second, but that it is another."""
    recorded = Recorded(tokens=4096, counts=((2048,) * 4,))
    ids = np.sort(expert_ids(recorded, 0, 0, 0, 4096), axis=1)
    met = np.bincount(ids[:, 0] * 4 + ids[:, 1], minlength=16).reshape(4, 4)
    pairs = met[np.triu_indices(4, 1)]
    assert pairs == pytest.approx(4096 / 6, rel=0.25)


def test_the_sample_of_a_large_step_has_its_shares() -> None:
    recorded = Recorded(tokens=1 << 20, counts=((1 << 20, 1 << 19, 1 << 19, 0),))
    ids = sample(recorded, 0, 0)
    shares = np.bincount(ids.ravel(), minlength=4) / len(ids)
    assert shares.tolist() == [1, 0.5, 0.5, 0]


def simulated(case: Case) -> Prediction:
    return predict(case, get_assumptions())


def recorded_case(system: str, counts_of: np.ndarray, **layout: Any) -> Case:
    case = make_case(system, **layout)
    recorded = Recorded(tokens=case.workload.global_batch_tokens, counts=tuple(map(tuple, counts_of.tolist())))
    fields = case.workload.model_dump() | {"routing": f"recorded:{recorded.digest}", "recorded": recorded}
    return case.model_copy(update={"workload": Workload(**fields)})


def skewed(tokens: int, layers: int = 4) -> np.ndarray:
    """[layers, experts]: one expert with every token, one with none, another one in every layer."""
    row = np.array([tokens, tokens // 2, tokens // 4, tokens // 4, 0, 0, 0, 0])
    return np.stack([np.roll(row, layer) for layer in range(layers)])


def test_simulated_loads_are_those_recorded() -> None:
    """Four ranks of two experts: pairs 1.5, 0.5, 0, 0 a token in layer 0, and 1, 0.75, 0.25, 0 in layer 1."""
    case = recorded_case("ep", skewed(256), ep=4)
    assert case.workload.global_batch_tokens == 256
    route = Routing.of(case.workload, case.model, 4)
    assert route.assignments(0, 4).tolist() == [1.5, 0.5, 0, 0]
    assert route.assignments(1, 4).tolist() == [1, 0.75, 0.25, 0]
    copies = route.copies(0, 4, "rank")
    assert copies[0] == 1 and 0.25 <= copies[1] <= 0.5  # experts 2 and 3 may share a token
    assert simulated(case).costs.load_imbalance == pytest.approx(1.5 / 0.5)
    balanced = case.workload.model_copy(update={"routing": "balanced", "recorded": None})
    even = simulated(case.model_copy(update={"workload": balanced}))
    assert simulated(case).metrics.step_time_s > even.metrics.step_time_s


def test_dense_layers_have_no_counts() -> None:
    model = get_model("tiny").model_copy(update={"num_dense_layers": 1})
    recorded = Recorded(tokens=64, counts=tuple(map(tuple, skewed(64, 3).tolist())))
    work = Workload(seq_len=16, global_batch_tokens=64, routing=f"recorded:{recorded.digest}", recorded=recorded)
    assert Routing.of(work, model, 1).expert_share(1).tolist() == [1, 0.5, 0.25, 0.25, 0, 0, 0, 0]


def test_the_counts_are_part_of_the_case() -> None:
    case, other = (recorded_case("ep", skewed(64)[turn], ep=1) for turn in ([0, 1, 2, 3], [1, 0, 2, 3]))
    assert case.id != other.id
    assert Case.parse(case.to_text()) == case
    assert hash(case) != hash(other)
    changed = case.to_text().replace('"routing": "recorded:', '"routing": "recorded:0', 1)
    with pytest.raises(BadInput, match="digest"):
        Case.parse(changed.replace(case.workload.routing[-12:], case.workload.routing[-12:-1]))
    with pytest.raises(BadInput, match="a file that a run recorded"):
        Workload.make(seq_len=16, global_batch_tokens=64, routing="recorded:0123456789ab")


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"num_layers": 5}, "workload.recorded.layers", "5, the layers with experts of tiny"),
        ({"num_experts": 16}, "workload.recorded.experts", "16, the experts of tiny"),
        ({"top_k": 3}, "workload.recorded.top_k", "3, the experts that a token of tiny chooses"),
    ],
)
def test_counts_of_another_model_are_refused(change: dict[str, int], field: str, says: str) -> None:
    case = recorded_case("ep", skewed(64), ep=1)
    fields = {"cluster": case.cluster, "workload": case.workload, "system": "ep"}
    with pytest.raises(BadInput) as refused:
        CaseSpec.make(model=case.model.model_copy(update=change), **fields)
    assert refused.value.field.endswith(field)
    assert refused.value.allowed == says


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([[64, 64], [64, 63]], r"counts\[1\]: 127 .* a sum of 128"),
        ([[64, 63]], r"counts\[0\]: 127 .* a sum of 64 tokens x top_k"),
        ([[65, 63]], r"counts\[0\]\[0\]: 65 .* at most the 64 tokens"),
        ([[64, 64], [64]], r"counts\[1\]: 1 .* 2 experts"),
        ([[64, -1]], r"counts\.0\.1: -1 .* greater than or equal to 0"),
        ([[0, 0]], r"counts\[0\]: 0 "),
        ([], r"counts: .* at least 1 item"),
    ],
)
def test_counts_that_cannot_be_are_refused(tmp_path: Path, rows: list[list[int]], says: str) -> None:
    path = tmp_path / "r.json"
    steps = [{"step": 0, "counts": rows}]
    text = {"format": "moebench-routing-1", "model": "m", "case_id": "c", "tokens": 64, "steps": steps}
    path.write_text(json.dumps(text))
    with pytest.raises(BadInput, match=says):
        read_recorded(str(path))


def test_a_file_is_read_step_by_step(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    text = RecordedRun.of("tiny", "c", 64, [(3, skewed(64).tolist()), (4, skewed(64)[::-1].tolist())]).to_text()
    path.write_text(text)
    assert RecordedRun.read(path).to_text() == text
    assert read_recorded(f"{path}@3").counts == tuple(map(tuple, skewed(64).tolist()))
    assert read_recorded(str(path)).counts == tuple(map(tuple, skewed(64)[::-1].tolist()))
    with pytest.raises(BadInput, match=r"routing\.step: 5 .* 3 to 4"):
        read_recorded(f"{path}@5")
    assert routing_fields("zipf:1") == {"routing": "zipf:1"}


@pytest.mark.parametrize(
    ("content", "says"), [("{", "JSON"), ("{}", "required"), ('{"case": {}}', "replayed a recorded step")]
)
def test_files_that_are_something_else_are_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(BadInput, match=says):
        read_recorded(str(path))


def test_the_command_line_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    words = ["simulate", "ep", "--model", "tiny", "--cluster", "h800x1", "--seq-len", "16", "--routing"]
    for routing, says in (
        (f"recorded:{tmp_path / 'none.json'}", "readable file"),
        ("recorded", "recorded:FILE[@STEP]"),
        ("recorded:0123456789ab", "readable file"),
    ):
        result = CliRunner().invoke(app, [*words, routing])
        assert (result.exit_code, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1
        assert says in result.stderr


RUNS: dict[str, dict[str, Any]] = {
    "ep": {"ep": 2, "pp": 2, "microbatches": 4},
    "dualpipe": {"ep": 1, "pp": 2, "mbs": 2, "microbatches": 4},
    "disagmoe": {"expert_ranks": 2, "replicas": 1, "mbs": 2, "microbatches": 4},
}


@pytest.fixture(scope="module")
def recorded_run(pool: RankPool) -> tuple[Case, dict[int, np.ndarray]]:
    """Three steps on four ranks whose routers choose; the counts of every step."""
    pytest.importorskip("torch")
    from bench.execute.train import train

    case, found = make_case("ep", **RUNS["ep"]), {}
    case = case.model_copy(update={"workload": case.workload.model_copy(update={"routing": "learned"})})
    train(case, steps=3, pool=pool, keep_routing=True, data="synthetic", on_step=lambda r: found.update({r.step: r}))
    assert [record.routing.sum(axis=1).tolist() for record in found.values()] == [[128 * TOP_K] * 4] * 3
    return case, {step: record.routing for step, record in found.items()}


def test_a_run_records_what_its_routers_chose(recorded_run: tuple[Case, dict[int, np.ndarray]], pool: RankPool) -> None:
    """The reference, whose ids are counted one by one, starts from the same weights and sees the same tokens."""
    from bench.execute.train import train

    case, counts = recorded_run
    found: list[Any] = []
    alone = case.model_copy(update={"system": "reference", "layout": make_case("reference", mbs=2).layout})
    train(alone, steps=1, pool=pool, keep_routing=True, data="synthetic", on_step=found.append)
    # Near ties may be broken differently.
    assert np.abs(found[0].routing - counts[0]).sum() <= 4
    assert not np.array_equal(counts[0], counts[2])


@pytest.mark.parametrize("system", [*RUNS, "reference"])
def test_a_recorded_step_is_replayed_on_other_ranks(
    system: str, recorded_run: tuple[Case, dict[int, np.ndarray]], pool: RankPool
) -> None:
    """In every step, every expert has the recorded number of tokens, simulated and executed."""
    from bench.execute.train import train

    counts = recorded_run[1][2]
    layout = RUNS.get(system, {"mbs": 8, "microbatches": 1})
    case = recorded_case(system, counts, **layout)
    assert case.workload.global_batch_tokens == 128
    found: list[Any] = []
    train(case, steps=2, pool=pool, keep_routing=True, data="synthetic", on_step=found.append)
    for record in found:
        assert np.array_equal(record.routing, counts)
    if system == "ep":
        pairs = counts.reshape(4, 2, 4).sum(axis=2)
        assert simulated(case).costs.load_imbalance == pytest.approx((pairs.max(axis=1) / 128).max())
        assert found[0].load_imbalance == pytest.approx((pairs.max(axis=1) / 128).mean())


def test_a_replay_has_the_references_loss_and_gradients(
    recorded_run: tuple[Case, dict[int, np.ndarray]], pool: RankPool
) -> None:
    from bench.execute.verify import verify

    report = verify(recorded_case("disagmoe", recorded_run[1][2], **RUNS["disagmoe"]), pool, data="synthetic")
    assert report.ok, str(report)
    assert report.flips == 0


def test_a_step_of_another_size_is_not_replayed(pool: RankPool) -> None:
    from bench.execute.train import train

    case = recorded_case("ep", skewed(64), ep=1)
    more = case.model_copy(update={"workload": case.workload.model_copy(update={"global_batch_tokens": 128})})
    assert simulated(more).costs.load_imbalance == 1  # one rank has all experts
    with pytest.raises(BadInput, match=r"global_batch_tokens: 128 .* 64 to replay recorded:"):
        train(more, steps=1, pool=pool, data="synthetic")


def test_a_trial_holds_the_counts_and_its_command_names_a_file_of_them(tmp_path: Path) -> None:
    case = recorded_case("ep", skewed(64), ep=1)
    trial = Trial.make(
        case=case, source="measured", provenance={}, command=command_for("run", case), metrics={"loss": 1.0}
    )
    digest = case.workload.recorded.digest
    assert f"--routing recorded:{digest}.json" in trial.command
    path = tmp_path / f"{digest}.json"
    path.write_text(trial.to_text())
    assert read_recorded(str(path)) == case.workload.recorded
    assert Trial.parse(path.read_text()).case_id == case.id
    row = load([path]).iloc[0]
    assert row["routing"] == f"recorded:{digest}"


def test_a_run_writes_its_file_and_another_replays_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    run = ["run", "ep", "--model", "tiny", "--ranks", "2", "--steps", "2", "--seq-len", "16", "--layout", "ep=2"]
    first = CliRunner().invoke(app, [*run, "--record-routing", "first.json"])
    assert first.exit_code == 0, first.output
    second = CliRunner().invoke(app, [*run, "--routing", "recorded:first.json@1", "--record-routing", "second.json"])
    assert second.exit_code == 0, second.output
    one, two = RecordedRun.read(Path("first.json")), RecordedRun.read(Path("second.json"))
    assert [step.counts for step in two.steps] == [one.steps[1].counts] * 2
    again = CliRunner().invoke(app, [*run, "--record-routing", "first.json"])
    assert again.exit_code == 2
    assert "record-routing: 'first.json' is not valid" in again.stderr
