"""The corpora and the numbering of sequences."""

import subprocess
import sys
import sysconfig
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.execute.data import (
    BYTE_VOCAB_SIZE,
    SyntheticCorpus,
    TextCorpus,
    open_corpus,
    permutation,
    read_microbatch,
    sequence_index,
    split_of,
)

small = st.integers(1, 4)
ONE_SEQUENCE = {"num_replicas": 1, "num_microbatches": 1, "num_ranks": 1, "mbs": 1}


def indices_of_step(step: int, *counts: int) -> list[int]:
    """All indices of a step; counts are of replicas, micro-batches, ranks and sequences of a micro-batch."""
    sizes = dict(zip(("num_replicas", "num_microbatches", "num_ranks", "mbs"), counts, strict=True))
    return [sequence_index(step, *place, **sizes) for place in product(*map(range, counts))]


def test_text_is_python_source() -> None:
    corpus = TextCorpus(512, seed=0)
    tokens = np.concatenate([corpus.sequence(i) for i in range(200)])
    assert tokens.dtype == np.int64
    assert tokens.min() >= 0
    assert tokens.max() < BYTE_VOCAB_SIZE
    assert b"def " in tokens.astype(np.uint8).tobytes()


def test_same_arguments_give_the_same_sequences_in_another_process() -> None:
    program = (
        "from bench.execute.data import TextCorpus; c = TextCorpus(64, seed=7);"
        "print([c.sequence(i).tolist() for i in (0, 3, 10**6)], c.provenance()['sha256'])"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    corpus = TextCorpus(64, seed=7)
    here = f"{[corpus.sequence(i).tolist() for i in (0, 3, 10**6)]} {corpus.provenance()['sha256']}"
    assert other.strip() == here


def test_an_epoch_reads_every_sequence_once_and_the_next_in_another_order() -> None:
    corpus = TextCorpus(4096, seed=1, split="validation")
    n = corpus.num_sequences
    epochs = [[corpus.sequence(e * n + i).tobytes() for i in range(n)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert sum(len(s) // 8 - 1 for s in epochs[0]) > corpus.provenance()["num_bytes"] - 4096 - 1


def test_any_index_can_be_read_first() -> None:
    read_in_order = TextCorpus(2048, seed=3, split="validation")
    n = read_in_order.num_sequences
    expected = [read_in_order.sequence(i) for i in range(n + 5)]
    resumed = TextCorpus(2048, seed=3, split="validation")
    for index in (n + 4, 0, n, n - 1, 2):
        np.testing.assert_array_equal(resumed.sequence(index), expected[index])


def test_seeds_shuffle_differently() -> None:
    first, second = TextCorpus(256, seed=0), TextCorpus(256, seed=1)
    assert any(not np.array_equal(first.sequence(i), second.sequence(i)) for i in range(4))


def test_splits_share_no_file_and_cover_all() -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    both = {split: TextCorpus(64, seed=0, split=split) for split in ("train", "validation")}
    files = {split: corpus.provenance()["num_files"] for split, corpus in both.items()}
    assert files["train"] > 4 * files["validation"] > 0
    for name in ("argparse.py", "dataclasses.py", "json/decoder.py", "asyncio/tasks.py", "typing.py"):
        text = (folder / name).read_bytes()
        holds = {split: text in corpus._text.tobytes() for split, corpus in both.items()}
        assert holds == {split: split == split_of(name) for split in both}


def test_provenance_describes_the_split() -> None:
    train, validation = TextCorpus(64, 0).provenance(), TextCorpus(64, 0, "validation").provenance()
    assert train["python_version"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert train["sha256"] != validation["sha256"]
    assert TextCorpus(128, 9).provenance() == train


@settings(max_examples=25)
@given(n=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**9))
def test_permutation_is_one(n: int, seed: int, epoch: int) -> None:
    order = permutation(n, seed, epoch)
    assert sorted(order) == list(range(n))
    np.testing.assert_array_equal(order, permutation(n, seed, epoch))


def test_permutation_is_as_stated() -> None:
    # By hand, in Python integers: the order must not move with a version of numpy.
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    words = [mix((mix((mix(42) + 5) & mask) + i) & mask) for i in range(50)]
    assert permutation(50, seed=42, epoch=5).tolist() == sorted(range(50), key=words.__getitem__)


def test_synthetic_is_a_function_of_seed_and_index() -> None:
    corpus = SyntheticCorpus(vocab_size=1000, seq_len=4095, seed=5)
    tokens = corpus.sequence(17)
    assert tokens.shape == (4096,)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 0
    assert tokens.max() < 1000
    assert len(np.unique(tokens)) > 900
    np.testing.assert_array_equal(tokens, SyntheticCorpus(1000, 4095, 5).sequence(17))
    assert not np.array_equal(tokens, corpus.sequence(18))
    assert not np.array_equal(tokens, SyntheticCorpus(1000, 4095, 6).sequence(17))


@settings(max_examples=30)
@given(step=st.integers(0, 5), replicas=small, microbatches=small, ranks=small, mbs=small, data=st.data())
def test_a_global_batch_is_the_same_for_every_layout(
    step: int, replicas: int, microbatches: int, ranks: int, mbs: int, data: st.DataObject
) -> None:
    total = replicas * microbatches * ranks * mbs
    indices = indices_of_step(step, replicas, microbatches, ranks, mbs)
    assert sorted(indices) == list(range(step * total, (step + 1) * total))
    rest, other = total, []
    for _ in range(3):
        size = data.draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        other.append(size)
        rest //= size
    assert set(indices_of_step(step, *other, rest)) == set(indices)


def test_microbatch_rows_are_its_sequences() -> None:
    corpus = open_corpus("text", vocab_size=300, seq_len=32, seed=0)
    sizes = {"num_replicas": 2, "num_microbatches": 3, "num_ranks": 2, "mbs": 2}
    tokens = read_microbatch(corpus, 4, 1, 2, 0, **sizes)
    assert tokens.shape == (2, 33)
    for j in range(2):
        np.testing.assert_array_equal(tokens[j], corpus.sequence(sequence_index(4, 1, 2, 0, j, **sizes)))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TextCorpus(64, 0, vocab_size=255), "vocab_size"),
        (lambda: TextCorpus(0, 0), "seq_len"),
        (lambda: TextCorpus(1 << 40, 0), "seq_len"),
        (lambda: TextCorpus(64, -1), "seed"),
        (lambda: TextCorpus(64, 0, split="test"), "split"),
        (lambda: TextCorpus(64, 0).sequence(-1), "index"),
        (lambda: SyntheticCorpus(0, 64, 0), "vocab_size"),
        (lambda: SyntheticCorpus(10, 64, 0).sequence(-1), "index"),
        (lambda: open_corpus("wiki", vocab_size=256, seq_len=64, seed=0), "corpus"),
        (lambda: indices_of_step(-1, 1, 1, 1, 1), "step"),
        (lambda: sequence_index(0, 0, 0, 1, 0, **ONE_SEQUENCE), "rank"),
    ],
)
def test_bad_input_names_the_field(make, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
