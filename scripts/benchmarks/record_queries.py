"""Records the queries that decoding sends to the recurrent language model; `scripts/bench query` replays them.

    scripts/bench record-queries talk.mp3 folder/ --output streams.npz.xz
    scripts/bench record-queries ... --lm-fusion search --search-beam 12 --skip-beam inf

A recording contains word ids and no audio: one stream for each segment of at most --max-segment-seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from asr.audio.io import read_audio
from asr.audio.segments import split_at_pauses
from asr.bundle import Bundle
from asr.cli.options import add_recognizer_arguments, recognizer_from
from asr.cli.recordings import audio_files
from asr.decoding.build import build_decoder
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import Difference, mapped_to
from asr.recognizer import Recognizer
from asr.results import StageTimes
from scripts.benchmarks.inputs import LIBRISPEECH_BUNDLE, argument_parser, cache_folder, with_progress
from scripts.benchmarks.query_stream import QueryRecorder, QueryStream, load_streams, save_streams
from scripts.benchmarks.speech import recordings

_NUM_UTTERANCES = 4


def record(recognizer: Recognizer, segments: Iterable[Tensor]) -> list[QueryStream]:
    """The queries for segments, each decoded separately with exact scores.

    Args:
        recognizer: of a mode with a recurrent model, whose decoder and options count.
        segments: (L,) samples of each.
    """
    bundle = recognizer.bundle
    assert bundle.rnn_lm is not None and bundle.small_ngram is not None
    recorder = QueryRecorder(CachedRNNLM(bundle.rnn_lm.network))  # type: ignore[arg-type]
    lm = Difference(mapped_to(recorder, bundle.small_ngram.vocabulary), bundle.small_ngram)
    choice = recognizer.decoder_name, recognizer.lm_fusion, bundle.graph, recognizer.options
    decoder = build_decoder(*choice, keep_lattices=False)
    for samples in segments:
        with torch.no_grad():
            decoder.decode(*recognizer.log_prob([samples], StageTimes()), lm)
    return recorder.streams()


def spoken_streams(corpora: Path | None, skip_beam: float | None) -> list[QueryStream] | None:
    """The queries of the bundle `librispeech`, language model inside the search, for some utterances of dev-clean-2.

    They are recorded once and kept in the cache folder.

    Args:
        corpora: folder of the corpora.
        skip_beam: beam of the words that are queried; None for all words, infinity included.

    Returns:
        None if the corpus is missing.
    """
    name, speech = recordings(corpora, _NUM_UTTERANCES)
    if name != "dev-clean-2":
        return None
    bundle = Bundle.load(LIBRISPEECH_BUNDLE)
    skip = "all" if skip_beam is None else f"skip_{skip_beam:g}"
    path = cache_folder() / f"queries_{bundle.fingerprint[:12]}_{skip}.npz.xz"
    if not path.is_file():
        options = {"skip_beam": math.inf if skip_beam is None else skip_beam}
        recognizer = Recognizer(bundle, "rnn", decoder="token-passing", lm_fusion="search", options=options)
        waveforms = (read_audio(one.path, bundle.sampling_rate) for one in with_progress(speech, "recording queries"))
        path.parent.mkdir(parents=True, exist_ok=True)
        save_streams(path, record(recognizer, waveforms))
    return load_streams(path)


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("record-queries", __doc__)
    parser.add_argument("audio", nargs="+", help="files or folders")
    parser.add_argument("--output", type=Path, required=True, help="file to write, .npz.xz")
    parser.add_argument("--every", type=int, default=1, help="take every N-th file (default: %(default)s)")
    add_recognizer_arguments(parser)
    args = parser.parse_args(argv)
    recognizer = recognizer_from(args, "rnn")
    seconds = 0.0

    def segments() -> Iterator[Tensor]:
        nonlocal seconds
        for path in audio_files(args.audio)[:: args.every]:
            waveform = read_audio(path, recognizer.sampling_rate)
            seconds += len(waveform) / recognizer.sampling_rate
            for begin, end in split_at_pauses(waveform, recognizer.sampling_rate, args.max_segment_seconds):
                yield waveform[begin:end]

    streams = record(recognizer, segments())
    save_streams(args.output, streams)
    num_queries = sum(stream.query.numel() for stream in streams)
    print(
        f"{args.output}: {len(streams)} streams, {num_queries:,} queries of {seconds:.1f} s of audio, "
        f"{args.output.stat().st_size:,} bytes"
    )
    return 0
