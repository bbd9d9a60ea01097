"""`asr transcribe`: turns audio files and folders into words. A file that cannot be read does not stop the others."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from asr.audio.io import AudioFile
from asr.cli.compile import compiling_notice
from asr.cli.external import (
    add_external_arguments,
    any_recognizer_from,
    check_external_options,
    describe_any,
    inputs_of_any,
    maker_of_any,
)
from asr.cli.file_names import read_names, with_names
from asr.cli.options import (
    add_recognizer_arguments,
    add_speaker_options,
    refuse_without,
    speaker_flag,
)
from asr.cli.output import (
    STANDARD_OUTPUT,
    TRANSCRIPTS,
    LatticeWriter,
    ResultsFile,
    TranscriptFolder,
    add_lattice_arguments,
    existing,
    lattice_files,
    with_lattices,
)
from asr.cli.printing import print_line, print_record, shown
from asr.cli.recordings import LIST_SUFFIXES, Recordings, Shard, audio_files, recordings
from asr.cli.stream import STANDARD_INPUT, add_stream_arguments, run_streams, streaming_options
from asr.errors import AsrError, in_one_line
from asr.metrics import stream_goes_on
from asr.models.adaptation import Speaker
from asr.recognizer import Recognizer
from asr.results import RecognitionResult, StageTimes, format_cache, later_cache
from asr.serialization import output_path, require_writable
from asr.transcripts import FORMATS, SUFFIXES, Transcript, format_transcript, parse_formats, unique_names

if TYPE_CHECKING:
    from asr.fusion.recognizer import FusionRecognizer

# This many seconds of audio suffice to learn a voice.
_LEARNING_SECONDS = {"statistics": 60.0, "transform": 600.0}

LEARNED = {"": "", "statistics": "speaker-statistics", "transform": "adapted"}
"""What the results of recordings are called whose speaker was learned, by the way of learning."""


@dataclass(frozen=True)
class Outcome:
    """The outcome for one recording: either a result or an error.

    Args:
        name: the recording's file or id.
        result: the recognition result.
        error: why there is none.
    """

    name: str
    result: RecognitionResult | None = None
    error: str = ""


def transcribe(
    recognizer: Recognizer | FusionRecognizer,
    names: Sequence[str],
    read: Callable[[str, int], Tensor | AudioFile],
    batch_seconds: float | None = None,
    nbest: int = 1,
    speaker: Speaker | None = None,
    session_of: Callable[[str], Hashable] | None = None,
) -> Iterator[Outcome]:
    """Recognizes recordings in order, several at a time, and yields each result as soon as it is available.

    Args:
        recognizer: the recognizer.
        names: names of the recordings.
        read: returns the samples (L,) of a recording by name and sampling rate, or the file of a long one; its
            `AsrError` becomes the outcome.
        batch_seconds: how much audio is read for each worker before it is recognized together; None means 60 seconds on
            a CPU, and the size of a batch on a GPU.
        nbest: as in `Recognizer`.
        speaker: as in `Recognizer`.
        session_of: with `carry_history`, the session of each recording; those of one follow one another in `names`. If
            None, each recording is one.
    """
    of_speaker: dict[str, Any] = {} if speaker is None else {"speaker": speaker}
    recognize = partial(recognizer.__call__, nbest=nbest, **of_speaker)
    if batch_seconds is None:
        batch_seconds = recognizer.batch_seconds if recognizer.device.type == "cuda" else 60.0
    # The stages overlap only if there are several batches for each worker.
    batch_seconds *= 1 + 4 * recognizer.resources.num_workers
    # With a carried history, a batch has one segment of each session, and those of long files are recognized together.
    longest = recognizer.resources.max_segment_seconds if recognizer.carries_history else math.inf
    waiting: list[tuple[str, Tensor | AudioFile | str]] = []
    num_samples = 0.0
    for name in names:
        is_next = session_of is not None and bool(waiting) and session_of(name) == session_of(waiting[-1][0])
        if num_samples >= batch_seconds * recognizer.sampling_rate and not is_next:
            yield from _recognized(recognize, waiting, session_of)
            waiting, num_samples = [], 0.0
        recording = _read(read, name, recognizer.sampling_rate)
        if isinstance(recording, str):
            waiting.append((name, recording))
            continue
        if not isinstance(recording, Tensor) and waiting and not recognizer.carries_history:
            # Short recordings do not wait for a long one.
            yield from _recognized(recognize, waiting, session_of)
            waiting, num_samples = [], 0.0
        waiting.append((name, recording))
        if not is_next:
            size = len(recording) if isinstance(recording, Tensor) else math.inf
            num_samples += min(size, longest * recognizer.sampling_rate)
    yield from _recognized(recognize, waiting, session_of)


def _read(read: Callable[[str, int], Tensor | AudioFile], name: str, sampling_rate: int) -> Tensor | AudioFile | str:
    """What `read` returns, or why it does not."""
    try:
        return read(name, sampling_rate)
    except AsrError as error:
        return str(error)
    except Exception as error:  # one odd file must not end the run
        return f"{name}: it cannot be read ({in_one_line(error)})."


def learn_speaker(
    recognizer: Recognizer, how: str, names: Iterable[str], read: Callable[[str, int], Tensor | AudioFile]
) -> Speaker | None:
    """Learns a speaker's voice from the beginning of the speaker's recordings; unreadable ones are skipped.

    Args:
        recognizer: the recognizer.
        how: `statistics` (`Recognizer.speaker_statistics`), `transform` (`Recognizer.speaker_transform`), or empty.
        names: names of the recordings.
        read: as for `transcribe`.
    """
    if not how:
        return None
    waveforms: list[Tensor] = []
    room = int(_LEARNING_SECONDS[how] * recognizer.sampling_rate)
    for name in names:
        if room <= 0:
            break
        with contextlib.suppress(Exception):  # recognition reports it
            waveforms.append(_beginning(read(name, recognizer.sampling_rate), room))
            room -= len(waveforms[-1])
    waveforms = [each for each in waveforms if len(each)]
    if how == "statistics":
        return recognizer.speaker_statistics(waveforms)
    with Console(stderr=True).status("learning the speaker's voice"):
        return recognizer.speaker_transform(waveforms)


def _beginning(recording: Tensor | AudioFile, num_samples: int) -> Tensor:
    if isinstance(recording, Tensor):
        return recording[:num_samples]
    pieces = list[Tensor]()
    for piece in recording:
        pieces.append(piece)
        if sum(map(len, pieces)) >= num_samples:
            break
    return torch.cat(pieces)[:num_samples]


_Recognize = Callable[..., list[RecognitionResult]]


def _recognized(
    recognize: _Recognize,
    waiting: Sequence[tuple[str, Tensor | AudioFile | str]],
    session_of: Callable[[str], Hashable] | None,
) -> Iterator[Outcome]:
    recordings = [content for _, content in waiting if not isinstance(content, str)]
    sessions = None
    if session_of is not None:
        sessions = [session_of(name) for name, content in waiting if not isinstance(content, str)]
    results = iter(_all_or_each(recognize, recordings, sessions))
    for name, content in waiting:
        if isinstance(content, str):
            yield Outcome(name, error=content)
            continue
        result = next(results)
        if isinstance(result, AsrError):
            # Errors about a file already name it.
            yield Outcome(name, error=str(result) if str(result).startswith(f"{name}: ") else f"{name}: {result}")
        else:
            yield Outcome(name, result)


def _all_or_each(
    recognize: _Recognize, recordings: list[Tensor | AudioFile], sessions: Sequence[Hashable] | None = None
) -> list[RecognitionResult | AsrError]:
    """All together; if that fails, one at a time and each on its own, so that only the failing ones are lost."""
    if not recordings:
        return []
    try:
        return [*(recognize(recordings) if sessions is None else recognize(recordings, sessions=sessions))]
    except AsrError as error:
        if len(recordings) == 1:
            return [error]
    except Exception as error:  # such as exhausted memory, also on a GPU
        if len(recordings) == 1:
            return [AsrError(f"it cannot be recognized ({in_one_line(error)}).")]
    return [result for recording in recordings for result in _all_or_each(recognize, [recording])]


HELP = """Turns audio files into words: WAV, FLAC, MP3, OGG, ... of any sampling rate and length, mono or stereo.

Recordings are audio files, folders of them, Kaldi's wav.scp (with segments in the same folder, if any), or a manifest
of lhotse cuts (.jsonl or .jsonl.gz). m4a, mp4, webm and similar need FFmpeg's libraries: pip install
'onepass-asr[media]'.

examples:
  asr transcribe talk.mp3
  asr transcribe recordings/ --output words.jsonl
  asr transcribe talk.mp4 --output-format srt > talk.srt
  asr transcribe talk.wav --acoustic-model torchaudio:WAV2VEC2_ASR_BASE_960H --ngram 4gram.arpa
  asr transcribe talk.wav --attention-model transformers:openai/whisper-small --language en --hot-words names.txt
  arecord -f S16_LE -r 16000 -t raw | asr transcribe --stream --raw-rate 16000 -"""

DETAILS = """\
If a file cannot be read, the error is reported, the other files are processed, and the exit code is 1. With --output or
--output-dir, finished recordings are skipped, so that an interrupted run continues where it stopped. With --lattices,
those that lack a lattice are recognized again. --shard I/N processes every N-th recording, for job arrays: give each
job its own --output; the jobs may share folders (--output-dir, --lattices).

A JSON line has these fields:
  audio      the path as given, or the id in wav.scp or a manifest, then also as 'id'
  text       the words
  duration   the duration of the audio in seconds
  words      each with 'word', 'start' and 'end' in seconds and, if the bundle is calibrated or with --lattices,
             --nbest, --transducer or --attention-model, 'confidence' from 0 to 1
  scores     of the words' path, natural logarithms: 'am', 'graph' and 'lm' unweighted; 'total' is their weighted sum
             plus the word insertion penalties
  nbest      with --nbest, the most probable distinct sentences, best first, each with 'text' and 'scores'; with
             --mbr-scale, the text itself may be another one than the first; if it is several sentences in a row,
             'sentence_ends' has the number of words before each end within the text
  complete   false if no complete sentence survived the beam
  seconds    computing time in seconds, by stage
  notes      if there is reason for doubt: 'unsure' for low confidences, 'noise' if words were left out as noise
  made_by    with --output, the bundle, the mode, and a number for all options that affect the words
A file that failed has 'error' instead of 'text' and all that follows it, except 'made_by'. With --stream a line has
'audio', 'type' (partial or final), 'begin' and 'end' of the utterance in seconds, 'text' and 'words'. A partial result
has 'settled' (the number of words that will no longer change), a final one 'reason' (pause or end), 'complete',
'scores' and perhaps 'notes'.

With --stream, words are output while the audio is still arriving, from a file or from standard input. The acoustic
model then has less right context, so that the words may differ from those of the whole recording. For figures and the
Python interface see docs/streaming.md.

more examples:
  asr transcribe talk.wav --ngram-only --statistics
  asr transcribe talk.wav --nbest 10 --jsonl
  asr transcribe recordings/ --output-format vtt,json --output-dir words/
  asr transcribe data/test/wav.scp --output-format ctm > words.ctm
  asr transcribe recordings/ --shard 3/8 --output words.3.jsonl
  asr transcribe talk.wav --transducer transformers:nvidia/parakeet-tdt-0.6b-v3 --ngram 4gram.arpa
  asr transcribe recordings/ --lattices lattices/ --lattice-format kaldi --jsonl"""

COMMON = (
    *("jsonl", "output", "output_format", "output_dir", "nbest", "stream", "raw_rate", "bundle", "mode"),
    *("acoustic_model", "transducer", "attention_model", "language", "ngram", "rnn_lm", "hot_words"),
    *("hot_word_score", "device", "num_workers", "search_beam", "lm_scale", "word_insertion_penalty"),
)
"""The options that `--help` shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("audio", nargs="+", help="audio files, folders of them, wav.scp, or lhotse cuts")
    parser.add_argument(
        "--jsonl", action="store_true", help="print one JSON object per file, with word times and scores"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="append JSON Lines to this file, and skip audio files that are already in it, with --stream those that "
        "have ended there; -: standard output, as with --jsonl",
    )
    parser.add_argument(
        "--output-format",
        metavar="FORMAT",
        help=f"format of what is printed, or with --output-dir written: {', '.join(FORMATS)}; separate several with "
        f"commas; {'; '.join(f'{name}: {kind.help}' for name, kind in FORMATS.items())}",
    )
    parser.add_argument(
        "--output-dir",
        type=output_path,
        metavar="DIR",
        help="write one file per recording and format to this folder; recordings that have theirs are skipped",
    )
    parser.add_argument(
        "--shard", metavar="I/N", default="1/1", help="process only part I of N of the recordings (default: all)"
    )
    parser.add_argument(
        "--statistics", action="store_true", help="print the times of all stages and cache counts to stderr"
    )
    add_speaker_options(parser, "all recordings are of one speaker")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument(
        "--nbest",
        type=int,
        default=1,
        metavar="N",
        help="output the N best sentences of each file in the JSON field 'nbest'; needs --jsonl or --output (default: "
        "1)",
    )
    add_lattice_arguments(parser)
    add_stream_arguments(parser)
    add_recognizer_arguments(parser)
    add_external_arguments(parser)


def run(args: argparse.Namespace) -> int:
    args.shard = Shard.parse(args.shard)
    if not 1 <= args.nbest < 2**31:
        raise AsrError(f"--nbest {args.nbest}: give 1 or more, below 2^31.")
    if not args.stream:
        refuse_without("--stream", add_stream_arguments, args)
    if args.lattices is None:
        refuse_without("--lattices", add_lattice_arguments, args)
    excluded = {
        "--stream": args.stream and args.attention_model is not None,
        "--lattices": args.lattices is not None,
        speaker_flag(args): args.speaker,
    }
    check_external_options(args, excluded)
    if args.nbest > 1 and args.stream:
        raise AsrError("--nbest and --stream exclude each other; transcribe the recording afterwards.")
    formats = _formats(args)
    if args.nbest > 1 and args.output is None and not {"json", "jsonl"} & set(formats):
        raise AsrError("--nbest needs --jsonl or --output: the further sentences are a JSON field.")
    if args.stream and args.lattices:
        raise AsrError("--lattices and --stream exclude each other; transcribe the recording afterwards.")
    if args.speaker and args.stream:
        raise AsrError(f"{speaker_flag(args)} and --stream exclude each other; transcribe the recording afterwards.")
    if args.output == STANDARD_OUTPUT:
        args.output, args.jsonl = None, True
    if args.stream:
        return _run_streams(args)
    if STANDARD_INPUT in args.audio:
        raise AsrError("standard input (-) needs --stream.")
    found = recordings(args.audio)
    written: list[str] = []
    if args.output_dir is not None:
        own_names = with_names(read_names(args.output_dir / TRANSCRIPTS), found.stem_of()).values()
        written = [f"{name}{SUFFIXES[kind]}" for name in own_names for kind in formats]
    _require_output(args, found.inputs, found.stems, written)
    if args.output_dir is not None:
        return _transcribe(args, found, TranscriptFolder(args.output_dir, formats, found.stem_of()))
    if formats and not FORMATS[formats[0]].is_joinable and len(found.names) > 1:
        raise AsrError(f"--output-format {formats[0]} of several recordings needs a file for each; give --output-dir.")
    if args.output is None:
        return _transcribe(args, found, None)
    with ResultsFile(Path(args.output), "audio") as output:
        return _transcribe(args, found, output)


def _formats(args: argparse.Namespace) -> tuple[str, ...]:
    """The requested formats; `--jsonl` is one."""
    formats = parse_formats(args.output_format) if args.output_format is not None else ()
    if args.output_dir is not None:
        if args.stream:
            raise AsrError("--output-dir and --stream exclude each other; give --output FILE for a file of JSON Lines.")
        if args.output is not None:
            raise AsrError("--output and --output-dir exclude each other; --output-format jsonl gives the same lines.")
        formats = formats or (("jsonl",) if args.jsonl else ("txt",))
    elif len(formats) > 1:
        raise AsrError(f"--output-format {args.output_format}: several formats need --output-dir.")
    if formats and args.stream:
        raise AsrError("--output-format and --stream exclude each other; streams give lines of text, or --jsonl.")
    if formats and args.output is not None:
        raise AsrError("--output always writes JSON Lines; for --output-format give --output-dir, or redirect stdout.")
    if args.jsonl and formats not in ((), ("jsonl",)):
        raise AsrError(f"--jsonl and --output-format {args.output_format} exclude each other; give one of them.")
    if args.jsonl and not formats:
        formats = ("jsonl",)
    return formats


def _require_output(
    args: argparse.Namespace, files: Sequence[str | Path], stems: Sequence[str] = (), written: Sequence[str] = ()
) -> None:
    """Rejects an output that is also an input; `written` are names in the folder of outputs."""
    outputs = [Path(args.output)] if args.output is not None else []
    if args.lattices is not None:
        outputs += existing(args.lattices, lattice_files(args.lattice_format, stems, args.shard))
    if args.output_dir is not None:
        outputs += existing(args.output_dir, written)
    inputs = [*files, *inputs_of_any(args)]
    if args.output is None or not Path(args.output).exists() or Path(args.output).is_file():
        require_writable(*outputs, inputs=inputs)


def _transcribe(args: argparse.Namespace, found: Recordings, output: ResultsFile | TranscriptFolder | None) -> int:
    names = args.shard.of(found.names)
    done = _done(args, names, output) if output is not None else set()
    todo = [name for name in names if name not in done]
    if not todo and not (output is not None and output.done):
        return 0
    if output is None and not any(found.is_listed(name) or Path(name).exists() for name in todo):
        return _report_missing(args, found, todo)
    # A result that lacks what is now requested does not count as done.
    nbest = f"nbest-{args.nbest}" if args.nbest > 1 else ""
    kind = " ".join(filter(None, (LEARNED[args.speaker], nbest, "lattices" if args.lattices is not None else "")))
    recognizer = any_recognizer_from(args)
    if output is not None:
        output.require_maker(maker_of_any(args, recognizer, kind))
    if not todo:
        return 0
    if isinstance(recognizer, Recognizer):
        recognizer.keep_lattices = args.lattices is not None
    with compiling_notice():
        recognizer.prepare()
    with contextlib.ExitStack() as opened:
        lattices, speaker = None, None
        if isinstance(recognizer, Recognizer):
            if args.lattices is not None:
                options = args.lattice_format, recognizer, found.stem_of(), todo, args.lattice_gzip, args.shard
                lattices = opened.enter_context(LatticeWriter(args.lattices, *options))
            speaker = learn_speaker(recognizer, args.speaker, names, found.read)
        outcomes = transcribe(recognizer, todo, found.read, nbest=args.nbest, speaker=speaker)
        console = Console(stderr=True)
        if not args.no_progress and console.is_terminal:
            outcomes = iter(track(outcomes, "transcribing", total=len(todo), console=console))
        write = _writer(args, found, output)
        num_failed, times, cache = 0, StageTimes(), dict[str, int | float]()
        for outcome in outcomes:
            # The lattice is written first: a recording in the output counts as done.
            if outcome.result is not None and lattices is not None:
                lattices.write(outcome.name, outcome.result)
            write(outcome)
            if outcome.result is None:
                num_failed += 1
                print(shown(f"asr: {outcome.error}"), file=sys.stderr)
            else:
                times.add(outcome.result.times)
                cache = later_cache(cache, outcome.result.cache)
    if args.statistics:
        print(f"{describe_any(args, recognizer)}: {times.format()}", file=sys.stderr)
        for line in format_cache(cache):
            print(line, file=sys.stderr)
    if num_failed:
        print(f"{len(todo) - num_failed} of {len(todo)} files transcribed, {num_failed} failed.", file=sys.stderr)
    return 1 if num_failed else 0


def _report_missing(args: argparse.Namespace, found: Recordings, names: Sequence[str]) -> int:
    """Reports files of which none exists, for which no recognizer has to be loaded; returns the exit code."""
    write = _writer(args, found, None)
    for name in names:
        error = str(_read(found.read, name, 16000))
        write(Outcome(name, error=error))
        print(shown(f"asr: {error}"), file=sys.stderr)
    print(f"0 of {len(names)} files transcribed, {len(names)} failed.", file=sys.stderr)
    return 1


def _done(args: argparse.Namespace, names: Sequence[str], output: ResultsFile | TranscriptFolder) -> set[str]:
    """The recordings that are not to be recognized again, since the output and the folder of lattices have them."""
    done = {name for name in names if name in output.done}
    where = args.output if args.output is not None else args.output_dir
    if args.lattices is not None:
        with_words = len(done)
        done = with_lattices(args.lattices, args.lattice_format, args.shard, done)
        if num_lacking := with_words - len(done):
            print(
                f"{num_lacking} of {len(names)} files are in {where}, but not all of their lattices are in "
                f"{args.lattices}; they are recognized again.",
                file=sys.stderr,
            )
    if done:
        print(f"{len(done)} of {len(names)} files are already in {where}.", file=sys.stderr)
    return done


def _run_streams(args: argparse.Namespace) -> int:
    if lists := [name for name in args.audio if name.endswith(LIST_SUFFIXES)]:
        raise AsrError(
            f"{lists[0]}: --stream reads audio files, folders of them and standard input (-), but no lists of "
            "recordings; name the files, or leave out --stream."
        )
    named = audio_files([name for name in args.audio if name != STANDARD_INPUT])
    inputs = [*map(str, named), *(name for name in args.audio if name == STANDARD_INPUT)]
    names = args.shard.of(inputs)
    _require_output(args, named)
    options = streaming_options(args)
    if args.output is None:
        return 1 if run_streams(args, any_recognizer_from(args), options, names, None) else 0
    with ResultsFile(Path(args.output), "audio") as output:
        recognizer = any_recognizer_from(args)
        output.require_maker(maker_of_any(args, recognizer, "stream", options))
        done = {
            name
            for name in names
            if name != STANDARD_INPUT and name in output.done and not stream_goes_on(output.record(name))
        }
        if done:
            print(f"{len(done)} of {len(names)} files are already in {args.output}.", file=sys.stderr)
        damaged = output.failures(done)  # streams with an error have the words before and after it
        for message in damaged:
            print(shown(f"asr: {message}"), file=sys.stderr)
        num_failed = run_streams(args, recognizer, options, [name for name in names if name not in done], output)
        return 1 if damaged or num_failed else 0


def _writer(
    args: argparse.Namespace, found: Recordings, output: ResultsFile | TranscriptFolder | None
) -> Callable[[Outcome], None]:
    """What is done with each outcome; errors are in JSON Lines only."""
    formats = _formats(args)
    if isinstance(output, TranscriptFolder):
        names = output.names
    else:
        names = dict(zip(found.names, unique_names(found.stems), strict=True)) if formats else {}

    def write(outcome: Outcome) -> None:
        record: dict[str, Any] = {"audio": outcome.name}
        record.update(outcome.result.as_dict() if outcome.result is not None else {"error": outcome.error})
        if found.is_listed(outcome.name):
            record["id"] = outcome.name
        if isinstance(output, ResultsFile):
            if outcome.name not in output.done:  # else only its lattices were missing
                output.add(record)
        elif formats == ("jsonl",) and output is None:
            print_record(record, sys.stdout)
        elif outcome.result is None:
            return
        elif not formats:
            print_line(shown(f"{outcome.name}: {outcome.result.text}"), sys.stdout)
        else:
            result = outcome.result
            transcript = Transcript(names[outcome.name], result.words, result.duration, record)
            if isinstance(output, TranscriptFolder):
                output.add(outcome.name, transcript)
            elif document := format_transcript(transcript, formats[0]):
                print_line(document.removesuffix("\n"), sys.stdout)

    return write
