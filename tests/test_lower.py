"""Programs: text and object are inverse, and what lowering adds."""

import numpy as np
import pytest
from hypothesis import given, settings

from bench.case import Case
from bench.errors import BadInput
from bench.lower import lower, parse_program
from bench.program import Op
from bench.system import plan_of
from tests.cases import cases, make_case


@settings(max_examples=15, deadline=None)
@given(cases())
def test_text_round_trip(case: Case) -> None:
    program = lower(plan_of(case), case.model)
    again = parse_program(program.to_text())
    assert again.to_text() == program.to_text()
    for name in ("op", "code", "group", "peer", "partner", "template", "templates", "queue_ptr", "dep_ptr", "deps"):
        assert np.array_equal(getattr(again, name), getattr(program, name))
    assert (again.queues, again.volumes) == (program.queues, program.volumes)


@pytest.mark.parametrize("text", ["", "plan ep microbatches=1", "model {}\nplan ep microbatches=1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_program(text)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_every_send_has_its_receive_in_the_senders_order(case: Case) -> None:
    program = lower(plan_of(case), case.model)
    sends, receives = np.flatnonzero(program.op == Op.SEND), np.flatnonzero(program.op == Op.RECV)
    assert len(sends) == len(receives)
    assert np.array_equal(program.partner[program.partner[sends]], sends)
    assert np.array_equal(program.code[program.partner[sends]], program.code[sends])
    queue_of = program.queue_of()
    for queue in np.unique(queue_of[receives]):
        mine = receives[queue_of[receives] == queue]
        assert (np.diff(program.partner[mine]) > 0).all()


def test_a_blocking_exchange_is_received_where_it_is_sent() -> None:
    program = lower(plan_of(make_case("ep", ep=2, microbatches=1)), make_case("ep").model)
    sends = np.flatnonzero(program.op == Op.SEND)
    assert np.array_equal(program.partner[sends], sends + 1)
