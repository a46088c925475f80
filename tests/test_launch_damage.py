"""Bookkeeping of a sweep that a power failure or a hand has damaged: said, or made anew, never a traceback."""

import pytest
from launching import task

from bench.errors import BadInput
from experiments.launch import sweeps
from experiments.launch.ledger import Ledger
from experiments.launch.locks import Process

DAMAGED = [b"", b"\xff\xfe", b"\x00\x00", b"[]", b"{}", b'{"owner": null}', b'{"key": "x", "ta']


@pytest.mark.parametrize("said", DAMAGED)
def test_a_damaged_claim_is_of_nobody(ledger: Ledger, said: bytes) -> None:
    one = task()
    (ledger.root / "claims" / f"{one.key}.0001").write_bytes(said)
    claim = ledger.claims([one.key])[one.key]
    assert (claim.generation, claim.owner, claim.job) == (1, Process("", 0, ""), "")
    sweeps.register(ledger, "mine", [one], accounting=False)
    assert sweeps.standing(ledger, "mine").counts == {"missing": 1}


@pytest.mark.parametrize("said", [*DAMAGED, b"../../x\n"])
def test_a_damaged_end_is_unreadable_and_then_forgotten(ledger: Ledger, said: bytes) -> None:
    one = task()
    sweeps.register(ledger, "mine", [one], accounting=False)
    (ledger.root / "done" / one.key).write_bytes(said)
    assert sweeps.standing(ledger, "mine").counts == {"unreadable": 1}
    ledger.recover()
    # What may be of another version of the code stays; see `Ledger.recover`.
    assert (one.key in ledger.done()) == said.startswith(b"{")


@pytest.mark.parametrize("said", DAMAGED)
def test_a_damaged_sweep_is_named_and_hides_no_other(ledger: Ledger, said: bytes) -> None:
    one = task()
    sweeps.register(ledger, "mine", [one], accounting=False)
    (ledger.sweeps / "hers").write_bytes(said)
    with pytest.raises(BadInput, match=r"hers.*once more writes it anew"):
        sweeps.standing(ledger, "hers")
    assert sweeps.logs_of(ledger, one.key) == []  # known, and has not run
