"""What the planner may choose from."""

from dataclasses import dataclass

from bench.errors import BadInput


@dataclass(frozen=True)
class Choices:
    """What the planner may choose from, next to M and N. None: what the model and the batch allow.

    Args:
        groups: values of p.
        unequal: numbers of expert groups that differ from p, instead of equal ones.
        recompute, shared_on, copies: values of the layout's fields of these names.
        tiling: "any", or "nodes": every group takes whole nodes or an equal part of one.
        nics: "own": a rank uses its share of its node's NICs. "sets": the NICs of a node are dealt to its attention
            and its expert ranks as is best, where every node holds both in equal parts. No transport here can honour
            sets, nor does the placement lay groups over nodes in that way: the gain is a bound.
        mbs: sequences of a micro-batch on an attention rank.
        shares: (tp, cp), ranks that share a sequence; what a sequence's length or the number of sequences calls for.
        offload: where the optimizer's state lives; with the host too where it crowds the GPUs.
    """

    groups: tuple[int, ...] | None = None
    unequal: bool = False
    recompute: tuple[str, ...] = ("none", "full", "redispatch")
    shared_on: tuple[str, ...] | None = None
    copies: tuple[str, ...] | None = None
    tiling: str = "any"
    nics: str = "own"
    mbs: int = 1
    shares: tuple[tuple[int, int], ...] | None = None
    offload: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("tiling", ("any", "nodes")), ("nics", ("own", "sets"))):
            if getattr(self, name) not in allowed:
                raise BadInput(name, getattr(self, name), " or ".join(allowed))
