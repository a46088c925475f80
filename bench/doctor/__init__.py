"""What of this machine works, what does not, and what to do: found out by trying, and not by asking for versions only.

A `Check` is one thing; an `Ability` is a way of using the software, and what it needs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.doctor import gpus, host, training
from bench.doctor.check import Check, State

__all__ = ["ABILITIES", "Ability", "Check", "Report", "State", "examine"]


class Ability(NamedTuple):
    """A way of using the software; `bit` is set in the exit code where it will not work."""

    name: str
    bit: int
    needs: tuple[str, ...]


# Bits above the codes that every verb has (1, 2), and whose sum is below those of signals (128 and more).
ABILITIES = (
    Ability("simulate", 8, ("python", "packages", "simulator", "results folder")),
    Ability("run --device cpu", 16, ("python", "packages", "torch", "megatron-core", "ranks", "results folder")),
    Ability(
        "run --device cuda", 32, ("python", "packages", "torch", "megatron-core", "gpus", "nccl", "results folder")
    ),
    Ability("sweep --executor slurm", 64, ("python", "packages", "submitit", "slurm", "results folder")),
)


@dataclass(frozen=True)
class Report:
    """Checks by name, in the order in which they were made."""

    checks: dict[str, Check]

    def missing(self, ability: Ability) -> list[str]:
        """What of an ability's needs is absent or broken; empty where it will work, as far as was tried."""
        return [name for name in ability.needs if self.checks[name].state not in ("ok", "not tried")]

    def untried(self, ability: Ability) -> list[str]:
        """What of an ability's needs is there and was not tried."""
        return [name for name in ability.needs if self.checks[name].state == "not tried"]

    def works(self, ability: Ability) -> bool | None:
        """Whether it will work; None where nothing speaks against it and not everything was tried."""
        return False if self.missing(ability) else None if self.untried(ability) else True

    @property
    def exit_code(self) -> int:
        """The sum of the bits of what will not work; 0 where everything will, as far as was tried."""
        return sum(ability.bit for ability in ABILITIES if self.missing(ability))


def examine(results: Path, quick: bool = False) -> Report:
    """Makes all checks; those that start processes or compile are not tried if `quick`."""
    checks: dict[str, Check] = {}
    for name, check in _checks(results, quick):
        checks[name] = _safely(name, check)
    return Report(checks)


def _checks(results: Path, quick: bool) -> Iterator[tuple[str, Callable[[], Check]]]:
    yield "python", host.python
    yield "packages", host.packages
    yield "simulator", host.simulator_is_there if quick else host.simulator
    yield "results folder", lambda: host.folder(results)
    yield "disk", lambda: host.disk(results)
    yield "clocks", host.clocks
    yield "torch", training.torch
    yield "megatron-core", training.megatron
    yield "ranks", training.ranks_are_there if quick else training.ranks
    yield "nvml", gpus.nvml
    yield "gpus", gpus.gpus
    yield "gpu clocks", gpus.gpu_clocks
    yield "nccl", gpus.nccl
    yield "peer access", gpus.peers
    yield "nvlink", gpus.nvlink
    yield "infiniband", host.infiniband
    yield "submitit", host.submitit
    yield "slurm", host.slurm


def _safely(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:
        return Check(name, "broken", " ".join(f"{type(error).__name__}: {error}".split())[:300], "see the error")


