"""`moebench roofline`: its table, its JSON, its files, and what it refuses in one line."""

import json
from pathlib import Path

import pytest
import typer

from bench.cli import roofline
from bench.cli.application import OneLineErrors

ARGUMENTS = ["roofline", "--model", "qwen3-30b", "--cluster", "h800x4"]


@pytest.fixture
def app() -> typer.Typer:
    found = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False)
    found.callback()(lambda: None)
    roofline.register(found)
    return found


def run(app: typer.Typer, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app([*ARGUMENTS, *arguments], prog_name="moebench")
    return int(ended.value.code or 0)


def test_json_has_every_point(app: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, "--seq-len", "4096,8192", "--top-k", "4,8", "--copies", "rank,node", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["points"]) == 2 * 2 * 2 * 3
    assert {point["bound_by"] for point in found["points"]} <= {"network", "compute"}
    assert found["files"] == []


def test_the_table_and_the_files(app: typer.Typer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(app, "--seq-len", "4096,8192", "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "attention" in shown and "colocated" in shown and "simulated" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"roofline.pdf", "roofline.png", "roofline.csv"}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--seq-len", "8192,4096"], "seq-len"),
        (["--seq-len", "-1"], "seq-len"),
        (["--seq-len", "4k"], "seq-len"),
        (["--seq-len", "4096", "--copies", "gpu"], "copies"),
        (["--seq-len", "4096", "--copies", ""], "copies"),
        (["--seq-len", "4096", "--copies", "rank,rank"], "copies"),
        (["--seq-len", "4096", "--top-k", "4,8,4"], "top-k"),
        (["--seq-len", "4096", "--expert-ranks", "3"], "--expert-ranks"),
        (["--seq-len", "4096", "--top-k", "999"], "top_k"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    app: typer.Typer, capsys: pytest.CaptureFixture[str], arguments: list[str], field: str
) -> None:
    assert run(app, *arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert field in said and "allowed" in said
