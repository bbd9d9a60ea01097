"""`asr calibrate`: fits the confidences of a bundle on speech that its network was not trained on."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asr.audio.io import PartReader
from asr.bundle import FILE_NAME, Bundle, read_manifest, write_manifest
from asr.cli.options import add_comparison_options, compared_text, fetched_bundle_folder, progress_bar
from asr.cli.printing import print_record
from asr.decoding.build import available_modes, chosen_mode
from asr.decoding.settings import ResourceOptions
from asr.decoding.words import FEATURES, Calibration, fit_calibration
from asr.errors import AsrError
from asr.metrics import GAP, align, normalized_cross_entropy
from asr.recognizer import Recognizer
from asr.serialization import require_writable

_MISSPELLED = 0.05  # of the words

HELP = """Fits the confidences of a bundle's words and writes them into its bundle.json.

A confidence is the probability that a word is correct. It is fitted on speech with transcripts on which the acoustic
model was not trained; on its training data the confidences would be far too high. If the last training used all data,
recognize with a bundle of an earlier training that held out some speakers, and write the result into the last bundle
(--into).

Each mode is fitted separately, and written when it is done: after an interruption, continue with the other --modes. A
mode that was not fitted uses the calibration of the best one. Streams and recordings share a calibration.

The JSON object on stdout has the number of words, the share of correct words, and the normalized cross-entropy on this
speech (0: no better than the share of correct words; 1: perfect), also with each speaker's confidences fitted on the
other speakers.

Words are compared as written. If the transcripts write case or punctuation and the bundle does not, or the other way
round, give --ignore-case and --ignore-punctuation: otherwise, right words count as wrong ones.

example:
  asr calibrate checkpoints/librispeech --cuts data/librispeech/train-clean-5.jsonl.gz --speakers 1988 2902"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="the bundle to recognize with")
    parser.add_argument("--cuts", required=True, help="manifest of 'asr prepare', with transcripts")
    parser.add_argument("--speakers", nargs="+", help="only these speakers' utterances (default: all)")
    parser.add_argument("--modes", nargs="+", help="only these modes (default: all modes of the bundle)")
    parser.add_argument("--into", help="the bundle to write the calibration into (default: the one to recognize with)")
    add_comparison_options(parser)


@dataclass(frozen=True, eq=False)
class _Recorder(Calibration):
    """Replaces a calibration and records the features that it is called with."""

    seen: list[NDArray[np.float64]] = field(default_factory=list)

    def probabilities(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        self.seen.append(features)
        return np.zeros(len(features))


@dataclass(frozen=True)
class _Marked:
    """The recognized words of one utterance: features (K, E), and which are correct (K,)."""

    speaker: str
    features: NDArray[np.float64]
    is_right: NDArray[np.bool_]


def run(args: argparse.Namespace) -> int:
    from asr.datasets.cuts import cut_text, cut_waveform, read_cuts

    folder = fetched_bundle_folder(args.bundle)
    into = fetched_bundle_folder(args.into) if args.into else folder
    bundle = Bundle.load(folder)
    # What would fail after the recognition, which may take hours, fails now.
    modes = [chosen_mode(bundle, mode) for mode in args.modes] if args.modes else available_modes(bundle)
    read_manifest(into)
    require_writable(into / FILE_NAME)
    cuts = [cut for cut in read_cuts([args.cuts]) if not args.speakers or _speaker(cut) in args.speakers]
    if not cuts:
        whose = f" of the speakers {', '.join(args.speakers)}" if args.speakers else ""
        raise AsrError(f"{args.cuts}: there are no utterances{whose}.")
    ignored = args.ignore_case, args.ignore_punctuation
    references = [compared_text(cut_text(cut), *ignored).split() for cut in cuts]
    _warn_of_spelling(args.cuts, references, bundle.graph.vocabulary.ordinary, ignored)
    parts = PartReader()
    speech = [
        (_speaker(cut), reference, cut_waveform(cut, bundle.sampling_rate, parts))
        for cut, reference in zip(cuts, references, strict=True)
    ]
    report: dict[str, Any] = {}
    try:
        for mode in modes:
            # No word may be dropped, so that each has its features.
            resources = ResourceOptions(max_segment_seconds=1e6)
            recognizer = Recognizer(bundle, mode, options={"max_token_seconds": None}, resources=resources)
            print(f"{mode}: {len(speech)} utterances", file=sys.stderr)
            marked = _recognized(mode, recognizer, speech, ignored)
            try:
                fitted = _fit(marked)
            except AsrError as error:
                raise AsrError(f"{args.cuts}: in the mode {mode}, {error}") from error
            _write(into, mode, fitted)
            report[mode] = _report(marked, fitted)
    finally:  # also after an interruption or an error in a later mode
        if report:
            print_record(report, sys.stdout)
        left = [mode for mode in modes if mode not in report]
        if report and left:
            print(
                f"asr: the calibrations of {', '.join(report)} are written; to continue, give --modes "
                f"{' '.join(left)}.",
                file=sys.stderr,
            )
    return 0


def _write(folder: Path, mode: str, fitted: Calibration) -> None:
    manifest = read_manifest(folder)  # another process may have written other modes meanwhile
    manifest.setdefault("confidence", {})[mode] = fitted.as_dict()
    write_manifest(folder, manifest)


def _speaker(cut: Any) -> str:
    return next((str(one.speaker) for one in cut.supervisions if one.speaker), "")


def _warn_of_spelling(
    where: str, references: Iterable[Sequence[str]], vocabulary: Iterable[str], ignored: tuple[bool, bool]
) -> None:
    """Tells if many words of the transcripts are in the vocabulary only without case and punctuation."""
    if all(ignored):
        return
    plain = [compared_text(" ".join(reference), True, True).split() for reference in references]
    known, plain_known = ({compared_text(word, *way) for word in vocabulary} for way in (ignored, (True, True)))
    num_words = sum(map(len, references))
    num_known = sum(word in known for reference in references for word in reference)
    num_plain = sum(word in plain_known for reference in plain for word in reference)
    if num_plain > num_known + _MISSPELLED * num_words:
        print(
            f"asr: {where}: {num_known} of {num_words} words are in the bundle's vocabulary, and {num_plain} without "
            "case and punctuation; give --ignore-case and --ignore-punctuation.",
            file=sys.stderr,
        )


_Speech = Sequence[tuple[str, Sequence[str], Tensor]]


def _recognized(mode: str, recognizer: Recognizer, speech: _Speech, ignored: tuple[bool, bool]) -> list[_Marked]:
    recorder = _Recorder(0.0, {}, {})
    recognizer.calibration = recorder
    recognizer.prepare()
    recorder.seen.clear()  # preparing recognizes synthetic input
    marked: list[_Marked] = []
    with progress_bar(mode) as on_progress:
        for speaker, reference, waveform in speech:
            on_progress(len(marked), len(speech))
            (result,) = recognizer([waveform], recognizer.sampling_rate)
            features = np.concatenate([np.zeros((0, len(FEATURES))), *recorder.seen])
            recorder.seen.clear()
            are_right = _are_right(reference, [word.text for word in result.words], ignored)
            marked.append(_Marked(speaker, features, are_right))
        on_progress(len(marked), len(speech))
    return marked


def _are_right(reference: Sequence[str], words: Sequence[str], ignored: tuple[bool, bool]) -> NDArray[np.bool_]:
    """Which of K words are right, (K,): those of which all parts are, where punctuation separates parts."""
    parts = [(index, part) for index, word in enumerate(words) for part in compared_text(word, *ignored).split()]
    pairs = align(reference, [part for _, part in parts])
    is_right = np.ones(len(words), dtype=bool)
    for (index, _), (said, heard) in zip(parts, (pair for pair in pairs if pair[1] != GAP), strict=True):
        is_right[index] &= said == heard
    return is_right


def _joined(marked: Iterable[_Marked]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    parts = list(marked)
    features = [np.zeros((0, len(FEATURES))), *(one.features for one in parts)]
    return np.concatenate(features), np.concatenate([np.zeros(0, dtype=bool), *(one.is_right for one in parts)])


def _fit(marked: Sequence[_Marked]) -> Calibration:
    return fit_calibration(*_joined(marked))


def _report(marked: Sequence[_Marked], fitted: Calibration) -> dict[str, Any]:
    features, is_right = _joined(marked)
    own = fitted.probabilities(features)
    report: dict[str, Any] = {
        "words": len(is_right),
        "right": round(float(is_right.mean()), 4),
        "nce": normalized_cross_entropy(list(zip(is_right.tolist(), own.tolist(), strict=True))),
    }
    with contextlib.suppress(AsrError):  # too few words of the others
        report["nce_of_other_speakers"] = _of_other_speakers(marked)
    return report


def _of_other_speakers(marked: Sequence[_Marked]) -> float | None:
    """The normalized cross-entropy with each speaker's confidences fitted on the others."""
    marked_words: list[tuple[bool, float | None]] = []
    for speaker in sorted({one.speaker for one in marked}):
        fitted = _fit([one for one in marked if one.speaker != speaker])
        features, right = _joined(one for one in marked if one.speaker == speaker)
        marked_words += zip(right.tolist(), fitted.probabilities(features).tolist(), strict=True)
    return normalized_cross_entropy(marked_words)
