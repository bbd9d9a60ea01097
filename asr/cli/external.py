"""`--transducer` and `--attention-model` of `asr transcribe` and `asr evaluate`: networks that write token after token,
and their decoders, beside the other recognizers."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asr.bundle import Bundle, local_path_or_bundle
from asr.cli.options import (
    add_recognizer_arguments,
    device_from,
    fetched_bundle_folder,
    found_rnn_lm,
    given_options,
    hot_words_from,
    listed,
    recognizer_from,
    recognizer_inputs,
    refuse_options,
    refuse_without,
    with_flags,
)
from asr.cli.output import maker_name, maker_of
from asr.decoding.settings import ResourceOptions
from asr.errors import AsrError
from asr.models import attention, transducers
from asr.models.attention import load_attention_model
from asr.models.transducers import load_transducer
from asr.options import flag_of, options_of
from asr.recognizer import Recognizer
from asr.serialization import fingerprint_of
from asr.streaming import StreamingOptions

if TYPE_CHECKING:
    from asr.fusion.recognizer import FusionRecognizer

# The recognizer's options that these networks have, too.
_SHARED = (
    *("bundle", "ngram", "rnn_lm", "rnn_weight", "hot_words", "hot_word_score", "device"),
    *("max_segment_seconds", "batch_seconds", "lm_scale", "word_insertion_penalty", "search_beam"),
)
_SOURCES = ("bundle", "ngram", "rnn_lm", "words", "hot_words")
# Kinds of networks, and what is said about them.
_KINDS = {
    "transducer": f"a transducer from elsewhere, used instead of a bundle's network; {listed(transducers.base.KINDS)}",
    "attention_model": f"the same for an encoder-decoder with attention, like Whisper; {listed(attention.base.KINDS)}",
}
# Options that only one kind has.
_OF_KIND = {
    "max_symbols_per_frame": "transducer",
    **dict.fromkeys(
        ("length_penalty", "no_speech_threshold", "max_tokens_per_second", "language", "task", "prompt"),
        "attention_model",
    ),
}
_SETTINGS: dict[str, tuple[type, str]] = {
    "beam_size": (int, "number of hypotheses that survive a step of the search"),
    "token_min_log_prob": (float, "tokens with a lower log-probability are not followed"),
    "internal_lm_scale": (float, "weight of the network's internal language model, which is subtracted"),
    "spelling_penalty": (float, "natural log, added for each word that is not listed; -inf: listed words only"),
    "max_symbols_per_frame": (int, "of a transducer, the most tokens in one frame"),
    "length_penalty": (float, "of an attention model: texts are compared by scores over lengths to this power"),
    "no_speech_threshold": (
        float,
        "of an attention model like Whisper: above this probability of silence, improbable texts are dropped",
    ),
    "max_tokens_per_second": (float, "of an attention model, the most tokens of a text for each second of audio"),
}
_OF_NETWORK = {
    "language": ("CODE", "of an attention model: the language of the speech, such as en (default: find out)"),
    "task": ("TASK", "of an attention model: transcribe (the default), or translate, which writes English"),
    "prompt": ("TEXT", "of an attention model: the text of the tokens before the first word (default: the network's)"),
}


def add_external_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--transducer`, `--attention-model` and the options that need one of them."""
    group = parser.add_argument_group(
        "transducers and attention models",
        textwrap.fill(
            f"Of the recognizer's options, {', '.join(map(flag_of, _SHARED))} act here, too. There is no language "
            "model unless one of the first three is given. Defaults: docs/transducers.md and docs/attention-models.md.",
            118,
            break_on_hyphens=False,
        ),
    )
    for kind, text in _KINDS.items():
        group.add_argument(flag_of(kind), metavar="KIND:NAME", help=text)
    group.add_argument("--words", metavar="FILE", help="the listed words, one per line (default: the n-gram model's)")
    for name, (number, text) in _SETTINGS.items():
        group.add_argument(flag_of(name), type=number, metavar="NUMBER", help=text)
    group.add_argument(
        "--plain-words",
        action=argparse.BooleanOptionalAction,
        help="find listed words in any letter case and with any punctuation (default: if they are all in one letter "
        "case and without punctuation, unlike what the network writes)",
    )
    for name, (metavar, text) in _OF_NETWORK.items():
        group.add_argument(flag_of(name), metavar=metavar, help=text)


def external_kind(args: argparse.Namespace) -> str | None:
    """`transducer`, `attention_model`, or None if neither was given.

    Raises:
        AsrError: both were given.
    """
    given = [kind for kind in _KINDS if getattr(args, kind) is not None]
    if len(given) > 1:
        raise AsrError(f"{flag_of(given[0])} and {flag_of(given[1])} exclude each other; leave out one of them.")
    return given[0] if given else None


def check_external_options(args: argparse.Namespace, excluded: Mapping[str, object]) -> None:
    """Refuses options that have no effect without a network from elsewhere, or with one.

    Args:
        args: the command line.
        excluded: flags of the command's own that these networks do not have, and whether they were given.

    Raises:
        AsrError: there is such an option.
    """
    kind = external_kind(args)
    if kind is None:
        refuse_without(" or ".join(map(flag_of, _KINDS)), add_external_arguments, args)
        return
    for flag in (flag for flag, is_given in excluded.items() if is_given):
        raise AsrError(f"{flag} and {flag_of(kind)} exclude each other; leave out one of them.")
    refuse_options(flag_of(kind), add_recognizer_arguments, args, _SHARED)
    for name, needed in _OF_KIND.items():
        if needed != kind and getattr(args, name) is not None:
            raise AsrError(f"{flag_of(name)} has no effect with {flag_of(kind)}; leave it out.")


def inputs_of_any(args: argparse.Namespace) -> list[str | Path | None]:
    """Files and folders that `any_recognizer_from` reads, which no output may overwrite."""
    name = _name(args)
    return [*recognizer_inputs(args), None if name is None else name.partition(":")[2], args.words]


def any_recognizer_from(args: argparse.Namespace) -> Recognizer | FusionRecognizer:
    """Loads the recognizer, or the network from elsewhere and the language models, that the arguments describe.

    Raises:
        AsrError: one cannot be loaded, or an option is out of range or would have no effect.
    """
    return recognizer_from(args) if external_kind(args) is None else _external_from(args)


def describe_any(args: argparse.Namespace, recognizer: Recognizer | FusionRecognizer) -> str:
    """A recognizer in words, for a line of statistics: mode and decoder, or the name of the network from elsewhere."""
    if not isinstance(recognizer, Recognizer):
        return str(_name(args))
    fusion = "" if recognizer.mode == "ngram" else f", language model in the {recognizer.lm_fusion}"
    models = recognizer.settings.language_models
    second = "" if models.second_pass == "none" else f", second pass {models.second_pass} {models.second_pass_mode}"
    return f"mode {recognizer.mode}, decoder {recognizer.decoder_name}{fusion}{second}"


def maker_of_any(
    args: argparse.Namespace,
    recognizer: Recognizer | FusionRecognizer,
    kind: str,
    streaming: StreamingOptions | None = None,
) -> str:
    """`asr.cli.output.maker_of`, and such a name for a network from elsewhere."""
    if isinstance(recognizer, Recognizer):
        return maker_of(recognizer, kind, streaming)
    sources = {name: getattr(args, name) for name in (*_KINDS, *_SOURCES)}
    decides = {
        "sources": {name: _fingerprint(source) for name, source in sources.items()},
        "config": _config(recognizer),
        "network": [getattr(args, name) for name in _OF_NETWORK],
        "weights": [args.rnn_weight, args.hot_word_score],
        "max_segment_seconds": recognizer.resources.max_segment_seconds,
        "kind": kind,
    }
    if streaming is not None:
        decides["streaming"] = asdict(streaming)
    return maker_name(decides, str(_name(args)), kind)


def described_system(args: argparse.Namespace, recognizer: FusionRecognizer) -> dict[str, Any]:
    """A network and its options for a report, like `asr.cli.evaluation_details.Details.describe`."""
    names = (*_KINDS, *_SOURCES, *_OF_NETWORK, "rnn_weight", "hot_word_score")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    config = _config(recognizer)
    shown = {name: str(value) if value in (math.inf, -math.inf) else value for name, value in config.items()}
    return {**options, "options": shown, "made_by": maker_of_any(args, recognizer, "")}


def _name(args: argparse.Namespace) -> str | None:
    """The name of the network."""
    kind = external_kind(args)
    return None if kind is None else str(getattr(args, kind))


def _external_from(args: argparse.Namespace) -> FusionRecognizer:
    from asr.attention import AttentionDecoder, AttentionRecognizer
    from asr.transducer import TransducerDecoder, TransducerRecognizer

    is_transducer = external_kind(args) == "transducer"
    decoder_type = TransducerDecoder if is_transducer else AttentionDecoder
    recognizer_type = TransducerRecognizer if is_transducer else AttentionRecognizer
    settings = {field.name: getattr(args, field.name) for field in fields(decoder_type.config_type)}
    settings = {name: value for name, value in settings.items() if value is not None}
    of_network = {name: getattr(args, name) for name in _OF_NETWORK if getattr(args, name) is not None}
    load: Any = load_transducer if is_transducer else load_attention_model
    try:
        resources = ResourceOptions(**given_options(args, options_of(ResourceOptions)))
        network = load(_name(args), **of_network).to(device_from(args.device))
        return recognizer_type(decoder_type(network, **_language_models(args), **settings), resources)
    except AsrError as error:
        raise with_flags(error, [*settings, "hot_words", "plain_words", "prompt", "max_segment_seconds"]) from error


def _config(recognizer: FusionRecognizer) -> dict[str, Any]:
    return asdict(recognizer.decoder.config)


def _language_models(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a decoder that say which words are likely."""
    bundle = None if args.bundle is None else Bundle.load(fetched_bundle_folder(args.bundle))
    ngram: Any = args.ngram
    lm: Any = args.rnn_lm and found_rnn_lm(args.rnn_lm)
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
    paths = local_path_or_bundle(source), Path(source.partition(":")[2] or source)
    return next((fingerprint_of(path) for path in paths if path.exists()), source)
