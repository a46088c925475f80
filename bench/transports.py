"""Which transport carries the payload of a run, by name: what is asked for, and what it comes to on this machine."""

from typing import NamedTuple, Self

from bench.errors import BadInput

TRANSPORTS = ("auto", "gloo", "host", "nccl", "nccl:BLOCKS", "copy")
"""
gloo: between processes on CPUs. host: through host memory and gloo, also with several ranks on one GPU. nccl: NCCL send
and receive, `nccl:BLOCKS` with as many thread blocks a communicator at most. copy: copy engines push into memory that
the ranks of a node share. auto: gloo on CPUs; on GPUs nccl, or host where there are more ranks than GPUs.
"""
NCCL_BLOCKS = 8
"""Thread blocks of a communicator's kernels on one GPU: they wait beside the computation, not in its place."""
MOST_BLOCKS = 64


class Carrier(NamedTuple):
    """A transport as it runs.

    Attributes:
        name: ``gloo``, ``host``, ``nccl`` or ``copy``.
        num_gpus: of this machine; rank r has GPU r modulo this. 0 on CPUs.
        blocks: thread blocks that a communicator of NCCL may have.
    """

    name: str
    num_gpus: int = 0
    blocks: int = NCCL_BLOCKS

    @classmethod
    def of(cls, word: str, device: str, num_ranks: int, num_gpus: int) -> Self:
        """What `word` comes to for so many ranks. Raises BadInput where it cannot be."""
        name, colon, blocks = word.partition(":")
        if name not in TRANSPORTS or (colon and name != "nccl"):
            raise BadInput("transport", word, f"one of {', '.join(TRANSPORTS)}")
        if device == "cpu":
            if name not in ("auto", "gloo", "host"):
                raise BadInput("transport", word, "auto, gloo or host on CPUs")
            return cls("gloo" if name == "auto" else name)
        if num_gpus < 1:
            raise BadInput("ranks", num_ranks, f"at most the {num_gpus} CUDA devices of this host")
        if name == "gloo":
            raise BadInput("transport", word, "auto, host, nccl or copy on GPUs")
        if name == "auto":
            name = "host" if num_ranks > num_gpus else "nccl"
        if name != "host" and num_ranks > num_gpus:
            allowed = f"at most the {num_gpus} CUDA devices of this host with {name}; with host, several on one GPU"
            raise BadInput("ranks", num_ranks, allowed)
        return cls(name, num_gpus, _blocks(word, blocks) if colon else NCCL_BLOCKS)

    def gpus(self, num_ranks: int) -> int:
        """How many GPUs so many ranks are on."""
        return min(self.num_gpus, num_ranks)

    def facts(self, num_ranks: int) -> dict[str, object]:
        """For a trial: what carried its payload, and how many ranks were on how many GPUs."""
        found: dict[str, object] = {"transport": self.name, "ranks": num_ranks}
        if self.num_gpus:
            found["gpus"] = self.gpus(num_ranks)
        return found | ({"nccl_blocks": self.blocks} if self.name == "nccl" else {})


def _blocks(word: str, number: str) -> int:
    if not (number.isascii() and number.isdigit() and 1 <= int(number) <= MOST_BLOCKS):
        raise BadInput("transport", word, f"nccl:1 to nccl:{MOST_BLOCKS}")
    return int(number)
