"""A pool of rank processes on this host that stays up, so that running many layouts pays for starting once.

Each rank is a process with an initialised ``torch.distributed``: gloo for CPU tensors and, on CUDA, NCCL for those of
its GPU, unless ranks share one (see `bench.transports`). `RankPool.run` has the first n ranks call a function; inside
it the default process group is exactly these n ranks; see `bench.execute.rank` for what else a function can ask for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from bench.errors import BadInput
from bench.execute.faults import DIED, HUNG
from bench.execute.flight import read_slots
from bench.execute.rank import flight_file, join_group, process_group, rank_device, rank_main, report, trace_file
from bench.transports import Carrier

__all__ = ["RankError", "RankPool", "process_group", "rank_device", "report"]

DEFAULT_TIMEOUT_S = 300.0
GRACE_S = 2.0  # after one rank's error, what the others get to come back by themselves
# What the server from which CPU ranks are forked imports once, instead of every rank for itself.
PRELOADED = ["torch", "torch.distributed", "bench.execute.train", "bench.execute.verify"]


class RankError(RuntimeError):
    """What went wrong on a rank, or between ranks.

    Attributes:
        rank: the rank that failed first.
        cause: ``died``, ``hung``, ``oom`` or the name of the exception's class.
        refused: field, value and what is allowed, where the rank refused its input.
        last_actions: what every rank did last, a line each, where a run knows how to say so.
    """

    last_actions: tuple[str, ...] = ()

    def __init__(self, rank: int, cause: str, message: str, refused: tuple[str, str, str] | None = None) -> None:
        super().__init__(message)
        self.rank, self.cause, self.refused = rank, cause, refused


class Ranks(Protocol):
    """Ranks that call functions together: those of a `RankPool`, or those that a launcher has started.

    Attributes:
        world_size, device, transport, carrier: as of `RankPool`.
    """

    world_size: int
    device: Literal["cpu", "cuda"]
    transport: str
    carrier: Carrier

    def carrier_of(self, transport: str) -> Carrier:
        """See `RankPool.carrier_of`."""
        ...

    def flights(self, num_ranks: int) -> list[tuple[int, ...]]:
        """See `RankPool.flights`."""
        ...

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        on_report: Callable[[int, Any], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """See `RankPool.run`."""
        ...


class RankPool:
    """Processes that run functions together, one a rank.

    A rank that dies or hangs ends the call with a `RankError` and all processes of the pool; the next call starts
    them afresh. Ranks also end when the process that made the pool does, however it ends.

    Args:
        world_size: ranks. On ``cuda`` rank r has GPU r, modulo their number.
        timeout_s: how long a call may go without an end or a report from any rank.
        transport: see `bench.transports`.
    Raises BadInput where there are fewer GPUs than the transport needs.

    Attributes:
        carrier: the transport as it runs.
    """

    def __init__(
        self,
        world_size: int,
        device: Literal["cpu", "cuda"] = "cpu",
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: str = "auto",
    ) -> None:
        if world_size < 1:
            raise BadInput("ranks", world_size, "at least 1")
        if device not in ("cpu", "cuda"):
            raise BadInput("device", device, "cpu or cuda")
        self.carrier = Carrier.of(transport, device, world_size, num_gpus() if device == "cuda" else 0)
        self.world_size, self.device, self.timeout_s, self.transport = world_size, device, timeout_s, transport
        self._folder = Path(tempfile.mkdtemp(prefix="moebench-ranks-"))
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._members = 0  # ranks in the default process group
        self._generation = 0  # number of that group; one is never used again after an error
        self._finalizer = weakref.finalize(self, _end, self._processes, self._connections, self._folder)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no process runs."""
        return [process.pid for process in self._processes if process.pid is not None]

    def flights(self, num_ranks: int) -> list[tuple[int, ...]]:
        """What the first ranks have noted in their flight recorders, also after they have ended."""
        return [read_slots(flight_file(self._folder, rank)) for rank in range(num_ranks)]

    def close(self) -> None:
        """Ends every process. The pool cannot be used again."""
        self._finalizer()

    def carrier_of(self, transport: str) -> Carrier:
        """Another transport for the same ranks, or the pool's own for ``auto``. Raises BadInput."""
        if transport in ("auto", self.transport):
            return self.carrier
        if self.carrier.name == "host" and self.device == "cuda":
            raise BadInput("transport", transport, "host, in a pool that was made for it")
        return Carrier.of(transport, self.device, self.world_size, self.carrier.num_gpus)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        on_report: Callable[[int, Any], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Has the first ``world_size`` ranks (default: all) call ``function(*args)``; results by rank.

        Args:
            function: importable by name. Arguments and results are pickled; results should be on the CPU.
            on_report: called with (rank, value) for what ranks `report`, in the order of arrival.
            timeout_s: in place of the pool's.
        Raises:
            BadInput: a rank refused its input.
            RankError: with the traceback of the rank that failed first.
        """
        if not self._finalizer.alive:
            raise BadInput("pool", "closed", "a pool that is open")
        members = self.world_size if world_size is None else world_size
        if not 1 <= members <= self.world_size:
            raise BadInput("ranks", members, f"1 to the {self.world_size} ranks of the pool")
        task = pickle.dumps((function, args))
        try:
            # A rank without a task says nothing: what can be read from it is the end of its process.
            if any(conn.poll() for conn in self._connections):
                self._stop()
            if not self._processes:
                self._start()
            if members != self._members:
                self._regroup(members)
            for conn in self._connections[:members]:
                conn.send_bytes(task)
            return self._gather(range(members), on_report, timeout_s or self.timeout_s)
        except BaseException:
            # Some ranks may be waiting for ever, and even where all came back, messages may be under way that nobody
            # takes: a group in that state cannot be left without risking to wait as well.
            self._stop()
            raise

    def _start(self) -> None:
        # CUDA does not survive a fork; on the CPU it saves every rank the seconds that importing torch takes.
        context: Any = get_context("forkserver" if self.device == "cpu" and sys.platform == "linux" else "spawn")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        for rank in range(self.world_size):
            flight_file(self._folder, rank).unlink(missing_ok=True)
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main,
                args=(rank, self.device, self.carrier, self._folder, theirs),
                name=f"rank {rank}",
                daemon=True,
            )
            with _unnamed_main(), _one_thread(self.device):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _regroup(self, members: int) -> None:
        self._generation += 1
        for conn in self._connections:
            conn.send_bytes(pickle.dumps((join_group, (members, self._generation))))
        self._gather(range(self.world_size), None, self.timeout_s)
        self._members = members

    def _stop(self) -> None:
        _kill(self._processes, self._connections)
        self._members = 0

    def _gather(
        self, ranks: Iterable[int], on_report: Callable[[int, Any], None] | None, timeout_s: float
    ) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[RankError] = []
        waiting = set(ranks)
        deadline = time.monotonic() + timeout_s
        while waiting:
            # A rank that died has its last message in the pipe; both become ready, and the message goes first.
            objects: dict[Any, int] = {self._connections[rank]: rank for rank in waiting}
            objects |= {self._processes[rank].sentinel: rank for rank in waiting}
            ready = connection.wait(list(objects), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted({objects[one] for one in ready}):
                kind, value = self._receive(rank)
                if kind == "report":
                    deadline = time.monotonic() + timeout_s if not failures else deadline
                    if on_report is not None:
                        on_report(rank, value)
                    continue
                waiting.discard(rank)
                if kind == "result":
                    results[rank] = value
                else:
                    failures.append(RankError(rank, *value))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            first = _first(failures, waiting)
            if first.cause == HUNG and waiting:  # those that waited for it noticed before this process did
                raise self._hung(sorted(waiting), timeout_s)
            raise BadInput(*first.refused) if first.refused else first
        if waiting:
            raise self._hung(sorted(waiting), timeout_s)
        return [results[rank] for rank in sorted(results)]

    def _receive(self, rank: int) -> tuple[str, Any]:
        conn, process = self._connections[rank], self._processes[rank]
        try:
            if conn.poll():
                return pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            pass
        process.join(GRACE_S)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return "error", (DIED, f"rank {rank} (process {process.pid}) died: {how}")

    def _hung(self, ranks: Sequence[int], timeout_s: float) -> RankError:
        """Says where the ranks that did not come back are; a stopped process is the one that the others wait for."""
        stopped = [rank for rank in ranks if _is_stopped(self._processes[rank].pid)]
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)  # the handlers write at once
        names = ", ".join(str(rank) for rank in ranks)
        where = [f"the process of rank {rank} is stopped" for rank in stopped]
        running = [rank for rank in ranks if rank not in stopped]
        where += [f"rank {rank} is at\n{(trace_file(self._folder, rank)).read_text()}" for rank in running]
        message = f"no answer for {timeout_s:g} s from rank {names}"
        return RankError([*stopped, *ranks][0], HUNG, "\n".join([message, *where]))


def _first(failures: Sequence[RankError], waiting: Iterable[int]) -> RankError:
    """The failure to show: a death before what it breaks on other ranks, and any cause before having waited for it."""
    order = {DIED: 0, HUNG: 2}
    first = min(failures, key=lambda failure: order.get(failure.cause, 1))
    others = sorted({failure.rank for failure in failures} - {first.rank})
    notes = [f"rank {', '.join(map(str, others))} failed as well"] if others else []
    unanswered = sorted(waiting)
    notes += [f"rank {', '.join(map(str, unanswered))} had not come back and was ended"] if unanswered else []
    return RankError(first.rank, first.cause, "\n".join([str(first), *notes]), first.refused)


def _is_stopped(process: int | None) -> bool:
    """Whether a signal has stopped a process (Linux)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def num_gpus() -> int:
    """CUDA devices of this host."""
    import torch

    return torch.cuda.device_count()


@contextlib.contextmanager
def _unnamed_main() -> Iterator[None]:
    """Keeps a new process from running the caller's script again: functions come from modules that can be imported."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Keeps what starts inside from making threads for mathematics: CPU ranks share the cores, and fork."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS") if device == "cpu" else ()
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _kill(processes: list[BaseProcess], connections: list[Connection]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for conn in connections:
        conn.close()
    processes.clear()
    connections.clear()


def _end(processes: list[BaseProcess], connections: list[Connection], folder: Path) -> None:
    _kill(processes, connections)
    shutil.rmtree(folder, ignore_errors=True)
