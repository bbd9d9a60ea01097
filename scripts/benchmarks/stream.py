"""The cost of words that are output while the audio is arriving: errors, revised words, delay; also long pauses.

    scripts/bench stream data/an4/an4_test.jsonl.gz --bundle an4 --every 2

Prints two tables, for single utterances with several windows and for concatenated utterances with noise between them,
and then one JSON line. Delays do not include computing time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asr.bundle import bundle_folder
from asr.datasets.cuts import cut_text, cut_waveform, read_cuts
from asr.metrics import NO_ERRORS, ErrorCounts, count_errors
from asr.recognizer import Recognizer
from asr.results import StreamResult, num_equal
from asr.streaming import StreamingOptions, StreamingRecognizer
from scripts.benchmarks.inputs import argument_parser

Utterance = tuple[Tensor, list[str]]  # samples, words
_PIECE_SECONDS = 0.1
# chunk, left, right in seconds; which partial results
_WINDOWS = [
    (0.64, 4.0, 0.64, "agreed"),
    (0.64, 2.0, 0.64, "best"),
    (0.32, 4.0, 0.64, "best"),
    (0.64, 4.0, 0.32, "stable"),
    (1.28, 4.0, 1.28, "agreed"),
]


@dataclass
class Watched:
    """The partial results of streams."""

    errors: ErrorCounts = NO_ERRORS
    num_shown: int = 0
    num_taken_back: int = 0
    delays: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    audio_seconds: float = 0.0

    def take(self, shown: Sequence[tuple[float, StreamResult]]) -> list[str]:
        """Results of one stream with the seconds of audio that had been heard; returns the final words."""
        final_words: list[str] = []
        before: tuple[str, ...] = ()
        first_seen: list[float] = []  # since when each of the words now shown has been shown
        for heard, result in shown:
            now = tuple(word.text for word in result.words)
            kept = num_equal(before, now)
            self.num_taken_back += len(before) - kept
            self.num_shown += len(now) - kept
            first_seen = first_seen[:kept] + [heard] * (len(now) - kept)
            before = now
            if result.is_final:
                self.delays += [seen - word.end for seen, word in zip(first_seen, result.words, strict=True)]
                final_words += now
                before, first_seen = (), []
        return final_words


def watch(recognizer: Recognizer, options: StreamingOptions, utterances: Sequence[Utterance]) -> Watched:
    """Each utterance as a stream, in pieces."""
    watched = Watched()
    rate = recognizer.sampling_rate
    for samples, words in utterances:
        streams = StreamingRecognizer(recognizer, options)
        stream = streams.open()
        shown: list[tuple[float, StreamResult]] = []
        heard = 0
        for piece in samples.split(int(_PIECE_SECONDS * rate)):
            heard += len(piece)
            streams.push(stream, piece)
            while streams.is_ready:
                shown += [(heard / rate, result) for result in streams.step()]
        streams.close(stream)
        while streams.is_ready:
            shown += [(heard / rate, result) for result in streams.step()]
        watched.errors += count_errors(words, watched.take(shown))
        watched.cpu_seconds += sum(streams.times.stages.values())
        watched.audio_seconds += len(samples) / rate
    return watched


def strung_together(utterances: Sequence[Utterance], pause: Tensor) -> Utterance:
    """One recording with the pause before, between and after utterances."""
    pieces = [pause]
    for samples, _ in utterances:
        pieces += [samples, pause]
    return torch.cat(pieces), [word for _, words in utterances for word in words]


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("stream", __doc__)
    parser.add_argument("cuts", help="manifest of a test set, from `asr prepare`")
    parser.add_argument("--bundle", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--every", type=int, default=1, help="take every n-th utterance")
    parser.add_argument(
        "--pauses", type=float, nargs="+", default=[0.0, 2.0, 6.0], help="seconds of noise between utterances"
    )
    parser.add_argument(
        "--noise", type=float, nargs="+", default=[0.0003, 0.001, 0.003], help="standard deviation of the noise"
    )
    parser.add_argument(
        "--strung",
        type=int,
        default=10,
        help="number of utterances in one recording with pauses (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    recognizer = Recognizer.from_folder(bundle_folder(args.bundle), mode=args.mode, decoder="token-passing")
    rate = recognizer.sampling_rate
    utterances: list[Utterance] = [
        (cut_waveform(cut, rate), cut_text(cut).split()) for cut in read_cuts([args.cuts])[:: args.every]
    ]
    found = recognizer([samples for samples, _ in utterances])
    whole = NO_ERRORS
    for (_, words), result in zip(utterances, found, strict=True):
        whole += count_errors(words, result.text.split())
    print(f"{len(utterances)} utterances, {whole.num_ref} words")
    print("| chunk, left, right (s) | partial results | word error rate | words taken back | delay | CPU s a second |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(f"| whole utterance | | {whole.rate:.1%} | | | |")
    summary: dict[str, float] = {"wer_whole": whole.rate}
    for chunk, left, right, partials in _WINDOWS:
        options = StreamingOptions(chunk_seconds=chunk, left_seconds=left, right_seconds=right, partial_policy=partials)
        one = watch(recognizer, options, utterances)
        taken_back = one.num_taken_back / max(1, one.num_shown)
        delay = sum(one.delays) / max(1, len(one.delays))
        columns = [f"{chunk:g}, {left:g}, {right:g}", partials, f"{one.errors.rate:.1%}", f"{taken_back:.1%}"]
        columns += [f"{delay:.1f} s", f"{one.cpu_seconds / one.audio_seconds:.3f}"]
        print(f"| {' | '.join(columns)} |")
        summary[f"wer_{chunk:g}_{left:g}_{right:g}_{partials}"] = one.errors.rate
    print("\n| noise | pauses (s) | errors: each by itself | one recording | one stream |")
    print("| --- | --- | --- | --- | --- |")
    generator = torch.Generator().manual_seed(0)
    chosen = utterances[:: max(1, len(utterances) // args.strung)][: args.strung]
    for level in args.noise:
        noisy = [(s + level * torch.randn(len(s), generator=generator), words) for s, words in chosen]
        alone = NO_ERRORS
        for (_, words), result in zip(noisy, recognizer([samples for samples, _ in noisy]), strict=True):
            alone += count_errors(words, result.text.split())
        for seconds in args.pauses:
            pause = level * torch.randn(int(seconds * rate), generator=generator)
            samples, words = strung_together(noisy, pause)
            at_once = count_errors(words, recognizer(samples)[0].text.split())
            streamed = watch(recognizer, StreamingOptions(), [(samples, words)]).errors
            print(f"| {level:g} | {seconds:g} | {alone.num_errors} | {at_once.num_errors} | {streamed.num_errors} |")
            summary[f"errors_{level:g}_{seconds:g}"] = at_once.num_errors
    print(json.dumps({name: round(value, 4) for name, value in summary.items()}))
    return 0
