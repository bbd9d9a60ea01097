"""`asr report`: one HTML page about one or several evaluations of a test set."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from asr.cli.printing import print_record
from asr.errors import AsrError
from asr.reports.evaluation import Evaluation
from asr.reports.page import PageOptions, make_page
from asr.serialization import open_atomic, output_path, require_writable
from asr.text.documents import is_whole_number

HELP = """Makes one HTML page about evaluations of a test set, from the files of 'asr evaluate --details NAME.json'.

The page needs only a browser: no network, and no other file unless --link-audio is given. It shows the error rates of
all systems, errors against time, time by stage, confidences, caches, confusions, pictures of a few utterances and, for
the first systems, every utterance with its alignment and audio. Utterances can be sorted and filtered, also with the
keyboard.

The page contains the audio of the utterances with the most errors, about 4 kB per second. It is read from the files
that were recognized; missing files are skipped with a notice. One JSON object with sizes goes to stdout.

examples:
  asr report an4.json
  asr report gru.json ngram.json --output report.html --title "GRU against n-gram"
  asr report an4.json --audio all --max-megabytes 200
  asr report an4.json --audio 0 --link-audio"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "evaluations", nargs="+", metavar="FILE", help="files *.json of 'asr evaluate --details', the main one first"
    )
    parser.add_argument(
        "--output", type=output_path, metavar="FILE", help="the page (default: the first file's name with .html)"
    )
    parser.add_argument("--title", help="heading of the page (default: the name of the first file)")
    parser.add_argument(
        "--audio",
        default="50",
        metavar="N",
        help="number of utterances whose audio is in the page, or all (default: %(default)s)",
    )
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=40.0,
        metavar="MB",
        help="maximum size of this audio (default: %(default)g)",
    )
    parser.add_argument(
        "--link-audio",
        action="store_true",
        help="write the audio of the other utterances to a folder next to the page, NAME.audio",
    )
    parser.add_argument(
        "--compare",
        type=int,
        default=3,
        metavar="N",
        help="show the transcripts of the first N systems (default: %(default)s)",
    )
    parser.add_argument(
        "--pictures",
        type=int,
        default=3,
        metavar="N",
        help="draw N utterances: spectrogram, words, lattice (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page."""
    options = _options(args)
    output = args.output or Path(args.evaluations[0]).with_suffix(".html")
    require_writable(output, inputs=args.evaluations)
    evaluations = _with_distinct_names([Evaluation.load(path) for path in args.evaluations], args.evaluations)
    folder = output.with_name(f"{output.stem}.audio") if args.link_audio else None
    title = args.title or evaluations[0].name
    page = make_page(evaluations, replace(options, title=title, clip_folder=folder))
    content = page.html.encode("utf-8", "backslashreplace")
    with open_atomic(output) as file:
        file.write(content)
    clips = page.clips
    if clips.problem:
        print(f"asr: some utterances have no audio in the report, the first because: {clips.problem}", file=sys.stderr)
    summary = {
        "output": str(output),
        "bytes": len(content),
        "systems": len(evaluations),
        "utterances": len(evaluations[0].utterances),
        "audio_embedded": len(clips.embedded),
        "audio_bytes": clips.num_bytes,
        "audio_linked": len(clips.linked),
    }
    print_record(summary, sys.stdout)
    return 0


def _options(args: argparse.Namespace) -> PageOptions:
    if args.audio != "all" and not is_whole_number(args.audio):
        raise AsrError(f"--audio {args.audio}: give a number of utterances, or all.")
    if not 0 <= args.max_megabytes < float("inf"):
        raise AsrError(f"--max-megabytes {args.max_megabytes}: give a number of MB, 0 or more.")
    if args.compare < 1 or args.pictures < 0:
        raise AsrError("--compare must be 1 or more, and --pictures 0 or more.")
    return PageOptions(
        num_embedded=sys.maxsize if args.audio == "all" else int(args.audio),
        max_bytes=int(args.max_megabytes * 1e6),
        num_compared=args.compare,
        num_pictures=args.pictures,
    )


def _with_distinct_names(evaluations: list[Evaluation], paths: list[str]) -> list[Evaluation]:
    """Systems are named after their files, or after their whole paths if several files have one name."""
    times = Counter(one.name for one in evaluations)
    return [
        replace(one, name=path) if times[one.name] > 1 else one for one, path in zip(evaluations, paths, strict=True)
    ]
