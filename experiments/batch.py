"""Speed-up against the global batch: how much of it is a pipeline that is better filled. Simulated.

The paper's global batch is not known. A small one leaves every pipeline few micro-batches: the bubble of a system with
long rounds costs it more than that of a system with short ones.
"""

from experiments import Evidence, Request
from experiments._study import COMPARED, Axis, Cell, spec, study

SUMMARY = "throughput and speed-up against the global batch, 16 x 8 H800 (simulated)"
MODELS = ("gpt-oss-120b", "qwen3-235b")
BATCHES = tuple(1 << n for n in (20, 21, 22, 23))
SEQ_LEN = 8192


def cells(quick: bool = False) -> list[Cell]:
    return [
        Cell(model, tokens, spec(system, model, seq_len=SEQ_LEN, global_batch_tokens=tokens))
        for model in (MODELS[:1] if quick else MODELS)
        for tokens in (BATCHES[:2] if quick else BATCHES)
        for system in COMPARED
    ]


def run(request: Request) -> Evidence:
    words = {float(tokens): f"{tokens >> 20}M" for tokens in BATCHES}
    return study(request, cells(request.quick), Axis("global batch (tokens)", words=words))
