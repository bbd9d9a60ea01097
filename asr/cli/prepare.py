"""`asr prepare`: reads a corpus and writes lhotse manifests."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from asr.cli.options import add_num_jobs, progress_bar, require_num_jobs
from asr.cli.printing import print_record
from asr.datasets.corpora import CORPORA
from asr.datasets.prepare import PartReport, copy_lexicon, prepare_part
from asr.serialization import output_path

HELP = """\
Reads a corpus folder and writes manifests of lhotse cuts for training and testing.

Three files are written for each part:
  CORPUS_PART.jsonl.gz     the utterances, as lhotse cuts
  CORPUS_PART.txt          their transcripts, one per line, for language models
  CORPUS_PART.report.json  number and duration of utterances, and what was skipped and why

Each audio file is decoded once, so that damaged files are found now; they are skipped and reported. Finished parts are
not prepared again unless their files have changed: after an interruption, repeat the command. If the corpus has a
lexicon, it is copied as well. One JSON object for each part goes to stdout.

examples:
  asr prepare an4 --corpus ~/an4 --output data
  asr prepare librispeech --corpus ~/LibriSpeech --output data --parts train-clean-100 dev-clean test-clean
  asr prepare kaldi --corpus data/train --output data       wav.scp and text, optionally segments and utt2spk
  asr prepare csv --corpus clips.tsv --output data          a table with columns such as path and sentence
  asr prepare nemo --corpus manifest.json --output data
  asr prepare lhotse --corpus cuts.jsonl.gz --output data
  asr prepare mini-librispeech --corpus ~/corpora --output data --download
"""


_MAX_WARNINGS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus_name", metavar="NAME", choices=sorted(CORPORA), help=", ".join(sorted(CORPORA)))
    parser.add_argument(
        "--corpus", type=Path, required=True, metavar="DIR", help="folder of the corpus, or a list file"
    )
    parser.add_argument("--output", type=output_path, required=True, metavar="DIR", help="folder for the manifests")
    parser.add_argument(
        "--parts", nargs="+", default=[], metavar="PART", help="parts to prepare (default: all that exist)"
    )
    parser.add_argument("--download", action="store_true", help="download missing parts into --corpus first")
    add_num_jobs(parser, "decode audio")
    parser.add_argument(
        "--redo", action="store_true", help="prepare finished parts again, also those of another --corpus"
    )


def run(args: argparse.Namespace) -> int:
    """Prepares the parts one by one.

    Returns:
        0, or 1 if something was skipped.
    """
    corpus = CORPORA[args.corpus_name]
    if args.download:
        corpus.download(args.corpus, args.parts)
    parts = args.parts or corpus.parts_in(args.corpus)
    require_num_jobs(args.num_jobs)
    any_skipped = False
    for part in parts:
        with progress_bar(f"{corpus.name} {part}") as on_progress:
            report = prepare_part(
                corpus, args.corpus, part, args.output, num_jobs=args.num_jobs, redo=args.redo, on_progress=on_progress
            )
        _warn(report)
        print_record(asdict(report), sys.stdout)
        any_skipped = any_skipped or bool(report.skipped)
    copy_lexicon(corpus, args.corpus, args.output)
    return int(any_skipped)


def _warn(report: PartReport) -> None:
    if not report.skipped:
        return
    print(f"{report.corpus} {report.part}: {len(report.skipped)} skipped:", file=sys.stderr)
    for skipped in report.skipped[:_MAX_WARNINGS]:
        print(f"  {skipped.item}: {skipped.reason}", file=sys.stderr)
    if len(report.skipped) > _MAX_WARNINGS:
        print(f"  and {len(report.skipped) - _MAX_WARNINGS} more, all in the report", file=sys.stderr)
