"""The ranks of a job as one finds them: each is a process that Slurm started, and all of them call the same function.

`bench.execute.pool.RankPool` starts ranks itself; here a call of `run` happens on every rank.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from bench.errors import BadInput
from bench.transports import Carrier
from experiments.launch.ledger import replace

RENDEZVOUS_TIMEOUT_S = 300.0


class JoinedRanks:
    """One rank's view of the ranks of its job.

    Args:
        environment: submitit's, which knows rank, local rank and hosts.
        meeting: file through which rank 0 says where it listens; a fresh name for every start of the job.
        num_ranks: ranks that take part; this is one of them.
        recorder: of a rank the file of its flight recorder, in a folder that all hosts see.
    Raises BadInput where a node has fewer GPUs than ranks.
    """

    def __init__(
        self,
        environment: Any,
        meeting: Path,
        num_ranks: int,
        device: Literal["cpu", "cuda"],
        recorder: Callable[[int], Path],
    ) -> None:
        from bench.execute.rank import become_rank

        self.rank, self.world_size, self.device, self.transport = environment.global_rank, num_ranks, device, "auto"
        # A GPU a rank, on all nodes together.
        self.carrier = Carrier.of("auto", device, num_ranks, num_ranks if device == "cuda" else 0)
        self._host = environment.hostname
        self._calls = 0
        self._on_report: Callable[[int, Any], None] | None = None
        self._reports: list[Any] = []
        gpu = _gpu_of(environment.local_rank) if device == "cuda" else 0
        self._recorder = recorder
        become_rank(self.rank, device, self.carrier, gpu, self._take_report, recorder(self.rank))
        alone = environment.num_nodes == 1
        if alone:  # this host's name need not resolve to an address that reaches it
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        self.store = _meet("127.0.0.1" if alone else environment.hostnames[0], meeting, self.rank, num_ranks)

    def agree(self, what: str, decide: Callable[[], str]) -> str:
        """What rank 0 decides; called by all ranks with the same words in the same order."""
        if self.rank == 0:
            self.store.set(what, decide())
        return str(self.store.get(what).decode())

    def flights(self, num_ranks: int) -> list[tuple[int, ...]]:
        """What the first ranks have noted in their flight recorders, as far as their hosts have written it."""
        from bench.execute.flight import read_slots

        return [read_slots(self._recorder(rank)) for rank in range(num_ranks)]

    def carrier_of(self, transport: str) -> Carrier:
        """As `RankPool.carrier_of`. Raises BadInput."""
        if transport in ("auto", self.transport):
            return self.carrier
        return Carrier.of(transport, self.device, self.world_size, self.carrier.num_gpus)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        on_report: Callable[[int, Any], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Calls the function here, in a process group of all ranks; results by rank.

        `on_report` gets the reports of rank 0: there as they come, elsewhere at the end.
        """
        import torch.distributed as dist

        from bench.execute.rank import forget_groups

        if world_size not in (None, self.world_size):
            raise BadInput("ranks", world_size, f"the {self.world_size} ranks of the job")
        self._calls += 1
        self._reports, self._on_report = [], on_report if self.rank == 0 else None
        forget_groups()
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        store = dist.PrefixStore(f"call-{self._calls}", self.store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size)
        self._require_own_gpus()
        try:
            result = function(*args)
        except Exception:
            if self.world_size == 1:  # it goes on with the next task; of several ranks, others wait and the job ends
                _end_group()
            raise
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, (result, self._reports))
        _end_group()
        if self.rank and on_report is not None:
            for value in gathered[0][1]:
                on_report(0, value)
        return [one for one, _ in gathered]

    def _take_report(self, value: Any) -> None:
        self._reports.append(value)
        if self._on_report is not None:
            self._on_report(self.rank, value)

    def _require_own_gpus(self) -> None:
        """Every rank has a GPU that no other has: a wrong setting gives all of them the first."""
        if self.device != "cuda":
            return
        import torch
        import torch.distributed as dist

        own = f"{self._host} {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        taken: list[Any] = [None] * self.world_size
        dist.all_gather_object(taken, own)
        if len(set(taken)) < self.world_size:
            raise RuntimeError(f"ranks share GPUs: {', '.join(taken)}")


def _end_group() -> None:
    import torch.distributed as dist

    from bench.execute.rank import leave

    leave()
    dist.destroy_process_group()


def _gpu_of(local_rank: int) -> int:
    """The GPU of the local rank; the only one, where the node shows each rank its own."""
    import torch

    found = torch.cuda.device_count()  # through NVML: CUDA itself does not start yet
    number = 0 if found == 1 else local_rank
    if number >= found:
        raise BadInput("gpus_per_node", local_rank + 1, f"at most the {found} GPUs of a node")
    return number


def _meet(host: str, meeting: Path, rank: int, num_ranks: int) -> Any:
    """A store on rank 0 that all ranks reach. It takes a free port: several jobs may share a node."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    wait = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
    if rank == 0:
        store = TCPStore(host, 0, num_ranks, is_master=True, wait_for_workers=False, timeout=wait)
        replace(meeting, str(store.port))
        return store
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 on {host} did not come within {RENDEZVOUS_TIMEOUT_S:g} s")
        time.sleep(0.1)
    return TCPStore(host, int(meeting.read_text()), num_ranks, is_master=False, wait_for_workers=False, timeout=wait)
