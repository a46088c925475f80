"""Megatron's indexed corpora, ``PREFIX.bin`` and ``PREFIX.idx``, read with numpy alone.

The format (megatron-core, ``datasets/indexed_dataset.py``, version 1), little-endian: nine bytes ``MMIDIDX\\0\\0``, a
u64 version, a u8 that names the tokens' dtype, u64 numbers of sequences and of document ends; then for every sequence
its length (i32), for every sequence its offset in bytes (i64), and the number of the sequence at which each document
begins or the last one ends (i64). The ``.bin`` holds the tokens and nothing else.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bench.errors import BadInput
from bench.execute.data import EpochOrder, check_sequence_arguments

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, str] = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_DIGESTED_BYTES = 1 << 20  # of the tokens, at either end: whole corpora are too long to digest


class Index(NamedTuple):
    """What an ``.idx`` says. num_tokens: of all documents, with the ends that were written into them."""

    dtype: DTypeLike
    num_documents: int
    num_tokens: int
    sha256: str


class IndexedCorpus:
    """The tokens of a corpus in the order of its documents, cut into sequences and shuffled anew in every epoch.

    Sequence i holds tokens i * seq_len to (i + 1) * seq_len inclusive; documents follow each other with whatever ends
    were written into them (``--append-eod``), and are split, as in `TextCorpus`.

    Args:
        prefix: path without ``.bin`` and ``.idx``.
        vocab_size: of the model; a sequence with an id beyond it is refused when it is read.
    Raises:
        BadInput: a file that is missing or not of this format, or too short for one sequence.
    """

    def __init__(self, prefix: str, seq_len: int, seed: int, vocab_size: int) -> None:
        check_sequence_arguments(seq_len, seed)
        self.prefix, self.seq_len, self.vocab_size = prefix, seq_len, vocab_size
        self._index = _read_index(prefix)
        if seq_len >= self._index.num_tokens:
            raise BadInput("seq_len", seq_len, f"less than the {self._index.num_tokens} tokens of {prefix}.bin")
        self._tokens = np.memmap(f"{prefix}.bin", self._index.dtype, "r")
        self.num_sequences = (self._index.num_tokens - 1) // seq_len
        self._order = EpochOrder(self.num_sequences, seed)

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Tokens [seq_len + 1] of any index from 0. Raises BadInput for a negative one, or foreign ids."""
        number = self._order.at(index)
        start = number * self.seq_len
        tokens = self._tokens[start : start + self.seq_len + 1].astype(np.int64)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            found = low if low < 0 else high
            raise BadInput("data", self.prefix, f"ids below vocab_size {self.vocab_size}; token {found} in {number}")
        return tokens

    def provenance(self) -> dict[str, object]:
        """Numbers of documents and tokens, and a SHA-256 of the index and of the tokens at both ends; no path."""
        index = self._index
        return {
            "source": "Megatron indexed corpus",
            "num_documents": index.num_documents,
            "num_tokens": index.num_tokens,
            "dtype": np.dtype(index.dtype).name,
            "sha256": index.sha256,
        }


def _read_index(prefix: str) -> Index:
    """Reads and checks. Raises BadInput."""
    try:
        content, size = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").stat().st_size
    except OSError as error:
        allowed = f"text, synthetic, or the prefix of a Megatron corpus; {error.filename}: {error.strerror}"
        raise BadInput("data", prefix, allowed) from None
    if len(content) < _HEADER.size or content[: len(_MAGIC)] != _MAGIC:
        raise _not_indexed(prefix, "it begins with other bytes")
    _, version, code, num_sequences, num_ends = _HEADER.unpack_from(content)
    if version != _VERSION:
        raise _not_indexed(prefix, f"its version is {version}")
    if code not in _DTYPES:
        raise _not_indexed(prefix, f"dtype {code} is none of whole numbers")
    if len(content) < _HEADER.size + 12 * num_sequences + 8 * num_ends:
        raise _not_indexed(prefix, "it is cut")
    dtype = np.dtype(_DTYPES[code])
    lengths = np.frombuffer(content, "<i4", num_sequences, _HEADER.size).astype(np.int64)
    offsets = np.frombuffer(content, "<i8", num_sequences, _HEADER.size + 4 * num_sequences)
    if not np.array_equal(offsets, (np.cumsum(lengths) - lengths) * dtype.itemsize):
        raise _not_indexed(prefix, "its sequences do not follow each other")
    num_tokens = int(lengths.sum())
    if size != num_tokens * dtype.itemsize:
        raise BadInput(
            "data", f"{prefix}.bin", f"{num_tokens * dtype.itemsize} bytes, as its index says; it has {size}"
        )
    return Index(dtype, max(0, num_ends - 1), num_tokens, _digest(prefix, content, size))


def _digest(prefix: str, index: bytes, size: int) -> str:
    digest = hashlib.sha256(index)
    with Path(f"{prefix}.bin").open("rb") as tokens:
        digest.update(tokens.read(_DIGESTED_BYTES))
        tokens.seek(max(0, size - _DIGESTED_BYTES))
        digest.update(tokens.read())
    return digest.hexdigest()


def _not_indexed(prefix: str, why: str) -> BadInput:
    return BadInput("data", f"{prefix}.idx", f"a Megatron index of version {_VERSION}; {why}")
