"""`asr transcribe`: audio files and folders to words."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import track

from asr.cli.lattices import LatticeWriter, add_lattice_arguments
from asr.cli.recognizer_options import add_recognizer_arguments, recognizer_from
from asr.cli.stream import STANDARD_INPUT, add_stream_arguments, run_streams
from asr.cli.transcription import Outcome, audio_files, transcribe
from asr.errors import AsrError
from asr.evaluation.cache_report import format_cache
from asr.evaluation.timing import StageTimes

NAME = "transcribe"
HELP = """Turns audio files into words: WAV, FLAC, MP3, OGG, ... of any sampling rate, mono or stereo, of any length.

A file that cannot be read is reported and the others are done; the exit code is then 1. With --output, files that
are in the output already are skipped, so that an interrupted run goes on where it stopped.

With --stream, words are told while the audio still comes, from a file or from standard input. The acoustic model then
hears a little less of what follows, so that the words can differ from those of the whole recording; figures and the
Python interface: recipes/an4/STREAMING.md.

examples:
  asr transcribe talk.mp3
  asr transcribe recordings/ --jsonl --output words.jsonl
  asr transcribe talk.wav --ngram-only --statistics
  asr transcribe recordings/ --lattices lattices/ --lattice-format kaldi --jsonl
  arecord -f S16_LE -r 16000 -t raw | asr transcribe --stream --raw-rate 16000 --jsonl -"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("audio", nargs="+", help="audio files, or folders of them")
    parser.add_argument("--jsonl", action="store_true", help="one JSON object a file, with word times and scores")
    parser.add_argument("--output", help="append JSON Lines to this file, and skip the files that it has already")
    parser.add_argument("--statistics", action="store_true", help="times of each stage and cache counts, on stderr")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    add_lattice_arguments(parser)
    add_stream_arguments(parser)
    add_recognizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.stream and args.lattices:
        raise AsrError("--lattices and --stream exclude each other; transcribe the recording afterwards.")
    if args.stream:
        return _run_streams(args)
    if STANDARD_INPUT in args.audio:
        raise AsrError("standard input (-) is read with --stream only.")
    files = audio_files(args.audio)
    done = _already_done(Path(args.output)) if args.output else set()
    todo = [path for path in files if str(path) not in done]
    if len(todo) < len(files):
        print(f"{len(files) - len(todo)} of {len(files)} files are in {args.output} already.", file=sys.stderr)
    if not todo:
        return 0
    recognizer = recognizer_from(args)
    recognizer.keep_lattices = args.lattices is not None
    lattices = LatticeWriter(args.lattices, args.lattice_format, recognizer) if args.lattices is not None else None
    outcomes = transcribe(recognizer, todo)
    console = Console(stderr=True)
    if not args.no_progress and console.is_terminal:
        outcomes = iter(track(outcomes, "transcribing", total=len(todo), console=console))
    failures: list[Outcome] = []
    times, cache = StageTimes(), {}
    with _opened(args.output) as stream:
        for outcome in outcomes:
            _write(outcome, stream, as_json=args.jsonl or args.output is not None)
            if outcome.result is None:
                failures.append(outcome)
                print(f"asr: {outcome.error}", file=sys.stderr)
            else:
                if lattices is not None:
                    lattices.write(outcome.audio, outcome.result)
                times.add(outcome.result.times)
                cache = outcome.result.cache
    if args.statistics:
        print(f"{recognizer.first_pass_name} first pass, mode {recognizer.mode}: {times.format()}", file=sys.stderr)
        print("\n".join(format_cache(cache)), file=sys.stderr)
    if failures:
        print(f"{len(todo) - len(failures)} of {len(todo)} files transcribed, {len(failures)} failed.", file=sys.stderr)
    return 1 if failures else 0


def _run_streams(args: argparse.Namespace) -> int:
    named = [name for name in args.audio if name != STANDARD_INPUT]
    names = [*map(str, audio_files(named)), *(name for name in args.audio if name == STANDARD_INPUT)]
    with _opened(args.output) as output:
        return 1 if run_streams(args, recognizer_from(args), names, output) else 0


def _write(outcome: Outcome, stream: TextIO, as_json: bool) -> None:
    if as_json:
        record: dict[str, Any] = {"audio": str(outcome.audio)}
        record.update(outcome.result.as_dict() if outcome.result is not None else {"error": outcome.error})
        print(json.dumps(record, ensure_ascii=False), file=stream, flush=True)
    elif outcome.result is not None:
        print(f"{outcome.audio}: {outcome.result.text}", file=stream, flush=True)


def _opened(path: str | None) -> AbstractContextManager[TextIO]:
    if path is None:
        return nullcontext(sys.stdout)
    try:
        return Path(path).open("a", encoding="utf-8")
    except OSError as error:
        raise AsrError(f"{path}: the output cannot be written ({error.strerror}).") from error


def _already_done(path: Path) -> set[str]:
    """The audio files that the output has words for; a line that an interruption left unfinished is taken away."""
    if not path.is_file():
        return set()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        path.write_text("".join(lines), encoding="utf-8")
    done = set()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if "error" not in record:
                done.add(record["audio"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise AsrError(f"{path}:{number}: this is no output of 'asr transcribe'; name another --output.") from error
    return done
