"""What ranks of a pool run in benchmarks of transports: exchanges between groups of ranks, timed where they end."""

import time

import torch
import torch.distributed as dist

from bench.action import Kind, Pass
from bench.execute.pool import rank_device
from bench.execute.transport import Channel, Packet, open_transport


def exchange(sources: tuple[int, ...], targets: tuple[int, ...], num_bytes: int, rounds: int) -> float:
    """Seconds that `rounds` exchanges take on the slowest rank: each source sends `num_bytes` to each target.

    What a rank sends to itself is copied and is not traffic.
    """
    rank, device = dist.get_rank(), rank_device()
    transport = open_transport(device)
    channel = Channel(Kind.DISPATCH, Pass.F, sources, targets)
    transport.open([channel])

    def packets(ranks: tuple[int, ...], mine: bool) -> list[Packet]:
        return [Packet(other, 0, torch.zeros(num_bytes, dtype=torch.uint8, device=device)) for other in ranks if mine]

    sends, receives = packets(targets, rank in sources), packets(sources, rank in targets)

    def once() -> None:
        transport.post(channel, sends, receives).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()

    once()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(rounds):
        once()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took.item())
