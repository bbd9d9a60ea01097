"""`asr serve`: recognizes live audio and recordings for clients on the network."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from asr.cli.compile import compiling_notice
from asr.cli.options import add_recognizer_arguments, errors_with_flags, recognizer_from, with_flags
from asr.cli.stream import add_window_arguments, window_options
from asr.errors import AsrError
from asr.options import flag_of
from asr.server import Server, ServerOptions
from asr.streaming import StreamingRecognizer

HELP = """\
Recognizes live audio and recordings for clients on the network:

  ws://HOST:PORT/                    live audio, by the protocol of Vosk's server
  POST /v1/audio/transcriptions      a recording, by OpenAI's interface: json, verbose_json, text, srt or vtt

All live connections share one batch and the language model's caches; recordings are recognized one after the other.
Ctrl-C or SIGTERM ends the server; open streams get their last words. There are no passwords and no encryption; unless
--host is given, only programs of this machine can connect.

example:
  asr serve --port 2700
  curl -F file=@talk.mp3 http://127.0.0.1:2700/v1/audio/transcriptions
"""

COMMON = (
    *("host", "port", "max_connections", "idle_seconds", "chunk_seconds", "right_seconds", "silence_after_words"),
    *("bundle", "mode", "acoustic_model", "ngram", "rnn_lm", "hot_words", "hot_word_score", "device"),
)
"""The options that `--help` shows."""

_LIMITS: dict[str, tuple[type, str, str]] = {
    "max_connections": (int, "NUMBER", "streams and recordings at the same time; more are refused"),
    "idle_seconds": (float, "SECONDS", "a connection that sends nothing for this long is ended"),
    "max_upload_mb": (float, "MB", "maximum size of a recording"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=2700, help="0 for any that is free (default: %(default)s)")
    for name, (kind, unit, text) in _LIMITS.items():
        default = getattr(ServerOptions, name)
        parser.add_argument(
            flag_of(name), type=kind, default=default, metavar=unit, help=f"{text} (default: {default:g})"
        )
    add_window_arguments(parser.add_argument_group("live audio"))
    add_recognizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.port < 1 << 16:
        raise AsrError(f"--port {args.port}: give a number from 0 to 65535.")
    try:
        options = ServerOptions(**{name: getattr(args, name) for name in _LIMITS})
    except AsrError as error:
        raise with_flags(error, _LIMITS) from error
    windows = window_options(args)
    recognizer = recognizer_from(args)
    with compiling_notice(), errors_with_flags(args):
        recognizer.prepare()
        server = Server(recognizer, StreamingRecognizer(recognizer, windows), options)
    asyncio.run(_serve(server, args.host, args.port))
    return 0


async def _serve(server: Server, host: str, port: int) -> None:
    """Serves until a signal comes; another one then ends the process at once."""
    async with server.listening(host, port) as addresses:
        print(f"asr: listening on {', '.join(addresses)}", file=sys.stderr, flush=True)
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, is_over.set)
        await is_over.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
