"""Which bundle a command takes where the user names none.

The options of every command that recognizes speech."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch

from asr.bundle import FILE_NAME
from asr.decoding.build import FIRST_PASSES, MODES
from asr.errors import AsrError
from asr.recognizer import Recognizer
from asr.text.lexicon import Lexicon

_CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"


_PREFERRED = "librispeech"


def bundle_folder(asked: str | None, checkpoints: Path = _CHECKPOINTS) -> Path:
    """The folder of a bundle.

    Args:
        asked: a folder, the name of a folder in `checkpoints`, or None for the variable ASR_BUNDLE, else the
            preferred one of `checkpoints`.
        checkpoints: the checkout's own bundles.

    Raises:
        AsrError: there is no such bundle.
    """
    own = sorted(path.parent for path in checkpoints.glob(f"*/{FILE_NAME}"))
    names = ", ".join(path.name for path in own) or "none"
    asked = asked or os.environ.get("ASR_BUNDLE")
    if asked:
        for folder in (Path(asked), checkpoints / asked):
            if (folder / FILE_NAME).is_file():
                return folder
        raise AsrError(f"{asked}: there is no bundle here ({FILE_NAME} is missing); checkpoints/ has: {names}.")
    if not own:
        raise AsrError(f"{checkpoints}: there is no trained bundle here; name one with --bundle.")
    return next((path for path in own if path.name == _PREFERRED), own[0])


_NUMBERS: dict[str, tuple[type, str]] = {
    "search_beam": (float, "partial paths this much worse than the best one are dropped; larger is slower and better"),
    "output_beam": (float, "lattice paths this much worse than the best one are dropped before rescoring"),
    "min_active_states": (int, "so many partial paths survive a frame even outside the beam"),
    "max_active_states": (int, "so many partial paths survive a frame at most"),
    "am_scale": (float, "weight of the acoustic model"),
    "graph_scale": (float, "weight of the graph and its n-gram"),
    "lm_scale": (float, "weight of the language model that acts on the fly"),
    "word_insertion_penalty": (float, "added for each word; negative for fewer words"),
    "rnn_weight": (float, "share of the recurrent model where it is interpolated with an n-gram, 0 to 1"),
}


def add_recognizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Bundle, mode, device and decoding options."""
    group = parser.add_argument_group("recognizer")
    group.add_argument("--bundle", help="folder of a trained bundle, or its name in checkpoints/")
    modes = "; ".join(f"{mode}: {text}" for mode, text in MODES.items())
    group.add_argument(
        "--mode",
        choices=["auto", *MODES],
        default="auto",
        help=f"{modes}; auto: the first of these that the bundle has",
    )
    group.add_argument("--ngram-only", action="store_true", help="the same as --mode ngram")
    group.add_argument(
        "--large-ngram",
        metavar="FILE",
        help="n-gram model to act on the fly, binary ('asr lm ngram --binary') or ARPA, which takes long to read",
    )
    group.add_argument(
        "--rnn-lm",
        metavar="FOLDER",
        help="recurrent model in the place of the bundle's: from 'asr lm rnn export', a checkpoint of 'asr fit', or a "
        "bundle",
    )
    group.add_argument(
        "--first-pass",
        choices=FIRST_PASSES,
        default="auto",
        help="; ".join(f"{name}: {text}" for name, text in FIRST_PASSES.items()),
    )
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU where there is one")
    group.add_argument(
        "--max-segment-seconds", type=float, default=25.0, help="longer recordings are cut at pauses (default 25)"
    )
    group.add_argument("--batch-seconds", type=float, default=100.0, help="audio recognized at a time (default 100)")
    group.add_argument(
        "--cache-mb",
        type=float,
        default=1000.0,
        help="what the recurrent language model's caches may hold, in MB; less is slower (default 1000)",
    )
    group.add_argument(
        "--lm-device-mb",
        type=float,
        help="device memory for the large language models' tables, in MB; the rest stays in host memory (default: all)",
    )
    group.add_argument(
        "--lexicon",
        help="the pronunciations that the graph was built from, for exact word times (default: the bundle's, if it has "
        "them)",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="NUMBER",
        help="search so many batches at a time while the next goes through the acoustic model; set OMP_NUM_THREADS=1 "
        "with it (default 0: one after the other)",
    )
    tuned = parser.add_argument_group("decoding", "what is not given is as the bundle was tuned")
    for name, (kind, text) in _NUMBERS.items():
        tuned.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text, metavar="NUMBER")


def recognizer_from(args: argparse.Namespace, mode: str | None = None) -> Recognizer:
    """Loads the recognizer that the arguments describe; `mode` overrides theirs.

    Raises:
        AsrError: the bundle or the device is not there, or an option is out of its range.
    """
    options: dict[str, Any] = {name: getattr(args, name) for name in _NUMBERS if getattr(args, name) is not None}
    if args.ngram_only and args.mode not in ("auto", "ngram"):
        raise AsrError(f"--ngram-only and --mode {args.mode} exclude each other; give one of them.")
    recognizer = Recognizer.from_folder(
        bundle_folder(args.bundle),
        large_ngram=args.large_ngram,
        rnn_lm=args.rnn_lm,
        mode=mode or ("ngram" if args.ngram_only else args.mode),
        first_pass=args.first_pass,
        max_segment_seconds=args.max_segment_seconds,
        batch_seconds=args.batch_seconds,
        num_workers=args.workers,
        lexicon=Lexicon.from_file(args.lexicon) if args.lexicon is not None else None,
        cache_bytes=_bytes("--cache-mb", args.cache_mb),
        lm_device_bytes=None if args.lm_device_mb is None else _bytes("--lm-device-mb", args.lm_device_mb),
        options=options,
    )
    return recognizer.to(device_from(args.device))


def _bytes(option: str, megabytes: float) -> int:
    if not 0 <= megabytes < math.inf:
        raise AsrError(f"{option} {megabytes}: give a number of MB, 0 or more.")
    return int(megabytes * 1e6)


def device_from(name: str) -> torch.device:
    """`auto`, or a device's name.

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
