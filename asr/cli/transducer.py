"""`--transducer` of `asr transcribe` and `asr evaluate`: a transducer and its decoder, beside the other recognizers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asr.bundle import Bundle
from asr.cli.options import (
    add_recognizer_arguments,
    describe,
    device_from,
    fetched_bundle_folder,
    given_options,
    hot_words_from,
    listed,
    recognizer_from,
    refuse_options,
    refuse_without,
    with_flags,
)
from asr.cli.output import maker_name, maker_of
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.models.transducers import load_transducer
from asr.models.transducers.base import KINDS
from asr.options import flag_of, options_of
from asr.recognizer import Recognizer
from asr.serialization import fingerprint_of

if TYPE_CHECKING:
    from asr.transducer import TransducerRecognizer

# The recognizer's options that a transducer has, too.
_SHARED = (
    *("bundle", "ngram", "rnn_lm", "rnn_weight", "hot_words", "hot_word_score", "device"),
    *("max_segment_seconds", "batch_seconds", "lm_scale", "word_insertion_penalty", "search_beam"),
)
_SOURCES = ("bundle", "ngram", "rnn_lm", "words", "hot_words")
_OWN: dict[str, tuple[type, str]] = {
    "beam_size": (int, "number of hypotheses that survive a frame"),
    "max_symbols_per_frame": (int, "the most tokens in one frame"),
    "token_min_log_prob": (float, "tokens with a lower log-probability are not followed"),
    "internal_lm_scale": (float, "weight of the network's internal language model, which is subtracted"),
    "spelling_penalty": (float, "natural log, added for each word that is not listed; -inf: listed words only"),
}


def add_transducer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--transducer` and the options that need it."""
    group = parser.add_argument_group(
        "transducer",
        f"Of the recognizer's options, {', '.join(map(flag_of, _SHARED))} act here, too. There is no language model "
        "unless one of the first three is given. Defaults: docs/transducers.md.",
    )
    group.add_argument(
        "--transducer",
        metavar="KIND:NAME",
        help=f"a transducer from elsewhere, used instead of a bundle's network; {listed(KINDS)}",
    )
    group.add_argument("--words", metavar="FILE", help="the listed words, one per line (default: the n-gram model's)")
    for name, (kind, text) in _OWN.items():
        group.add_argument(flag_of(name), type=kind, metavar="NUMBER", help=text)
    group.add_argument(
        "--plain-words",
        action=argparse.BooleanOptionalAction,
        help="find listed words in any letter case and with any punctuation (default: if they are all in one letter "
        "case and without punctuation, unlike what the network writes)",
    )


def check_transducer_options(args: argparse.Namespace, excluded: Mapping[str, object]) -> None:
    """Refuses options that have no effect without a transducer, or with one.

    Args:
        args: the command line.
        excluded: flags of the command's own that transducers do not have, and whether they were given.

    Raises:
        AsrError: there is such an option.
    """
    if args.transducer is None:
        refuse_without("--transducer", add_transducer_arguments, args)
        return
    for flag in (flag for flag, is_given in excluded.items() if is_given):
        raise AsrError(f"{flag} and --transducer exclude each other; leave out one of them.")
    refuse_options("--transducer", add_recognizer_arguments, args, _SHARED)


def transducer_inputs(args: argparse.Namespace) -> list[str | Path | None]:
    """Files and folders that a transducer needs, which no output may overwrite."""
    return [None if args.transducer is None else args.transducer.partition(":")[2], args.words]


def any_recognizer_from(args: argparse.Namespace) -> Recognizer | TransducerRecognizer:
    """Loads the recognizer, or with `--transducer` the transducer and the language models, that the arguments describe.

    Raises:
        AsrError: one cannot be loaded, or an option is out of range or would have no effect.
    """
    return recognizer_from(args) if args.transducer is None else _transducer_from(args)


def describe_any(args: argparse.Namespace, recognizer: Recognizer | TransducerRecognizer) -> str:
    """A recognizer in words, for a line of statistics."""
    return describe(recognizer) if isinstance(recognizer, Recognizer) else str(args.transducer)


def maker_of_any(args: argparse.Namespace, recognizer: Recognizer | TransducerRecognizer, kind: str) -> str:
    """`asr.cli.output.maker_of`, and such a name for a transducer."""
    return maker_of(recognizer, kind) if isinstance(recognizer, Recognizer) else _maker_of(args, recognizer, kind)


def described_system(args: argparse.Namespace, recognizer: TransducerRecognizer) -> dict[str, Any]:
    """A transducer and its options for a report, like `asr.cli.evaluation_details.Details.describe`."""
    names = ("transducer", *_SOURCES, "rnn_weight", "hot_word_score")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    config = _config(recognizer)
    shown = {name: str(value) if value in (math.inf, -math.inf) else value for name, value in config.items()}
    return {**options, "options": shown, "made_by": _maker_of(args, recognizer, "")}


def _transducer_from(args: argparse.Namespace) -> TransducerRecognizer:
    from asr.transducer import TransducerDecoder, TransducerDecodingConfig, TransducerRecognizer

    settings = {field.name: getattr(args, field.name) for field in fields(TransducerDecodingConfig)}
    settings = {name: value for name, value in settings.items() if value is not None}
    resources = ResourceOptions(**given_options(args, options_of(ResourceOptions)))
    try:
        network = load_transducer(args.transducer).to(device_from(args.device))
        return TransducerRecognizer(TransducerDecoder(network, **_language_models(args), **settings), resources)
    except AsrError as error:
        raise with_flags(error, [*settings, "hot_words", "plain_words"]) from error


def _maker_of(args: argparse.Namespace, recognizer: TransducerRecognizer, kind: str) -> str:
    """A name that depends on everything that affects the words."""
    sources = {name: getattr(args, name) for name in ("transducer", *_SOURCES)}
    decides = {
        "sources": {name: _fingerprint(source) for name, source in sources.items()},
        "config": _config(recognizer),
        "weights": [args.rnn_weight, args.hot_word_score],
        "max_segment_seconds": recognizer.resources.max_segment_seconds,
        "kind": kind,
    }
    return maker_name(decides, args.transducer, kind)


def _config(recognizer: TransducerRecognizer) -> dict[str, Any]:
    return asdict(recognizer.decoder.config)


def _language_models(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `TransducerDecoder` that say which words are likely."""
    bundle = None if args.bundle is None else Bundle.load(fetched_bundle_folder(args.bundle))
    ngram, lm = args.ngram, args.rnn_lm
    if bundle is not None:
        ngram = ngram or bundle.large_ngram or bundle.small_ngram
        lm = lm or (None if bundle.rnn_lm is None else bundle)
    if args.rnn_weight is not None and (ngram is None or lm is None):
        raise AsrError("--rnn-weight needs an n-gram and a recurrent model, which it weighs; leave it out.")
    hot_words, score = hot_words_from(args)
    if hot_words is not None:
        hot_words = {phrase: score if own is None else own for phrase, own in hot_words.items()}
    models = {"ngram": ngram, "lm": lm, "words": args.words, "hot_words": hot_words, "lm_weight": args.rnn_weight}
    return {name: value for name, value in models.items() if value is not None}


def _fingerprint(source: str | None) -> str | None:
    """Changes with the content of a file or folder; a name on a hub stands for itself."""
    if source is None:
        return None
    # A file's own name may have a colon, too.
    paths = Path(source), Path(source.partition(":")[2] or source)
    return next((fingerprint_of(path) for path in paths if path.exists()), source)
