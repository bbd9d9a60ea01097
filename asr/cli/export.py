"""`asr export`: a bundle's acoustic model as an ONNX or TorchScript file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asr.bundle import Bundle, local_bundle_folder
from asr.cli.options import fetched_bundle_folder, with_flags
from asr.cli.printing import print_record
from asr.errors import AsrError
from asr.models.export import FORMATS, StreamChunks, export_acoustic_model
from asr.options import flag_of
from asr.serialization import output_path, require_writable
from asr.streaming import StreamingOptions

_CHUNK_OPTIONS = ("chunk_seconds", "right_seconds", "memory_seconds")
HELP = """Writes the acoustic model of a bundle to an ONNX or TorchScript file for other programs.

The network reads filterbanks (N, T, F) and numbers of frames (N,), normalizes each utterance, and returns
log-probabilities of the tokens and numbers of frames. The file's metadata contain tokens and filterbank settings, so
that 'asr transcribe --acoustic-model onnx:FILE' needs no other file. Decoding graph and language models stay in the
bundle.

With --streaming the network has states: it reads one stream in chunks, normalizes features as they arrive, and returns
what a stream with the bundle has while it runs. (The bundle evaluates utterances again when they have ended, and makes
fewer errors.) Use it with 'asr transcribe --stream --acoustic-model onnx:FILE' (or torchscript:FILE). This works only
for TDNN-F networks.

examples:
  asr export librispeech --format onnx --output librispeech.onnx
  asr transcribe talk.flac --bundle librispeech --acoustic-model onnx:librispeech.onnx
  asr export librispeech --format onnx --streaming --output streaming.onnx
  asr transcribe talk.flac --stream --bundle librispeech --acoustic-model onnx:streaming.onnx"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", nargs="?", help="folder of a trained bundle, or its name in checkpoints/")
    parser.add_argument("--format", choices=FORMATS, required=True, help="kind of file")
    parser.add_argument("--streaming", action="store_true", help="a network with states, for streams")
    for name in _CHUNK_OPTIONS:
        default = getattr(StreamingOptions, name)
        help_text = f"as in 'asr transcribe --stream' (default: {default})"
        parser.add_argument(flag_of(name), type=float, metavar="SECONDS", help=help_text)
    parser.add_argument("--output", type=output_path, required=True, metavar="FILE", help="file to write")


def run(args: argparse.Namespace) -> int:
    output: Path = args.output
    require_writable(output, inputs=[local_bundle_folder(args.bundle)])
    given = {name: getattr(args, name) for name in _CHUNK_OPTIONS if getattr(args, name) is not None}
    if given and not args.streaming:
        raise AsrError(f"{flag_of(next(iter(given)))} is for streams; add --streaming.")
    bundle = Bundle.load(fetched_bundle_folder(args.bundle))
    chunks = None
    if args.streaming:
        try:
            sizes = StreamingOptions(**given).window_sizes(bundle.frame_seconds)
        except AsrError as error:
            raise with_flags(error, _CHUNK_OPTIONS) from error
        chunks = StreamChunks(sizes.chunk, sizes.right, sizes.memory, sizes.min_feature_std)
    export_acoustic_model(bundle, output, args.format, streaming=chunks)
    report = {
        "output": str(output),
        "format": args.format,
        "tokens": len(bundle.graph.tokens),
        "megabytes": round(output.stat().st_size / 1e6, 1),
    }
    print_record(report, sys.stdout)
    return 0
