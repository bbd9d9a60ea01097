"""Streams of external networks: results do not depend on how audio is cut, and utterances end at pauses."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asr.ctc import CTCDecoder
from asr.ctc.streams import ExternalStreams
from asr.errors import AsrError
from asr.lm.interface import LanguageModel
from asr.results import StreamResult
from asr.streaming import StreamingOptions
from asr.transducer import TransducerDecoder
from tests.reference.toy_transducer import StreamingToy, ToyReader, ToyTransducer

DIM = 160
PIECES = ["▁a", "b", "<blk>", "▁b"]


def network(**options: Any) -> StreamingToy:
    return StreamingToy(PIECES, dim=DIM, **{"blank_bias": 0.5, "seed": 7, **options})


class Loud(StreamingToy):
    """Hears tokens in loud frames only."""

    def __init__(self) -> None:
        super().__init__(PIECES, dim=DIM, seed=1)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        logits = super().join(encoded, predicted)
        blank = torch.zeros_like(logits)
        blank[:, self.tokens.blank_id] = 40.0 * (encoded.abs().amax(1) < 0.1)
        return logits + blank


def noise(seconds: float, seed: int = 0) -> Tensor:
    return torch.rand(int(16000 * seconds), generator=torch.Generator().manual_seed(seed)) - 0.5


def run(streams: ExternalStreams, pieces: Iterable[Any], rate: int | None = None) -> list[StreamResult]:
    number, found = streams.open(rate), list[StreamResult]()
    for piece in pieces:
        streams.push(number, piece)
        while streams.is_ready:
            found += streams.step()
    streams.close(number)
    while streams.is_ready:
        found += streams.step()
    assert all(result.stream == number for result in found)
    return found


def finals(results: Iterable[StreamResult]) -> list[StreamResult]:
    return [result for result in results if result.is_final]


def test_the_words_are_those_of_the_whole_recording() -> None:
    decoder = TransducerDecoder(network(), words=["a", "ab", "b"], hot_words={"ab": 3.0})
    audio = noise(1.0)
    whole = decoder(*decoder.network(audio))[0][0]
    streams = ExternalStreams(decoder.network, decoder, StreamingOptions(), confidences=True)
    (found,) = finals(run(streams, audio.split(999)))
    assert [word.confidence for word in found.words] == pytest.approx([word.confidence for word in whole.words])
    assert [word.text for word in found.words] == [word.text for word in whole.words] != []
    assert [(word.start, word.end) for word in found.words] == [(word.start, word.end) for word in whole.words]
    assert (found.reason, found.begin, found.end, found.is_complete) == ("end", 0.0, 1.0, True)
    assert (found.total, found.lm_score) == pytest.approx((whole.score, whole.lm_score), abs=1e-3)
    assert streams.times.audio_seconds == pytest.approx(1.0)
    assert set(streams.times.stages) == {"acoustic model", "search"}


@pytest.mark.parametrize("policy", ["agreed", "best", "stable"])
def test_results_do_not_depend_on_pieces_or_other_streams(policy: str) -> None:
    decoder = TransducerDecoder(Loud(), beam_size=3)
    audio = torch.cat([noise(0.4), torch.zeros(8000), noise(0.5, 1), torch.zeros(4000)])
    options = StreamingOptions(partial_policy=policy, silence_after_words=0.3)
    expected = run(ExternalStreams(decoder.network, decoder, options), audio.split(4 * DIM))
    for size in (1234, 7, 100_000):
        found = run(ExternalStreams(decoder.network, decoder, options), audio.split(size))
        assert finals(found) == finals(expected)
        if size < 4 * DIM:
            assert found == expected
    both = ExternalStreams(decoder.network, decoder, options)
    numbers, others = [both.open(), both.open()], noise(0.7, 3)
    both.push(numbers[1], others)
    for piece in audio.split(4 * DIM):
        both.push(numbers[0], piece)
    for number in numbers:
        both.close(number)
    results = both.step()
    assert [each.text for each in finals(results) if each.stream == 0] == [each.text for each in finals(expected)]
    assert sum(each.reason == "end" for each in results) == 2
    assert not both.is_ready


def test_pauses_end_utterances() -> None:
    decoder = TransducerDecoder(Loud())
    audio = torch.cat([torch.zeros(32000), noise(0.4), torch.zeros(16000), noise(0.5, 1), torch.zeros(16000)])
    options = StreamingOptions(silence_after_words=0.4, silence_before_words=0.9)
    results = run(ExternalStreams(decoder.network, decoder, options), audio.split(500))
    first, second, last = finals(results)
    assert (first.reason, second.reason, last.reason, last.text) == ("pause", "pause", "end", "")
    assert first.begin == pytest.approx(1.84)  # after two pauses without words
    assert first.text and second.text
    for utterance, begin, end in ((first, 2.0, 2.4), (second, 3.4, 3.9)):
        assert begin <= utterance.words[0].start <= utterance.words[-1].end <= end
        assert 0.4 <= utterance.end - utterance.words[-1].end < 0.44
    assert second.begin == first.end
    for utterance, begin, end in ((first, 2.0, 2.4), (second, 3.4, 3.9)):
        alone = decoder(*decoder.network(audio[int(16000 * begin) : int(16000 * end)]))[0][0]
        assert utterance.text == alone.text
    partial = [result for result in results if not result.is_final]
    assert partial and all(result.words and result.begin in (first.begin, second.begin) for result in partial)


def test_the_network_reads_a_stream_once_whatever_the_utterances() -> None:
    class Counted(Loud):
        num_readers = 0

        def stream(self) -> ToyReader:  # type: ignore[override]
            Counted.num_readers += 1
            return super().stream()

    decoder = TransducerDecoder(Counted())
    streams = ExternalStreams(decoder.network, decoder, StreamingOptions(silence_after_words=0.2))
    before = Counted.num_readers
    assert len(finals(run(streams, torch.cat([noise(0.3), torch.zeros(8000)] * 3).split(700)))) > 3
    assert Counted.num_readers == before + 1


def test_utterances_that_are_too_long_end() -> None:
    decoder = TransducerDecoder(network(), beam_size=2)
    options = StreamingOptions(longest_utterance=1.0)
    found = finals(run(ExternalStreams(decoder.network, decoder, options), noise(3.5).split(800)))
    assert [each.reason for each in found][-1] == "end" and len(found) >= 4
    assert all(each.end - each.begin <= 1.01 for each in found)


def test_stable_words_are_not_revised() -> None:
    decoder = TransducerDecoder(network(sharpness=3.0, blank_bias=2.0), beam_size=4)
    streams = ExternalStreams(decoder.network, decoder, StreamingOptions(partial_policy="stable"))
    results = run(streams, noise(3.0).split(640))
    shown: tuple[str, ...] = ()
    for result in results:
        words = tuple(word.text for word in result.words)
        assert words[: len(shown)] == shown
        assert result.num_stable == len(words)
        shown = () if result.is_final else words
    assert len(results) > 5


def test_a_ctc_network() -> None:
    class Network:
        """Log-probabilities of three letters by the loudest of three samples."""

        sampling_rate, frame_shift, name = 16000, 0.01, "ctc"

        def __call__(self, waveform: Any, sampling_rate: int | None = None) -> tuple[Tensor, Tensor]:
            raise NotImplementedError

        def stream(self) -> Any:
            reader = ToyReader(DIM)
            accept = reader.accept
            reader.accept = lambda *args, **given: accept(*args, **given)[:, :4].log_softmax(1)  # type: ignore[method-assign]
            return reader

    decoder = CTCDecoder(["-", "a", "|", "b"], words=["a", "ab"], frame_shift=0.01)
    audio = 6.0 * noise(1.0)
    (whole,) = decoder(audio.reshape(-1, DIM)[:, :4].log_softmax(1))
    (found,) = finals(run(ExternalStreams(Network(), decoder, StreamingOptions()), audio.split(1000)))
    assert found.text == whole.text != ""


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_short_and_resampled_streams(rate: int) -> None:
    decoder = TransducerDecoder(network())
    streams = ExternalStreams(decoder.network, decoder, StreamingOptions())
    for num in (0, 1, 100):
        (found,) = run(streams, [np.zeros(num, dtype=np.int16)], rate)
        assert (found.reason, found.end) == ("end", num / rate)
    assert run(streams, [], rate)[0].reason == "end"
    assert finals(run(streams, (noise(1.0)[:rate] * 0.5).split(300), rate))[0].end <= 1.0


def test_all_streams_share_a_language_model() -> None:
    decoder = TransducerDecoder(network(), words=["a", "ab", "b"], hot_words={"ab a": 3.0})
    made, make = list[LanguageModel](), decoder.models._make

    def counted() -> LanguageModel:
        made.append(make())  # type: ignore[misc]
        return made[-1]

    decoder.models._make = counted
    for _ in range(2):
        assert run(ExternalStreams(decoder.network, decoder, StreamingOptions()), [noise(0.2)])
    assert len(made) == 1


def test_what_is_refused() -> None:
    decoder = TransducerDecoder(network())
    with pytest.raises(AsrError, match=r"^toy: its encoder keeps no states and reads whole utt.*cannot stream"):
        ExternalStreams(ToyTransducer(PIECES), decoder, StreamingOptions())
    streams = ExternalStreams(decoder.network, decoder, StreamingOptions())
    number = streams.open()
    for piece, message in (
        (torch.zeros(2, 3), r"stream 0 at 0.00 s: the piece has the shape \(2, 3\); give \(samples,\)"),
        (torch.tensor([torch.nan]), "stream 0 at 0.00 s: the piece has samples that are NaN"),
        ([1.0], "stream 0 at 0.00 s: the piece is of type list"),
    ):
        with pytest.raises(AsrError, match=message):
            streams.push(number, piece)
    with pytest.raises(AsrError, match="sampling"):
        streams.open(-3)
    with pytest.raises(AsrError, match="cannot be copied"):
        pickle.dumps(streams)
    streams.close(number)
    for wrong in (number, 7):
        with pytest.raises(AsrError, match=f"stream {wrong} is not open"):
            streams.push(wrong, torch.zeros(3))


def test_a_network_that_fails_ends_all_streams() -> None:
    class Broken(StreamingToy):
        def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
            return super().join(encoded, predicted) * torch.nan

    decoder = TransducerDecoder(Broken(PIECES, dim=DIM))
    streams = ExternalStreams(decoder.network, decoder, StreamingOptions())
    numbers = [streams.open(), streams.open()]
    streams.push(numbers[0], noise(0.5))
    with pytest.raises(AsrError, match="toy: the joint network returned NaN"):
        streams.step()
    assert not streams.is_ready
    with pytest.raises(AsrError, match="stream 1 is not open"):
        streams.push(numbers[1], noise(0.5))
    assert streams.open() == 2
