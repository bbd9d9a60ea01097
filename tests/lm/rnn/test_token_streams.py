"""Token files and streams: nothing lost, sentence starts, histories."""

from __future__ import annotations

import contextlib
import lzma
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asr.distributed import Share
from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.lm.rnn.data import TokenFile, TokenStreams
from asr.serialization import write_whole_text
from asr.text.symbols import BOS_ID, EOS_ID, EPSILON_ID, UNK_ID, Vocabulary


def test_texts_and_transcripts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A B\n\nX A\n")
    with lzma.open(tmp_path / "b.xz", "wt") as out:
        out.write("utt-1 B B\n")
    vocabulary = Vocabulary(["A", "B"])
    paths = [tmp_path / "a.txt"], [tmp_path / "b.xz"]
    tokens = TokenFile.build(*paths, vocabulary, tmp_path / "t.tokens")
    assert tokens.token_id.tolist() == [4, 5, EOS_ID, UNK_ID, 4, EOS_ID, 5, 5, EOS_ID]
    assert (tokens.counts.num_sentences, tokens.counts.num_words, tokens.counts.num_unknown) == (3, 6, 1)
    stamp = (tmp_path / "t.tokens").stat().st_mtime_ns
    TokenFile.build(*paths, vocabulary, tmp_path / "t.tokens")
    assert (tmp_path / "t.tokens").stat().st_mtime_ns == stamp
    # Another vocabulary makes another file.
    assert TokenFile.build(*paths, Vocabulary(["B"]), tmp_path / "t.tokens").token_id[0] == UNK_ID


@pytest.mark.parametrize("words_at_once", [1, 4, 9, 100])
def test_words_are_counted(words_at_once: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A B A\nX A\n")
    vocabulary = Vocabulary(["A", "B", "C"])
    tokens = TokenFile.build([tmp_path / "a.txt"], [], vocabulary, tmp_path / "t.tokens")
    counts = tokens.unigram_counts(len(vocabulary), words_at_once=words_at_once)
    assert counts.tolist() == [0, 0, 2, 1, 3, 1, 0]


def test_a_text_without_known_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b\n\nb\n")
    with pytest.raises(AsrError, match=r"a\.txt\) has no word of the vocabulary; check that both have the same case"):
        TokenFile.build([tmp_path / "a.txt"], [], Vocabulary(["A", "B"]), tmp_path / "t.tokens")
    assert not (tmp_path / "t.tokens").exists()


def test_a_changed_text_is_read_again(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("A B\n")
    vocabulary = Vocabulary(["A", "B"])
    TokenFile.build([text], [], vocabulary, tmp_path / "t.tokens")
    text.write_text("B A B\n")
    assert TokenFile.build([text], [], vocabulary, tmp_path / "t.tokens").token_id.tolist() == [5, 4, 5, EOS_ID]
    text.write_text("A B A\n")  # as long as before
    os.utime(text, (2_000, 2_000))
    assert TokenFile.build([text], [], vocabulary, tmp_path / "t.tokens").token_id.tolist() == [4, 5, 4, EOS_ID]


def test_trainings_that_share_a_path_get_their_own_tokens(tmp_path: Path) -> None:
    """Another process writes its tokens, and their counts, between the tokens and the counts of the first."""
    (tmp_path / "a.txt").write_text("A B A\n")
    own, others = ([tmp_path / "a.txt"], [], Vocabulary(["A", "B"])), ([tmp_path / "a.txt"], [], Vocabulary(["B", "A"]))
    path = tmp_path / "t.tokens"

    def interleaved(counts_path: Path, text: str) -> None:
        with mock.patch("asr.lm.rnn.data.write_whole_text", write_whole_text):
            assert TokenFile.build(*others, path).token_id.tolist() == [5, 4, 5, EOS_ID]
        write_whole_text(counts_path, text)

    with mock.patch("asr.lm.rnn.data.write_whole_text", interleaved):
        assert TokenFile.build(*own, path).token_id.tolist() == [4, 5, 4, EOS_ID]
    # The counts are the first one's now, but the tokens are the other's.
    assert TokenFile.build(*own, path).token_id.tolist() == [4, 5, 4, EOS_ID]


def test_a_text_is_the_same_for_all_models(tmp_path: Path) -> None:
    """Blanks of every kind, line ends of every system, utterances without words; and marks, which are none's words."""
    (tmp_path / "a.txt").write_bytes("A\u00a0B\t\u3000C\r\n\u2003\r\n\nC".encode())
    (tmp_path / "transcripts").write_text("u1 B X\nu2\n")
    vocabulary = Vocabulary(["A", "B", "C"])
    files = [tmp_path / "a.txt"], [tmp_path / "transcripts"]
    stream = read_word_stream(files[0], vocabulary, files[1]).with_unknown()
    tokens = TokenFile.build(*files, vocabulary, tmp_path / "t.tokens").token_id
    assert tokens.tolist() == [4, 5, 6, EOS_ID, 6, EOS_ID, 5, UNK_ID, EOS_ID, EOS_ID]
    assert stream.word_id[stream.word_id != BOS_ID].tolist() == tokens.tolist()
    (tmp_path / "a.txt").write_text("A\n<s> A </s>\n")
    with pytest.raises(AsrError, match="line 2: the text contains the mark <s> as a word"):
        TokenFile.build(*files, vocabulary, tmp_path / "t.tokens")


@pytest.mark.parametrize("damage", ["", '{"num_sentences": 3, "num_w', "[]", "1", '{"fingerprint": "x"}', "\xff"])
def test_damaged_counts_are_made_again(tmp_path: Path, damage: str) -> None:
    """As after a full disk."""
    (tmp_path / "a.txt").write_text("A B\n")
    made = [tmp_path / "a.txt"], [], Vocabulary(["A", "B"]), tmp_path / "t.tokens"
    counts = TokenFile.build(*made).counts
    (tmp_path / "t.json").write_text(damage, encoding="latin-1")
    assert TokenFile.build(*made).counts == counts
    content = (tmp_path / "t.json").read_bytes()
    assert TokenFile.build(*made).counts == counts and (tmp_path / "t.json").read_bytes() == content


def test_counts_of_older_tokens_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, path = tmp_path / "a.txt", tmp_path / "t.tokens"
    for content in ("A B\n", "B A B\n"):
        text.write_text(content)
        os.utime(text, (2_000, 2_000))
        with contextlib.suppress(OSError):
            TokenFile.build([text], [], Vocabulary(["A", "B"]), path)
        monkeypatch.setattr("asr.lm.rnn.data.write_whole_text", mock.Mock(side_effect=OSError))
    text.write_text("A B\n")
    os.utime(text, (2_000, 2_000))
    monkeypatch.undo()
    assert TokenFile.build([text], [], Vocabulary(["A", "B"]), path).token_id.tolist() == [4, 5, EOS_ID]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(AsrError, match=r"a\.txt.*empty|empty.*a\.txt"):
        TokenFile.build([tmp_path / "a.txt"], [], Vocabulary(["A"]), tmp_path / "t.tokens")


def test_bad_texts(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "cut.xz").write_bytes(lzma.compress(b"A B\n" * 1000)[:-20])
    for name, message in (("latin.txt", "UTF-8"), ("cut.xz", "cannot be unpacked"), ("none.txt", "cannot be read")):
        with pytest.raises(AsrError, match=message):
            TokenFile.build([tmp_path / name], [], Vocabulary(["A"]), tmp_path / "t.tokens")
        assert not (tmp_path / "t.tokens").exists()


def test_a_line_of_100000_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A " * 100_000 + "\n")
    tokens = TokenFile.build([tmp_path / "a.txt"], [], Vocabulary(["A"]), tmp_path / "t.tokens")
    assert len(tokens.token_id) == 100_001


def test_the_last_window_may_be_shorter() -> None:
    token_id = np.arange(4, 27, dtype=np.int32)  # 23 words: 2 streams of 11, with windows of 3, 3, 3 and 2
    streams = TokenStreams(token_id, 2, 3, 2)
    assert (len(streams), streams.num_streams, streams.stream_length) == (4, 2, 11)
    assert [batch.is_first for batch in (streams[0], streams[1])] == [True, False]
    assert streams[2].target_id.tolist() == [[10, 11, 12], [21, 22, 23]]
    assert streams[3].target_id.tolist() == [[13, 14], [24, 25]]
    assert streams[3].history.tolist() == [[[12, 11], [13, 12]], [[23, 22], [24, 23]]]
    assert (streams[0].num_all_words, streams[0]._replace(num_all_streams=0).num_all_words) == (6, 6)
    assert streams[3].num_all_words == 4
    for beyond in (-1, 4):
        with pytest.raises(IndexError):
            streams[beyond]


@pytest.mark.parametrize("num_words", [1, 31, 33, 8000, 9999])
def test_hardly_a_word_is_left_out(num_words: int) -> None:
    """With the data module's default numbers of streams and steps."""
    streams = TokenStreams(np.full(num_words, 4, dtype=np.int32), 128, 32, 0)
    read = sum(streams[window].num_all_words for window in range(len(streams)))
    assert num_words - streams.num_streams < read <= num_words


def test_a_short_text_makes_fewer_streams() -> None:
    token_id = np.arange(4, 10, dtype=np.int32)
    assert [TokenStreams(token_id, num, 3, 0).num_streams for num in (1, 2, 3)] == [1, 2, 2]
    whole = TokenStreams(token_id, 5, 7, 0)
    assert (whole.num_streams, whole.num_steps, len(whole)) == (1, 6, 1)


def test_each_process_reads_its_share_of_the_streams() -> None:
    token_id = np.arange(4, 16, dtype=np.int32)
    whole = TokenStreams(token_id, 3, 2, 1)[1]
    shares = [TokenStreams(token_id, 3, 2, 1, Share(rank, 3))[1] for rank in range(3)]
    assert torch.equal(torch.cat([one.target_id for one in shares]), whole.target_id)
    assert [(one.first_stream, one.num_all_streams, one.num_all_words) for one in shares] == [
        (i, 3, 6) for i in range(3)
    ]
    with pytest.raises(AsrError, match="the text of 12 words makes 3 streams for 4 processes; raise num_streams"):
        TokenStreams(token_id, 3, 2, 1, Share(0, 4))


sentences = st.lists(st.lists(st.integers(4, 9), min_size=1, max_size=6), min_size=1, max_size=20)


@pytest.mark.slow
@given(sentences, st.integers(1, 4), st.integers(1, 5), st.integers(0, 4))
def test_streams_give_each_word_its_own_past(
    text: list[list[int]], num_streams: int, num_steps: int, num_history_words: int
) -> None:
    token_id = np.array([word for sentence in text for word in [*sentence, EOS_ID]], dtype=np.int32)
    streams = TokenStreams(token_id, num_streams, num_steps, num_history_words)
    batches = [streams[idx] for idx in range(len(streams))]
    if not batches:
        return
    targets = torch.cat([batch.target_id for batch in batches], dim=1)
    for stream in range(streams.num_streams):
        begin = stream * streams.stream_length
        past: list[int] = []
        for step, target in enumerate(targets[stream].tolist()):
            assert target == token_id[begin + step]
            batch = batches[step // streams.num_steps]
            column = step % streams.num_steps
            assert bool(batch.is_start[stream, column]) == (not past)
            assert int(batch.input_id[stream, column]) == (past[-1] if past else BOS_ID)
            wanted = [*reversed(past), BOS_ID, *[EPSILON_ID] * num_history_words][:num_history_words]
            assert batch.history[stream, column].tolist() == wanted
            past = [] if target == EOS_ID else [*past, target]
