"""Site files and time limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.cli.sweep import Asked
from bench.errors import BadInput
from experiments.launch import site


def test_the_template_explains_every_setting_and_its_values_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    site.write_template(path)
    assert site.load(path, {}) == site.Site()
    lines = path.read_text().splitlines()
    settings_ = [line.removeprefix("# ") for line in lines if "=" in line or line == "# [sbatch]"]
    path.write_text("\n".join(line for line in settings_ if not line.startswith("and an option")))
    filled = site.load(path, {})
    assert set(site.Site.model_fields) == filled.model_fields_set
    with pytest.raises(BadInput, match="does not exist yet"):
        site.write_template(path)


def test_options_win_over_the_file_and_switch_it_off(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('partition = "gpu"\naccount = "mine"\ntime = "01:00:00"\n')
    loaded = site.load(path, {"partition": "other", "account": "none", "time": None})
    assert (loaded.partition, loaded.account, loaded.minutes) == ("other", None, 60)


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("jobs", 0, "--jobs: 0 is not valid"),
        ("max_nodes", 0, "--max-nodes: 0 is not valid"),
        ("time", "1-", "--time: '1-' is not valid; allowed: minutes, minutes:seconds, hours:minutes:seconds"),
        ("time", "366-0", "--time: '366-0' is not valid; allowed: at most 365 days"),
        ("time", "9" * 5000, "--time: '9"),
        ("executor", "pbs", "--executor: 'pbs' is not valid"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_typed(tmp_path: Path, option: str, value: object, line: str) -> None:
    (tmp_path / "site.toml").write_text("jobs = 2\n")
    with pytest.raises(BadInput) as refused:
        site.load(tmp_path / "site.toml", {option: value})
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('partitoin = "a"', "did you mean 'partition'"),
        ('executor = "pbs"', "site.executor: 'pbs'"),
        ('time = "soon"', "site.time: 'soon'"),
        ("jobs = 0", "site.jobs: 0"),
        ("jobs =", "TOML"),
    ],
)
def test_wrong_site_files_are_refused_in_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(BadInput, match=line) as refused:
        site.load(tmp_path / "site.toml", {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 30),
        ("00:30:00", 30),
        ("0:30", 1),
        ("1:01", 2),
        ("1-02:03:04", 1564),
        ("1-02:03", 1563),
        ("1-2", 1560),
        ("00:00:01", 1),
    ],
)
def test_time_limits_are_read_as_slurm_does(text: str, expected: int) -> None:
    assert site.minutes_of("time", text) == expected
    assert site.minutes_of("time", site.clock(expected)) == expected


@pytest.mark.parametrize("line", ['"a b\\ntouch x #" = "y"', 'comment = "a\\nb"', 'Mem = "1"'])
def test_more_options_of_sbatch_stay_on_their_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "site.toml").write_text(f"[sbatch]\n{line}\n")
    with pytest.raises(BadInput, match=r"site\.sbatch"):
        site.load(tmp_path / "site.toml", {})


def test_every_option_switches_off_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('max_nodes = 4\njobs = 2\ngpus_per_node = 8\npartition = "gpu"\n')
    kept = Asked("fig7", site=path).settings_of_site()
    assert (kept.max_nodes, kept.jobs, kept.gpus_per_node, kept.partition) == (4, 2, 8, "gpu")
    off = Asked("fig7", site=path, max_nodes="none", jobs="none", gpus_per_node="none", partition="none")
    found = off.settings_of_site()
    assert (found.max_nodes, found.jobs, found.gpus_per_node, found.partition) == (None, None, None, None)
    assert Asked("fig7", site=path, max_nodes="16").settings_of_site().max_nodes == 16


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_nodes": "many"}, "--max-nodes: 'many' is not valid; allowed: a whole number, or none"),
        ({"setup": Path("/dev/full")}, "setup: '/dev/full' is not valid; allowed: a text file that can be read"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], line: str) -> None:
    (tmp_path / "site.toml").write_text("")
    with pytest.raises(BadInput) as refused:
        Asked("fig7", site=tmp_path / "site.toml", **options).settings_of_site()
    assert str(refused.value).startswith(line)
