"""`asr bundle`: assembles trained parts into one folder, which `asr transcribe` and torch.hub load."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from asr.audio.fbank import Fbank
from asr.bundle import Bundle, read_rnn_lm
from asr.cli.options import graph_notice
from asr.ctc.bundles import bundle_with_acoustic_model
from asr.decoding.build import OLD_MODES, chosen_mode, recognition_settings
from asr.decoding.settings import MODES
from asr.errors import AsrError
from asr.graph.decoding_graph import DecodingGraph
from asr.graph.denominator_graph import DenominatorGraph
from asr.lm.ngram.io import read_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.models.external.base import KINDS
from asr.serialization import ModelSpec
from asr.text.documents import parse_yaml
from asr.text.lexicon import Lexicon
from asr.text.symbols import TokenTable

NAME = "bundle"


HELP = """Assembles trained parts into one folder: acoustic model, decoding graph and language models.

'asr bundle list', 'asr bundle fetch' and 'asr bundle info' list, fetch and describe existing bundles.

Larger language models need the n-gram model of the graph (--small-ngram), whose scores they replace.

example:
  asr bundle checkpoints/an4 --acoustic-model exp/am/checkpoints/last.ckpt --recipe recipes/an4/am.yaml \\
      --graph graph.safetensors --small-ngram 3gram.arpa --rnn-lm exp/lm/checkpoints/last.ckpt --card card.md
  asr bundle mine --acoustic-model checkpoints/librispeech --graph my-words.safetensors --small-ngram my-words.arpa
  asr bundle theirs --acoustic-model onnx:model.onnx --ngram 3gram.arpa --rnn-lm checkpoints/librispeech

For an acoustic model from elsewhere (KIND:NAME, see 'asr transcribe --help'), the graph is compiled here from an n-gram
model of any size (--ngram); phones need --lexicon. An ONNX file is copied into the bundle; a network of torchaudio or
of the transformers hub is only named in it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", help="folder of the bundle; its name becomes the name of the bundle")
    parser.add_argument(
        "--acoustic-model",
        required=True,
        nargs="+",
        help="a checkpoint of 'asr fit' (several are averaged), the folder of another bundle, or KIND:NAME, a CTC "
        "network from elsewhere",
    )
    parser.add_argument("--recipe", help="the YAML file that the checkpoint was trained with")
    parser.add_argument("--graph", help="decoding graph of 'asr graph'")
    parser.add_argument("--ngram", help="with KIND:NAME, n-gram model of words, of any size, to compile a graph from")
    parser.add_argument("--small-ngram", help="the n-gram model that the graph was built from, ARPA or binary")
    parser.add_argument("--large-ngram", help="a larger n-gram model, ARPA or binary")
    parser.add_argument(
        "--rnn-lm", help="recurrent language model: a checkpoint of 'asr fit', an exported folder, or a bundle"
    )
    parser.add_argument("--lexicon", help="the pronunciations that the graph was built from, for exact word times")
    parser.add_argument(
        "--denominator",
        help="denominator graph that the acoustic model was trained with (the denominator.npz of 'asr chain'), for "
        "adaptation to speakers",
    )
    parser.add_argument(
        "--decoding",
        help="YAML or JSON file with the tuned decoding options of each mode (default: those of the bundle that the "
        "acoustic model is from)",
    )
    parser.add_argument(
        "--default-mode",
        choices=list(MODES),
        help="the mode to use when none is given (default: the best one that the parts allow)",
    )
    parser.add_argument("--card", help="Markdown file that says what the bundle was trained on and its error rates")
    parser.add_argument("--full-precision", action="store_true", help="store weights as float32 instead of float16")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.output)
    is_external = any(name.partition(":")[0] in KINDS for name in args.acoustic_model)
    bundle = _external(args, folder.name) if is_external else _assembled(args, folder.name)
    bundle.default_mode = args.default_mode
    chosen_mode(bundle, "auto")
    _check_decoding(bundle)
    graph_file = Path(args.graph) if args.graph is not None else None
    bundle.save(folder, half_precision=not args.full_precision, graph_file=graph_file)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    print(json.dumps({"bundle": str(folder), "megabytes": round(num_bytes / 1e6, 1)}))
    return 0


def _external(args: argparse.Namespace, name: str) -> Bundle:
    """The bundle of an acoustic model from elsewhere."""
    for option in ("recipe", "small_ngram"):
        if getattr(args, option) is not None:
            raise AsrError(
                f"--{option.replace('_', '-')} cannot be used with {args.acoustic_model[0]}, whose graph is compiled "
                "here or given with --graph; give its n-gram model with --ngram."
            )
    if len(args.acoustic_model) > 1:
        raise AsrError("--acoustic-model: only checkpoints of 'asr fit' can be averaged; give one KIND:NAME.")
    with graph_notice() as progress:
        bundle = bundle_with_acoustic_model(
            args.acoustic_model[0], None, args.ngram, args.lexicon, progress, graph=args.graph
        )
    bundle = bundle.with_language_models(args.large_ngram, args.rnn_lm)
    decoding = _by_mode(_mapping(Path(args.decoding))) if args.decoding else bundle.decoding
    return replace(bundle, name=name, decoding=decoding, card=_text(Path(args.card)) if args.card else "")


def _assembled(args: argparse.Namespace, name: str) -> Bundle:
    """The bundle of parts made by this program."""
    if args.graph is None:
        raise AsrError("--graph is missing: a bundle needs a decoding graph; make one with 'asr graph'.")
    if args.ngram is not None:
        raise AsrError("--ngram needs an acoustic model KIND:NAME; name the graph's n-gram model with --small-ngram.")
    acoustics = _acoustics([Path(path) for path in args.acoustic_model], args.recipe)
    graph = DecodingGraph.load(args.graph)
    graph.require_tokens(acoustics.tokens)
    return Bundle(
        name=name,
        features=acoustics.features,
        acoustic_model=acoustics.network,
        graph=graph,
        small_ngram=_ngram(args.small_ngram),
        large_ngram=_ngram(args.large_ngram),
        rnn_lm=read_rnn_lm(args.rnn_lm) if args.rnn_lm else None,
        lexicon=Lexicon.for_words([args.lexicon], graph.vocabulary.words) if args.lexicon else None,
        denominator=acoustics.denominator
        if args.denominator is None
        else DenominatorGraph.load(Path(args.denominator)),
        decoding=_by_mode(_mapping(Path(args.decoding)) if args.decoding else acoustics.decoding),
        card=_text(Path(args.card)) if args.card else "",
    )


def _by_mode(decoding: dict[str, Any]) -> dict[str, Any]:
    """The decoding options by the current names of the modes."""
    return {OLD_MODES.get(mode, mode): options for mode, options in decoding.items()}


def _check_decoding(bundle: Bundle) -> None:
    """Checks the decoding options of all modes."""
    for mode in bundle.decoding:
        if mode not in MODES:
            raise AsrError(f"--decoding: there is no mode {mode!r}; there are {', '.join(MODES)}.")
        recognition_settings(bundle, mode, {})


class _Acoustics(NamedTuple):
    network: ModelSpec
    features: ModelSpec
    tokens: TokenTable
    decoding: dict[str, dict[str, Any]]
    denominator: DenominatorGraph | None = None


def _acoustics(paths: list[Path], recipe: str | None) -> _Acoustics:
    """The acoustic model, and the decoding options of the bundle that it is from."""
    if any(path.is_dir() for path in paths):
        if len(paths) > 1:
            raise AsrError(
                "--acoustic-model: only checkpoints of 'asr fit' can be averaged; give these, or one bundle."
            )
        bundle = Bundle.load(paths[0])
        return _Acoustics(
            bundle.acoustic_model, bundle.features, bundle.graph.tokens, bundle.decoding, bundle.denominator
        )
    if recipe is None:
        raise AsrError(f"{paths[0]}: a checkpoint needs --recipe, the YAML file that it was trained with.")
    from asr.models.checkpoint import network_from_checkpoint

    network, tokens = network_from_checkpoint(paths, recipe)
    fbank = _mapping(Path(recipe)).get("data", {}).get("init_args", {}).get("fbank", {})
    # Dither is for training only.
    features = {name: value for name, value in fbank.get("init_args", {}).items() if name != "dither"}
    return _Acoustics(network, ModelSpec("Fbank", features, Fbank(**features)), tokens, {})


def _ngram(path: str | None) -> NgramLM | None:
    if path is None:
        return None
    model = read_ngram_lm(path)
    model.name = Path(path).name  # not its path at the time
    return model


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(_text(path))
    except ValueError as error:
        raise AsrError(f"{path}: this is not valid YAML or JSON ({error}).") from error
    if not isinstance(content, dict):
        raise AsrError(f"{path}: the file does not contain a mapping of names to values.")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise AsrError(f"{path}: the file cannot be read ({reason}).") from error
