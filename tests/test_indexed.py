"""Megatron's indexed corpora, written by megatron-core's own builder and read by ours."""

from __future__ import annotations

import itertools
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from cases import make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checkpoint import STEPS, Saving, case_for, train
from test_cli import call, call_json

from bench.errors import BadInput
from bench.execute.data import open_corpus, permutation
from bench.execute.indexed import IndexedCorpus
from bench.execute.pool import RankPool

torch = pytest.importorskip("torch")

Documents = list[list[list[int]]]  # documents of sequences of tokens


def build(prefix: Path, documents: Documents, dtype: type[np.number] = np.int32) -> str:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def flat(documents: Documents) -> list[int]:
    return [token for document in documents for sequence in document for token in sequence]


words = st.lists(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=4), min_size=1)


@settings(max_examples=30)
@given(documents=words, dtype=st.sampled_from([np.uint8, np.uint16, np.int32, np.int64]), seq_len=st.integers(1, 7))
def test_sequences_are_the_tokens_in_order(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, dtype: type[np.number], seq_len: int
) -> None:
    """One label more than inputs; every epoch has every sequence once, in the order of the other corpora."""
    prefix = build(tmp_path_factory.mktemp("corpus") / "tokens", documents, dtype)
    tokens = flat(documents)
    if seq_len >= len(tokens):
        with pytest.raises(BadInput, match="seq_len"):
            IndexedCorpus(prefix, seq_len, 0, 100)
        return
    corpus = IndexedCorpus(prefix, seq_len, 5, 100)
    number = (len(tokens) - 1) // seq_len
    assert corpus.num_sequences == number
    for epoch, position in itertools.product(range(2), range(number)):
        start = int(permutation(number, 5, epoch)[position]) * seq_len
        found = corpus.sequence(epoch * number + position)
        assert found.dtype == np.int64
        assert found.tolist() == tokens[start : start + seq_len + 1]
    said = corpus.provenance()
    assert (said["num_documents"], said["num_tokens"]) == (len(documents), len(tokens))
    assert said["dtype"] == np.dtype(dtype).name


def test_megatrons_own_reader_reads_the_same(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    generator = np.random.default_rng(0)
    documents = [[generator.integers(0, 1000, size=n).tolist() for n in (5, 30, 1)] for _ in range(20)]
    prefix = build(tmp_path / "tokens", documents, np.uint16)
    theirs = IndexedDataset(prefix)
    stream = np.concatenate([theirs[i] for i in range(len(theirs))])
    corpus = open_corpus(prefix, vocab_size=1000, seq_len=10, seed=0)
    ours = {tuple(corpus.sequence(i)) for i in range(corpus.num_sequences)}  # type: ignore[attr-defined]
    assert ours == {tuple(stream[at : at + 11]) for at in range(0, len(stream) - 10, 10)}


def test_a_copy_elsewhere_is_the_same_corpus_and_another_is_not(tmp_path: Path) -> None:
    one = build(tmp_path / "one", [[[1, 2, 3, 4]]])
    (tmp_path / "far").mkdir()
    for end in (".bin", ".idx"):
        shutil.copy(one + end, tmp_path / "far" / f"two{end}")
    other = build(tmp_path / "other", [[[1, 2, 3, 5]]])
    said = [
        open_corpus(path, vocab_size=9, seq_len=2, seed=0).provenance() for path in (one, f"{tmp_path}/far/two", other)
    ]
    assert said[0] == said[1] != said[2]


def read_all(prefix: str, vocab_size: int) -> None:
    corpus = open_corpus(prefix, vocab_size=vocab_size, seq_len=4, seed=0)
    for i in range(2):
        corpus.sequence(i)


@pytest.mark.parametrize(
    ("damage", "field", "said"),
    [
        ("none", "data", "No such file"),
        ("no bin", "data", "No such file"),
        ("magic", "data", "it begins with other bytes"),
        ("version", "data", "its version is 2"),
        ("floats", "data", "dtype 7 is none of whole numbers"),
        ("idx cut", "data", "it is cut"),
        ("bin cut", "data", "it has 39"),
        ("holes", "data", "do not follow each other"),
        ("vocabulary", "data", "ids below vocab_size 8; token 9"),
    ],
)
def test_what_is_no_corpus_is_refused_in_one_line(damage: str, field: str, said: str, tmp_path: Path) -> None:
    prefix = build(tmp_path / "tokens", [[[1, 2, 3, 4, 5]], [[6, 7, 8, 9, 0]]])
    index, tokens = tmp_path / "tokens.idx", tmp_path / "tokens.bin"
    content = bytearray(index.read_bytes())
    match damage:
        case "none":
            prefix += "-elsewhere"
        case "no bin":
            tokens.unlink()
        case "magic":
            content[0] = 0
        case "version":
            struct.pack_into("<Q", content, 9, 2)
        case "floats":
            content[17] = 7
        case "idx cut":
            del content[-1:]
        case "bin cut":
            tokens.write_bytes(tokens.read_bytes()[:-1])
        case "holes":
            struct.pack_into("<q", content, 34 + 8 + 8, 24)
    index.write_bytes(content)
    with pytest.raises(BadInput, match=said) as caught:
        read_all(prefix, 8 if damage == "vocabulary" else 10)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Bytes that repeat with a period of a document: quickly learned."""
    documents = [[[(7 * i + j) % 251 for j in range(50)]] for i in range(200)]
    return build(tmp_path_factory.mktemp("corpus") / "bytes", documents)


def test_systems_train_on_it_alike_and_resume_at_the_right_sample(prefix: str, tmp_path: Path, pool: RankPool) -> None:
    whole = train(case_for("reference"), steps=STEPS, pool=pool, data=prefix).losses
    saving = Saving(tmp_path / "saved", 2)
    assert train(case_for("ep"), steps=4, pool=pool, data=prefix, saving=saving).losses == pytest.approx(
        whole[:4], 1e-5
    )
    moved = tmp_path / "moved"
    for end in (".bin", ".idx"):
        shutil.copy(prefix + end, f"{moved}{end}")
    again = train(case_for("2:1:2"), steps=STEPS, pool=pool, data=str(moved), resume=saving.folder).losses
    assert again == pytest.approx(whole[4:], 1e-5)
    other = build(tmp_path / "other", [[[1] * 10_000]])
    with pytest.raises(BadInput, match="whose corpus has num_documents 1; this one's has 200"):
        train(case_for("ep"), steps=STEPS, data=other, resume=saving.folder)


def test_the_command_line_takes_a_prefix(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(prefix).parent)
    words = ["ep", "--model", "tiny", "--ranks", "2", "--seq-len", "16", "--layout", "ep=2"]
    facts = call_json("run", *words, "--steps", "1", "--data", "bytes", "--results", str(tmp_path))
    assert facts["losses"] != call_json("run", *words, "--steps", "1", "--results", str(tmp_path))["losses"]
    assert f"--data {prefix}" in facts["command"]
    assert call_json("verify", *words, "--data", "bytes")["ok"]
    line = call("run", *words, "--data", "./nothing", code=2).stderr
    assert line.startswith("moebench: --data: ") and "nothing.idx: No such file" in line


def test_ids_beyond_the_vocabulary_are_refused_where_they_are_read(tmp_path: Path, pool: RankPool) -> None:
    prefix = build(tmp_path / "wide", [[[300] * 1000]])
    with pytest.raises(BadInput, match="ids below vocab_size 256; token 300"):
        train(make_case("ep", ep=2, seq_len=32), steps=1, pool=pool, data=prefix)
