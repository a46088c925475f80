"""What the paper reports, as read from it: arXiv 2605.11005, 16 nodes x 8 H800. Not ours, not measured here.

Its claims lie in ``claims.toml``, each with its source.
"""

from pathlib import Path

CLUSTER = "h800x16"
MODELS = ("deepseek-moe-16b", "gpt-oss-120b", "qwen3-235b")
SEQ_LENS = (4096, 8192, 16384, 32768)
EXPERT_PARALLEL = 16
CLAIMS = Path(__file__).with_name("claims.toml")
