import numpy as np
import pytest
from cases import make_case

from bench.action import Action, Kind, pack
from bench.errors import BadInput
from bench.flops import step_flops
from bench.metrics import (
    bubble_fraction,
    exposed_comm_s,
    metrics,
    mfu,
    moving_s,
    overlapped_fraction,
    taxed_share,
    union_s,
    waiting_s,
)
from bench.program import Op
from bench.timeline import Timeline

# rank, operation, ready, start, end, bytes. Rank 0 computes [0, 4] and [6, 8] and updates [9, 10]; its links are busy
# in [3, 7] and [8, 8.5], where the receive from 5 to 7 lies inside the send. Rank 1 computes [0, 10] with a send in it,
# and an exchange that carries nothing.
ROWS = [
    (0, Op.COMPUTE, 0, 0, 4, 0),
    (0, Op.SEND, 2, 3, 7, 8),
    (0, Op.RECV, 4, 5, 7, 8),
    (0, Op.COMPUTE, 4, 6, 8, 0),
    (0, Op.SYNC, 8, 8, 8.5, 4),
    (0, Op.UPDATE, 8.5, 9, 10, 0),
    (1, Op.COMPUTE, 0, 0, 10, 0),
    (1, Op.SEND, 1, 1, 2, 8),
    (1, Op.RECV, 2, 2, 20, 0),
]


def by_hand(rows: list[tuple[int, Op, float, float, float, float]] = ROWS) -> Timeline:
    rank, op, ready, start, end, num_bytes = (np.array(column) for column in zip(*rows, strict=True))
    return Timeline(
        source="measured",
        queues=(("S0", "compute"),),
        rank=rank.astype(np.int32),
        queue=np.zeros(len(rows), np.int32),
        op=op.astype(np.int8),
        code=pack([Action(Kind.ATTENTION)] * len(rows)),
        ready_s=ready.astype(float),
        start_s=start.astype(float),
        end_s=end.astype(float),
        bytes=num_bytes.astype(float),
        flops=np.zeros(len(rows)),
        alloc_bytes=np.zeros(len(rows)),
    )


def test_bubble_is_what_of_the_step_a_rank_does_not_compute() -> None:
    # Step 20 s; rank 0 computes 7 s, rank 1 10 s.
    assert bubble_fraction(by_hand()) == pytest.approx(1 - 8.5 / 20)


def test_exposed_communication_is_link_time_beside_idle_computation() -> None:
    # Rank 0: [4, 6] and [8, 8.5]; rank 1: nothing, its send lies inside the computation.
    assert exposed_comm_s(by_hand()) == pytest.approx(2.5 / 2)


def test_moving_is_the_union_of_a_ranks_transfers_that_carry_bytes() -> None:
    assert moving_s(by_hand()) == pytest.approx((4.5 + 1) / 2)
    assert overlapped_fraction(by_hand()) == pytest.approx(1 - 1.25 / 2.75)


def test_waiting_is_apart_from_moving() -> None:
    # Rank 0: 1 s before the send, 1 s before the receive.
    assert waiting_s(by_hand()) == pytest.approx(2 / 2)


def test_the_taxed_share_is_computing_time_with_a_busy_link() -> None:
    # Rank 0: [3, 4] and [6, 7] of 6 s; rank 1: [1, 2] of 10 s.
    assert taxed_share(by_hand()) == pytest.approx((2 + 1) / (6 + 10))


def test_no_communication_is_all_overlapped() -> None:
    alone = by_hand(ROWS[:1])
    assert overlapped_fraction(alone) == 1
    assert exposed_comm_s(alone) == moving_s(alone) == waiting_s(alone) == 0


def test_union_counts_each_moment_of_each_rank_once() -> None:
    rank = np.array([1, 0, 0, 0, 1], dtype=np.int32)
    start, end = np.array([5.0, 0.0, 1.0, 6.0, 2.0]), np.array([6.0, 4.0, 2.0, 7.0, 5.5])
    assert union_s(rank, start, end) == pytest.approx((4 + 1) + 4)


def test_mfu_is_model_flops_over_peak() -> None:
    assert mfu(4e12, 2.0, 4, 1e12) == pytest.approx(0.5)


def test_rates_divide_by_allocated_gpus() -> None:
    case = make_case("ep", cluster="h800x2", ep=2, microbatches=4, seq_len=16)  # 128 tokens; uses 2 of 16 GPUs
    found = metrics(by_hand(), case)
    assert found.step_time_s == 20
    assert found.tokens_per_s == pytest.approx(128 / 20)
    assert found.tokens_per_s_per_gpu == pytest.approx(128 / 20 / 16)
    flops = step_flops(case.model, 16, 128)
    assert found.tflops_per_gpu == pytest.approx(flops / 20 / 16 / 1e12)
    assert found.mfu == pytest.approx(flops / 20 / 16 / 989e12)
    assert found.hfu == found.mfu
    for recompute in ("full", "redispatch"):
        again = metrics(by_hand(), make_case("ep", cluster="h800x2", ep=2, recompute=recompute))
        assert again.mfu == pytest.approx(found.mfu) and again.hfu == pytest.approx(4 / 3 * found.mfu)
    assert metrics(by_hand(), case, num_gpus=2).tokens_per_s_per_gpu == pytest.approx(128 / 20 / 2)


def test_a_dtype_without_a_peak_has_no_mfu() -> None:
    case = make_case("ep", cluster="h800x1", ep=2)
    gpu = case.cluster.gpu.model_copy(update={"peak_tflops": {"fp8": 1.0}})
    unknown = case.model_copy(update={"cluster": case.cluster.model_copy(update={"gpu": gpu})})
    found = metrics(by_hand(), unknown)
    assert (found.mfu, found.hfu) == (None, None)


def test_a_step_without_time_is_refused() -> None:
    with pytest.raises(BadInput, match="a step that takes time"):
        metrics(by_hand([(0, Op.COMPUTE, 0, 0, 0, 0)]), make_case("ep", ep=2))
