"""ARPA files in and out, and what is said about malformed ones."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from asr.errors import AsrError
from asr.lm.ngram import arpa
from asr.lm.ngram.arpa import LN_10, read_arpa, read_arpa_words, write_arpa
from asr.lm.ngram.model import NgramLM
from asr.text.symbols import Vocabulary
from tests.reference.tiny_arpa import TINY


def _file(folder: Path, text: str | bytes, name: str = "lm.arpa") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_reads_the_hand_written_model(tmp_path: Path) -> None:
    trie = read_arpa(_file(tmp_path, TINY))
    assert trie.vocabulary.words == ("<eps>", "<s>", "</s>", "<unk>", "a", "b")
    assert trie.order_begin == (0, 6, 10, 11)
    assert trie.counts == (5, 4, 1)
    assert trie.words_of(2).tolist() == [[1, 4], [4, 5], [5, 2], [5, 4]]
    assert trie.words_of(3).tolist() == [[1, 4, 5]]
    np.testing.assert_allclose(trie.score[4:] / LN_10, [-0.5, -0.7, -0.2, -0.4, -0.3, -0.9, -0.05], rtol=1e-6)
    np.testing.assert_allclose(trie.backoff[:8] / LN_10, [0, -0.5, 0, 0, -0.3, -0.2, -0.1, 0], rtol=1e-6)
    assert trie.suffixes().tolist() == [-1] * 6 + [4, 5, 2, 4] + [7]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_reads_packed_files(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    name = "lm.arpa.gz" if pack is gzip.compress else "lm.arpa.xz"
    packed = _file(tmp_path, pack(TINY.encode()), name)
    np.testing.assert_array_equal(read_arpa(packed).score, read_arpa(_file(tmp_path, TINY)).score)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(AsrError, match="cannot be unpacked"):
        read_arpa(packed)


def test_written_file_reads_back_the_same(tmp_path: Path) -> None:
    trie = read_arpa(_file(tmp_path, TINY))
    write_arpa(trie, tmp_path / "again.arpa")
    again = read_arpa(tmp_path / "again.arpa")
    assert again.counts == trie.counts
    np.testing.assert_allclose(again.score, trie.score, rtol=1e-6)
    np.testing.assert_allclose(again.backoff, trie.backoff, rtol=1e-6)
    np.testing.assert_array_equal(again.parent, trie.parent)


def test_block_boundaries_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, TINY.replace("\t", "  ").replace("\n", "\r\n"))
    whole = read_arpa(path)
    monkeypatch.setattr(arpa, "BLOCK_LINES", 2)
    np.testing.assert_array_equal(read_arpa(path).score, whole.score)
    write_arpa(whole, tmp_path / "whole.arpa")
    write_arpa(whole, tmp_path / "blocks.arpa", ngrams_at_once=2)
    assert (tmp_path / "blocks.arpa").read_bytes() == (tmp_path / "whole.arpa").read_bytes()


def test_orders_without_ngrams_are_read(tmp_path: Path) -> None:
    unigrams, _ = TINY.replace("ngram 2=4", "ngram 2=0").replace("ngram 3=1", "ngram 3=0").split("\\2-grams:")
    trie = read_arpa(_file(tmp_path, unigrams + "\\2-grams:\n\n\\3-grams:\n\n\\end\\\n"))
    assert trie.counts == (5, 0, 0) and trie.order_begin == (0, 6, 6, 6)
    assert len(trie.score) == len(trie.backoff) == 6


def test_vocabulary_given_from_outside(tmp_path: Path) -> None:
    trie = read_arpa(_file(tmp_path, TINY), Vocabulary(["c", "a"]))
    assert trie.counts == (4, 1, 0)
    assert trie.words_of(2).tolist() == [[1, 5]]
    assert not trie.listed()[4]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("ngram 2=4", "ngram 2=5", r"line 18: the header declares 5 2-grams, the section contains 4"),
        ("ngram 2=4", "ngram 2=3", r"line 17: the header declares 3 2-grams, the section contains more"),
        ("ngram 3=1", "ngram 3=2", r"the header declares 2 3-grams, the section contains 1"),
        ("ngram 2=4\n", "", r"line 3: the header counts 3-grams after 1-grams; every lower order must be present"),
        ("ngram 2=4", "ngram 2=four", r"line 3: 'ngram 2=four' is not a count"),
        ("\\end\\\n", "", r"found the end of the file instead of \\end\\"),
        ("\\2-grams:", "\\4-grams:", r"found '.*4-grams:' instead of .*2-grams:"),
        ("-0.2\t<s> a\t-0.1", "-0.2\t<s> b\t-0.1", r"the 3-gram begins with '<s> a', which is not among the 2-grams"),
        ("-0.4\ta b\t0.0", "-0.4\ta c\t0.0", r"line 15: the word 'c' has no unigram"),
        ("-0.4\ta b\t0.0", "-0.4\ta b\t0.0\t1", r"line 15: 5 fields where a log10 probability, 2 words and a backoff"),
        ("-0.4\ta b\t0.0", "x\ta b\t0.0", r"line 15: the probability 'x' is not a number"),
        ("-0.4\ta b\t0.0", "-0.4\ta b\tinf", r"line 15: the backoff weight 'inf' is not a number"),
        ("-0.4\ta b\t0.0", "0.4\ta b\t0.0", r"line 15: the log10 probability '0.4' is above 0; write 0 if it is"),
        ("-0.4\ta b\t0.0", "-0.4\tb a\t0.0", r"a 2-gram occurs twice"),
        ("-0.5\ta\t-0.3", "-0.5\tb\t-0.3", r"line 11: the word 'b' occurs twice"),
        ("-0.6\t</s>", "-0.6\tc", r"</s> has no unigram"),
        ("\\data\\", "hello", r"no .*data.* line; this is not an ARPA file"),
        ("ngram 1=5\nngram 2=4\nngram 3=1", "ngram 1=0", r"line \d+: the header declares no n-grams; rebuild the file"),
        ("-0.9\tb a", "nan\tb a", r"line 17: the probability 'nan' is not a number"),
        ("-0.05\t<s> a b", "-0.05\t<s> a b\t0.0", r"line 20: 5 fields where a log10 probability, 3 words are due"),
        ("-0.05\t<s> a b", "-0.05\t<s> a", r"line 20: 3 fields where a log10 probability, 3 words are due"),
        ("-0.3\tb </s>\n", "\n", r"line 16: the header declares 4 2-grams, the section contains 2"),
        (
            "-0.05\t<s> a b",
            "-0.05\t<s> b a",
            r"line 20: the 3-gram begins with '<s> b', which is not among the 2-grams",
        ),
    ],
)
@pytest.mark.parametrize("block_lines", [1, arpa.BLOCK_LINES])
def test_malformed_file_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, sentence: str, block_lines: int
) -> None:
    assert old in TINY
    monkeypatch.setattr(arpa, "BLOCK_LINES", block_lines)
    with pytest.raises(AsrError, match=sentence) as caught:
        read_arpa(_file(tmp_path, TINY.replace(old, new)))
    assert "lm.arpa" in str(caught.value)
    assert str(caught.value).endswith(".")


def test_more_ngrams_than_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or when those with words outside the vocabulary have been left out."""
    large = _file(tmp_path, TINY.replace("ngram 3=1", "ngram 3=2147483639"))
    with pytest.raises(AsrError, match="2147483648 n-grams are more than the 2147483647 that a model may have; prune"):
        read_arpa(large)
    monkeypatch.setattr(arpa, "MOST_NGRAMS", 8)
    path = _file(tmp_path, TINY)
    assert sum(read_arpa(path, Vocabulary(["a"])).counts) == 5
    with pytest.raises(AsrError, match=r"lm.arpa: 10 n-grams are more than the 8"):
        read_arpa(path, Vocabulary(["a", "b"]))


def test_extreme_scores_are_read(tmp_path: Path) -> None:
    """Certain and impossible n-grams, and a backoff weight above 1; <UNK> is <unk>."""
    text = TINY.replace("-0.4\ta b\t0.0", "0\ta b\t0.7").replace("-0.9\tb a", "-inf\tb a").replace("<unk>", "<UNK>")
    trie = read_arpa(_file(tmp_path, text))
    assert trie.score[7] == 0.0 and trie.score[9] == -np.inf and trie.score[3] == pytest.approx(-LN_10)
    assert trie.backoff[7] == pytest.approx(0.7 * LN_10)
    write_arpa(trie, tmp_path / "again.arpa")
    assert b"-99\tb a\t0\n" in (tmp_path / "again.arpa").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["-99", "-inf"])
def test_a_word_that_only_follows_its_histories_is_listed(tmp_path: Path, zero: str) -> None:
    """Its unigram has probability 0, its n-grams have not."""
    write_arpa(read_arpa(_file(tmp_path, TINY.replace("-0.7\tb", f"{zero}\tb"))), tmp_path / "again.arpa")
    trie = read_arpa(tmp_path / "again.arpa")
    assert trie.counts == (5, 4, 1) and trie.score[5] == pytest.approx(-99 * LN_10)
    lm = NgramLM.from_trie(trie)
    log_prob, _ = lm.score(lm.score(lm.start(1), torch.tensor([4]))[1], torch.tensor([5]))
    assert float(log_prob) == pytest.approx(-0.05 * LN_10)


def test_words_alone(tmp_path: Path) -> None:
    """Longer n-grams are not read, not even for mistakes."""
    assert read_arpa_words(_file(tmp_path, TINY)) == ["a", "b"]
    assert read_arpa_words(_file(tmp_path, TINY.replace("-0.05\t<s> a b", "?").replace("<unk>", "<UNK>"))) == ["a", "b"]


def test_blank_lines_and_spaces_change_nothing(tmp_path: Path) -> None:
    text = TINY.replace("\\2-grams:", "\n \n\\2-grams:").replace("\\data", "a comment\n\n\\data")
    text = text.replace("-0.05\t<s> a b", " -0.05   <s>  a\tb ").replace("ngram 2=4", "ngram  2 = 4")
    with pytest.raises(AsrError, match=r"no \\data\\ line"):
        read_arpa(_file(tmp_path, "\n" * 10_001 + text))
    ours, plain = read_arpa(_file(tmp_path, text)), read_arpa(_file(tmp_path, TINY))
    np.testing.assert_array_equal(ours.score, plain.score)
    np.testing.assert_array_equal(ours.backoff, plain.backoff)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(AsrError, match="line 11: the line is not UTF-8"):
        read_arpa(_file(tmp_path, TINY.replace("\tb\t", "\tb\u00e9\t").encode("latin-1")))


def test_missing_and_empty_file(tmp_path: Path) -> None:
    with pytest.raises(AsrError, match="cannot be read"):
        read_arpa(tmp_path / "none.arpa")
    with pytest.raises(AsrError, match="not an ARPA file"):
        read_arpa(_file(tmp_path, ""))


def test_a_binary_of_kenlm(tmp_path: Path) -> None:
    with pytest.raises(AsrError, match="line 1: a KenLM binary does not list its n-grams; give the ARPA file"):
        read_arpa(_file(tmp_path, b"mmap lm http://kheafield.com/code format version 5\n\0\xff"))


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    trie = read_arpa(_file(tmp_path, TINY))
    (tmp_path / "out.arpa").mkdir()
    with pytest.raises(AsrError, match=r"out\.arpa: the file cannot be written"):
        write_arpa(trie, tmp_path / "out.arpa")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lm.arpa", "out.arpa"]


def test_a_missing_backoff_weight_is_zero(tmp_path: Path) -> None:
    """Also that of an n-gram that is a context, as in KenLM and Kaldi."""
    assert "-0.7\tb\t-0.2" in TINY
    missing = read_arpa(_file(tmp_path, TINY.replace("-0.7\tb\t-0.2", "-0.7\tb")))
    zero = read_arpa(_file(tmp_path, TINY.replace("-0.7\tb\t-0.2", "-0.7\tb\t0")))
    np.testing.assert_array_equal(missing.backoff, zero.backoff)
    with pytest.raises(AsrError, match=r"line 11: the backoff weight 'nan' is not a number"):
        read_arpa(_file(tmp_path, TINY.replace("-0.7\tb\t-0.2", "-0.7\tb\tnan")))


def test_words_with_white_space_of_unicode_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spaced = TINY.replace("b", "x\u00a0y")
    found, wanted = read_arpa(_file(tmp_path, spaced)), read_arpa(_file(tmp_path, TINY), Vocabulary(["a"]))
    assert found.vocabulary == wanted.vocabulary and found.order_begin == wanted.order_begin
    np.testing.assert_array_equal(found.score, wanted.score)
    assert "1 words have white space in them ('x\\xa0y') and are left out, as are their n-grams" in caplog.text
    assert read_arpa_words(_file(tmp_path, spaced)) == ["a"]
