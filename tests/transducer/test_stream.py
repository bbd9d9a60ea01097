"""Streams of transducers: the result is that of the whole utterance, however it is cut."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from asr.errors import AsrError
from asr.text.symbols import Vocabulary
from asr.transducer import TransducerDecoder
from tests.reference.table_lm import TableLM
from tests.reference.toy_transducer import ToyTransducer

PIECES = ["▁a", "b", "<blk>", "▁b"]


def frames(num: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("durations", [(), (0, 1, 2, 4)])
@pytest.mark.parametrize("sizes", [(1,) * 30, (0, 30), (7, 11, 12)])
def test_chunks_do_not_matter(durations: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    network = ToyTransducer(PIECES, durations, blank_bias=1.0)
    decoder = TransducerDecoder(network, lm=TableLM(Vocabulary(["a", "ab"])), beam_size=4, internal_lm_scale=0.1)
    (whole,) = decoder(frames(30))
    stream = decoder.stream()
    for chunk in frames(30).split(sizes):
        stream.accept(chunk)
    assert stream.num_frames == 30
    found = stream.finish()
    assert found.tokens == whole.tokens
    assert found.score == pytest.approx(whole.score, abs=1e-4)
    assert len(found.words) > 2


def test_stable_words_do_not_change() -> None:
    decoder = TransducerDecoder(ToyTransducer(PIECES, sharpness=4.0, blank_bias=2.0), beam_size=4)
    stream = decoder.stream()
    assert (stream.partial().text, stream.num_stable_words) == ("", 0)
    stable: list[str] = []
    for chunk in frames(200).split(5):
        stream.accept(chunk)
        partial = stream.partial()
        assert not partial.is_complete
        words = [word.text for word in partial.words]
        assert words[: len(stable)] == stable
        assert len(stable) <= stream.num_stable_words <= len(words)
        stable = words[: stream.num_stable_words]
    assert len(stable) > 5
    assert [word.text for word in stream.finish().words][: len(stable)] == stable


def test_prefixes_that_are_needed_no_more_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    network = ToyTransducer(PIECES, (0, 1, 3), blank_bias=1.0)
    decoder = TransducerDecoder(network, lm=TableLM(Vocabulary(["a", "ab"])), beam_size=4, internal_lm_scale=0.1)
    utterances = [frames(num, num) for num in (90, 40, 300)]
    padded = torch.nn.utils.rnn.pad_sequence(utterances, batch_first=True)
    expected = decoder(padded, [90, 40, 300], nbest=3)
    num_before = num_prefixes(decoder, padded)
    monkeypatch.setattr("asr.transducer.search._COMPACT_AT", 100)
    assert decoder(padded, [90, 40, 300], nbest=3) == expected
    assert num_prefixes(decoder, padded) < 0.7 * num_before


@torch.no_grad()
def num_prefixes(decoder: TransducerDecoder, encoded: torch.Tensor) -> int:
    """Those in memory at the end of a search."""
    with decoder.models.lent() as lm:
        beam = decoder.begin(lm, len(encoded))
        beam.advance(encoded, np.full(len(encoded), encoded.shape[1]))
        return beam.prefixes.num


def test_streams_share_a_decoder() -> None:
    decoder = TransducerDecoder(ToyTransducer(PIECES, blank_bias=1.0), lm=TableLM(Vocabulary(["a", "ab"])))
    streams, audio = [decoder.stream() for _ in range(3)], [frames(20, seed) for seed in range(3)]
    for begin in range(0, 20, 5):
        for stream, own in zip(streams, audio, strict=True):
            stream.accept(own[begin : begin + 5])
    for stream, own in zip(streams, audio, strict=True):
        assert stream.finish().text == decoder(own)[0].text


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (torch.zeros(1, 3, 6), "a stream reads one utterance"),
        (torch.full((3, 6), math.nan), "NaN or infinity"),
        ("audio", "cannot be read"),
    ],
)
def test_input_is_refused(encoded: Any, message: str) -> None:
    stream = TransducerDecoder(ToyTransducer(PIECES)).stream()
    with pytest.raises(AsrError, match=message):
        stream.accept(encoded)
    stream.finish()
    for call in (stream.finish, stream.partial, lambda: stream.accept(frames(1)), lambda: stream.num_stable_words):
        with pytest.raises(AsrError, match="the stream has ended"):
            call()
