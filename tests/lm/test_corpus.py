"""Texts as word ids: the same in blocks of any size, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asr.errors import AsrError
from asr.lm.corpus import read_word_ids, read_word_stream
from asr.lm.ngram.arpa import read_arpa, write_arpa
from asr.lm.ngram.estimate import estimate_kneser_ney
from asr.text.symbols import BOS_ID, EOS_ID, UNK_ID, Vocabulary

BLOCK_BYTES = (0, 1, 6, 7, 1 << 20)


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_blocks_end_where_lines_do(block_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A B\nB\n\n  \nA A A")
    (tmp_path / "transcripts").write_text("u1 B A\nu2\nu3 A\n")
    stream = read_word_stream([tmp_path / "text"], None, [tmp_path / "transcripts"], block_bytes)
    sentences = [[4, 5], [5], [4, 4, 4], [5, 4], [], [4]]
    assert stream.word_id.tolist() == [word for one in sentences for word in [BOS_ID, *one, EOS_ID]]
    assert (stream.num_sentences, stream.num_words, stream.num_unlisted) == (6, 9, 0)


@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"A\nB\n\nA <eps> B\n", "line 4: the text contains the mark <eps> as a word; remove it"),
        (b"A\n\nB </s>\nA\n", "line 3: the text contains the mark </s> as a word"),
        (b"A\nB\n<s> A\n", "line 3: the text contains the mark <s> as a word"),
        (b"A\nB\ncaf\xe9\n", "line 3: the text is not UTF-8; convert it first"),
        (b"\xe9 A\nB\n", "line 1: the text is not UTF-8"),
    ],
)
def test_errors_name_the_line(block_bytes: int, text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(text)
    with pytest.raises(AsrError, match=f"text, {message}"):
        read_word_stream([tmp_path / "text"], block_bytes=block_bytes)


def test_words_beyond_the_vocabulary_are_numbered_after_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("X A\nY X\n")
    stream = read_word_stream([tmp_path / "text"], Vocabulary(["A", "B"]))
    assert stream.vocabulary.words[4:] == ("A", "B", "X", "Y") and stream.num_listed == 6
    assert (stream.num_words, stream.num_unlisted) == (4, 3)
    known = stream.with_unknown()
    assert known.word_id.tolist() == [BOS_ID, UNK_ID, 4, EOS_ID, BOS_ID, UNK_ID, UNK_ID, EOS_ID]
    assert known.word_id.dtype == np.int32 and known.vocabulary == Vocabulary(["A", "B"])


@pytest.mark.parametrize("words", [None, ["A", "B"], ["A", "<UNK>", "B"]])
def test_unknown_words_are_marked_in_either_case(words: list[str] | None, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A <UNK> B C\n<unk> <UNK> A\n")
    stream = read_word_stream([tmp_path / "text"], None if words is None else Vocabulary(words))
    listed = stream.vocabulary.words
    read = [listed[word] for word in stream.word_id.tolist() if word not in (BOS_ID, EOS_ID)]
    assert read == ["A", "<unk>", "B", "C", "<unk>", "<unk>", "A"]
    model = estimate_kneser_ney(stream, 2).trie
    write_arpa(model, tmp_path / "model.arpa")
    again = read_arpa(tmp_path / "model.arpa", model.vocabulary)
    np.testing.assert_allclose(again.score, model.score, rtol=1e-6)
    assert again.counts == model.counts


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_a_text_without_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(text)
    assert list(read_word_ids([tmp_path / "text"], [], {})) == []
    with pytest.raises(AsrError, match="text: the text contains no sentence; give files with one sentence per line"):
        read_word_stream([tmp_path / "text"])
