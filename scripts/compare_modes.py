"""Recognizes audio with the n-gram alone and with the bundle's best language model, and shows what each took.

Run by scripts/demo; `asr transcribe` is the command for work.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from parts.command import run

from asr.audio.io import read_audio
from asr.bundle import Bundle
from asr.cli.options import bundle_folder, device_from
from asr.cli.transcribe import audio_files, transcribe
from asr.decoding.build import MODES, available_modes
from asr.errors import AsrError
from asr.metrics import read_transcripts, score_transcripts
from asr.recognizer import Recognizer
from asr.results import StageTimes, format_cache, later_cache


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("audio", nargs="+", help="files or folders")
    parser.add_argument("--bundle", help="folder of a bundle, or its name in checkpoints/")
    parser.add_argument("--reference", help="the right words, 'name words ...', by file name without ending")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    try:
        return compare(args)
    except AsrError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def compare(args: argparse.Namespace) -> int:
    files = audio_files(args.audio)
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
        print(f"\n== {MODES[mode]} ({recognizer.decoder_name})")
        times, cache, hypotheses, failed = StageTimes(), {}, {}, 0
        for outcome in transcribe(recognizer, files, read_audio):
            if outcome.result is None:
                failed += 1
                print(f"{outcome.name.name}: FAILED: {outcome.error}")
                continue
            print(f"{outcome.name.name}: {outcome.result.text}")
            hypotheses[outcome.name.stem] = tuple(outcome.result.text.split())
            times.add(outcome.result.times)
            cache = later_cache(cache, outcome.result.cache)
        print(f"time: {times.format()}")
        print("\n".join(format_cache(cache)), end="\n" if cache else "")
        known = {name: words for name, words in references.items() if name in hypotheses}
        if known:
            counts = score_transcripts(known, {name: hypotheses[name] for name in known}).total_words
            print(f"word errors: {counts.num_errors} of {counts.num_ref} ({counts.rate:.1%})")
    return 1 if failed else 0


if __name__ == "__main__":
    run(main)
