"""Ranks work together, what goes wrong on one is told, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BadInput
from bench.execute.pool import RankError, RankPool
from bench.execute.rank import process_group, rank_device, report

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

NUM_RANKS = 3


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """Not the shared one: these tests break it."""
    with RankPool(NUM_RANKS, timeout_s=240) as pool:
        yield pool


def total(values: list[float]) -> tuple[int, int, float, str, int]:
    """What a rank sees: number, world size, a sum over ranks, device, threads."""
    x = torch.tensor(values[dist.get_rank()], device=rank_device())
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.item(), x.device.type, torch.get_num_threads()


def neighbours_total() -> list[float]:
    """Sums inside overlapping sets of ranks, of those that this rank belongs to."""
    sums = []
    for ranks in ([0, 1], [1, 2], [0, 1, 2], [1]):
        group = process_group(ranks)
        assert (group is not None) == (dist.get_rank() in ranks)
        assert process_group(ranks) is group
        if group is not None:
            x = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(x, group=group)
            sums.append(x.item())
    return sums


def pid() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    """The other ranks wait for ever in a collective that one of them never reaches."""
    if dist.get_rank() == rank:
        raise ZeroDivisionError("on purpose")
    dist.barrier()


def refuse() -> None:
    raise BadInput("layout.ep", 3, "a divisor of 8")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def report_twice() -> None:
    for step in range(2):
        report((step, dist.get_rank()))


def unpicklable() -> Any:
    return lambda: None


def alive(process: int) -> bool:
    """Whether any thread of it still runs; its first one may end before the others."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
    except OSError:
        return Path(f"/proc/{process}").exists()
    return any(stat.rpartition(")")[2].split()[0] not in "ZX" for stat in stats)


def wait_until_gone(processes: list[int]) -> None:
    for _ in range(1200):
        if not any(alive(process) for process in processes):
            return
        time.sleep(0.05)
    raise AssertionError(f"still alive: {[p for p in processes if alive(p)]}")


def test_ranks_reduce_together(own_pool: RankPool) -> None:
    assert own_pool.run(total, [1.0, 2.0, 4.0]) == [(rank, 3, 7.0, "cpu", 1) for rank in range(3)]


def test_first_ranks_form_a_world_of_their_own(own_pool: RankPool) -> None:
    assert own_pool.run(total, [1.0, 2.0], world_size=2) == [(rank, 2, 3.0, "cpu", 1) for rank in range(2)]
    assert own_pool.run(total, [5.0], world_size=1) == [(0, 1, 5.0, "cpu", 1)]
    assert own_pool.run(total, [1.0, 2.0, 4.0])[2] == (2, 3, 7.0, "cpu", 1)


def test_process_groups_may_overlap(own_pool: RankPool) -> None:
    assert own_pool.run(neighbours_total) == [[1.0, 3.0], [1.0, 3.0, 3.0, 1.0], [3.0, 3.0]]
    assert own_pool.run(neighbours_total)[0] == [1.0, 3.0]


def test_processes_persist_between_calls(own_pool: RankPool) -> None:
    first = own_pool.run(pid)
    assert first == own_pool.run(pid) == own_pool.pids
    assert own_pool.run(pid, world_size=2) == first[:2]


def test_reports_arrive_before_the_end_in_a_ranks_order(own_pool: RankPool) -> None:
    seen: list[tuple[int, Any]] = []
    own_pool.run(report_twice, on_report=lambda rank, value: seen.append((rank, value)))
    for rank in range(NUM_RANKS):
        assert [value for who, value in seen if who == rank] == [(0, rank), (1, rank)]


def test_an_exception_comes_back_with_its_ranks_traceback(own_pool: RankPool) -> None:
    own_pool.run(pid)
    before = own_pool.pids
    with pytest.raises(
        RankError, match=r"rank 1 failed:\n(?s:.*)in raise_on\n(?s:.*)ZeroDivisionError: on purpose"
    ) as caught:
        own_pool.run(raise_on, 1)
    assert (caught.value.rank, caught.value.cause) == (1, "ZeroDivisionError")
    wait_until_gone(before)
    assert own_pool.run(total, [1.0, 2.0, 4.0])[0][2] == 7.0  # started afresh


def test_input_that_ranks_refuse_is_refused(own_pool: RankPool) -> None:
    with pytest.raises(BadInput, match=r"^layout.ep: '3' is not valid; allowed: a divisor of 8$"):
        own_pool.run(refuse)


def test_a_result_that_cannot_be_pickled_is_an_error(own_pool: RankPool) -> None:
    with pytest.raises(RankError, match="unpicklable"):
        own_pool.run(unpicklable)


def test_a_rank_that_dies_is_named(own_pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 2 \(process \d+\) died: signal SIGKILL") as caught:
        own_pool.run(die_on, 2)
    assert (caught.value.rank, caught.value.cause) == (2, "died")


def test_a_rank_that_died_between_calls_is_replaced(own_pool: RankPool) -> None:
    own_pool.run(pid)
    os.kill(own_pool.pids[0], signal.SIGKILL)
    wait_until_gone(own_pool.pids[:1])
    assert own_pool.run(total, [1.0, 2.0, 4.0])[0][2] == 7.0


def test_a_rank_that_hangs_is_named_with_the_place(own_pool: RankPool) -> None:
    own_pool.run(pid)  # so that no time goes into starting
    with pytest.raises(RankError, match=r"no answer for 8 s from rank 1\n(?s:.*)in sleep_on") as caught:
        own_pool.run(sleep_on, 1, timeout_s=8)
    assert (caught.value.rank, caught.value.cause) == (1, "hung")
    assert own_pool.pids == []


def test_closing_ends_every_process() -> None:
    pool = RankPool(2)
    pids = pool.run(pid)
    pool.close()
    wait_until_gone(pids)
    with pytest.raises(BadInput, match="open"):
        pool.run(pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_parent(how: signal.Signals) -> None:
    """Also where the parent has no chance to clean up, and while ranks are busy."""
    folder = str(Path(__file__).parent)
    program = (
        # A shell that runs the tests in its background has its children ignore Ctrl-C.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import sys; sys.path[:0] = [{folder!r}, {str(Path(folder).parent)!r}]\n"
        "import test_pool\nfrom bench.execute.pool import RankPool\n"
        "pool = RankPool(2)\nprint(*pool.run(test_pool.pid), flush=True)\n"
        "pool.run(test_pool.sleep_on, 1)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(alive(process) for process in pids)
    parent.send_signal(how)
    parent.wait(timeout=60)
    parent.stdout.close()
    wait_until_gone(pids)


def test_bad_pools_are_refused(own_pool: RankPool) -> None:
    with pytest.raises(BadInput, match="ranks"):
        RankPool(0)
    with pytest.raises(BadInput, match="device"):
        RankPool(1, "tpu")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="1 to the 3 ranks"):
        own_pool.run(pid, world_size=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(BadInput, match="CUDA devices of this host"):
        RankPool(1, "cuda")
