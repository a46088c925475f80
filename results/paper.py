"""Values that the paper reports, as read from it: arXiv 2605.11005, 16 nodes x 8 H800. Not ours, not measured here."""

from typing import NamedTuple

SOURCE = "arXiv 2605.11005"
CLUSTER = "h800x16"
MODELS = ("deepseek-moe-16b", "gpt-oss-120b", "qwen3-235b")
SEQ_LENS = (4096, 8192, 16384, 32768)
EXPERT_PARALLEL = 16


class Speedup(NamedTuple):
    """Throughput of DisagMoE over `baseline`, from `low` to `high` over the paper's cells; low None: "up to"."""

    baseline: str
    low: float | None
    high: float
    source: str = SOURCE

    def __str__(self) -> str:
        span = f"up to {self.high:.2f}x" if self.low is None else f"{self.low:.2f}x to {self.high:.2f}x"
        return f"{span} over {self.baseline} ({self.source})"


SPEEDUPS = (
    Speedup("Megatron-LM interleaved 1F1B", 1.59, 1.81),
    Speedup("the best overlap system (Tutel, Comet, DualPipe)", None, 1.34),
    Speedup("DualPipe", 1.05, 1.13),
)
