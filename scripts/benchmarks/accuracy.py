"""Word error rates of a bundle on clean speech, at 8 kHz, in noise, rooms and long recordings, as streams; confidences.

    scripts/bench accuracy --quick              # one to two minutes of one core; the last line is one JSON object
    scripts/bench accuracy --every 1            # all of dev-clean-2, every mode, whole chapters

Recognizes every fourth utterance of dev-clean-2, or the demo's clips if the corpora are missing, and of AN4's test part
with the AN4 bundle, on one thread. `nce` is the normalized cross-entropy of the default mode's word confidences (1 is
perfect, 0 is no better than the share of correct words). Each line of results is printed at once.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.audio.io import read_audio
from asr.audio.resample import resample
from asr.bundle import Bundle
from asr.datasets.augment import add_noise, reverberated
from asr.decoding.build import available_modes
from asr.metrics import GAP, NO_ERRORS, align, count_errors, normalized_cross_entropy
from asr.recognizer import Recognizer
from asr.streaming import recognize_stream
from scripts.benchmarks.inputs import AN4_BUNDLE, LIBRISPEECH_BUNDLE, argument_parser, default_corpora
from scripts.benchmarks.rooms import room_response
from scripts.benchmarks.speech import Recording, an4_recordings, recordings

_BATCH = 16
_NOISE_SECONDS = 60
_PIECE = 4000
# Utterances of a stream with long pauses, the length of these, and the level of their noise.
_IN_STREAM, _PAUSE_SECONDS, _PAUSE_NOISE = 8, 4, 3e-4
# The amplitude of every second utterance where the level changes: -20 dB.
_SOFT = 0.1
# A room in meters, who speaks in it, and microphones at one and two meters; its reverberation time.
_ROOM, _SPEAKER, _MICROPHONES = (6.0, 5.0, 3.0), (2.0, 1.7, 1.6), {1: (2.8, 2.2, 1.3), 2: (3.6, 2.8, 1.3)}
_REVERBERATION_SECONDS = 0.4
_NUM_VOICES = 6


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("accuracy", __doc__)
    parser.add_argument("--quick", action="store_true", help="no other modes than n-gram and the default, no chapters")
    parser.add_argument("--bundle", type=Path, default=LIBRISPEECH_BUNDLE)
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="(default: %(default)s)")
    parser.add_argument("--every", type=int, default=4, help="take every N-th utterance (default: %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bundle = Bundle.load(args.bundle)
    name, everything = recordings(args.corpora)
    speech = everything[:: args.every] if len(everything) > args.every else everything
    with torch.no_grad():
        report = {"bundle": bundle.name, "speech": name, **measure(bundle, speech, args.quick)}
        if (of_an4 := an4_recordings(args.corpora)[:: args.every]) and AN4_BUNDLE.is_dir():
            report["wer_an4"] = an4(of_an4)
        print(json.dumps(report))
    return 0


def measure(bundle: Bundle, speech: Sequence[Recording], is_quick: bool) -> dict[str, Any]:
    """The figures of the JSON line."""
    rate = bundle.sampling_rate
    waveforms = {recording.path: read_audio(recording.path, rate) for recording in speech}
    report: dict[str, Any] = {"num_utterances": len(speech), "num_words": sum(len(one.words) for one in speech)}
    modes = available_modes(bundle)
    for mode in ("ngram",) if is_quick else modes[1:]:
        recognizer = Recognizer(bundle, mode=mode)
        report[f"wer_{mode}"], _ = errors(mode, speech, batches(recognizer, speech, waveforms.__getitem__, rate))
    default = Recognizer(bundle)
    default.prepare()
    begin, seconds = time.process_time(), sum(map(len, waveforms.values())) / rate
    results = list(batches(default, speech, waveforms.__getitem__, rate))
    report["rtf_default"] = round((time.process_time() - begin) / seconds, 4)
    report["wer_default"], marked = errors("default", speech, results)
    report["nce"] = normalized_cross_entropy(marked)
    generator = torch.Generator().manual_seed(1)

    def noisy(path: Path) -> Tensor:
        waveform = waveforms[path]
        return add_noise(waveform, torch.randn(len(waveform), generator=generator), 10.0)

    def narrow(path: Path) -> Tensor:
        return resample(waveforms[path], rate, 8000)

    streams = (spoken_words(recognize_stream(default, waveforms[one.path].split(_PIECE), rate)) for one in speech)
    report["wer_stream"], _ = errors("stream", speech, streams)

    def paused(group: Sequence[Recording]) -> Words:
        parts = [torch.zeros(0)]
        for one in group:
            parts += [waveforms[one.path], _PAUSE_NOISE * torch.randn(_PAUSE_SECONDS * rate, generator=generator)]
        return spoken_words(recognize_stream(default, torch.cat(parts).split(_PIECE), rate))

    groups = [speech[first : first + _IN_STREAM] for first in range(0, len(speech), _IN_STREAM)]
    report["wer_pauses"], _ = errors("stream with long pauses", [*map(as_one, groups)], map(paused, groups))
    report["wer_8k"], _ = errors("8 kHz", speech, batches(default, speech, narrow, 8000))
    report["wer_noise10db"], _ = errors("noise at 10 dB", speech, batches(default, speech, noisy, rate))

    def babbled(path: Path) -> Tensor:
        """Six other speakers' utterances, equally loud; of this speaker's, if there is no other."""
        others = [waveforms[one.path] for one in speech if speaker(one.path) != speaker(path)] or [*waveforms.values()]
        voices = [others[number] for number in torch.randint(len(others), (_NUM_VOICES,), generator=generator)]
        positions = torch.arange(len(waveforms[path]))
        babble = sum(voice[positions % len(voice)] / voice.square().mean().sqrt() for voice in voices)
        assert isinstance(babble, Tensor)
        return add_noise(waveforms[path], babble, 10.0)

    report["wer_babble10db"], _ = errors("other voices at 10 dB", speech, batches(default, speech, babbled, rate))
    for meters, microphone in _MICROPHONES.items():
        response = room_response(_ROOM, _SPEAKER, microphone, _REVERBERATION_SECONDS, rate)
        heard = {path: reverberated(waveform, response) for path, waveform in waveforms.items()}
        found = batches(default, speech, heard.__getitem__, rate)
        report[f"wer_room_{meters}m"], _ = errors(f"in a room, at {meters} m", speech, found)
    noise = 0.02 * torch.randn(_NOISE_SECONDS * rate, generator=generator)
    report["words_from_noise_per_minute"] = len(default([noise], rate)[0].words) * 60 / _NOISE_SECONDS
    following = dict(itertools.pairwise(one.path for one in speech))

    def softer(path: Path) -> Tensor:
        pause = _PAUSE_NOISE * torch.randn(rate // 2, generator=generator)
        return torch.cat([waveforms[path], pause, _SOFT * torch.cat([pause, waveforms[following[path]]])])

    pairs = [as_one(speech[first : first + 2]) for first in range(0, len(speech) - 1, 2)]
    report["wer_20db_softer"], _ = errors("20 dB softer from the middle", pairs, batches(default, pairs, softer, rate))
    if not is_quick:
        report |= in_chapters(default, speech, waveforms)
    return report


def in_chapters(
    recognizer: Recognizer, speech: Sequence[Recording], waveforms: Mapping[Path, Tensor]
) -> dict[str, float]:
    """The word error rates in % where the utterances of each chapter are one recording, and where they are a stream."""
    rate = recognizer.sampling_rate
    chapters = [list(group) for _, group in itertools.groupby(speech, key=chapter)]
    whole = {group[0].path: torch.cat([waveforms[one.path] for one in group]) for group in chapters}
    joined = [*map(as_one, chapters)]
    streams = (spoken_words(recognize_stream(recognizer, whole[one.path].split(_PIECE), rate)) for one in joined)
    return {
        "wer_long": errors("each chapter", joined, batches(recognizer, joined, whole.__getitem__, rate))[0],
        "wer_long_stream": errors("each chapter as a stream", joined, streams)[0],
    }


def chapter(one: Recording) -> str:
    """The speaker and chapter in the name of an utterance of LibriSpeech."""
    return one.path.stem.rpartition("-")[0]


def speaker(path: Path) -> str:
    """The speaker in the name of an utterance of LibriSpeech."""
    return path.stem.partition("-")[0]


def as_one(group: Sequence[Recording]) -> Recording:
    """The recording of a group of utterances, by the name of the first."""
    return group[0]._replace(words=tuple(word for one in group for word in one.words))


def an4(speech: Sequence[Recording]) -> float:
    """The word error rate of the AN4 bundle's default mode, in %."""
    bundle = Bundle.load(AN4_BUNDLE)
    rate = bundle.sampling_rate
    return errors("AN4 test", speech, batches(Recognizer(bundle), speech, lambda path: read_audio(path, rate), rate))[0]


Words = list[tuple[str, float | None]]


def batches(
    recognizer: Recognizer, speech: Sequence[Recording], waveform: Callable[[Path], Tensor], rate: int
) -> Iterable[Words]:
    """The words of each recording with their confidences."""
    recognizer.prepare()
    for begin in range(0, len(speech), _BATCH):
        for result in recognizer([waveform(one.path) for one in speech[begin : begin + _BATCH]], rate):
            yield [(word.text, word.confidence) for word in result.words]


def spoken_words(results: Iterable[Any]) -> Words:
    return [(word.text, None) for result in results if result.is_final for word in result.words]


def errors(
    name: str, speech: Sequence[Recording], found: Iterable[Words]
) -> tuple[float, list[tuple[bool, float | None]]]:
    """The word error rate in %, and of each word found whether it is right, and its confidence."""
    counts, marked = NO_ERRORS, []
    for one, words in zip(speech, found, strict=True):
        hypothesis = [word for word, _ in words]
        counts += count_errors(one.words, hypothesis)
        confidence = iter([value for _, value in words])
        pairs = align(one.words, hypothesis)
        marked += [(said == heard, next(confidence)) for said, heard in pairs if heard != GAP]
    print(f"{name}: {100 * counts.rate:.2f} % of {counts.num_ref} words", file=sys.stderr)
    return round(100 * counts.rate, 2), marked
