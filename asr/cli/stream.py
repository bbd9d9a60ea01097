"""`asr transcribe --stream`: words while the audio is still arriving."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from asr.audio.io import file_pieces
from asr.audio.pcm import RAW_FORMATS, PcmFormat, byte_pieces
from asr.cli.compile import compiling_notice
from asr.cli.options import errors_with_flags, given_options, listed, refuse_without, renamed, with_flags
from asr.cli.output import ResultsFile
from asr.cli.printing import print_line, print_record, shown
from asr.ctc.streams import ExternalStreams
from asr.decoding.settings import WHOLE_RECORDINGS, ResourceOptions
from asr.errors import AsrError
from asr.fusion.recognizer import FusionRecognizer
from asr.options import flag_of, options_of
from asr.recognizer import Recognizer
from asr.results import StreamResult, format_cache
from asr.streaming import PARTIAL_POLICIES, StreamingOptions, StreamingRecognizer

STANDARD_INPUT = "-"
_MAX_CHANNELS = 1024
_SECONDS = {
    "chunk_seconds": "audio between two results",
    "left_seconds": "audio before a chunk that the acoustic model uses",
    "right_seconds": "audio after a chunk that the acoustic model waits for: less is faster, more is more accurate",
    "silence_after_words": "a pause of this length ends an utterance",
    "longest_utterance": "maximum length of an utterance",
}


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only `--stream` uses."""
    group = parser.add_argument_group(
        "streaming",
        "The latency of words is up to chunk-seconds + right-seconds, plus computing time.",
    )
    group.add_argument(
        "--stream",
        action="store_true",
        help="recognize while reading; AUDIO may be - for standard input (WAV, or raw samples with --raw-rate). "
        "Prints one line for each utterance, and with --jsonl one for each partial result",
    )
    group.add_argument(
        "--raw-rate", type=int, metavar="HZ", help="standard input consists of samples without a header, at this rate"
    )
    _add_raw_arguments(group)
    group.add_argument(
        "--streams",
        type=int,
        default=1,
        metavar="NUMBER",
        help="number of files to stream at the same time (default: 1)",
    )
    add_window_arguments(group)


def add_window_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the options of `window_options`."""
    defaults = StreamingOptions()
    for name, text in _SECONDS.items():
        group.add_argument(
            flag_of(name),
            type=float,
            default=getattr(defaults, name),
            metavar="SECONDS",
            help=f"{text} (default: {getattr(defaults, name):g})",
        )
    group.add_argument(
        "--partials",
        type=renamed("--partials", {"settled": "stable"}),
        choices=[*PARTIAL_POLICIES],
        default=defaults.partial_policy,
        help=f"which words of an unfinished utterance are shown; {listed(PARTIAL_POLICIES)} (default: "
        f"{defaults.partial_policy})",
    )


def _add_raw_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the options that only `--raw-rate` uses."""
    parser.add_argument(
        "--raw-format", choices=[*RAW_FORMATS], default="s16le", help="format of raw samples (default: s16le)"
    )
    parser.add_argument(
        "--raw-channels",
        type=int,
        default=1,
        metavar="NUMBER",
        help="number of channels of raw samples, interleaved (default: 1)",
    )


def streaming_options(args: argparse.Namespace) -> StreamingOptions:
    """The options that the arguments describe.

    Raises:
        AsrError: an option is out of range, or has no effect with streams.
    """
    if args.raw_rate is None:
        refuse_without("--raw-rate", _add_raw_arguments, args)
    if args.transducer is not None:
        for name in ("chunk_seconds", "left_seconds", "right_seconds"):
            if getattr(args, name) != getattr(StreamingOptions, name):
                raise AsrError(
                    f"{flag_of(name)} has no effect with --transducer, which has chunks of its own; leave it out."
                )
    resources = options_of(ResourceOptions)
    for name in given_options(args, resources):
        if resources[name].needs == WHOLE_RECORDINGS:
            raise AsrError(f"{resources[name].flag} has no effect with --stream; leave out one of them.")
    return window_options(args)


def window_options(args: argparse.Namespace) -> StreamingOptions:
    """The options that the arguments of windows and results, and those of a recognizer, describe.

    Raises:
        AsrError: an option is out of range, or two of them exclude each other.
    """
    given = given_options(args, options_of(ResourceOptions))
    if args.partials == "stable" and args.lm_fusion in ("lattice", "chunks"):
        raise AsrError(
            f"--lm-fusion {args.lm_fusion} may revise all words of an utterance, but --partials stable only shows "
            "words that cannot change; leave out one of them."
        )
    try:
        return StreamingOptions(
            **{name: getattr(args, name) for name in _SECONDS},
            partial_policy=args.partials,
            decoder="k2" if args.decoder == "k2" else "token-passing",
            cache_bytes=given.get("cache_bytes", StreamingOptions.cache_bytes),
        )
    except AsrError as error:
        raise with_flags(error, _SECONDS) from error


class _EndOfInput:
    """Ctrl-C or SIGTERM during live audio ends the input, so that its last utterance is completed.

    Another signal ends the command at once.

    Attributes:
        requested_by: the number of the signal, or None if there was none.
    """

    def __init__(self) -> None:
        self.requested_by: int | None = None
        self._is_reading = False

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Handles the signals within the block, unless the process ignores them or this is not the main thread."""
        usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        usual = {number: handler for number, handler in usual.items() if handler not in (None, signal.SIG_IGN)}
        if threading.current_thread() is not threading.main_thread():
            usual = {}

        def handle(number: int, frame: FrameType | None) -> None:
            if self.requested_by is not None:
                signal.signal(number, usual[signal.Signals(number)])
                signal.raise_signal(number)
            self.requested_by = number
            if self._is_reading:
                raise KeyboardInterrupt

        for number in usual:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block that the signals interrupt, as it may wait for long."""
        self._is_reading = True
        try:
            yield
        finally:
            self._is_reading = False

    def next(self, pieces: Iterator[Tensor]) -> Tensor | None:
        """The next piece; None at the end of the input."""
        try:
            with self.reading():
                return None if self.requested_by is not None else next(pieces, None)
        except KeyboardInterrupt:
            return None


def run_streams(
    args: argparse.Namespace,
    recognizer: Recognizer | FusionRecognizer,
    options: StreamingOptions,
    names: list[str],
    output: ResultsFile | None,
) -> int:
    """Recognizes inputs as streams; returns the number of those with an error.

    Raises:
        AsrError: an option is out of range, or standard input is given more than once.
        KeyboardInterrupt: Ctrl-C was pressed; the utterances of live audio have been completed.
        SystemExit: the same after SIGTERM, with the code 143.
    """
    for name in ("streams", "raw_channels", "raw_rate"):
        if (number := getattr(args, name)) is not None and number < 1:
            raise AsrError(f"{flag_of(name)} {number}: give 1 or more.")
    if args.raw_channels > _MAX_CHANNELS:
        raise AsrError(f"--raw-channels {args.raw_channels}: give at most {_MAX_CHANNELS}.")
    if args.raw_rate is not None and STANDARD_INPUT not in args.audio:
        raise AsrError("--raw-rate is for standard input; give - as AUDIO, or leave out the option.")
    if names.count(STANDARD_INPUT) > 1:
        raise AsrError("standard input (-) can be given only once; leave out the others.")
    raw = None
    if args.raw_rate is not None:
        raw = PcmFormat(args.raw_rate, RAW_FORMATS[args.raw_format], args.raw_channels)
    streaming: StreamingRecognizer | ExternalStreams
    with compiling_notice(), errors_with_flags(args):
        if isinstance(recognizer, Recognizer):
            streaming = StreamingRecognizer(recognizer, options)
            description = f"mode {recognizer.mode}, decoder {options.decoder}"
        else:
            decoder = recognizer.decoder
            streaming, description = ExternalStreams(decoder.network, decoder, options, True), decoder.network.name
            recognizer.prepare()
    end = _EndOfInput()
    with end.by_signals() if names == [STANDARD_INPUT] else nullcontext():
        num_failed = _run(args, streaming, names, output, raw, end)
    if args.statistics:
        print(f"{description}: {streaming.times.format()}", file=sys.stderr)
        for line in format_cache({} if streaming.engine is None else streaming.engine.statistics().as_dict()):
            print(line, file=sys.stderr)
    if end.requested_by == signal.SIGINT:
        raise KeyboardInterrupt
    if end.requested_by is not None:
        raise SystemExit(128 + end.requested_by)
    return num_failed


def _run(
    args: argparse.Namespace,
    streaming: StreamingRecognizer | ExternalStreams,
    names: list[str],
    output: ResultsFile | None,
    raw: PcmFormat | None,
    end: _EndOfInput,
) -> int:
    waiting, pieces_of, name_of = deque(names), dict[int, Iterator[Tensor]](), dict[int, str]()
    failed, ignored = set[str](), set[int]()
    chunk_seconds = args.chunk_seconds

    def report(name: str, error: AsrError) -> None:
        failed.add(name)
        message = f"{name}: {str(error).removeprefix(f'{name}: ')}"
        print(shown(f"asr: {message}"), file=sys.stderr)
        _write_record({"audio": name, "error": message}, output, args.jsonl)

    while waiting or pieces_of or streaming.is_ready:
        while waiting and len(pieces_of) < args.streams:
            name = waiting.popleft()
            try:
                if name == STANDARD_INPUT:
                    with end.reading():
                        rate, pieces = byte_pieces(sys.stdin.buffer, chunk_seconds / 4, raw)
                else:
                    rate, pieces = file_pieces(name, chunk_seconds)
                stream = streaming.open(rate)
                pieces_of[stream], name_of[stream] = pieces, name
            except AsrError as error:
                report(name, error)
        for stream, pieces in list(pieces_of.items()):
            try:
                piece = end.next(pieces)
            except AsrError as error:
                report(name_of[stream], error)
                piece = None
            if piece is None:
                streaming.close(stream)
                del pieces_of[stream]
                continue
            try:
                streaming.push(stream, piece)
                ignored.discard(stream)
            except AsrError as error:
                if stream not in ignored:  # the first of wrong pieces in a row
                    report(name_of[stream], error)
                ignored.add(stream)
                streaming.push(stream, torch.zeros(len(piece)))  # later words keep their times
        try:
            results = streaming.step()
        except AsrError as error:  # it has ended all open streams
            for name in name_of.values():
                report(name, error)
            pieces_of.clear()
            name_of.clear()
            continue
        for result in results:
            _write(result, name_of[result.stream], output, args.jsonl)
            if result.reason == "end":
                del name_of[result.stream]
    return len(failed)


def _write(result: StreamResult, name: str, output: ResultsFile | None, as_json: bool) -> None:
    if output is None and not as_json:
        if result.is_final and result.words:
            print_line(shown(f"{name} {result.begin:.2f}-{result.end:.2f}: {result.text}"), sys.stdout)
        return
    _write_record({"audio": name, **result.as_dict()}, output, as_json)


def _write_record(record: Mapping[str, Any], output: ResultsFile | None, as_json: bool) -> None:
    if output is not None:
        output.add(record)
    elif as_json:
        print_record(record, sys.stdout)
