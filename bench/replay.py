"""Tokens dealt to experts so that counts come out exactly as they were recorded.

A block of tokens is halved until single tokens are left. What a half gets of an expert's count is its share, rounded
up or down so that the half has top_k experts a token: systematic sampling of the fractions, the experts in a random
order and from a random start. So no expert ever has more tokens than the half has, every token ends with different
experts, and all of it is whole numbers.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bench.recorded import Recorded

Ints = NDArray[np.int64]

SAMPLED_TOKENS = 4096
"""Tokens behind the expected rows of a token on each rank: their error is below one per cent of the tokens."""

_SEQUENCES, _TOKENS, _SAMPLE = range(3)  # streams of random numbers, kept apart under one seed


def expert_ids(recorded: Recorded, row: int, seed: int, sequence: int, seq_len: int) -> Ints:
    """[seq_len, top_k] experts of a sequence's tokens; those of all sequences together have the recorded counts.

    Args:
        row: number of the layer among those with experts.
        sequence: its number in the global batch, of which all sequences have `seq_len` tokens.
    """
    counts = _by_sequence(recorded, row, seed, recorded.tokens // seq_len)[sequence]
    return _ids(_split(np.random.default_rng((seed, _TOKENS, row, sequence)), counts, seq_len), recorded.top_k)


@lru_cache(maxsize=256)
def sample(recorded: Recorded, row: int, seed: int) -> Ints:
    """[tokens, top_k] experts of as many tokens as a step has, or of fewer that have the same shares."""
    random = np.random.default_rng((seed, _SAMPLE, row))
    counts, tokens = np.array(recorded.counts[row], dtype=np.int64), recorded.tokens
    if tokens > SAMPLED_TOKENS:
        counts = _part(random, counts[None], np.array([SAMPLED_TOKENS]), np.array([tokens]))[0]
        tokens = SAMPLED_TOKENS
    return _ids(_split(random, counts, tokens), recorded.top_k)


@lru_cache(maxsize=256)
def _by_sequence(recorded: Recorded, row: int, seed: int, num_sequences: int) -> Ints:
    """[sequences, experts]."""
    counts = np.array(recorded.counts[row], dtype=np.int64)
    return _split(np.random.default_rng((seed, _SEQUENCES, row)), counts, num_sequences)


def _split(random: np.random.Generator, counts: Ints, num_parts: int) -> Ints:
    """[parts, experts]: counts [experts] dealt to equal parts; each gets its share of every count, up or down."""
    blocks, sizes = counts[None], np.array([num_parts])
    while sizes.max() > 1:
        left = sizes // 2
        first = _part(random, blocks, left, sizes)
        blocks = np.stack([first, blocks - first], axis=1).reshape(-1, len(counts))
        sizes = np.stack([left, sizes - left], axis=1).ravel()
        blocks, sizes = blocks[sizes > 0], sizes[sizes > 0]
    return blocks


def _part(random: np.random.Generator, blocks: Ints, part: Ints, of: Ints) -> Ints:
    """[blocks, experts]: what part / of of each block gets; the sum of a block's counts is a multiple of `of`."""
    whole, rest = np.divmod(blocks * part[:, None], of[:, None])
    order = random.permuted(np.broadcast_to(np.arange(blocks.shape[1]), blocks.shape), axis=1)
    ends = np.take_along_axis(rest, order, axis=1).cumsum(axis=1) + random.integers(of)[:, None]
    steps = np.diff(ends // of[:, None], axis=1, prepend=0)
    up = np.empty_like(whole)
    np.put_along_axis(up, order, steps, axis=1)
    return whole + up


def _ids(chosen: Ints, top_k: int) -> Ints:
    """[tokens, top_k]: places of the ones in [tokens, experts]."""
    return np.nonzero(chosen)[1].reshape(-1, top_k)
