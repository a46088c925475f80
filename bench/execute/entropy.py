"""Cross-entropy of every row of logits, with its gradient; what is kept is the logits and a number a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.execute.kernels import kernels

CHUNK_ELEMENTS = 1 << 26  # logits turned to fp32 at a time where there is no kernel: 256 MiB


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)[label] of every row, fp32 [T].

    Args:
        logits: [T, V]. labels: int64 [T].
    """
    losses: Tensor = _CrossEntropy.apply(logits, labels)
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Without the kernel it works through the rows in chunks: the fp32 copy of the logits of a long sequence would not
    fit beside them.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.contiguous(), labels.contiguous()
        fused = kernels("entropy", logits)
        if fused is not None:
            losses, normalizers = fused.forward(logits, labels)
        else:
            losses, normalizers = logits.new_zeros(2, len(labels), dtype=torch.float32)
            for some in _chunks(logits):
                rows = logits[some].float()
                normalizers[some] = rows.logsumexp(dim=-1)
                losses[some] = normalizers[some] - rows.gather(1, labels[some, None]).squeeze(1)
        ctx.save_for_backward(logits, labels, normalizers)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels, normalizers = ctx.saved_tensors
        fused = kernels("entropy", logits)
        if fused is not None:
            grad_logits: Tensor = fused.backward(logits, labels, normalizers, grad)
            return grad_logits, None
        grad_logits = torch.empty_like(logits)
        for some in _chunks(logits):
            slope = (logits[some].float() - normalizers[some, None]).exp()
            slope.scatter_add_(1, labels[some, None], slope.new_full((len(slope), 1), -1.0))
            grad_logits[some] = slope * grad[some, None]
        return grad_logits, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))
