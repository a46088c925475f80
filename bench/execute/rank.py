"""A rank's process: what it does between the functions that a `RankPool` sends, and what these can ask for.

`rank_device` is the rank's device, `report` sends a value to the caller while a function runs, `process_group` makes
groups of ranks of the default process group. `become_rank` makes a rank of a process that something else has started.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import BadInput
from bench.execute.faults import cause_of, chain
from bench.execute.flight import Flight
from bench.execute.parent import end_with_parent
from bench.transports import Carrier

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def rank_device() -> torch.device:
    """Inside a function that a pool runs: the device of this rank."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if _rank.device == "cuda" else torch.device("cpu")


def rank_carrier() -> Carrier:
    """Inside a function that a pool runs: what carries payload between its ranks."""
    return _rank.carrier


def report(value: Any) -> None:
    """Inside a function that a pool runs: sends ``value`` to the ``on_report`` of the caller."""
    if _rank.on_report is not None:
        _rank.on_report(value)


def process_group(ranks: Sequence[int]) -> ProcessGroup | None:
    """The process group of these ranks of the default group, made once; None on a rank that is not among them.

    Every rank of the default group calls this, for the same sets in the same order. (torch's local synchronisation
    would not need the others, but names a group by how many groups a rank already has, which differs between ranks.)
    """
    import torch.distributed as dist

    key = tuple(ranks)
    if key not in _rank.groups:
        everyone = key == tuple(range(dist.get_world_size()))
        _rank.groups[key] = dist.group.WORLD if everyone else dist.new_group(list(key))
    return _rank.groups[key] if dist.get_rank() in key else None


def when_over(leave: Callable[[], None]) -> None:
    """Inside a function that ranks run: has ``leave`` called when the function has returned, on all of them.

    What a function leaves behind stays in the process, where threads of process groups go on waking.
    """
    _rank.leaving.append(leave)


def become_rank(
    number: int, device: str, carrier: Carrier, gpu: int, on_report: Callable[[Any], None], recorder: Path | None = None
) -> None:
    """Makes this process, which a launcher has started, the rank of that number.

    Args:
        carrier: what carries payload between the ranks.
        gpu: which of the GPUs that this process sees is its own, where `device` is ``cuda``.
        on_report: gets what `report` sends.
        recorder: file of its flight recorder; None where nobody is to read it.
    """
    _rank.number, _rank.device, _rank.carrier, _rank.on_report = number, device, carrier, on_report
    _rank.flight = Flight(recorder)
    _set_up_torch(gpu)


def forget_groups() -> None:
    """To be called where the default process group is another one from now on: `process_group` makes new ones."""
    _rank.groups.clear()


def flight() -> Flight:
    """The flight recorder of this rank; of a rank of a pool, in a file that the pool reads."""
    if _rank.flight is None:
        in_pool = _rank.folder != Path()
        _rank.flight = Flight(flight_file(_rank.folder, _rank.number) if in_pool else None)
    return _rank.flight


class _Rank:
    """What a rank's process knows of itself."""

    def __init__(self) -> None:
        self.number = 0
        self.device: str = "cpu"
        self.carrier = Carrier("gloo")
        self.folder = Path()
        self.on_report: Callable[[Any], None] | None = None
        self.groups: dict[tuple[int, ...], Any] = {}
        self.flight: Flight | None = None
        self.leaving: list[Callable[[], None]] = []


_rank = _Rank()


def rank_main(rank: int, device: str, carrier: Carrier, folder: Path, conn: Connection) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    trace = trace_file(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, trace)
    _rank.number, _rank.device, _rank.carrier, _rank.folder = rank, device, carrier, folder
    _rank.on_report = lambda value: conn.send_bytes(pickle.dumps(("report", value)))
    flight()
    # All ranks are on this host, whose name need not resolve to an address that reaches it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        _set_up_torch(rank % carrier.num_gpus if device == "cuda" else 0)
    except Exception as error:
        conn.send_bytes(_failure(error))
        return
    while True:
        try:
            task = conn.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(task)
            answer = pickle.dumps(("result", function(*args)))
            leave()
        except Exception as error:
            answer = _failure(error)
        conn.send_bytes(answer)


def leave() -> None:
    """After a function that ranks ran: nothing of it stays but the process groups that all functions share."""
    called = bool(_rank.leaving)
    while _rank.leaving:
        _rank.leaving.pop()()
    if called or _rank.device == "cuda":
        gc.collect()  # a trainer's hooks refer to it, so that only this frees its tensors and ends its groups' threads
    if _rank.device == "cuda":
        import torch

        torch._C._cuda_clearCublasWorkspaces()  # one for every stream there was: the next run's peak would count them
        torch.cuda.empty_cache()


def _set_up_torch(gpu: int) -> None:
    import torch

    torch.set_num_threads(1)
    if _rank.device == "cuda":
        from bench.execute.nccl import DEVICE_CONNECTIONS

        # Both are read when CUDA starts. Lazily, a kernel's code is loaded at its first use, which waits until the GPU
        # is idle: for ever, where a message is awaited on it meanwhile (see `bench.execute.staged`).
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(DEVICE_CONNECTIONS))
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        # cuDNN compiles its attention anew in every thread, which is such a wait again: flash attention instead.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Multicast objects are a resource of the whole node.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(gpu)
        assert torch.cuda.current_device() == gpu


def join_group(members: int, generation: int) -> None:
    """Leaves the default process group and, where this rank is among the members, joins the next one."""
    import torch.distributed as dist

    forget_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    if _rank.number < members:
        # A file has no port that somebody else could take between choosing and binding it.
        store = dist.FileStore(str(_rank.folder / f"store-{generation}"), members)
        # NCCL refuses two ranks on one GPU: their sums go through host memory as well, see `collectives`.
        shared = _rank.carrier.name in ("gloo", "host")
        backend = "gloo" if shared else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=_rank.number, world_size=members)


def _failure(error: Exception) -> bytes:
    """What `RankPool` makes its error of: cause, text, and of input that is refused its parts."""
    text = "".join(traceback.format_exception(error)).rstrip()
    bad = next((one for one in chain(error) if isinstance(one, BadInput)), None)
    refused = (bad.field, str(bad.value), bad.allowed) if bad is not None else None
    return pickle.dumps(("error", (cause_of(error), f"rank {_rank.number} failed:\n{text}", refused)))


def trace_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.txt"


def flight_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.flight"
