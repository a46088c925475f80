"""Trials: round trips, names, and the commands that give them again."""

import math
import shlex

import pytest
from cases import make_case

from bench.case import Case, CaseSpec, Layout
from bench.errors import BadInput
from bench.models import Model
from bench.provenance import ENVIRONMENT, ROOT, code_digest, collect, git_state
from bench.trial import Trial, command_for, content_id


def simulated(case: CaseSpec, **fields: object) -> Trial:
    given: dict[str, object] = {
        "source": "simulated",
        "assumptions": "plain",
        "assumption_values": {"efficiency": 0.5},
        "code_digest": "0" * 16,
        "command": "moebench simulate",
        "metrics": {"step_time_s": 1.5, "mfu": None},
    }
    return Trial.make(case=case, provenance={"python": "3.11"}, **{**given, **fields})  # type: ignore[arg-type]


def measured(case: CaseSpec, **fields: object) -> Trial:
    given: dict[str, object] = {"source": "measured", "command": "moebench run", "samples": {"loss": [2.0, 1.0]}}
    return Trial.make(case=case, provenance={"python": "3.11"}, **{**given, **fields})  # type: ignore[arg-type]


def test_text_and_parse_are_inverse() -> None:
    case = make_case("ep", ep=2)
    for trial in (simulated(case), measured(case)):
        assert Trial.parse(trial.to_text()) == trial
        assert trial.layout == "replicas=1 ep=2"
        assert isinstance(trial.case, Case)


def test_a_diverged_run_keeps_its_samples_in_plain_json() -> None:
    trial = measured(
        make_case("ep"), status="diverged", message="loss is nan at step 1", samples={"loss": [2.0, math.nan, math.inf]}
    )
    text = trial.to_text()
    assert "NaN," not in text.replace('"NaN"', "")
    losses = Trial.parse(text).samples["loss"]
    assert losses[0] == 2.0
    assert math.isnan(losses[1])
    assert losses[2] == math.inf


def test_a_spec_without_a_layout_can_be_infeasible() -> None:
    spec = simulated(make_case("ep")).spec
    trial = simulated(spec, status="infeasible", message="needs 93.1 GiB, allowed 80 GiB: 13.1 GiB missing")
    assert Trial.parse(trial.to_text()) == trial
    assert type(trial.case) is CaseSpec
    assert trial.layout is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"status": "oom"}, "message"),
        ({"code_digest": None}, "simulated with assumptions and code_digest"),
        ({"source": "measured"}, "measured without"),
        ({"status": "fine"}, "trial.status"),
        ({"metrics": {"mfu": "high"}}, "trial.metrics.mfu"),
        ({"colour": "red"}, "trial.colour"),
    ],
)
def test_what_does_not_belong_together_is_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        simulated(make_case("ep"), **fields)


def test_a_record_whose_case_was_edited_is_refused() -> None:
    text = simulated(make_case("ep")).to_text()
    with pytest.raises(BadInput, match="case_id"):
        Trial.parse(text.replace('"seq_len": 16', '"seq_len": 32'))


def test_simulated_names_tell_code_and_assumptions_and_measured_names_tell_all() -> None:
    case = make_case("ep")
    assert simulated(case).name == simulated(case).name
    assert simulated(case).name != simulated(case, code_digest="1" * 16).name
    assert simulated(case).name != simulated(case, assumption_values={"efficiency": 0.6}).name
    assert simulated(case).name != simulated(make_case("ep", ep=2)).name
    assert measured(case).name != measured(case).name
    assert content_id(case) == case.id


def test_the_command_names_the_whole_case() -> None:
    case = make_case("disagmoe", cluster="h800x2", attention_ranks=2, expert_ranks=4)
    words = shlex.split(command_for("simulate", case, ("--assumptions", "plain")))
    assert words[:3] == ["moebench", "simulate", "disagmoe"]
    for option, value in (
        ("--model", "tiny"),
        ("--cluster", "h800x2"),
        ("--seq-len", "16"),
        ("--global-batch-tokens", "128"),
    ):
        assert words[words.index(option) + 1] == value
    at = words.index("--layout") + 1
    assert Layout.from_pairs(words[at : words.index("--assumptions")]) == case.layout


def test_a_model_of_ones_own_is_named_as_a_file() -> None:
    case = make_case("ep")
    other = Model.from_fields({**case.model.model_dump(), "num_layers": 2})
    changed = make_case("ep", other)
    assert "--model tiny.json" in command_for("run", changed)
    assert "--model tiny " in command_for("run", case)


def test_provenance_takes_only_listed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SOME_API_TOKEN", "hush")
    facts = collect()
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    assert set(facts["environment"]) <= set(ENVIRONMENT)
    assert "hush" not in str(facts)
    assert str(ROOT) not in str(facts)
    assert facts["packages"]["numpy"]


def test_git_state_is_none_outside_a_work_tree(tmp_path: object) -> None:
    assert git_state(tmp_path) is None  # type: ignore[arg-type]


def test_code_digest_is_of_the_sources() -> None:
    assert code_digest("ep") == code_digest("disagmoe")
    assert len(code_digest("ep")) == 16
    with pytest.raises(BadInput, match="reference, ep"):
        code_digest("nothing")


def test_provenance_tells_the_slurm_job_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "somebody")
    monkeypatch.setenv("NCCL_NET", "/somewhere/of/mine/libnet.so")
    facts = collect()
    assert facts["slurm"]["SLURM_JOB_ID"] == "4711"
    assert "somebody" not in str(facts) and "of/mine" not in str(facts)
    assert facts["environment"]["NCCL_NET"] == "(a path)"
    assert len(facts["host"]) == 8
