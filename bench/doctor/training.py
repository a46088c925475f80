"""Checks of what executing needs on any machine: torch, megatron-core, processes that talk."""

import importlib.util
import warnings
from typing import Literal

from bench.doctor.check import Check

INSTALL_TRAIN = "pip install 'disagmoe-bench[train]', or make setup-train"


def torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "absent", "not installed", INSTALL_TRAIN)
    import torch

    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"
    right = numbers >= (2, 10)
    return Check("torch", "ok" if right else "broken", f"{torch.__version__}, {built}", "" if right else INSTALL_TRAIN)


def megatron() -> Check:
    if importlib.util.find_spec("megatron") is None:
        return Check("megatron-core", "absent", "not installed", INSTALL_TRAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else it could use
        import megatron.core

    return Check("megatron-core", "ok", str(megatron.core.__version__))


def sum_over_ranks(device: str) -> float:
    """On a rank: the sum over all ranks of one more than the rank."""
    import torch
    import torch.distributed as dist

    value = torch.full((1,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(value)
    return value.item()


def summed(device: Literal["cpu", "cuda"], ranks: int) -> Check:
    from bench.execute.pool import RankPool

    with RankPool(ranks, device, timeout_s=90) as pool:
        sums = pool.run(sum_over_ranks, device)
    name, how = ("ranks", "gloo") if device == "cpu" else ("nccl", "NCCL")
    right = sums == [ranks * (ranks + 1) / 2] * ranks
    found = f"{ranks} processes summed over {how}" if right else f"{ranks} processes got the sums {sums}"
    return Check(name, "ok" if right else "broken", found, "" if right else "see the environment's NCCL_* and GLOO_*")


def ranks() -> Check:
    there = ranks_are_there()
    return there if there.state != "not tried" else summed("cpu", 2)


def ranks_are_there() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("ranks", "absent", "no torch", INSTALL_TRAIN)
    import torch.distributed as dist

    there = dist.is_available() and dist.is_gloo_available()
    if not there:
        return Check("ranks", "broken", "torch is built without gloo", INSTALL_TRAIN)
    return Check("ranks", "not tried", "torch has gloo", "without --quick two processes are started")


