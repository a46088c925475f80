"""What is trained on: sequences of token ids, each a pure function of an index.

The default corpus is real text that every machine already has: the sources of Python's own standard library,
as bytes. Which sequences form the global batch of a step depends on the step alone, not on the layout.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from bench.errors import BadInput, unknown

Split = Literal["train", "validation"]

BYTE_VOCAB_SIZE = 256
DOCUMENT_END = b"\x00"  # follows every file; Python sources hold no such byte
MAX_CORPUS_BYTES = 16 << 20
VALIDATION_PERCENT = 10

_EXCLUDED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
# Written when Python was built or installed: they differ from machine to machine.
_EXCLUDED_PREFIXES = ("_sysconfigdata", "sitecustomize")


class Corpus(Protocol):
    """Token sequences by index. Any index from 0 has one, so a run resumes with no state to restore."""

    seq_len: int

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Tokens [seq_len + 1]: the inputs are all but the last, the labels all but the first."""

    def provenance(self) -> dict[str, object]:
        """Where the tokens come from, with a digest that is equal where they are."""


@dataclass(frozen=True)
class CorpusProvenance:
    """What one split of the text was made from; `sha256` is over its bytes, document ends included."""

    source: str
    python_version: str
    split: str
    num_files: int
    num_bytes: int
    sha256: str


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's step and finalizer (Steele, Lea and Flood, OOPSLA 2014), element by element."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _random_words(seed: int, stream: int, count: int) -> NDArray[np.uint64]:
    """[count] words of a stream: mix(mix(mix(seed) + stream) + i), the same in every version of numpy."""
    state = _mix(np.full(1, seed, dtype=np.uint64))
    state = _mix(state + np.full(1, stream, dtype=np.uint64))
    return _mix(np.add(state, np.arange(count, dtype=np.uint64), dtype=np.uint64))


def permutation(num_sequences: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch: [num_sequences], the stable argsort of the 64-bit words of (seed, epoch)."""
    return np.argsort(_random_words(seed, epoch, num_sequences), kind="stable").astype(np.int64)


def split_of(name: str) -> Split:
    """The split of a file, by the SHA-256 of its name: about one file in ten validates."""
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "validation" if word % 100 < VALIDATION_PERCENT else "train"


def _source_names(folder: Path) -> Iterator[str]:
    """Relative names of the library's *.py files, with forward slashes."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]
        for name in files:
            if name.endswith(".py") and not name.startswith(_EXCLUDED_PREFIXES):
                yield (Path(parent) / name).relative_to(folder).as_posix()


@functools.cache
def _read_split(split: Split) -> tuple[NDArray[np.uint8], CorpusProvenance]:
    """All bytes of a split, files in the order of their names, up to MAX_CORPUS_BYTES in both splits."""
    folder = Path(sysconfig.get_path("stdlib"))
    documents: list[bytes] = []
    num_read = 0
    for name in sorted(_source_names(folder)):
        document = (folder / name).read_bytes() + DOCUMENT_END
        num_read += len(document)
        if num_read > MAX_CORPUS_BYTES:
            break
        if split_of(name) == split:
            documents.append(document)
    text = b"".join(documents)
    provenance = CorpusProvenance(
        source="Python standard library, *.py",
        python_version=platform.python_version(),
        split=split,
        num_files=len(documents),
        num_bytes=len(text),
        sha256=hashlib.sha256(text).hexdigest(),
    )
    return np.frombuffer(text, dtype=np.uint8), provenance


def check_sequence_arguments(seq_len: int, seed: int) -> None:
    """Raises BadInput."""
    if seq_len < 1:
        raise BadInput("seq_len", seq_len, "at least 1")
    if not 0 <= seed < 1 << 63:
        raise BadInput("seed", seed, "0 to 2^63 - 1")


def _check_index(index: int) -> None:
    if index < 0:
        raise BadInput("index", index, "0 or more")


class EpochOrder:
    """Which of n sequences has which index: ``permutation(n, seed, index // n)[index % n]``."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        self.num_sequences, self.seed = num_sequences, seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def at(self, index: int) -> int:
        """The number of the sequence with an index from 0. Raises BadInput for a negative one."""
        _check_index(index)
        epoch, position = divmod(index, self.num_sequences)
        if epoch != self._epoch:
            self._order = permutation(self.num_sequences, self.seed, epoch)
            self._epoch = epoch
        return int(self._order[position])


class TextCorpus:
    """The standard library's sources as bytes, cut into sequences and shuffled anew in every epoch.

    Sequence i of n holds bytes i * seq_len to (i + 1) * seq_len inclusive (the last byte is a label only).
    Index k is sequence ``permutation(n, seed, k // n)[k % n]``. Files are split, not sequences.

    Args:
        seq_len: input tokens a sequence.
        seed: of the shuffles.
        split: ``train`` or ``validation``.
        vocab_size: of the model; ids 256 and up are never used.

    Raises:
        BadInput: a vocabulary that bytes do not fit in, or a split too short for one sequence.
    """

    def __init__(self, seq_len: int, seed: int, split: Split = "train", vocab_size: int = BYTE_VOCAB_SIZE) -> None:
        check_sequence_arguments(seq_len, seed)
        if split not in get_args(Split):
            raise unknown("split", split, get_args(Split))
        if vocab_size < BYTE_VOCAB_SIZE:
            raise BadInput("vocab_size", vocab_size, f"at least {BYTE_VOCAB_SIZE}: tokens are bytes")
        self._text, self._provenance = _read_split(split)
        if seq_len >= len(self._text):
            raise BadInput("seq_len", seq_len, f"less than the {len(self._text)} bytes of the {split} text")
        self.seq_len = seq_len
        self.seed = seed
        self.split = split
        self.num_sequences = (len(self._text) - 1) // seq_len
        self._order = EpochOrder(self.num_sequences, seed)

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Tokens [seq_len + 1] of any index from 0. Raises BadInput for a negative one."""
        start = self._order.at(index) * self.seq_len
        return self._text[start : start + self.seq_len + 1].astype(np.int64)

    def provenance(self) -> dict[str, object]:
        """Source, Python version, split, number of files and bytes, and the SHA-256 of the bytes."""
        return asdict(self._provenance)


class SyntheticCorpus:
    """Uniform token ids: nothing to learn, any vocabulary, no end.

    Token i of sequence k is word i of stream k of the seed, modulo `vocab_size`.
    """

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        check_sequence_arguments(seq_len, seed)
        if vocab_size < 1:
            raise BadInput("vocab_size", vocab_size, "at least 1")
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.seed = seed

    def sequence(self, index: int) -> NDArray[np.int64]:
        """Tokens [seq_len + 1] of any index from 0. Raises BadInput for a negative one."""
        _check_index(index)
        words = _random_words(self.seed, index, self.seq_len + 1)
        return (words % np.uint64(self.vocab_size)).astype(np.int64)

    def provenance(self) -> dict[str, object]:
        """The arguments, which are all there is to know."""
        return {"source": "synthetic"} | vars(self)


def open_corpus(name: str, *, vocab_size: int, seq_len: int, seed: int, split: Split = "train") -> Corpus:
    """The corpus called `name`: ``text``, ``synthetic``, or a path, the prefix of a Megatron corpus. Raises BadInput.

    Only the text has splits.
    """
    if name == "text":
        return TextCorpus(seq_len, seed, split, vocab_size)
    if name == "synthetic":
        return SyntheticCorpus(vocab_size, seq_len, seed)
    if is_path(name):
        from bench.execute.indexed import IndexedCorpus

        return IndexedCorpus(name, seq_len, seed, vocab_size)
    raise unknown("corpus", name, ("text", "synthetic"))


def is_path(name: str) -> bool:
    """Whether the name of a corpus means files."""
    return "/" in name or Path(f"{name}.idx").exists()


def sequence_index(
    step: int,
    replica: int,
    microbatch: int,
    rank: int,
    j: int,
    *,
    num_replicas: int,
    num_microbatches: int,
    num_ranks: int,
    mbs: int,
) -> int:
    """Index of the j-th sequence of a micro-batch on one rank of a group.

    A step takes the next num_replicas x num_microbatches x num_ranks x mbs indices, dealt out with j fastest,
    then rank, micro-batch and replica: equal global batches are equal sets of sequences, whatever the layout.

    Raises:
        BadInput: a coordinate outside its range.
    """
    if step < 0:
        raise BadInput("step", step, "0 or more")
    index = step
    coordinates = (
        ("replica", replica, num_replicas),
        ("microbatch", microbatch, num_microbatches),
        ("rank", rank, num_ranks),
        ("j", j, mbs),
    )
    for field, value, size in coordinates:
        if not 0 <= value < size:
            raise BadInput(field, value, f"0 to {size - 1}")
        index = index * size + value
    return index


def read_microbatch(
    corpus: Corpus,
    step: int,
    replica: int,
    microbatch: int,
    rank: int,
    *,
    num_replicas: int,
    num_microbatches: int,
    num_ranks: int,
    mbs: int,
) -> NDArray[np.int64]:
    """Tokens [mbs, seq_len + 1] of one micro-batch on one rank, numbered by `sequence_index`."""
    first = sequence_index(
        step,
        replica,
        microbatch,
        rank,
        0,
        num_replicas=num_replicas,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
        mbs=mbs,
    )
    return np.stack([corpus.sequence(first + j) for j in range(mbs)])
