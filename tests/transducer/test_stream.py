"""Streams of transducers: the result is that of the whole utterance, however it is cut."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from asr.errors import AsrError
from asr.fusion.beam import Fusion
from asr.fusion.scores import WordScores
from asr.fusion.spelling import spelled_words
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.rnn.model import RNNLanguageModel, RNNLMConfig
from asr.text.symbols import Vocabulary
from asr.transducer import TransducerDecoder, TransducerDecodingConfig
from asr.transducer.search import TransducerBeam
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
    most = 0
    for seed in range(8):
        network = ToyTransducer(PIECES, sharpness=3.0, blank_bias=2.0, seed=seed)
        stream = TransducerDecoder(network, beam_size=4).stream()
        assert (stream.partial().text, stream.partial().score, stream.num_stable_words) == ("", 0.0, 0)
        stable: list[str] = []
        for chunk in frames(100, seed).split(3):
            stream.accept(chunk)
            partial = stream.partial()
            assert not partial.is_complete
            words = [word.text for word in partial.words]
            assert words[: len(stable)] == stable
            assert len(stable) <= stream.num_stable_words <= len(words)
            stable = words[: stream.num_stable_words]
        most = max(most, len(stable))
        found = stream.finish()
        assert [word.text for word in found.words][: len(stable)] == stable
        assert found.score == pytest.approx(partial.score, abs=1.0)  # others may have the same text
    assert most > 5


@pytest.mark.parametrize("durations", [(), (0, 1, 3)])
@torch.no_grad()
def test_prefixes_that_are_needed_no_more_are_removed(durations: tuple[int, ...]) -> None:
    config = TransducerDecodingConfig(beam_size=3, internal_lm_scale=0.1)
    padded, num_frames = torch.stack([frames(200, seed) for seed in range(3)]), np.array([200, 40, 90])
    num_prefixes = {10: 0, 1 << 20: 0}
    for seed in range(3):
        network = ToyTransducer(PIECES, durations, blank_bias=1.0, seed=seed)
        found = []
        for compact_at in num_prefixes:
            model = TableLM(Vocabulary(["a", "ab"]))
            scores = WordScores(
                network.tokens, spelled_words(model.vocabulary.ordinary, network.tokens), config, model.vocabulary
            )
            beam = TransducerBeam(network, Fusion(scores, config, model), config, 3, compact_at)
            for begin in range(0, 200, 20):
                beam.advance(padded[:, begin : begin + 20], (num_frames - begin).clip(0, 20))
            num_prefixes[compact_at] += beam.prefixes.num
            found.append([one for own in beam.finished() for one in own])
        assert [one.entries.tolist() for one in found[0]] == [one.entries.tolist() for one in found[1]]
        assert [one.total for one in found[0]] == pytest.approx([one.total for one in found[1]], abs=1e-3)
    few, many = num_prefixes.values()
    assert few < 0.75 * many


def test_streams_share_a_decoder() -> None:
    decoder = TransducerDecoder(ToyTransducer(PIECES, blank_bias=1.0), lm=TableLM(Vocabulary(["a", "ab"])))
    streams, audio = [decoder.stream() for _ in range(3)], [frames(20, seed) for seed in range(3)]
    for begin in range(0, 20, 5):
        for stream, own in zip(streams, audio, strict=True):
            stream.accept(own[begin : begin + 5])
    for stream, own in zip(streams, audio, strict=True):
        assert stream.finish().text == decoder(own)[0].text


def test_streams_take_the_language_model_of_those_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CachedRNNLM] = []

    class Counted(CachedRNNLM):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("asr.ctc.language_models.CachedRNNLM", Counted)
    torch.manual_seed(0)
    model = RNNLanguageModel(Vocabulary(["a", "b", "ab"]), RNNLMConfig(embedding_size=6, hidden_size=6)).eval()
    decoder = TransducerDecoder(ToyTransducer(PIECES, blank_bias=1.0), lm=model)
    wanted = [decoder(frames(20, seed))[0] for seed in range(3)]
    num_made = len(made)
    for seed in range(3):
        stream = decoder.stream(confidences=True)
        stream.accept(frames(20, seed))
        found = stream.finish()
        assert found.tokens == wanted[seed].tokens
        assert found.score == pytest.approx(wanted[seed].score, abs=1e-4)
    assert len(made) == num_made
    open_streams = [decoder.stream() for _ in range(3)]
    num_made = len(made)
    for seed, stream in enumerate(open_streams):
        stream.accept(frames(20, seed))
    assert [stream.finish().text for stream in open_streams] == [each.text for each in wanted]
    assert decoder(frames(20, 1))[0].tokens == wanted[1].tokens
    assert len(made) == num_made


def test_a_stream_that_has_ended_holds_nothing_of_a_users_model() -> None:
    class Told(TableLM):
        live = torch.zeros(0)

        def retain(self, live: torch.Tensor) -> None:
            self.live = live

    lm = Told(Vocabulary(["a", "ab"]))
    stream = TransducerDecoder(ToyTransducer(PIECES, blank_bias=1.0), lm=lm).stream()
    stream.accept(frames(20))
    assert len(lm.live)
    stream.finish()
    assert not len(lm.live)


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
