"""`asr export`: a bundle's acoustic model as an ONNX or TorchScript file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from asr.bundle import Bundle, bundle_folder
from asr.models.export import FORMATS, export_acoustic_model
from asr.serialization import require_writable

NAME = "export"


HELP = """Writes the acoustic model of a bundle to a file that other programs run: ONNX or TorchScript.

The network reads filterbanks (N, T, F) and their frames (N,), normalizes each utterance, and gives log-probabilities of
the tokens and their frames. Tokens and the settings of the filterbank are in the file's metadata, so that
'asr transcribe --acoustic-model onnx:FILE' needs nothing beside it. Decoding graph and language models stay in the
bundle.

examples:
  asr export librispeech --format onnx --output librispeech.onnx
  asr transcribe talk.flac --bundle librispeech --acoustic-model onnx:librispeech.onnx"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", nargs="?", help="folder of a trained bundle, or its name in checkpoints/")
    parser.add_argument("--format", choices=FORMATS, required=True, help="kind of file")
    parser.add_argument("--output", required=True, metavar="FILE", help="the file")


def run(args: argparse.Namespace) -> int:
    output = Path(args.output)
    require_writable(output)
    bundle = Bundle.load(bundle_folder(args.bundle))
    export_acoustic_model(bundle, output, args.format)
    report = {
        "output": str(output),
        "format": args.format,
        "tokens": len(bundle.graph.tokens),
        "megabytes": round(output.stat().st_size / 1e6, 1),
    }
    print(json.dumps(report))
    return 0
