"""`asr bundle`: assembles, lists, fetches and describes bundles, which `asr transcribe` and torch.hub load."""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from asr import hub
from asr.audio.fbank import Fbank
from asr.bundle import FILE_NAME, Bundle, all_bundle_folders, read_card, read_manifest, read_rnn_lm
from asr.cli.main import Command
from asr.cli.options import (
    bundle_with_network,
    fetched_bundle_folder,
    fetched_path_or_bundle,
    fetching,
    found_rnn_lm,
)
from asr.cli.printing import print_record
from asr.decoding.build import OLD_MODES, chosen_mode, modes_of, recognition_settings
from asr.decoding.settings import MODES
from asr.decoding.words import lexicon_of_graph
from asr.errors import AsrError, printable
from asr.graph.decoding_graph import DecodingGraph
from asr.graph.denominator_graph import DenominatorGraph
from asr.lm.ngram.io import read_ngram_lm
from asr.lm.ngram.model import NgramLM
from asr.models.external.base import KINDS
from asr.models.tdnnf import Ensemble
from asr.options import flag_of
from asr.serialization import ModelSpec, atomic_folder, fingerprint_of_description, output_path
from asr.text.documents import parse_yaml, read_text
from asr.text.symbols import TokenTable

BUNDLE_HELP = """Assembles trained parts into one folder: acoustic model, decoding graph and language models.

'asr bundle list', 'asr bundle fetch' and 'asr bundle info' list, fetch and describe existing bundles.

Larger language models need the n-gram model of the graph (--small-ngram), whose scores they replace.

example:
  asr bundle checkpoints/an4 --acoustic-model exp/am/checkpoints/last.ckpt --recipe recipes/an4/am.yaml \\
      --graph graph.safetensors --small-ngram 3gram.arpa --rnn-lm exp/lm/checkpoints/last.ckpt --card card.md
  asr bundle mine --acoustic-model checkpoints/librispeech --graph my-words.safetensors --small-ngram my-words.arpa
  asr bundle both --acoustic-model checkpoints/librispeech second --graph graph.safetensors --small-ngram 3gram.arpa
  asr bundle theirs --acoustic-model onnx:model.onnx --ngram 3gram.arpa --rnn-lm checkpoints/librispeech

For an acoustic model from elsewhere (KIND:NAME, see 'asr transcribe --help-all'), the graph is compiled here from an
n-gram model of any size (--ngram); phones need --lexicon. An ONNX file is copied into the bundle; a network of
torchaudio or of the transformers hub is only named in it."""


def add_bundle_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output", type=output_path, help="folder of the bundle; its name becomes the name of the bundle"
    )
    parser.add_argument(
        "--acoustic-model",
        required=True,
        nargs="+",
        help="a checkpoint of 'asr fit' (the weights of several are averaged), another bundle, named as "
        "for 'asr transcribe --bundle' (the scores of several TDNN-F are averaged), or KIND:NAME, a CTC network from "
        "elsewhere",
    )
    parser.add_argument("--recipe", help="the YAML file that the checkpoint was trained with")
    parser.add_argument("--graph", help="decoding graph of 'asr graph'")
    parser.add_argument("--ngram", help="with KIND:NAME, n-gram model of words, of any size, to compile a graph from")
    parser.add_argument("--small-ngram", help="the n-gram model that the graph was built from, ARPA or binary")
    parser.add_argument("--large-ngram", help="a larger n-gram model, ARPA or binary")
    parser.add_argument(
        "--rnn-lm", help="recurrent language model: a checkpoint of 'asr fit', an exported folder, or another bundle"
    )
    parser.add_argument(
        "--lexicon",
        nargs="+",
        metavar="FILE",
        help="the pronunciations that the graph was built from, for exact word times; the first file that has a word "
        "wins",
    )
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
    parser.add_argument(
        "--byte-matrices",
        action="store_true",
        help="store the acoustic model's matrices and the language model's word vectors as 8-bit integers with a scale "
        "for each row, which halves their files; where the acoustic model's products are of 8-bit integers "
        "(--acoustic-precision auto), its results stay the same",
    )
    parser.add_argument(
        "--compress-ngrams",
        action="store_true",
        help="compress the n-gram models to about 40 %%; they are then decompressed into memory instead of mapped",
    )


def run_bundle(args: argparse.Namespace) -> int:
    folder: Path = args.output
    name = folder.resolve().name
    is_external = any(name.partition(":")[0] in KINDS for name in args.acoustic_model)
    bundle = _external(args) if is_external else _assembled(args, name)
    decoding = _mapping(Path(args.decoding)) if args.decoding else bundle.decoding
    bundle = replace(
        bundle,
        name=name,
        decoding={OLD_MODES.get(mode, mode): options for mode, options in decoding.items()},
        default_mode=args.default_mode,
        card=read_text(args.card) if args.card else "",
    )
    chosen_mode(bundle, "auto")
    _check_decoding(bundle)
    graph_file = Path(args.graph) if args.graph is not None else None
    bundle.save(
        folder,
        half_precision=not args.full_precision,
        graph_file=graph_file,
        byte_matrices=args.byte_matrices,
        compress_ngrams=args.compress_ngrams,
    )
    print_record({"bundle": str(folder), "megabytes": round(folder_bytes(folder) / 1e6, 1)}, sys.stdout)
    return 0


def _external(args: argparse.Namespace) -> Bundle:
    """The bundle of an acoustic model from elsewhere."""
    for option in ("recipe", "small_ngram"):
        if getattr(args, option) is not None:
            raise AsrError(
                f"{flag_of(option)} cannot be used with {args.acoustic_model[0]}, whose graph is compiled "
                "here or given with --graph; give its n-gram model with --ngram."
            )
    if args.denominator is not None:
        raise AsrError(
            f"--denominator cannot be used with {args.acoustic_model[0]}: only networks of this program adapt to "
            "speakers; leave it out."
        )
    if len(args.acoustic_model) > 1:
        raise AsrError("--acoustic-model: only checkpoints of 'asr fit' can be averaged; give one KIND:NAME.")
    if args.lexicon is not None and len(args.lexicon) > 1:
        raise AsrError(f"--lexicon: {args.acoustic_model[0]} takes one file; give one.")
    return bundle_with_network(args, args.acoustic_model[0], args.lexicon[0] if args.lexicon else None, None)


def _assembled(args: argparse.Namespace, name: str) -> Bundle:
    """The bundle of parts made by this program."""
    if args.graph is None:
        raise AsrError("--graph is missing: a bundle needs a decoding graph; make one with 'asr graph'.")
    if args.ngram is not None:
        raise AsrError("--ngram needs an acoustic model KIND:NAME; name the graph's n-gram model with --small-ngram.")
    acoustics = _acoustics([fetched_path_or_bundle(name) for name in args.acoustic_model], args.recipe)
    graph = DecodingGraph.load(args.graph)
    graph.require_tokens(acoustics.tokens)
    bundle = Bundle(
        name=name,
        features=acoustics.features,
        acoustic_model=acoustics.network,
        graph=graph,
        small_ngram=_ngram(args.small_ngram),
        large_ngram=_ngram(args.large_ngram),
        rnn_lm=read_rnn_lm(found_rnn_lm(args.rnn_lm)) if args.rnn_lm else None,
        lexicon=lexicon_of_graph(args.lexicon, graph) if args.lexicon else None,
        denominator=acoustics.denominator
        if args.denominator is None
        else DenominatorGraph.load(Path(args.denominator)),
        decoding=acoustics.decoding,
    )
    bundle.check({part: getattr(args, part) for part in ("small_ngram", "large_ngram", "rnn_lm")})
    return bundle


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
    """The acoustic model, and the decoding options of the first bundle that it is from."""
    if any(path.is_dir() for path in paths):
        if recipe is not None:
            raise AsrError("--recipe has no effect with a bundle; leave it out, or give a checkpoint.")
        if not all(path.is_dir() for path in paths):
            raise AsrError("--acoustic-model: give checkpoints or bundles, not both.")
        bundles = [Bundle.load(path) for path in paths]
        first = bundles[0]
        network = first.acoustic_model if len(bundles) == 1 else _ensemble(paths, bundles)
        return _Acoustics(network, first.features, first.graph.tokens, first.decoding, first.denominator)
    if recipe is None:
        raise AsrError(f"{paths[0]}: a checkpoint needs --recipe, the YAML file that it was trained with.")
    from asr.models.checkpoint import network_from_checkpoint

    features = _features(Path(recipe))
    fbank: Any = features.network
    network, tokens = network_from_checkpoint(paths, recipe, fbank.arguments)
    return _Acoustics(network, features, tokens, {})


def _features(recipe: Path) -> ModelSpec:
    """The filterbank of a recipe's data; the default where the recipe has none, or Lightning's null."""
    section: Any = _mapping(recipe)
    for name in ("data", "init_args", "fbank", "init_args"):
        section = (isinstance(section, dict) and section.get(name)) or {}
    # Dither is for training only.
    arguments = {name: value for name, value in section.items() if name != "dither"}
    try:
        return ModelSpec("Fbank", arguments, Fbank(**arguments))
    except TypeError as error:
        raise AsrError(f"{recipe}: data.init_args.fbank: {error}.") from error


def _ensemble(paths: list[Path], bundles: list[Bundle]) -> ModelSpec:
    """The networks of several bundles as one."""
    fits = [(bundle.features.arguments, bundle.graph.tokens.tokens) for bundle in bundles]
    for path, fit in zip(paths, fits, strict=True):
        if fit != fits[0]:
            raise AsrError(
                f"{path}: its network reads other features or has other tokens than that of {paths[0]}; give bundles "
                "whose networks agree in both."
            )
    try:
        return Ensemble.of([bundle.acoustic_model for bundle in bundles])
    except ValueError as error:
        raise AsrError(f"--acoustic-model: the networks cannot be one acoustic model: {error}.") from error


def _ngram(path: str | None) -> NgramLM | None:
    if path is None:
        return None
    model = read_ngram_lm(path)
    model.name = Path(path).name  # not its path at the time
    return model


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(read_text(path))
    except ValueError as error:
        raise AsrError(f"{path}: this is not valid YAML or JSON ({error}).") from error
    if not isinstance(content, dict):
        raise AsrError(f"{path}: the file does not contain a mapping of names to values.")
    return content


LIST_HELP = """Lists the bundles on this machine: those of the checkout, and fetched ones.

A bundle that is not listed is fetched on first use, or by 'asr bundle fetch'. Fetched bundles are in the folder that
ASR_CACHE names, or else in asr/ in the user's cache folder; deleting a folder there deletes the bundle."""


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object per line instead of the table")


def run_list(args: argparse.Namespace) -> int:
    here = [(folder.name, folder) for folder in all_bundle_folders()] + hub.cached_bundles()
    width = max((len(name) for name, _ in here), default=0) + 2
    for name, folder in here:
        num_bytes = folder_bytes(folder)
        if args.json:
            print_record({"name": name, "folder": str(folder), "megabytes": round(num_bytes / 1e6, 1)}, sys.stdout)
        else:
            print(f"{name:<{width}}{num_bytes / 1e6:8.1f} MB  {folder}")
    if not here:
        print(
            f"asr: there is no bundle on this machine; fetch one with 'asr bundle fetch' "
            f"({', '.join(hub.KNOWN_BUNDLES)}, https://... or hf:owner/name).",
            file=sys.stderr,
        )
    return 0


def folder_bytes(folder: Path) -> int:
    """The bytes of all files of a bundle."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


FETCH_HELP = """Fetches a bundle, checks it, and prints its folder.

Files that are already on this machine are not fetched again. After an interruption, repeat the command: it continues
where the transfer stopped. All files are compared with the checksums in the bundle.

environment:
  ASR_CACHE     the folder for fetched bundles (default: asr/ in the user's cache folder)
  ASR_BUNDLES   address of the folder that an4 and librispeech are fetched from
  HF_TOKEN      access token for private repositories on the Hugging Face Hub
  HF_ENDPOINT   address of another hub

examples:
  asr bundle fetch hf:owner/name
  asr bundle fetch https://example.org/bundles/mine --output mine"""


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", help="https://..., hf:owner/name, hf:owner/name@revision, an4 or librispeech")
    parser.add_argument("--output", type=output_path, metavar="FOLDER", help="copy the bundle to this folder as well")
    parser.add_argument("--refresh", action="store_true", help="fetch the files that have changed at the source")


def run_fetch(args: argparse.Namespace) -> int:
    source = hub.source_of(args.bundle)
    if args.refresh:
        if source is None:
            raise AsrError(
                f"--refresh has no effect on {args.bundle}, which names no source to fetch from; give https://... or "
                "hf:owner/name, or leave it out."
            )
        with fetching(args.bundle) as report:
            folder = hub.fetch(source, refresh=True, on_progress=report)
    else:
        folder = fetched_bundle_folder(args.bundle)
    manifest = read_manifest(folder)
    if args.output is not None:
        output: Path = args.output
        if output.exists() and not (output / FILE_NAME).is_file() and any(output.iterdir() if output.is_dir() else [1]):
            raise AsrError(f"{output}: this already exists and is not a bundle; name a new folder.")
        with atomic_folder(output) as partial:
            for name in (FILE_NAME, hub.CARD, *manifest["files"]):
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, partial / name)
        folder = output
    print(folder)
    return 0


INFO_HELP = """Shows the contents of a bundle: parts, sizes, modes (the default first) with their options, and its card.

The bundle is fetched if it is not on this machine. All files are compared with their checksums."""


def add_info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundle", nargs="?", help="folder, name, https://... or hf:owner/name (default: the preferred one)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run_info(args: argparse.Namespace) -> int:
    folder = fetched_bundle_folder(args.bundle)
    info = describe(folder)
    if args.json:
        print_record(info, sys.stdout)
        return 0
    lines = [f"{info['name']}  {info['megabytes']} MB  {info['folder']}"]
    lines += [f"  {part:<18}{text}" for part, text in info["parts"].items()]
    for mode in info["modes"]:
        options = info["decoding"].get(mode, {}).items()
        lines.append(f"  mode {mode:<13}{', '.join(f'{name} {value}' for name, value in options)}".rstrip())
    lines.append(f"  {'fingerprint':<18}{info['fingerprint']}")
    if info["card"]:
        lines.append(f"\n{info['card'].strip()}")
    print(printable("\n".join(lines)))
    return 0


_PARTS = "features acoustic_model graph small_ngram large_ngram rnn_lm lexicon denominator".split()


def describe(folder: Path) -> dict[str, Any]:
    """The contents of a bundle as JSON values; no model is loaded.

    Raises:
        AsrError: there is no bundle, or one of its files is damaged.
    """
    manifest = read_manifest(folder)
    parts = {}
    for part in _PARTS:
        if part not in manifest:
            continue
        entry = manifest[part]
        sizes = [manifest["files"][entry[key]]["num_bytes"] for key in ("file", "words") if key in entry]
        described = [str(entry["class"])] if "class" in entry else []
        parts[part] = ", ".join(described + ([f"{sum(sizes) / 1e6:.1f} MB"] if sizes else []))
    return {
        "name": manifest["name"],
        "folder": str(folder),
        "megabytes": round(folder_bytes(folder) / 1e6, 1),
        "parts": parts,
        "modes": modes_of(manifest, manifest.get("default_mode")),
        "decoding": {OLD_MODES.get(mode, mode): options for mode, options in manifest["decoding"].items()},
        "fingerprint": fingerprint_of_description(manifest),
        "card": read_card(folder),
    }


SUBCOMMANDS = {
    "bundle": Command(BUNDLE_HELP, add_bundle_arguments, run_bundle),
    "bundle list": Command(LIST_HELP, add_list_arguments, run_list),
    "bundle fetch": Command(FETCH_HELP, add_fetch_arguments, run_fetch),
    "bundle info": Command(INFO_HELP, add_info_arguments, run_info),
}
