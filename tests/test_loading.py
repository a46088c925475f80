"""Schedules of one's own that are wrong: each kind of wrong is one line that says where, and never a traceback."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bench import system
from bench.action import Action, BadAction, Kind, Pass, pack
from bench.assumptions import get_assumptions
from bench.cli import app, executed
from bench.cli.comparing import run_cases
from bench.errors import BadInput
from bench.loading import load
from bench.system import BrokenPackage, get_system, plan_of, systems
from tests.cases import make_case

EXAMPLE = (Path(__file__).parents[1] / "docs" / "examples" / "pingpong.py").read_text()
ON = ["--model", "tiny", "--cluster", "h800x1", "--seq-len", "64", "--global-batch-tokens", "2048"]
GIVEN = [*ON, "--layout", "ep=2", "pp=2"]
IN_FLIGHT = "        return min(2 * (layout.pp"

pytestmark = pytest.mark.filterwarnings("ignore::bench.loading.ExecutesFile")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def moebench(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def python_file(old: str = "", new: str = "") -> Path:
    """`mine.py`, the example with a change."""
    assert old in EXAMPLE
    path = Path("mine.py")
    path.write_text(EXAMPLE.replace(old, new, 1))
    return path


def text_file(old: str = "", new: str = "") -> Path:
    """`mine.txt`, a plan of `ep` with a change."""
    text = str(plan_of(make_case("ep", ep=2, pp=2)))
    assert old in text
    path = Path("mine.txt")
    path.write_text(text.replace(old, new, 1))
    return path


def line_of(path: Path, word: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if word in line)


# Python files


@pytest.mark.parametrize("leaves", ["sys.exit(0)", "sys.exit('bye')", "raise SystemExit"])
@pytest.mark.parametrize("old", ["class PingPong", IN_FLIGHT])
def test_a_file_that_exits_is_refused(old: str, leaves: str) -> None:
    indent = " " * (len(old) - len(old.lstrip()))
    path = python_file(old, f"{indent}import sys; {leaves}\n{old}")
    done = moebench("simulate", str(path), *ON)
    assert done.exit_code == 2
    assert f"mine.py, line {line_of(path, leaves)}: " in done.stderr and "SystemExit" in done.stderr


@pytest.mark.parametrize("verb", ["simulate", "compare", "explain", "plan", "tune"])
def test_what_a_method_of_the_tuner_raises_ends_every_verb_with_its_line(verb: str) -> None:
    path = python_file(IN_FLIGHT, "        raise KeyError('gone')\n" + IN_FLIGHT)
    done = moebench(verb, str(path), *ON)
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.stderr.splitlines() if "warning" not in line]
    assert line.startswith(f"moebench: mine.py, line {line_of(path, 'KeyError')}: ") and "gone" in line


def test_an_error_that_cannot_be_printed_is_said_by_its_name() -> None:
    path = python_file()
    odd = "class _Odd(Exception):\n    def __str__(self):\n        raise self\n"
    path.write_text(f"{EXAMPLE}\n\n{odd}\n\nraise _Odd\n")
    with pytest.raises(BadInput, match=r"mine\.py, line \d+: .*_Odd"):
        load(str(path))


@pytest.mark.parametrize("value", ["'three'", "None", "float('nan')", "-1"])
def test_a_number_in_flight_that_is_none_is_refused(value: str) -> None:
    path = python_file(IN_FLIGHT, f"        return {value}\n" + IN_FLIGHT)
    done = moebench("simulate", str(path), *ON)
    assert (done.exit_code, "mine.py" in done.stderr.splitlines()[-1]) == (2, True), done.output


def test_what_a_file_prints_goes_to_stderr() -> None:
    path = python_file(IN_FLIGHT, "        print('planning')\n" + IN_FLIGHT)
    path.write_text("print('loading')\n" + path.read_text())
    done = moebench("simulate", str(path), *ON, "--json")
    assert json.loads(done.stdout)["kind"] == "simulated"
    assert "loading" in done.stderr and "planning" in done.stderr


def test_a_space_leaves_the_output_of_others_alone(capsys: pytest.CaptureFixture[str]) -> None:
    path = python_file(
        "    def chunks_in", "    def space(self, spec):\n        yield Layout(ep=2)\n\n    def chunks_in"
    )
    case = make_case("ep", ep=2)
    for _ in get_system(str(path)).space(case):
        print("mine")
    assert capsys.readouterr().out == "mine\n"


@pytest.mark.parametrize("name", ["", "Upper", "a b", "ep", "disagmoe", "x.py"])
def test_a_name_that_is_none_or_is_taken_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=r"mine\.py: name"):
        load(str(python_file('"pingpong"', repr(name))))


def test_a_second_name_for_the_one_class_is_no_second_class() -> None:
    path = python_file()
    path.write_text(EXAMPLE + "\n\nSYSTEM = PingPong\n")
    assert load(str(path)).name == "pingpong"


@pytest.mark.parametrize("layer", ["layer + 99999", "layer + 0.5", "str(layer)", "layer - 9", "10**20", "None"])
def test_an_action_that_cannot_be_names_its_place_and_line(layer: str) -> None:
    path = python_file("Action(kind, of, layer, m)", f"Action(kind, of, {layer}, m)")
    done = moebench("plan", str(path), *GIVEN)
    assert done.exit_code == 2
    said = f"mine.py, line {line_of(path, 'Action(kind, of')}: queue S0 compute [2]: layer: "
    assert said in done.stderr and "0 to 16383" in done.stderr


@pytest.mark.parametrize("item", ["'attn:F0.0'", "7", "(kind, of)"])
def test_what_stands_for_an_action_and_is_none_is_named(item: str) -> None:
    path = python_file("Action(kind, of, layer, m) for m", f"{item} for m")
    done = moebench("plan", str(path), *GIVEN)
    assert (done.exit_code, "queue S0 compute [2]" in done.stderr) == (2, True), done.output


PLAN = """
    def plan(self, case):
        from dataclasses import replace
        from bench.plan import ActionColumn
        plan = super().plan(case)
        return {}
"""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("replace(plan, num_microbatches=plan.num_microbatches // 2)", "plan.num_microbatches"),
        ("replace(plan, recompute='full')", "plan.recompute"),
        ("replace(plan, placement=replace(plan.placement, shared_on='expert'))", "plan.placement"),
        ("replace(plan, queues={key: list(queue) for key, queue in plan.queues.items()})", "plan.queue"),
        ("replace(plan, queues={key: ActionColumn(queue.codes + 31) for key, queue in plan.queues.items()})", "[0]"),
        ("str(plan)", "a Plan"),
    ],
)
def test_a_plan_of_another_case_or_of_no_actions_is_refused(changed: str, said: str) -> None:
    """A plan of less work, or one that is charged for another way of doing it, would be the fastest."""
    path = python_file("    def chunks_in", PLAN.format(changed) + "\n    def chunks_in")
    done = moebench("plan", str(path), *GIVEN)
    assert done.exit_code == 2, done.output
    assert "mine.py" in done.stderr.splitlines()[-1] and said in done.stderr


def test_what_a_system_knows_besides_is_known_of_its_file() -> None:
    path = Path("mine.py")
    path.write_text(
        "from systems.disagmoe.system import DisagMoE\n\n\n"
        "class Mine(DisagMoE):\n    name = 'mine'\n    defaults = {'groups': 2}\n"
    )
    mine, theirs = get_system(str(path)), get_system("disagmoe")
    assert isinstance(mine, system.KnowsSeeds) and isinstance(theirs, system.KnowsSeeds)
    assert isinstance(mine, system.KnowsInFlight) and not isinstance(mine, system.RunsAsItself)
    assert system.default_layout(mine).groups == 2
    case, assumptions = make_case("disagmoe"), get_assumptions()
    assert mine.seeds(case, assumptions) == theirs.seeds(case, assumptions) != []


# Texts


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("attn:F99999999999999999999.0", "layer: a whole number from 0 to 16383"),
        ("attn:F16384.0", "layer: a whole number from 0 to 16383"),
        ("attn:F0.99999999999999999999", "micro-batch: "),
        ("expert:F0.0.99999", "chunk: a whole number from 0 to 1023"),
        ("attn:F0.5.0.0", "kind:PASSlayer.microbatch[.chunk]"),
        ("attn:F01.0", "kind:PASSlayer.microbatch[.chunk]"),
        ("attn:F1e3.0", "kind:PASSlayer.microbatch[.chunk]"),
        ("attn:F-1.0", "kind:PASSlayer.microbatch[.chunk]"),
        ("attn:F٣.0", "kind:PASSlayer.microbatch[.chunk]"),
    ],
)
def test_an_action_of_a_text_that_cannot_be_names_its_place_and_line(word: str, said: str) -> None:
    path = text_file("attn:F0.0", word)
    done = moebench("plan", str(path), *GIVEN[:-3])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"moebench: mine.txt, line {line_of(path, word)}: queue S0 compute [1]: action: ")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("microbatches=4", "microbatches=²", "microbatches=N"),
        ("microbatches=4", "microbatches=99999999999999999999", "microbatches=N"),
        ("microbatches=4", "microbatches=4 microbatches=2", "microbatches=N"),
        ("plan ep ", "plan ", "plan SYSTEM"),
        ("group S0", "plan ep microbatches=4\ngroup S0", "once"),
        ("group S0 = 0..1", "group S0 = 0..1_0", "NAME = FIRST..LAST"),
        ("group S0 = 0..1", "group S0 = 0..99999999999999999999", "NAME = FIRST..LAST"),
        ("home join", "home attention S0 S0 S0 S0\nhome join", "each once"),
        ("home join", "home joint", "each once"),
        ("home embed S0", "home embed S0 S1", "one name"),
        ("home join S0 S0 S1 S1", "home join S0 S0 S1", "a home of attention"),
        ("home shared attention", "home shared neither", "attention or expert"),
        ("home head S1", "home head S9", "known groups: S0, S1"),
    ],
)
def test_a_text_with_another_head_is_refused_in_a_line(old: str, new: str, said: str) -> None:
    done = moebench("plan", str(text_file(old, new)), *GIVEN[:-3])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("moebench: mine.txt") and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_experts_that_their_ranks_do_not_divide_are_refused() -> None:
    text_file("group S0 = 0..1\ngroup S1 = 2..3", "group S0 = 0..2\ngroup S1 = 3..5")
    with pytest.raises(BadInput, match=r"mine\.txt: placement: .* divide the 8 experts of tiny"):
        list(get_system("mine.txt").space(make_case("ep", ep=2, pp=2)))


def test_a_text_of_another_number_of_micro_batches_is_executed_as_it_is() -> None:
    pytest.importorskip("torch")
    Path("mine.txt").write_text(str(plan_of(make_case("ep", microbatches=3, ep=2, pp=1, recompute="full"))))
    case = executed.run_case("mine.txt", "tiny", 2, "cpu", 64, None, "fp32", "learned", 0, None)
    assert (plan_of(case).num_microbatches, case.layout.recompute) == (3, "full")


@pytest.mark.parametrize("word", ["hop:F2.2", "hop:B2.2", "hop:F2.0"])
def test_the_marker_of_a_missing_hop_stands_at_the_hop_beside_it(word: str) -> None:
    done = moebench("plan", str(text_file(f"{word}", "")), *GIVEN[:-3])
    assert f"'{word} is missing'" in done.stderr
    shown, marker = done.stderr.splitlines()[-2:]
    kind, _, number = word.rpartition(".")
    assert shown[marker.index("^") :].split()[0] in {f"{kind}.{int(number) - 1}", f"{kind}.{int(number) + 1}"}


@pytest.mark.parametrize("bad", [(0, 0, 2.5, 0, 0), (0, 0, "1", 0, 0), (0, 0, 2**14, 0, 0), (99, 0, 0, 0, 0)])
def test_no_action_is_packed_as_another(bad: tuple[int, ...]) -> None:
    good = Action(Kind.ATTENTION, Pass.F, 1, 2)
    with pytest.raises(BadAction, match=r"\[1\]: "):
        pack([good, Action(*bad)])  # type: ignore[arg-type]


# Comparing on this machine


def test_what_is_modelled_only_is_said_and_left_out_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    cases = run_cases(["ep", "comet"], "tiny", 2, "cpu", 64, 0)
    assert [case.system for case in cases] == ["ep"]
    assert capsys.readouterr().err == "moebench: comet is not run: its plan is modelled-only\n"


def test_a_text_of_more_ranks_than_there_are_is_refused_by_ranks() -> None:
    pytest.importorskip("torch")
    Path("mine.txt").write_text(str(plan_of(make_case("ep", seq_len=64, microbatches=8, ep=4, pp=2))))
    done = moebench("compare", "mine.txt", "--against", "ep", *ON, "--run", "--ranks", "4")
    assert done.exit_code == 2
    assert done.stderr == "moebench: --ranks: 4 is not valid; allowed: 8 or more, the ranks of mine.txt\n"


def test_a_text_of_three_micro_batches_is_run_beside_others() -> None:
    pytest.importorskip("torch")
    Path("mine.txt").write_text(str(plan_of(make_case("ep", microbatches=3, ep=2, pp=1))))
    cases = run_cases(["mine.txt", "ep", "disagmoe"], "tiny", 2, "cpu", 64, 0)
    assert plan_of(cases[0]).num_microbatches == 3
    assert len({case.workload for case in cases}) == 1


# Packages


@pytest.fixture
def package(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package that offers a system `mine`; its module is to be written."""
    monkeypatch.syspath_prepend(str(here))
    info = here / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[moebench.systems]\nmine = acme_mine:SYSTEM\n")
    found = (system.systems, system._offered, system._installed)
    for each in found:
        each.cache_clear()
    yield here / "acme_mine.py"
    for each in found:
        each.cache_clear()
    sys.modules.pop("acme_mine", None)


NAMED = EXAMPLE.replace('"pingpong"', '"mine"')


def test_a_package_brings_a_system(package: Path) -> None:
    package.write_text(NAMED + "\n\nprint('loading')\nSYSTEM = PingPong()\n")
    done = moebench("simulate", "mine", *ON, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["system"] == "mine"
    assert "mine" in systems()


@pytest.mark.parametrize(
    "text",
    [
        "import no_such_module\n",
        "raise SystemExit(0)\n",
        "x = 1\n",
        NAMED + "\n\nSYSTEM = PingPong\n",
        EXAMPLE + "\n\nSYSTEM = PingPong()\n",
        NAMED.replace('Colocated.fields - {"vpp"}', '{"epp"}') + "\n\nSYSTEM = PingPong()\n",
    ],
)
def test_a_broken_package_is_a_warning_and_an_error_where_it_is_asked_for(package: Path, text: str) -> None:
    package.write_text(text)
    done = moebench("simulate", "mine", *ON)
    assert done.exit_code == 2
    assert done.stderr.startswith("moebench: package acme: system mine")
    assert len(done.stderr.splitlines()) == 1
    assert moebench("simulate", "ep", *ON).exit_code == 0
    with pytest.warns(BrokenPackage, match="package acme: system mine"):
        assert list(systems())[:2] == ["reference", "ep"]


def test_a_package_takes_no_name_that_is_there(package: Path) -> None:
    package.write_text(NAMED + "\n\nSYSTEM = PingPong()\n")
    (package.parent / "acme-1.0.dist-info" / "entry_points.txt").write_text(
        "[moebench.systems]\nep = acme_mine:SYSTEM\n"
    )
    assert type(get_system("ep")).__module__ == "systems.baselines.ep"
    with pytest.warns(BrokenPackage, match="package acme: system ep"):
        assert type(systems()["ep"]).__module__ == "systems.baselines.ep"


# Starting files


def test_the_command_that_a_new_system_is_tried_with_names_its_file(here: Path) -> None:
    assert "moebench verify ./mine.py " in moebench("new-system", "mine").stdout
    assert f"moebench verify {here}/other.py " in moebench("new-system", "mine", "--out", f"{here}/other.py").stdout


@pytest.mark.parametrize("name", ["turn", "kind", "colocated"])
def test_a_new_system_is_not_called_as_what_its_file_needs(name: str) -> None:
    done = moebench("new-system", name)
    assert (done.exit_code, Path(f"{name}.py").exists()) == (2, False)
