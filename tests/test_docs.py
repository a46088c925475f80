"""The documentation: every block of `docs/add-a-system.md` is run from the page; tables are as the code makes them."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.errors import BadInput
from bench.loading import load
from bench.results import read_trials
from bench.scaffold import starting_text, write_system

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "add-a-system.md"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.filterwarnings("ignore::bench.loading.ExecutesFile")


class Block(NamedTuple):
    language: str
    info: str
    text: str


def blocks(path: Path = PAGE) -> list[Block]:
    found = [Block(language, info.strip(), text) for language, info, text in BLOCK.findall(path.read_text())]
    assert found
    return found


def doc_tables() -> ModuleType:
    found = importlib.util.spec_from_file_location("doc_tables", ROOT / "tools" / "doc_tables.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def run(line: str) -> tuple[int, str, str]:
    """One line of a console block: exit code, stdout, stderr. `moebench` runs in this process."""
    if not line.startswith("moebench "):
        done = subprocess.run(["sh", "-c", line], check=False, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr
    command, _, target = line.partition(" > ")
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    if target:
        Path(target).write_text(result.stdout)
    return result.exit_code, result.stdout, result.stderr


def test_every_block_of_the_page_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    last_error = ""
    for block in blocks():
        match block.language:
            case "python":
                Path(block.info).write_text(block.text)
            case "console":
                wanted = int(block.info.removeprefix("exit=") or 0)
                lines = block.text.splitlines()
                for line in lines:
                    code, shown, last_error = run(line)
                    assert code == (wanted if line is lines[-1] else 0), f"{line}\n{shown}\n{last_error}"
            case "text" if block.info == "stderr":
                assert block.text.strip() in last_error
            case "toml":
                assert "moebench.systems" in block.text
            case other:
                pytest.fail(f"a block that nothing runs: {other} {block.info}")
    assert (tmp_path / "out" / "compare.png").is_file() and (tmp_path / "out" / "compare-measured.png").is_file()
    ran = {(trial.source, trial.case.system) for _, trial in read_trials([tmp_path / "results"])}
    assert {("measured", "./pingpong.py"), ("simulated", "./pingpong.py"), ("simulated", "./mine.txt")} <= ran


def test_the_schedule_takes_less_than_60_lines_and_is_the_example() -> None:
    (code,) = (block.text for block in blocks() if block.language == "python")
    assert len(code.splitlines()) < 60
    assert code == (ROOT / "docs" / "examples" / "pingpong.py").read_text()


@pytest.mark.parametrize("name", ["architecture.md", "gpus.md"])
def test_tables_are_as_the_code_makes_them(name: str) -> None:
    tables, path = doc_tables(), ROOT / "docs" / name
    page = path.read_text()
    assert page == tables.written(page, tables.PAGES[path]()), "run: python tools/doc_tables.py"


def test_the_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:bench|systems|tests|tools|docs)/[\w/.-]+)`", page))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_links_of_all_pages_lead_somewhere() -> None:
    broken = []
    for page in (ROOT / "docs").glob("*.md"):
        for link in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            if not (page.parent / link).exists():
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_a_new_system_is_a_schedule_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_system("two-words")
    assert str(path) == "two_words.py"
    assert load(str(path)).name == "two-words"
    assert "class TwoWords(Colocated)" in path.read_text()
    assert "emplate" not in starting_text("two-words")
    with pytest.raises(BadInput, match="does not exist yet"):
        write_system("two-words")


@pytest.mark.parametrize("name", ["", "Upper", "9lives", "a b", "../up", "class", "ep"])
def test_a_name_that_is_none_or_taken_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="name"):
        write_system(name)
    assert list(tmp_path.iterdir()) == []
