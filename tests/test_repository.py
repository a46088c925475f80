"""The repository as a whole: what importing costs, who imports whom, what README and Makefile say."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "systems", "experiments", "paper_figs", "results")
HEAVY = {"torch", "megatron", "pandas", "scipy", "seaborn", "matplotlib", "numba"}

# Who may import whom among the top-level packages. The command line stands above all of them.
MAY_IMPORT = {
    "bench": {"bench", "results"},
    "systems": {"systems", "bench"},
    "experiments": {"experiments", "systems", "bench", "results"},
    "paper_figs": {"paper_figs", "bench", "results"},
    "results": {"results"},
}
COMMAND_LINE = re.compile(r"bench/cli(\.py|/.*)")

SETUP_THAT_ONLY_STAMPS = """
echo $1 >>log
mkdir -p .venv
case $1 in
    base) echo ${PYTHON:-python3} >.venv/.base ;;
    train) echo ${TORCH:-2} >.venv/.train ;;
esac
"""

# Folders of one machine, which no file of the repository may name.
LOCAL_PATH = re.compile(r"(?<![\w.])/(home|root|work|Users|tmp)/\w")


def python_files() -> list[Path]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert files
    return files


def repository_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, at any depth; relative imports stay in the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def phony_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return {name for line in re.findall(r"^\.PHONY:(.*)$", text, re.MULTILINE) for name in line.split()}


def outside_make() -> dict[str, str]:
    """The environment without what a make that runs these tests hands down."""
    inherited = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "TORCH", "ARGS"}
    return {name: value for name, value in os.environ.items() if name not in inherited}


def loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "modules",
    ["bench", "bench.case, bench.plan, bench.edges, bench.lower, bench.check", "systems", "bench.cli"],
)
def test_importing_loads_nothing_heavy(modules: str) -> None:
    loaded = loaded_by(f"import {modules}")
    assert "bench" in loaded
    assert loaded & HEAVY == set()


def test_imports_point_one_way() -> None:
    wrong = []
    for path in python_files():
        name = path.relative_to(ROOT).as_posix()
        if COMMAND_LINE.fullmatch(name):
            continue
        allowed = MAY_IMPORT[name.partition("/")[0]]
        for module in imported_modules(path):
            top = module.partition(".")[0]
            if top in PACKAGES and top not in allowed:
                wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_every_package_folder_is_a_package() -> None:
    folders = {path.parent for path in python_files()}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_every_make_target_is_phony_or_a_stamp() -> None:
    targets = re.findall(r"^([A-Za-z$][^:=\s]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"test", "check", "reproduce-fig7", "train-demo", "setup", "setup-train", "bench"} <= set(targets)
    assert set(targets) - phony_targets() == {"$(BASE)", "$(TRAIN)"}


def test_help_lists_every_target_that_a_person_calls() -> None:
    shown = subprocess.check_output(["make", "-s", "help"], cwd=ROOT, env=outside_make(), text=True)
    listed = set(re.findall(r"^  ([a-z0-9-]+)  ", shown, re.MULTILINE))
    assert listed == phony_targets() - {"changed"}


def test_readme_names_targets_that_exist() -> None:
    named = set(re.findall(r"\bmake ([a-z0-9-]+)", (ROOT / "README.md").read_text()))
    assert {"reproduce-fig7", "train-demo", "test"} <= named
    assert named - phony_targets() == set()


def test_readme_links_to_files_that_exist() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_a_target_runs_nothing_the_second_time(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup.sh").write_text(SETUP_THAT_ONLY_STAMPS)
    log = tmp_path / "log"

    def make(*arguments: str) -> list[str]:
        log.write_text("")
        subprocess.run(["make", "-s", *arguments], cwd=tmp_path, env=outside_make(), check=True)
        return log.read_text().split()

    assert make("setup") == ["base"]
    assert make("setup") == []
    assert make("setup-train") == ["train"]
    assert make("setup-train") == []
    assert make("setup-train", "PYTHON=python3") == []
    assert make("setup-train", "PYTHON=python3.12") == ["base", "train"]
    assert make("setup-train", "PYTHON=python3.12") == []
    assert make("setup-train", "TORCH=1.0") == ["train"]
    assert make("setup-train", "TORCH=1.0") == []
    assert make("setup-train") == []


@pytest.mark.parametrize(("num_gpus", "executor", "told"), [(2, "", True), (1, "", False), (2, "slurm", False)])
def test_a_run_of_figure_7_without_a_cluster_names_what_two_gpus_can_do(
    tmp_path: Path, num_gpus: int, executor: str, told: bool
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup.sh").write_text(SETUP_THAT_ONLY_STAMPS)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    programs = {
        tmp_path / ".venv" / "bin" / "moebench": "echo refused: $@ >&2; exit 2",
        tmp_path / "nvidia-smi": "\n".join(["echo GPU"] * num_gpus),
    }
    for path, text in programs.items():
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    environment = {**outside_make(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "-s", "reproduce-fig7", "BACKEND=run", f"EXECUTOR={executor}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"sweep fig7 --executor {executor or 'inprocess'} --backend run" in done.stderr
    assert ("moebench figure h200x2" in done.stderr) == told


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("no-such", "PYTHON: 'no-such' is not valid; allowed: an interpreter that runs"),
        ("./old", "PYTHON: './old' is Python 2.7.0; allowed: Python 3.11 to 3.13"),
    ],
)
def test_setup_refuses_a_wrong_python_in_one_line(tmp_path: Path, python: str, message: str) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup.sh").write_bytes((ROOT / "tools" / "setup.sh").read_bytes())
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$1$2" in -V) echo Python 2.7.0;; *sys.exit*) exit 1;; esac\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["sh", "tools/setup.sh", "base"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": python},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.strip()) == (2, message)
    assert not (tmp_path / ".venv").exists()


def test_no_file_names_a_folder_of_one_machine() -> None:
    found = []
    for path in repository_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT)
        found += [f"{name}:{i}: {line}" for i, line in enumerate(lines, 1) if LOCAL_PATH.search(line)]
    assert found == []


def test_a_wheel_holds_all_packages_and_published_data_only(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for path in repository_files():
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    for name in ("results/published/fig0/trials.jsonl", "results/local/fig0/trials.jsonl"):
        (clone / name).parent.mkdir(parents=True)
        (clone / name).write_text("{}\n")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*pip, str(tmp_path), str(clone)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("disagmoe_bench-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = next(archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    sources = {path.relative_to(clone).as_posix() for package in PACKAGES for path in (clone / package).rglob("*.py")}
    assert "bench/__init__.py" in sources
    assert sources <= names
    assert "results/published/fig0/trials.jsonl" in names
    assert [name for name in names if name.startswith(("results/local", "tests", "docs", "tools"))] == []
    assert "moebench = bench.cli:main" in scripts


def test_constraints_pin_one_version_of_every_base_dependency() -> None:
    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {plain(re.match(r"[\w.-]+", line)[0]) for line in project["dependencies"]}
    pins = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    names = [plain(pin.partition("==")[0]) for pin in pins if pin]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins if pin)
    assert len(names) == len(set(names))
    assert wanted <= set(names)
    assert "torch" not in names
