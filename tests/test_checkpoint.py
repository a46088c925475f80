"""Checkpoints: what any layout saves any other loads, losses go on, and a run that is killed loses nothing whole."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path, PosixPath
from typing import Any

import pytest
from cases import make_case
from hypothesis import given
from hypothesis import strategies as st
from test_cli import call, call_json
from test_pool import wait_until_gone
from test_train import MODEL, QUICK

from bench.case import Case
from bench.errors import BadInput
from bench.execute.manifest import LATEST, MANIFEST, METADATA, find_saved
from bench.execute.pool import RankPool
from bench.results import read_trial

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING  # noqa: E402

from bench.execute.checkpoint import NUM_KEPT, Saving, _Unpickler  # noqa: E402
from bench.execute.shards import boxes, global_shapes  # noqa: E402
from bench.execute.train import TrainResult, train  # noqa: E402

STEPS, SAVED = 6, 3

# Each trains on the same 8 sequences of 32 tokens a step.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("reference", {"mbs": 4, "microbatches": 2}),
    "ep": ("ep", {"ep": 2, "pp": 2, "microbatches": 4, "shard_state": False}),
    "ep sharded": ("ep", {"ep": 2, "replicas": 2, "microbatches": 2}),
    "state with the host": ("ep", {"ep": 2, "replicas": 2, "microbatches": 2, "offload": "state"}),
    "megatron": ("megatron", {"ep": 2, "pp": 2, "microbatches": 4, "copies": "expert", "shard_state": False}),
    "megatron sharded": ("megatron", {"ep": 2, "replicas": 2, "microbatches": 2, "copies": "expert"}),
    "two copies": ("dualpipe", {"ep": 2, "pp": 2, "microbatches": 4}),
    "dualpipe": ("dualpipe", {"ep": 2, "pp": 2, "microbatches": 4}),
    "2:1:2": ("disagmoe", {"attention_ranks": 2, "expert_ranks": 1, "groups": 2, "mbs": 2, "microbatches": 2}),
    "1:2, two replicas": ("disagmoe", {"expert_ranks": 2, "replicas": 2, "microbatches": 4, "shared_on": "expert"}),
    "4:4": ("disagmoe", {"attention_ranks": 4, "expert_ranks": 4, "microbatches": 2, "shard_state": False}),
}


def case_for(name: str, dtype: str = "fp32") -> Case:
    system, layout = LAYOUTS[name]
    case = make_case(system, MODEL, seq_len=32, **layout)
    assert case.workload.num_sequences == 8
    changes = {"routing": "learned", "dtype": dtype}
    return case.model_copy(update={"workload": case.workload.model_copy(update=changes)})


def run_and_save(case: Case, folder: Path, pool: RankPool, steps: int = STEPS) -> TrainResult:
    return train(case, steps=steps, pool=pool, settings=QUICK, saving=Saving(folder, SAVED))


@pytest.fixture(scope="module")
def expected(pool: RankPool) -> TrainResult:
    """The reference, uninterrupted."""
    return train(case_for("reference"), steps=STEPS, pool=pool, settings=QUICK)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 6), st.integers(1, 7))))
    low = draw(st.integers(0, math.prod(shape) - 1))
    return shape, low, draw(st.integers(low + 1, math.prod(shape)))


@given(intervals())
def test_boxes_are_an_interval_in_order(interval: tuple[tuple[int, ...], int, int]) -> None:
    shape, low, high = interval
    numbers = torch.arange(math.prod(shape)).view(shape)
    found = list(boxes(shape, low, high))
    assert len(found) <= 3
    covered = []
    for box in found:
        inside = numbers[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))].flatten()
        assert box.start == inside[0]
        covered += inside.tolist()
    assert covered == list(range(low, high))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", ["reference", "ep", "2:1:2", "1:2, two replicas", "megatron sharded", "state with the host"]
)
def test_the_same_layout_goes_on_to_the_last_bit(name: str, dtype: str, tmp_path: Path, pool: RankPool) -> None:
    case = case_for(name, dtype)
    whole = run_and_save(case, tmp_path, pool)
    again = train(case, steps=STEPS, pool=pool, resume=tmp_path / "step-00000003")
    assert again.losses == whole.losses[SAVED:]
    assert again.grad_norms == whole.grad_norms[SAVED:]


@pytest.mark.parametrize(
    ("saver", "loaders"),
    [
        ("2:1:2", ["reference", "ep", "4:4", "megatron sharded"]),
        ("two copies", ["reference", "two copies", "2:1:2"]),
        ("ep sharded", ["1:2, two replicas", "ep", "state with the host"]),
        ("4:4", ["ep sharded", "megatron"]),
        ("megatron sharded", ["2:1:2", "megatron"]),
        ("megatron", ["ep sharded"]),
        ("reference", ["2:1:2"]),
    ],
)
def test_any_layout_loads_what_another_saved(
    saver: str, loaders: list[str], expected: TrainResult, tmp_path: Path, pool: RankPool
) -> None:
    run_and_save(case_for(saver), tmp_path, pool, SAVED)
    for name in loaders:
        losses = train(case_for(name), steps=STEPS, pool=pool, resume=tmp_path).losses
        assert losses == pytest.approx(expected.losses[SAVED:], rel=1e-5), name


@pytest.mark.parametrize("trainer", ["native", "plan"])
def test_a_run_goes_through_megatron_and_back(
    trainer: str, expected: TrainResult, tmp_path: Path, pool: RankPool
) -> None:
    """Each goes on from what the one before saved; `trainer` is who runs megatron's legs."""
    legs = [("2:1:2", None), ("megatron sharded", trainer), ("reference", None), ("megatron", trainer), ("4:4", None)]
    losses: list[float] = []
    for stop, (name, by) in zip((1, 3, 4, 5, STEPS), legs, strict=True):
        resume = {"resume": tmp_path} if losses else {"settings": QUICK}
        losses += train(case_for(name), steps=stop, pool=pool, trainer=by, saving=Saving(tmp_path), **resume).losses
    assert losses == pytest.approx(expected.losses, rel=1e-5)


def test_moments_and_the_learning_rate_go_on_too(expected: TrainResult, tmp_path: Path, pool: RankPool) -> None:
    """A run that began anew with these weights would do otherwise; the step number sets the rate and the data."""
    run_and_save(case_for("ep"), tmp_path, pool, SAVED)
    forgetful = replace(QUICK, warmup_steps=0)
    losses = train(case_for("ep"), steps=STEPS, pool=pool, resume=tmp_path, settings=forgetful).losses
    assert losses[0] == pytest.approx(expected.losses[SAVED], rel=1e-5)
    assert abs(losses[-1] / expected.losses[-1] - 1) > 1e-4


def content(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint by name, as torch's own tool gives them."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, folder.parent / "whole.pt")
    return dict(torch.load(folder.parent / "whole.pt", weights_only=True))


@pytest.mark.parametrize("name", ["1:2, two replicas", "ep"])
def test_nothing_of_the_layout_is_in_it(name: str, tmp_path: Path, pool: RankPool) -> None:
    """Names and shapes are the model's, and the values are the reference's to within rounding."""
    tensors = []
    for which in ("reference", name):
        folder = tmp_path / which[:2]
        case = case_for(which, "bf16")
        # Where experts are chosen by scores, rounding sends a token of some texts to another one.
        case = case.model_copy(update={"workload": case.workload.model_copy(update={"routing": "balanced"})})
        train(case, steps=1, pool=pool, settings=QUICK, saving=Saving(folder))
        tensors.append(content(folder / "step-00000001"))
    expected, found = tensors
    assert {key: tuple(value.shape) for key, value in found.items()} == global_shapes(MODEL)
    assert {value.dtype for value in found.values()} == {torch.float32}
    for key, value in expected.items():
        assert (found[key] - value).norm() <= 0.05 * value.norm() + 1e-6, key
    # Main weights, and not the bf16 parameters.
    weight = found["model.layers.1.experts.3.fc1"]
    assert not torch.equal(weight, weight.bfloat16().float())


def test_the_marker_names_the_last_and_older_ones_go(tmp_path: Path, pool: RankPool) -> None:
    saved: list[Path] = []
    train(case_for("ep"), steps=7, pool=pool, saving=Saving(tmp_path, 2), on_saved=saved.append)
    assert [path.name for path in saved] == [f"step-0000000{step}" for step in (2, 4, 6, 7)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, *(path.name for path in saved[-NUM_KEPT:])]
    assert find_saved(tmp_path).folder == saved[-1]


def bad_checkpoint(folder: Path, damage: str) -> None:
    step = folder / "step-00000003"
    data = next(step.glob("*.distcp"))
    match damage:
        case "no folder":
            shutil.rmtree(folder)
        case "no marker":
            (folder / LATEST).unlink()
        case "no manifest":
            (step / MANIFEST).unlink()
        case "manifest cut":
            (step / MANIFEST).write_bytes((step / MANIFEST).read_bytes()[:100])
        case "file missing":
            data.unlink()
        case "file cut":
            os.truncate(data, data.stat().st_size - 1)
        case "metadata foreign":
            (step / METADATA).write_bytes(pickle.dumps(Attack(folder / "attacked")))
            fields = json.loads((step / MANIFEST).read_text())
            fields["files"][METADATA] = (step / METADATA).stat().st_size
            (step / MANIFEST).write_text(json.dumps(fields))
        case "tensor missing":
            metadata = pickle.loads((step / METADATA).read_bytes())
            del metadata.state_dict_metadata["model.layers.1.experts.3.fc2"]
            (step / METADATA).write_bytes(pickle.dumps(metadata))
            fields = json.loads((step / MANIFEST).read_text())
            fields["files"][METADATA] = (step / METADATA).stat().st_size
            (step / MANIFEST).write_text(json.dumps(fields))


class Attack:
    """Makes a folder where it is unpickled without care."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("no folder", "there is no such folder"),
        ("no marker", "it has no file 'latest'"),
        ("no manifest", "it has no file checkpoint.json"),
        ("manifest cut", "manifest of format 1"),
        ("file missing", "__0_0.distcp is missing"),
        ("file cut", "__0_0.distcp has "),
        ("metadata foreign", "it names posix.mkdir"),
        ("tensor missing", "it has no tensor model.layers.1.experts.3.fc2"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    damage: str, said: str, small_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(small_checkpoint, folder)
    bad_checkpoint(folder, damage)
    with pytest.raises(BadInput, match=said) as caught:
        train(case_for("reference"), steps=STEPS, resume=folder)
    assert caught.value.field == "resume"
    assert "\n" not in str(caught.value)
    assert not (folder / "attacked").exists()


class Taken:
    """Pickled as ``getattr(kind, name)``, as the first releases of Python 3.11 do with members of enumerations."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.kind, self.name)


def test_of_classes_that_metadata_names_only_members_of_enumerations_are_taken() -> None:
    member = next(iter(_MEM_FORMAT_ENCODING))
    assert _Unpickler(BytesIO(pickle.dumps(Taken(_MEM_FORMAT_ENCODING, member.name)))).load() is member
    with pytest.raises(pickle.UnpicklingError, match="it takes unlink from"):
        _Unpickler(BytesIO(pickle.dumps(Taken(PosixPath, "unlink")))).load()


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    run_and_save(case_for("reference"), folder, pool, SAVED)
    return folder


def test_a_whole_older_one_is_named(small_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(small_checkpoint, folder)
    (folder / LATEST).write_text("step-00000009\n")
    with pytest.raises(BadInput, match=r"step-00000009.*; whole is .*step-00000003"):
        find_saved(folder)


def test_what_cannot_go_on_is_refused_in_one_line(small_checkpoint: Path, tmp_path: Path) -> None:
    case = case_for("ep")

    def other(**changes: Any) -> Case:
        return case.model_copy(update={"workload": case.workload.model_copy(update=changes)})

    def start(case: Case = case, steps: int = STEPS, data: str = "text", saving: Saving | None = None) -> None:
        train(case, steps=steps, data=data, saving=saving, resume=small_checkpoint)

    wide = case.model_copy(update={"model": MODEL.model_copy(update={"expert_hidden_size": 72, "name": "wide"})})
    with pytest.raises(BadInput, match="a checkpoint of wide; this one is of bytes, with expert_hidden_size 64"):
        start(wide)
    with pytest.raises(BadInput, match="a checkpoint with dtype bf16; this one has fp32"):
        start(other(dtype="bf16"))
    with pytest.raises(BadInput, match="a checkpoint with seed 5; this one has 0"):
        start(other(seed=5))
    with pytest.raises(BadInput, match="corpus has source synthetic; this one's has Python standard library"):
        start(data="synthetic")
    with pytest.raises(BadInput, match="more than the 3 steps"):
        start(steps=3)
    with pytest.raises(BadInput, match=r"save: .*without checkpoints"):
        train(case, steps=STEPS, saving=Saving(small_checkpoint))
    with pytest.raises(BadInput, match="save_every: 0"):
        Saving(tmp_path, 0)


def losses_of(*words: str, trials: Path) -> list[float]:
    return list(call_json("run", *words, "--results", str(trials))["losses"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_while_it_saves_a_run_goes_on_from_the_last_whole_one(tmp_path: Path) -> None:
    """SIGKILL to all processes at once, when a checkpoint has begun to be written."""
    # Wide experts: writing them takes longer than who watches is away from the processor.
    wide = tmp_path / "wide.json"
    wide.write_text(MODEL.model_copy(update={"expert_hidden_size": 1024, "name": "wide"}).to_text())
    options = ["ep", "--model", str(wide), "--ranks", "2", "--steps", "8", "--seq-len", "32"]
    whole = losses_of(*options, trials=tmp_path)
    for attempt in range(10):  # a save may be faster than the one who watches
        folder = tmp_path / f"saved-{attempt}"
        _kill_when(folder / ".step-00000006.partial", [*options, "--save", str(folder), "--save-every", "2"], tmp_path)
        saved = find_saved(folder)
        again = losses_of("--resume", str(folder), trials=tmp_path)
        assert again == whole[saved.step :]
        if saved.step == 4:
            break
    else:
        raise AssertionError("never killed in the middle")
    assert [path.name for path in sorted(folder.iterdir())] == [LATEST, "step-00000006", "step-00000008"]


def _kill_when(path: Path, words: list[str], trials: Path) -> None:
    """Starts `moebench run` and kills it and all its ranks as soon as there is such a path."""
    command = [sys.executable, "-m", "bench.cli", "run", *words, "--results", str(trials)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + 200
        while not path.exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.001)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wait_until_gone(in_group(process.pid))


def in_group(group: int) -> list[int]:
    """Processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            found.append(int(path.parent.name))
    return found


def test_another_system_goes_on_from_the_command_line(tmp_path: Path) -> None:
    """Options that are not named are the checkpoint's; the trial's command gives it again."""
    folder, trials = tmp_path / "saved", tmp_path / "trials"
    options = ["ep", "--model", "tiny", "--ranks", "2", "--seq-len", "24", "--seed", "3"]
    whole = losses_of(*options, "--steps", "6", trials=trials)
    losses_of(*options, "--steps", "4", "--save", str(folder), "--save-every", "2", trials=trials)
    facts = call_json(
        "run", "disagmoe", "--ranks", "3", "--layout", "attention_ranks=2", "expert_ranks=1", "--steps", "6",
        "--resume", str(folder), "--results", str(trials),
    )  # fmt: skip
    assert facts["losses"] == pytest.approx(whole[4:], rel=1e-5)
    trial = read_trial(trials / f"{facts['trial']}.json")
    assert (trial.case.system, trial.case.workload.seq_len, trial.metrics["first_step"]) == ("disagmoe", 24, 4)
    assert f"--save {folder} --save-every 2 --resume {folder}" in trial.command
    assert find_saved(folder).step == 6
    line = call("run", "--resume", str(folder), "--model", "tiny-shared", code=2).stderr
    assert "a checkpoint of tiny-shared; this one is of tiny" in line


def test_options_of_checkpoints_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for words, said in (
        (["ep", "--model", "tiny", "--save-every", "2"], "--save-every: 2 "),
        (["--resume", str(tmp_path / "none")], "--resume: "),
        (["--model", "tiny"], "system: None "),
        (["ep"], "--model: None "),
    ):
        assert call("run", *words, code=2).stderr.startswith(f"moebench: {said}")
