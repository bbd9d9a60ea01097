"""Recognizes recordings with the n-gram model alone and in the bundle's default mode, and shows the cost of each.

Run by scripts/demo; for regular use there is `asr transcribe`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from asr.audio.io import read_audio
from asr.bundle import Bundle, bundle_folder
from asr.cli.compile import compiling_notice
from asr.cli.options import device_from
from asr.cli.recordings import audio_files
from asr.cli.transcribe import transcribe
from asr.decoding.build import available_modes
from asr.decoding.settings import MODES
from asr.metrics import read_transcripts, score_transcripts
from asr.recognizer import Recognizer
from asr.results import StageTimes, format_cache, later_cache
from scripts.benchmarks.inputs import argument_parser


def main(argv: Sequence[str]) -> int:
    parser = argument_parser("modes", __doc__)
    parser.add_argument("audio", nargs="+", help="files or folders")
    parser.add_argument("--bundle", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--reference", help="lines 'name words ...', where name is a file name without suffix")
    args = parser.parse_args(argv)
    files = list(map(str, audio_files(args.audio)))
    references = read_transcripts(args.reference) if args.reference else {}
    begin = time.perf_counter()
    folder = bundle_folder(args.bundle)
    bundle = Bundle.load(folder)
    device = device_from("auto")
    print(f"Bundle {bundle.name} loaded in {time.perf_counter() - begin:.1f} s; {len(files)} files, on {device}.")
    if args.reference:
        print("The clips are synthetic (flite), see scripts/demo_clips/README.md.")
    failed = 0
    best = available_modes(bundle)[0]
    for mode in dict.fromkeys(("ngram", best)):
        recognizer = Recognizer(bundle, mode=mode).to(device)
        with compiling_notice():
            recognizer.prepare()
        print(f"\n== {MODES[mode]} ({recognizer.decoder_name})")
        times, cache, hypotheses, failed = StageTimes(), {}, {}, 0
        for outcome in transcribe(recognizer, files, read_audio):
            if outcome.result is None:
                failed += 1
                print(f"{Path(outcome.name).name}: FAILED: {outcome.error}")
                continue
            print(f"{Path(outcome.name).name}: {outcome.result.text}")
            hypotheses[Path(outcome.name).stem] = tuple(outcome.result.text.split())
            times.add(outcome.result.times)
            cache = later_cache(cache, outcome.result.cache)
        print(f"time: {times.format()}")
        print("\n".join(format_cache(cache)), end="\n" if cache else "")
        known = {name: words for name, words in references.items() if name in hypotheses}
        if known:
            counts = score_transcripts(known, {name: hypotheses[name] for name in known}).total_words
            print(f"word errors: {counts.num_errors} of {counts.num_ref} ({counts.rate:.1%})")
    return 1 if failed else 0
