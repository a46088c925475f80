"""The model's parts, one module per kind and layer, from megatron-core; activations are rows [T, H]."""

from __future__ import annotations

from bench.execute.parts.attention import AttentionOutput, AttentionPart
from bench.execute.parts.ends import EmbedPart, HeadPart
from bench.execute.parts.expert import ExpertPart
from bench.execute.support import unsupported

__all__ = ["AttentionOutput", "AttentionPart", "EmbedPart", "ExpertPart", "HeadPart", "unsupported"]
