"""The options that all commands which recognize speech have in common.

Old spellings work for one release, with a hint on stderr; `asr.decoding.build` knows what they stand for.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from asr.bundle import bundle_folder
from asr.cli.bundle_fetch import fetching
from asr.decoding.build import DECODERS, MODES, OLD_FIRST_PASSES, OLD_MODES
from asr.decoding.token_passing import LM_FUSIONS
from asr.errors import AsrError
from asr.recognizer import Recognizer, ResourceOptions
from asr.text.lexicon import Lexicon

_NUMBERS: dict[str, tuple[type, str]] = {
    "search_beam": (
        float,
        "drop partial paths that are this much worse than the best one; larger is slower and better",
    ),
    "output_beam": (float, "drop lattice paths that are this much worse than the best one before rescoring"),
    "min_active_states": (int, "minimum number of partial paths that survive a frame, even outside the beam"),
    "max_active_states": (int, "maximum number of partial paths that survive a frame"),
    "am_scale": (float, "weight of the acoustic model"),
    "graph_scale": (float, "weight of the decoding graph and its n-gram"),
    "lm_scale": (float, "weight of the large language model"),
    "word_insertion_penalty": (float, "added for each word; negative for fewer words"),
    "rnn_weight": (float, "weight of the recurrent model where it is interpolated with an n-gram, 0 to 1"),
}


def hint(text: str) -> None:
    """Tells the user of a new spelling, on stderr."""
    print(f"asr: hint: {text}; the old spelling will go with the next release.", file=sys.stderr)


def renamed(option: str, old: Mapping[str, str]) -> Callable[[str], str]:
    """A type for argparse that replaces old values of an option by new ones, with a hint."""

    def convert(value: str) -> str:
        if value in old:
            hint(f"{option} {value} is now {option} {old[value]}")
        return old.get(value, value)

    return convert


class _FirstPass(argparse.Action):
    """`--first-pass` as it was before `--decoder` and `--lm-fusion`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.decoder, namespace.lm_fusion = OLD_FIRST_PASSES[str(values)]
        fusion = "" if namespace.lm_fusion == "lattice" else f" --lm-fusion {namespace.lm_fusion}"
        hint(f"--first-pass {values} is now --decoder {namespace.decoder}{fusion}")


def add_recognizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds bundle, mode, decoder, device and decoding options."""
    group = parser.add_argument_group("recognizer")
    group.add_argument(
        "--bundle",
        metavar="BUNDLE",
        help="folder of a trained bundle, its name in checkpoints/, or one that is fetched: an4, librispeech, "
        "https://... or hf:owner/name ('asr bundle fetch --help')",
    )
    group.add_argument(
        "--mode",
        type=renamed("--mode", OLD_MODES),
        choices=["auto", *MODES],
        default="auto",
        help=f"which language model decides; {_choices(MODES)}; auto: the best that the bundle has",
    )
    group.add_argument("--ngram-only", action="store_true", help="the same as --mode ngram")
    group.add_argument(
        "--large-ngram",
        metavar="FILE",
        help="n-gram model in the place of the bundle's large one: binary ('asr lm ngram --binary'), or ARPA, which is "
        "slow to load",
    )
    group.add_argument(
        "--rnn-lm",
        metavar="FOLDER",
        help="recurrent model in the place of the bundle's: from 'asr lm rnn export', a checkpoint of 'asr fit', or "
        "another bundle",
    )
    group.add_argument("--decoder", choices=DECODERS, default="auto", help=f"{_choices(DECODERS)} (default: auto)")
    group.add_argument(
        "--lm-fusion",
        choices=LM_FUSIONS,
        default="lattice",
        help=f"where the large language model acts; {_choices(LM_FUSIONS)} (default: lattice)",
    )
    group.add_argument("--first-pass", action=_FirstPass, choices=OLD_FIRST_PASSES, help=argparse.SUPPRESS)
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one")
    group.add_argument(
        "--max-segment-seconds", type=float, default=25.0, help="cut longer recordings at pauses (default: 25)"
    )
    group.add_argument(
        "--batch-seconds", type=float, default=100.0, help="audio that is recognized together (default: 100)"
    )
    group.add_argument(
        "--cache-mb",
        type=float,
        default=1000.0,
        metavar="MB",
        help="memory for the recurrent language model's caches; less is slower (default: 1000)",
    )
    group.add_argument(
        "--lm-device-mb",
        type=float,
        metavar="MB",
        help="device memory for the tables of the large language models; the rest stays in host memory (default: no "
        "limit)",
    )
    group.add_argument(
        "--lexicon",
        metavar="FILE",
        help="the pronunciations that the graph was built from, for exact word times (default: the bundle's, if it has "
        "them)",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="NUMBER",
        help="number of batches that are decoded at the same time, while the next one goes through the acoustic model; "
        "set OMP_NUM_THREADS=1 with it (default: 0, one after the other)",
    )
    tuned = parser.add_argument_group("decoding", "The default of each is what the bundle was tuned to.")
    for name, (kind, text) in _NUMBERS.items():
        tuned.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text, metavar="NUMBER")


def _choices(choices: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in choices.items())


def recognizer_from(args: argparse.Namespace, mode: str | None = None) -> Recognizer:
    """Loads the recognizer that the arguments describe; `mode` overrides theirs.

    Raises:
        AsrError: the bundle or the device does not exist, or an option is out of range.
    """
    options: dict[str, Any] = {name: getattr(args, name) for name in _NUMBERS if getattr(args, name) is not None}
    if args.ngram_only and args.mode not in ("auto", "ngram"):
        raise AsrError(f"--ngram-only and --mode {args.mode} exclude each other; give one of them.")
    with fetching(str(args.bundle)) as report:
        folder = bundle_folder(args.bundle, on_progress=report)
    recognizer = Recognizer.from_folder(
        folder,
        large_ngram=args.large_ngram,
        rnn_lm=args.rnn_lm,
        lexicon=Lexicon.from_file(args.lexicon) if args.lexicon is not None else None,
        mode=mode or ("ngram" if args.ngram_only else args.mode),
        decoder=args.decoder,
        lm_fusion=args.lm_fusion,
        options=options,
        resources=ResourceOptions(
            max_segment_seconds=args.max_segment_seconds,
            batch_seconds=args.batch_seconds,
            num_workers=args.workers,
            cache_bytes=_bytes("--cache-mb", args.cache_mb),
            lm_device_bytes=None if args.lm_device_mb is None else _bytes("--lm-device-mb", args.lm_device_mb),
        ),
    )
    return recognizer.to(device_from(args.device))


def describe(recognizer: Recognizer) -> str:
    """Mode and decoder in words, for a line of statistics."""
    fusion = "" if recognizer.mode == "ngram" else f", language model in the {recognizer.lm_fusion}"
    return f"mode {recognizer.mode}, decoder {recognizer.decoder_name}{fusion}"


def _bytes(option: str, megabytes: float) -> int:
    if not 0 <= megabytes < math.inf:
        raise AsrError(f"{option} {megabytes}: give a number of MB, 0 or more.")
    return int(megabytes * 1e6)


def device_from(name: str) -> torch.device:
    """A device by its name, or for `auto` a GPU where there is one.

    Raises:
        AsrError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise AsrError(f"--device {name}: there is no such device; give cpu, cuda or cuda:NUMBER.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise AsrError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs here; 'asr doctor' says more.")
    return device
