"""The cost of the large language model: word error rate against time, in one pass and over the finished lattice.

    scripts/bench onepass --quick     # under a minute; the last line is one JSON object
    scripts/bench onepass             # all beams, all systems, batches and streams; --plot FILE.svg draws the curves
    scripts/bench onepass --systems gru "gru, one pass" --every 3

Recognizes real speech: LibriSpeech dev-clean-2 if the corpora are found, else the checkout's clips. The acoustic model
runs once; times are CPU seconds of this process for search and language model, one thread, cold caches, compiled loops.
There are only two comparisons: all systems with the same beams, and for each system the least time in which any of the
beams reaches a word error rate. A bundle's card names the utterances on which its beams were tuned.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.decoding.build import available_modes
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.results import StageTimes
from asr.streaming import StreamingRecognizer
from scripts.benchmarks import figures, mutants
from scripts.benchmarks.decode_workload import Workload
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE, argument_parser, default_corpora
from scripts.benchmarks.nbest import measure_n_best, middle_sized
from scripts.benchmarks.report import table
from scripts.benchmarks.speech import recordings
from scripts.benchmarks.systems import (
    BATCH_SECONDS,
    BEAMS,
    SECOND_PASSES,
    SYSTEMS,
    Beams,
    Run,
    System,
    batches_of,
    run,
    warm_up,
)

_PART = "dev-clean-2"
_QUICK_UTTERANCES = 12
_SHORT_BATCH_SECONDS = 8.0
_NUM_STREAMS = 16
_QUICK_BEAMS = (1, 2, 3)
_REPETITIONS = 2  # of which the faster one counts


@dataclass(frozen=True)
class Speech:
    """Recordings with their references.

    Args:
        name: where they are from.
        waveforms: samples (L,) each, at the bundle's rate.
        references: words of each.
        rate: samples a second.
    """

    name: str
    waveforms: list[Tensor]
    references: list[Sequence[str]]
    rate: int

    @property
    def seconds(self) -> float:
        return sum(map(len, self.waveforms)) / self.rate


@dataclass(frozen=True)
class Scored:
    """The speech before and after the acoustic model, and the CPU seconds that took."""

    speech: Speech
    workload: Workload
    seconds: float


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("onepass", __doc__)
    parser.add_argument("--quick", action="store_true", help="few utterances and beams, and print only the JSON object")
    parser.add_argument("--bundle", type=Path, default=LIBRISPEECH_BUNDLE)
    parser.add_argument("--rnn-lm", help="as of 'asr transcribe'; the systems called gru then use it")
    parser.add_argument("--corpora", type=Path, default=default_corpora(), help="(default: %(default)s)")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=[_PART],
        help="folders of LibriSpeech, such as train-clean-5/1988 (default: %(default)s)",
    )
    parser.add_argument("--every", type=int, default=3, help="take every n-th utterance (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="index of the first utterance (default: %(default)s)")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--beams", type=int, nargs="+", default=list(range(len(BEAMS))), help="rows of BEAMS, from 0")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="a decoding option of all systems in which it has an effect",
    )
    parser.add_argument("--second-beams", type=int, help="the row of BEAMS for second passes (default: the last)")
    parser.add_argument("--only-beams", action="store_true", help="only the table of equal beams")
    parser.add_argument("--plot", type=Path, help="write the curves to this file (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.quick and (args.option or args.only_beams or args.plot):
        parser.error("--quick takes neither --option nor --only-beams nor --plot.")
    torch.set_num_threads(1)
    bundle = Bundle.load(args.bundle).with_language_models(rnn_lm=args.rnn_lm)
    if bundle.rnn_lm is None or bundle.small_ngram is None:
        raise AsrError(f"{args.bundle}: the bundle has no recurrent language model; name one that has one.")
    speech = read_speech(args.corpora, args.parts, slice(args.first, None, args.every), bundle.sampling_rate)
    with torch.no_grad():
        if args.quick:
            speech = _some(speech, _QUICK_UTTERANCES)
            print(json.dumps(quick(bundle, score(bundle, speech))))
        else:
            report(bundle, score(bundle, speech), args)
    return 0


def read_speech(corpora: Path | None, parts: Sequence[str], chosen: slice, rate: int) -> Speech:
    """Some utterances of folders of LibriSpeech, or the checkout's clips where there are no such folders.

    Raises:
        AsrError: one of the folders is missing.
    """
    found = dict(recordings(corpora, part=part) for part in parts)
    missing = [part for part in parts if part not in found]
    if missing and parts != [_PART]:
        raise AsrError(f"{missing[0]}: there is no such folder; give --parts of LibriSpeech that are in --corpora.")
    speech = sorted((one for some in found.values() for one in some), key=lambda one: one.path.stem)[chosen]
    waveforms = [read_audio(one.path, rate) for one in speech]
    return Speech(" ".join(found), waveforms, [one.words for one in speech], rate)


def _some(speech: Speech, number: int) -> Speech:
    """This number of utterances, spread evenly."""
    step = max(1, len(speech.waveforms) // number)
    return Speech(speech.name, speech.waveforms[::step][:number], speech.references[::step][:number], speech.rate)


def score(bundle: Bundle, speech: Speech) -> Scored:
    """Runs features and acoustic model once over all of the speech, in batches of similar length."""
    recognizer = Recognizer(bundle, mode="ngram")
    recognizer.log_prob(speech.waveforms[:1], StageTimes())
    found: dict[int, Tensor] = {}
    seconds = math.inf
    for _ in range(_REPETITIONS):
        begin = time.process_time()
        for batch in batches_of(speech.waveforms, BATCH_SECONDS * speech.rate):
            log_prob, num_frames = recognizer.log_prob([speech.waveforms[i] for i in batch], StageTimes())
            found.update((i, row[:num]) for i, row, num in zip(batch, log_prob, num_frames.tolist(), strict=True))
        seconds = min(seconds, time.process_time() - begin)
    frames = [found[i] for i in range(len(speech.waveforms))]
    return Scored(speech, Workload(speech.name, frames, speech.references, speech.seconds), seconds)


def least_seconds(runs: Sequence[Run], wer: float) -> float:
    """The least time in which any of the beams reaches a word error rate; infinite if none does."""
    return min((one.seconds for one in runs if one.wer <= wer + 1e-9), default=math.inf)


def at_equal_error(one: Sequence[Run], other: Sequence[Run]) -> float:
    """The time of one system divided by another's at the lowest word error rate that both reach."""
    wer = max(min(run.wer for run in runs) for runs in (one, other))
    return least_seconds(one, wer) / least_seconds(other, wer)


def stream_seconds(bundle: Bundle, speech: Speech) -> tuple[float, dict[str, float]]:
    """CPU seconds of the default mode in 16 concurrent streams, everything included; seconds of each stage."""
    recognizer = Recognizer(bundle, decoder="token-passing")
    streaming = StreamingRecognizer(recognizer)
    waiting = list(enumerate(speech.waveforms))
    live: dict[int, Iterator[Tensor]] = {}
    piece = int(streaming.options.chunk_seconds * speech.rate)
    begin = time.process_time()
    while waiting or live or streaming.is_ready:
        while waiting and len(live) < _NUM_STREAMS:
            live[streaming.open()] = iter(waiting.pop(0)[1].split(piece))
        for stream, pieces in list(live.items()):
            samples = next(pieces, None)
            if samples is None:
                streaming.close(stream)
                del live[stream]
            else:
                streaming.push(stream, samples)
        streaming.step()
    return time.process_time() - begin, streaming.times.stages


def quick(bundle: Bundle, scored: Scored) -> dict[str, Any]:
    """The figures of the JSON line."""
    default = System("auto", "chunks")
    gru, chunks, one_pass = SYSTEMS["gru"], SYSTEMS["gru, chunks"], SYSTEMS["gru, one pass"]
    warm_up(bundle, scored.workload, [SYSTEMS["trigram"], default, gru, chunks, one_pass])
    knee = Recognizer(bundle, decoder="token-passing").options
    context_beam = math.inf if knee.context_beam is None else knee.context_beam
    beams = Beams(knee.search_beam, knee.max_active_states, knee.output_beam, context_beam)

    def fastest(system: System, *arguments: Any) -> Run:
        found = (run(bundle, scored.workload, system, *arguments) for _ in range(_REPETITIONS))
        return min(found, key=lambda one: one.seconds)

    own, trigram, network = fastest(default), fastest(SYSTEMS["trigram"], beams), fastest(gru, beams)
    systems = gru, chunks, one_pass
    lattice, *one_passes = ([fastest(one, BEAMS[row]) for row in _QUICK_BEAMS] for one in systems)
    n_best = measure_n_best(bundle, middle_sized(scored.workload.frames), 40)
    seconds = scored.speech.seconds
    return {
        "bundle": bundle.name,
        "speech": scored.speech.name,
        "num_utterances": len(scored.workload.frames),
        "audio_seconds": round(seconds, 1),
        "default_mode": available_modes(bundle)[0],
        "default_beams": str(beams),
        "rnnlm_over_ngram_same_beams": network.seconds / trigram.seconds,
        "wer_ngram": run(bundle, scored.workload, SYSTEMS["trigram"]).wer,
        "wer_default": own.wer,
        "wer_widest": run(bundle, scored.workload, default, BEAMS[-2]).wer,
        "default_rtf_search_and_lm": own.seconds / seconds,
        "default_rtf_acoustic_model": scored.seconds / seconds,
        "stream_rtf": stream_seconds(bundle, scored.speech)[0] / seconds,
        "one_pass_over_second_pass_time_at_equal_wer": min(at_equal_error(one, lattice) for one in one_passes),
        "each_frame_over_second_pass_time_at_equal_wer": at_equal_error(one_passes[-1], lattice),
        "default_answered_without_hidden": own.counts.answered_without_hidden if own.counts else None,
        "default_bytes_per_history": own.counts.bytes_per_context if own.counts else None,
        "nbest_1000_over_rescoring": n_best["nbest_extraction_seconds"] / n_best["nbest_seconds"][1],
        **mutants.recorded(),
    }


def report(bundle: Bundle, scored: Scored, args: argparse.Namespace) -> None:
    """Prints all tables, each row as soon as it is measured."""
    systems = {name: SYSTEMS[name] for name in args.systems if _has(bundle, SYSTEMS[name])}
    more = dict(_option(text) for text in args.option)
    warm_up(bundle, scored.workload, list(systems.values()))
    seconds = scored.speech.seconds
    num_utts = len(scored.workload.frames)
    print(f"{scored.speech.name}: {num_utts} utterances, {seconds:.0f} s of speech; the default mode is")
    print(f"{available_modes(bundle)[0]}; the acoustic model takes {scored.seconds / seconds:.4f} of real time.")
    curves: dict[str, list[Run]] = {name: [] for name in systems}
    rows: list[dict[str, Any]] = []
    for beams in [BEAMS[row] for row in args.beams]:
        row: dict[str, Any] = {"search beam / active / output / context beam": str(beams)}
        for name, system in systems.items():
            curves[name].append(run(bundle, scored.workload, system, beams, more))
            row[name] = _cell(curves[name][-1])
        rows.append(row)
    table("The same beams in each row: CPU s of search and language model, word error rate", rows)
    _network_work(curves, [BEAMS[row] for row in args.beams], sum(map(len, scored.speech.references)))
    if args.only_beams:
        return
    _own_beams(bundle, scored, systems, more)
    _second_passes(bundle, scored, BEAMS[args.beams[-1] if args.second_beams is None else args.second_beams], more)
    _equal_errors(curves, seconds)
    if args.plot is not None:
        points = [
            {"system": name, "of real time": one.seconds / seconds, "WER": one.wer}
            for name, runs in curves.items()
            for one in runs
        ]
        figures.error_over_time(points, scored.speech.name, args.plot)


def _has(bundle: Bundle, system: System) -> bool:
    return system.mode in available_modes(bundle)


def _option(text: str) -> tuple[str, float | int]:
    name, _, number = text.partition("=")
    try:
        return name, int(number) if number.lstrip("-").isdigit() else float(number)
    except ValueError as error:
        raise AsrError(f"--option {text}: give NAME=NUMBER.") from error


def _cell(one: Run) -> str:
    return f"{one.seconds:.2f} s, {one.wer:.2f} %"


def _network_work(curves: dict[str, list[Run]], beams: Sequence[Beams], num_words: int) -> None:
    """The network's work, which explains why systems with it differ in time."""
    rows = []
    for place, own in enumerate(beams):
        row: dict[str, Any] = {"search beam / active / output / context beam": str(own)}
        for name, runs in curves.items():
            counts = runs[place].counts
            if counts is not None:
                row[name] = f"{counts.num_queries / num_words:.0f} / {counts.num_hidden_rows / num_words:.1f}"
        rows.append(row)
    table("For each spoken word: queries to the network / runs of its hidden layer", rows)


def _own_beams(bundle: Bundle, scored: Scored, systems: dict[str, System], more: dict[str, Any]) -> None:
    """Each system with the beams that the bundle gives its mode, in long and in short batches, and in streams."""
    rows = []
    for name, system in systems.items():
        own = run(bundle, scored.workload, system, None, more)
        short = run(bundle, scored.workload, system, None, more, _SHORT_BATCH_SECONDS)
        counts = own.counts
        rows.append(
            {
                "the bundle's beams": name,
                "WER": f"{own.wer:.2f} %",
                "95 % interval": f"{own.interval[0]:.1f} to {own.interval[1]:.1f}",
                f"CPU s, batches of {BATCH_SECONDS:g} s": own.seconds,
                f"of {_SHORT_BATCH_SECONDS:g} s": short.seconds,
                "of real time": own.seconds / scored.speech.seconds,
                "without hidden layer": f"{counts.answered_without_hidden:.1%}" if counts else "",
                "bytes per history": round(counts.bytes_per_context) if counts else "",
            }
        )
    table("The bundle's own beams", rows)
    total, stages = stream_seconds(bundle, scored.speech)
    parts = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items())
    share = total / scored.speech.seconds
    print(f"\n{_NUM_STREAMS} concurrent streams: {total:.2f} s ({parts}), {share:.4f} of real time.")


def _second_passes(bundle: Bundle, scored: Scored, beams: Beams, more: dict[str, Any]) -> None:
    """Second passes of every kind with the same beams, one pass for comparison."""
    systems = {"gru, one pass": SYSTEMS["gru, one pass"], "gru": SYSTEMS["gru"], **SECOND_PASSES}
    systems = {
        name: one for name, one in systems.items() if _has(bundle, one) and one.second_mode in available_modes(bundle)
    }
    warm_up(bundle, scored.workload, list(systems.values()))
    rows = []
    for name, system in systems.items():
        one = run(bundle, scored.workload, system, beams, more)
        low, high = one.interval
        rows.append(
            {"pass": name, "WER": f"{one.wer:.2f} %", "95 % interval": f"{low:.1f} to {high:.1f}", "CPU s": one.seconds}
        )
    table(f"Second passes, beams {beams}", rows)


def _equal_errors(curves: dict[str, list[Run]], seconds: float) -> None:
    """The least time in which each system reaches the error rates that any of them has, the best ones first."""
    best = sorted({round(min(run.wer for run in runs), 2) for runs in curves.values()})
    rows = []
    for wer in best:
        needed = {name: least_seconds(runs, wer + 0.005) for name, runs in curves.items()}
        shown = {name: f"{s:.2f} s ({s / seconds:.4f})" if s < math.inf else "" for name, s in needed.items()}
        rows.append({"WER at most": f"{wer:.2f} %", **shown})
    table("The least time to reach an error rate, any of the beams: CPU s (of real time)", rows)
