"""Throughput of `disagmoe` against the split of its GPUs between attention and experts. Simulated.

Attention grows with the square of the sequence length and experts with the length: the best split moves with it. A
split that does not tile the cluster leaves GPUs idle; throughput is divided by all that are allocated.
"""

from experiments import Evidence, Request
from experiments._study import OURS, Axis, Cell, spec, study

SUMMARY = "throughput of disagmoe against its split of GPUs, attention to experts, 16 x 8 H800 (simulated)"
MODEL = "gpt-oss-120b"
SPLITS = ((8, 32), (8, 16), (16, 16), (16, 8), (32, 8))
SEQ_LENS = (4096, 16384, 32768)


def cells(quick: bool = False) -> list[Cell]:
    return [
        Cell(
            f"{MODEL}, {seq_len // 1024}K",
            m / (m + n),
            spec(OURS, MODEL, seq_len=seq_len),
            (f"attention_ranks={m}", f"expert_ranks={n}"),
        )
        for seq_len in (SEQ_LENS[:1] if quick else SEQ_LENS)
        for m, n in (SPLITS[1:3] if quick else SPLITS)
    ]


def run(request: Request) -> Evidence:
    words = {m / (m + n): f"{m}:{n}" for m, n in SPLITS}
    return study(request, cells(request.quick), Axis("A:F split of a pair of groups (GPUs)", log=False, words=words))
