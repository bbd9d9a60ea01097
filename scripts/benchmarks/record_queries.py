"""Records the queries that decoding sends to the recurrent language model; `scripts/bench query` replays them.

    scripts/bench record-queries talk.mp3 folder/ --output streams.npz.xz
    scripts/bench record-queries ... --first-pass torch-search --search-beam 12 --skip-beam 8

A recording contains word ids and no audio: one stream for each segment of at most --max-segment-seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from asr.audio.io import read_audio
from asr.audio.segments import split_at_pauses
from asr.cli.options import add_recognizer_arguments, recognizer_from
from asr.cli.recordings import audio_files
from asr.decoding.build import build_decoder
from asr.errors import AsrError
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import Difference, RemappedLM
from asr.lm.interface import LanguageModel
from asr.results import StageTimes
from scripts.benchmarks.inputs import argument_parser
from scripts.benchmarks.query_stream import QueryRecorder, save_streams


def record(args: argparse.Namespace) -> int:
    recognizer = recognizer_from(args, "rnn")
    if args.repeat_frames < 1:
        raise AsrError(f"--repeat-frames is {args.repeat_frames}; give 1 (frames unchanged) or more.")
    am_scale = recognizer.options.am_scale / args.repeat_frames
    options = replace(recognizer.options, skip_beam=args.skip_beam, am_scale=am_scale)
    bundle = recognizer.bundle
    assert bundle.rnn_lm is not None and bundle.small_ngram is not None
    recorder = QueryRecorder(CachedRNNLM(bundle.rnn_lm.network))  # type: ignore[arg-type]
    large: LanguageModel = recorder
    if recorder.vocabulary != bundle.small_ngram.vocabulary:
        large = RemappedLM(recorder, bundle.small_ngram.vocabulary)
    lm = Difference(large, bundle.small_ngram)
    decoder = build_decoder(recognizer.decoder_name, recognizer.lm_fusion, bundle.graph, options, keep_lattices=False)
    seconds = 0.0
    for path in audio_files(args.audio)[:: args.every]:
        waveform = read_audio(path, recognizer.sampling_rate)
        for begin, end in split_at_pauses(waveform, recognizer.sampling_rate, args.max_segment_seconds):
            with torch.no_grad():
                log_prob, num_frames = recognizer.log_prob([waveform[begin:end]], StageTimes())
                log_prob = log_prob.repeat_interleave(args.repeat_frames, dim=1)
                decoder.decode(log_prob, num_frames * args.repeat_frames, lm)
        seconds += len(waveform) / recognizer.sampling_rate
    streams = recorder.streams()
    save_streams(args.output, streams)
    num_queries = sum(stream.query.numel() for stream in streams)
    print(
        f"{args.output}: {len(streams)} streams, {num_queries:,} queries of {seconds:.1f} s of audio, "
        f"{args.output.stat().st_size:,} bytes"
    )
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("record-queries", __doc__)
    parser.add_argument("audio", nargs="+", help="files or folders")
    parser.add_argument("--output", type=Path, required=True, help="file to write, .npz.xz")
    parser.add_argument("--every", type=int, default=1, help="take every N-th file (default: %(default)s)")
    parser.add_argument("--skip-beam", type=float, help="query only words within this beam (default: all)")
    parser.add_argument(
        "--repeat-frames",
        type=int,
        default=1,
        help="repeat each frame N times with 1/N of its weight, as if frames were shorter (default: %(default)s)",
    )
    add_recognizer_arguments(parser)
    return record(parser.parse_args(argv))
