"""Transports by name, the pieces in which copy engines push, and payload through host memory on gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import make_case
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.cli import app
from bench.errors import BadInput
from bench.transports import Carrier

torch = pytest.importorskip("torch")

from bench.execute.pieces import ALIGNMENT, cut  # noqa: E402
from bench.execute.pool import RankPool, rank_device  # noqa: E402
from bench.execute.rank import rank_carrier  # noqa: E402
from bench.execute.transport import open_transport  # noqa: E402
from bench.execute.verify import verify  # noqa: E402


@pytest.mark.parametrize(
    ("word", "device", "ranks", "gpus", "carrier"),
    [
        ("auto", "cpu", 4, 0, Carrier("gloo")),
        ("host", "cpu", 4, 0, Carrier("host")),
        ("auto", "cuda", 2, 2, Carrier("nccl", 2)),
        ("auto", "cuda", 6, 2, Carrier("host", 2)),
        ("host", "cuda", 2, 2, Carrier("host", 2)),
        ("nccl:4", "cuda", 2, 8, Carrier("nccl", 8, 4)),
        ("copy", "cuda", 8, 8, Carrier("copy", 8)),
    ],
)
def test_what_a_name_comes_to(word: str, device: str, ranks: int, gpus: int, carrier: Carrier) -> None:
    assert Carrier.of(word, device, ranks, gpus) == carrier


@pytest.mark.parametrize(
    ("word", "device", "ranks", "gpus", "field"),
    [
        ("mpi", "cuda", 2, 2, "transport"),
        ("copy:4", "cuda", 2, 2, "transport"),
        ("nccl:0", "cuda", 2, 2, "transport"),
        ("nccl:x", "cuda", 2, 2, "transport"),
        ("nccl:BLOCKS", "cuda", 2, 2, "transport"),
        ("gloo", "cuda", 2, 2, "transport"),
        ("copy", "cpu", 2, 0, "transport"),
        ("copy", "cuda", 3, 2, "ranks"),
        ("nccl", "cuda", 3, 2, "ranks"),
        ("auto", "cuda", 1, 0, "ranks"),
    ],
)
def test_what_cannot_be_is_refused(word: str, device: str, ranks: int, gpus: int, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        Carrier.of(word, device, ranks, gpus)
    assert refused.value.field == field


def test_a_trial_says_what_shared_a_gpu() -> None:
    assert Carrier("host", 2).facts(6) == {"transport": "host", "ranks": 6, "gpus": 2}
    assert Carrier("nccl", 8, 4).facts(2) == {"transport": "nccl", "ranks": 2, "gpus": 2, "nccl_blocks": 4}
    assert Carrier("gloo").facts(4) == {"transport": "gloo", "ranks": 4}


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(1, 8))
def test_pieces_hold_every_byte_once_and_fit(sizes: list[int], slots: int) -> None:
    slot_bytes = slots * ALIGNMENT
    reached = [0] * len(sizes)
    for piece in cut(sizes, slot_bytes):
        end = 0
        for tensor, start, stop, place in piece:
            assert start == reached[tensor] < stop
            assert place % ALIGNMENT == 0
            assert end <= place
            end = place + stop - start
            reached[tensor] = stop
        assert end <= slot_bytes
    assert reached == sizes


def carrier_and_transport() -> tuple[Carrier, str]:
    return rank_carrier(), type(open_transport(rank_device())).__name__


def test_unequal_groups_are_verified_through_host_memory() -> None:
    """p = 2, M = 2, N = 1: as on GPUs that ranks share, but for the GPUs."""
    case = make_case("disagmoe", groups=2, attention_ranks=2, expert_ranks=1)
    with RankPool(6, transport="host") as pool:
        found = pool.run(carrier_and_transport)
        report = verify(case, pool)
    assert found == [(Carrier("host"), "StagedTransport")] * 6
    assert report.ok, str(report)


def test_the_command_line_says_what_carried_the_payload(tmp_path: Path) -> None:
    words = ["run", "disagmoe", "--model", "tiny", "--ranks", "2", "--steps", "1", "--results", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, [*words, "--transport", "host"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["execution"].items() >= {"transport": "host", "ranks": 2, "serial": False}.items()
    assert "--transport host" in found["command"]
    for verb in ("run", "verify"):
        refused = CliRunner().invoke(app, [verb, *words[1:6], "--transport", "copy"])
        assert refused.exit_code == 2
        assert "transport: 'copy'" in refused.output
