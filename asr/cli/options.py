"""The options that all commands which recognize speech have in common.

Old spellings work for one release, with a hint on stderr; `asr.decoding.build` knows what they stand for.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from asr import hub
from asr.bundle import (
    MODES_WITH,
    Bundle,
    bundle_folder,
    local_bundle_folder,
    local_path_or_bundle,
    path_or_bundle,
    read_manifest,
)
from asr.decoding.build import DECODERS, OLD_FIRST_PASSES, OLD_MODES
from asr.decoding.settings import MODES, OLD_NAMES, Pass, ResourceOptions, setting_options
from asr.decoding.token_passing import LM_FUSIONS
from asr.errors import AsrError
from asr.kernels.jit import torch_on_one_thread
from asr.lm.hot_words import DEFAULT_SCORE, read_hot_words
from asr.lm.transformers import is_transformer, without_kind
from asr.models.external.base import KINDS
from asr.options import Option, device_named, flag_of, options_of
from asr.recognizer import Recognizer
from asr.text.normalize import without_punctuation


def hint(text: str) -> None:
    """Tells the user about a new spelling, on stderr."""
    print(f"asr: hint: {text}; the old spelling will be removed in the next release.", file=sys.stderr)


def renamed(option: str, old: Mapping[str, str]) -> Callable[[str], str]:
    """A type for argparse that replaces old values of an option with new ones, and prints a hint."""

    def convert(value: str) -> str:
        if value in old:
            hint(f"{option} {value} is now {option} {old[value]}")
        return old.get(value, value)

    return convert


class _FirstPass(argparse.Action):
    """`--first-pass` as it was before `--decoder` and `--lm-fusion`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.decoder, lm_fusion = OLD_FIRST_PASSES[values]
        namespace.lm_fusion = lm_fusion
        hint(f"--first-pass {values} is now --decoder {namespace.decoder} --lm-fusion {lm_fusion}")


class _OldName(argparse.Action):
    """An option under its old name."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)
        hint(f"{option_string} is now {flag_of(self.dest)}")


def add_speaker_options(parser: argparse.ArgumentParser, whose: str) -> None:
    """Adds the options that say how to learn a speaker's voice; `whose` is what they say of the recordings."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--speaker-statistics",
        dest="speaker",
        action="store_const",
        const="statistics",
        default="",
        help=f"{whose}: normalize features by mean and variance of the recording and of up to a minute of the "
        "speaker's, which makes fewer errors in short recordings at hardly any cost",
    )
    group.add_argument(
        "--adapt",
        dest="speaker",
        action="store_const",
        const="transform",
        help=f"{whose}: first adapt to the voice on up to ten minutes of audio, without transcripts, which takes "
        "more than ten times as long as recognizing it",
    )


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which differences between words are no errors; `compared_text` follows them."""
    parser.add_argument("--ignore-case", action="store_true", help="compare words in upper case")
    parser.add_argument(
        "--ignore-punctuation",
        action="store_true",
        help="compare letters, digits and apostrophes only; other characters, such as hyphens, separate words",
    )


def compared_text(text: str, ignore_case: bool, ignore_punctuation: bool) -> str:
    """A text without what the options of `add_comparison_options` ignore."""
    text = without_punctuation(text) if ignore_punctuation else text
    return text.upper() if ignore_case else text


def speaker_flag(args: argparse.Namespace) -> str:
    """The option of `add_speaker_options` that was given."""
    return "--adapt" if args.speaker == "transform" else "--speaker-statistics"


def add_recognizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds bundle, mode, decoder, device and decoding options."""
    group = parser.add_argument_group("recognizer")
    group.add_argument(
        "--bundle",
        metavar="BUNDLE",
        help="folder of a trained bundle, its name in checkpoints/, or a bundle to fetch: an4, librispeech, "
        "https://... or hf:owner/name ('asr bundle fetch --help')",
    )
    group.add_argument(
        "--mode",
        type=renamed("--mode", OLD_MODES),
        choices=["auto", *MODES],
        default="auto",
        help=f"which language model decides; {listed(MODES)}; auto: the default of the bundle (default: auto)",
    )
    group.add_argument("--ngram-only", action="store_true", help="the same as --mode ngram")
    group.add_argument(
        "--acoustic-model",
        metavar="KIND:NAME",
        help=f"a CTC network from elsewhere, used instead of the bundle's; {listed(KINDS)}",
    )
    group.add_argument(
        "--ngram",
        metavar="FILE",
        help="with --acoustic-model, the n-gram model of words to compile its graph from, ARPA or binary, of any size "
        "(default: the bundle's); with it and without --bundle no bundle is read",
    )
    group.add_argument(
        "--graph",
        metavar="FILE",
        help="with --acoustic-model, a decoding graph for its tokens, used instead of compiling one; from 'asr graph', "
        "which also converts HLG.pt and HLG.fst; --ngram is then the model that the graph was built from",
    )
    group.add_argument(
        "--large-ngram",
        metavar="FILE",
        help="n-gram model, used instead of the bundle's large one: binary ('asr lm ngram --binary'), or ARPA, which "
        "is slow to load",
    )
    group.add_argument(
        "--rnn-lm",
        metavar="MODEL",
        help="recurrent model, used instead of the bundle's: from 'asr lm rnn export', a checkpoint of 'asr fit', or "
        "another bundle, named as for --bundle; or transformers:NAME, an AutoModelForCausalLM of transformers, a hub "
        "name or a local folder",
    )
    group.add_argument(
        "--hot-words",
        metavar="FILE",
        help="words and phrases to prefer, one on each line, with a score of its own after a colon: NEW YORK :3.5",
    )
    group.add_argument(
        "--hot-word-score",
        type=float,
        metavar="NUMBER",
        help=f"natural log, added for each word of a phrase in --hot-words (default: {DEFAULT_SCORE:g})",
    )
    group.add_argument("--decoder", choices=DECODERS, default="auto", help=f"{listed(DECODERS)} (default: auto)")
    group.add_argument(
        "--lm-fusion",
        choices=LM_FUSIONS,
        help=f"where the large language model is applied; {listed(LM_FUSIONS)} (default: chunks in token passing on "
        "a CPU, otherwise lattice)",
    )
    group.add_argument(
        "--no-confidences",
        action="store_true",
        help="do not compute calibrated word confidences",
    )
    group.add_argument("--first-pass", action=_FirstPass, choices=OLD_FIRST_PASSES, help=argparse.SUPPRESS)
    group.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one (default: auto)"
    )
    group.add_argument(
        "--lexicon",
        metavar="FILE",
        help="the pronunciations that the graph was built from, for exact word times (default: the bundle's, if it has "
        "them); with --acoustic-model, the words written in its tokens, needed only for phones",
    )
    for one in options_of(ResourceOptions).values():
        _add_option(group, one, f"default: {_shown(one)}")
    tuned = parser.add_argument_group(
        "decoding",
        "The defaults are the values that the bundle was tuned with. An option that would have no effect is rejected.",
    )
    for one in setting_options().values():
        _add_option(tuned, one, "")
    for old, new in OLD_NAMES.items():
        tuned.add_argument(flag_of(old), dest=new, type=float, action=_OldName, help=argparse.SUPPRESS)


def _add_option(group: argparse._ArgumentGroup, one: Option, note: str) -> None:
    if one.kind is bool:
        group.add_argument(one.flag, dest=one.name, action=argparse.BooleanOptionalAction, default=None, help=one.help)
        return
    text = one.help if not isinstance(one.choices, Mapping) else f"{one.help}; {listed(one.choices)}"
    metavar = None if one.choices else "MB" if one.unit else "NAME" if one.kind is str else "NUMBER"
    group.add_argument(
        one.flag,
        dest=one.name,
        type=float if one.unit else one.kind,
        choices=list(one.choices) or None,
        metavar=metavar,
        help=f"{text} ({note})" if note else text,
    )


def _shown(one: Option) -> str:
    if one.default is None:
        return "no limit" if one.unit else "the recognizer's"
    if one.kind is str:
        return str(one.default)
    return f"{one.default / 1e6:.0f}" if one.unit else f"{one.default:g}"


def given_options(args: argparse.Namespace, options: Mapping[str, Option]) -> dict[str, Any]:
    """The options that were given on the command line, with megabytes converted to bytes."""
    given = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
    return {
        name: bytes_from(options[name].flag, value) if options[name].unit else value for name, value in given.items()
    }


def refuse_without(
    needed: str, add_arguments: Callable[[argparse.ArgumentParser], None], args: argparse.Namespace
) -> None:
    """Refuses options that would have no effect because another one, `needed`, was not given.

    Args:
        needed: such as `--stream`.
        add_arguments: adds `needed` and the options that need it to a parser.
        args: the command line.

    Raises:
        AsrError: one of the options has another value than its default.
    """
    for flag in _given_flags(add_arguments, args):
        raise AsrError(f"{flag} has no effect without {needed}; give both, or leave it out.")


def refuse_options(
    beside: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    args: argparse.Namespace,
    allowed: Collection[str],
) -> None:
    """Refuses options that would have no effect because another one, `beside`, was given, except those `allowed`.

    Raises:
        AsrError: one of the options has another value than its default.
    """
    for flag in _given_flags(add_arguments, args, allowed):
        raise AsrError(f"{flag} has no effect with {beside}; leave it out.")


def _given_flags(
    add_arguments: Callable[[argparse.ArgumentParser], None], args: argparse.Namespace, leave_out: Collection[str] = ()
) -> Iterator[str]:
    """The flags of some options that were given, as their values are not the defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for action in parser._actions:
        if (given := getattr(args, action.dest)) == parser.get_default(action.dest) or action.dest in leave_out:
            continue
        is_off = isinstance(action, argparse.BooleanOptionalAction) and not given
        yield action.option_strings[-1 if is_off else 0]


def with_flags(error: AsrError, names: Collection[str]) -> AsrError:
    """An error about values of these names, with their flags instead: `--idle-seconds` for `idle_seconds`."""
    return AsrError(re.sub(r"\w+", lambda match: flag_of(match[0]) if match[0] in names else match[0], str(error)))


def listed(choices: Mapping[str, str]) -> str:
    """Choices and their descriptions, for help."""
    return "; ".join(f"{name}: {text}" for name, text in choices.items())


def recognizer_from(args: argparse.Namespace, mode: str | None = None) -> Recognizer:
    """Loads the recognizer that the arguments describe; `mode` overrides theirs.

    Raises:
        AsrError: the bundle or the device does not exist, or an option is out of range.
    """
    with errors_with_flags(args), torch_on_one_thread():  # its threads busy-wait; the graph is loaded in its own thread
        return _recognizer_from(args, mode)


@contextlib.contextmanager
def errors_with_flags(args: argparse.Namespace) -> Iterator[None]:
    """A block whose errors about options that were given call them by their flags."""
    try:
        yield
    except AsrError as error:
        options = setting_options() | options_of(ResourceOptions)
        flags = {name: one.flag for name, one in options.items() if "_" in name}  # such as --workers for num_workers
        flags["lm_fusion"] = "--lm-fusion"
        flags["hot_words"] = f"--hot-words {args.hot_words}"
        names, message = re.compile(rf"\b({'|'.join(flags)})\b"), str(error)
        if any(getattr(args, name) is not None for name in names.findall(message)):
            message = names.sub(lambda match: flags[match[0]], message)
        raise AsrError(message) from error


def _recognizer_from(args: argparse.Namespace, mode: str | None) -> Recognizer:
    options = given_options(args, setting_options())
    if args.ngram_only and args.mode not in ("auto", "ngram"):
        raise AsrError(f"--ngram-only and --mode {args.mode} exclude each other; give one of them.")
    hot_words, hot_word_score = hot_words_from(args)
    arguments: dict[str, Any] = {
        "mode": mode or ("ngram" if args.ngram_only else args.mode),
        "decoder": args.decoder,
        "lm_fusion": args.lm_fusion or "auto",
        "hot_words": hot_words,
        "hot_word_score": hot_word_score,
        "options": options,
        "resources": ResourceOptions(**given_options(args, options_of(ResourceOptions))),
    }
    if args.acoustic_model is not None:
        is_alone = args.bundle is None and any(part is not None for part in (args.ngram, args.lexicon, args.graph))
        base = None if is_alone else Bundle.load(fetched_bundle_folder(args.bundle))
        bundle = bundle_with_network(args, args.acoustic_model, args.lexicon, base)
        recognizer = Recognizer(bundle, **arguments)
    elif args.graph is not None:
        raise AsrError("--graph needs --acoustic-model; to combine a graph with a network of ours, use 'asr bundle'.")
    elif args.ngram is not None:
        raise AsrError("--ngram needs --acoustic-model; with a bundle, which has its own graph, use --large-ngram.")
    else:
        folder = fetched_bundle_folder(args.bundle)
        recognizer = Recognizer.from_folder(
            folder,
            large_ngram=args.large_ngram,
            rnn_lm=args.rnn_lm and found_rnn_lm(args.rnn_lm),
            lexicon=args.lexicon,
            **arguments,
        )
        if arguments["mode"] == "auto" and (args.large_ngram or args.rnn_lm):
            _tell_mode(recognizer.mode, read_manifest(folder).get("default_mode"))
    _refuse_unused_models(args, recognizer)
    if args.no_confidences:
        recognizer.calibration = None
    recognizer = recognizer.to(device_from(args.device))
    if not getattr(args, "stream", False):
        is_asked = getattr(args, "nbest", 1) > 1 or getattr(args, "lattices", None) is not None
        keeps_lattice = is_asked or recognizer.needs_lattices
        models, cache = recognizer.settings.models
        recognizer.refuse_unused(Pass(recognizer.mode, recognizer.lm_fusion, models, cache, keeps_lattice))
    return recognizer


def hot_words_from(args: argparse.Namespace) -> tuple[dict[str, float | None] | None, float]:
    """The hot words of `--hot-words`, or None, and the score of those that have none of their own.

    Raises:
        AsrError: the file cannot be read, or there is a score without a file.
    """
    if args.hot_words is None and args.hot_word_score is not None:
        raise AsrError("--hot-word-score has no effect without --hot-words; give both, or leave it out.")
    score = DEFAULT_SCORE if args.hot_word_score is None else args.hot_word_score
    return None if args.hot_words is None else read_hot_words(args.hot_words), score


def _tell_mode(mode: str, default: str | None) -> None:
    """Prints a hint if a language model of the user's has changed the mode."""
    if default not in (None, mode):
        print(
            f"asr: hint: the mode is {mode}, because the bundle's default, {default}, does not use the given language "
            "model; --mode chooses another.",
            file=sys.stderr,
        )


def _refuse_unused_models(args: argparse.Namespace, recognizer: Recognizer) -> None:
    if args.lm_fusion not in (None, "lattice") and recognizer.mode == "ngram":
        raise AsrError(
            f"--lm-fusion {args.lm_fusion} has no effect in the mode ngram, whose only language model is the graph's; "
            "leave it out, or give another --mode."
        )
    modes = Pass(recognizer.mode, recognizer.lm_fusion, *recognizer.settings.models).modes
    for name, users in MODES_WITH.items():
        if getattr(args, name) is not None and not users & set(modes):
            raise AsrError(
                f"{flag_of(name)} has no effect in the mode {recognizer.mode}; leave it out, or give "
                f"--mode {' or '.join(sorted(users))}."
            )


def recognizer_inputs(args: argparse.Namespace) -> list[str | Path | None]:
    """Files and folders that `recognizer_from` reads, which no output may overwrite."""
    network = None if args.acoustic_model is None else args.acoustic_model.partition(":")[2]
    neural = args.rnn_lm and local_rnn_lm(args.rnn_lm)
    others = (args.lexicon, args.ngram, args.graph, args.large_ngram, neural, args.hot_words)
    return [local_bundle_folder(args.bundle), network, *others]


def fetched_bundle_folder(bundle: str | None) -> Path:
    """`bundle_folder`, with a progress bar if the bundle has to be fetched."""
    with fetching(str(bundle)) as report:
        return bundle_folder(bundle, on_progress=report)


def fetched_path_or_bundle(name: str) -> Path:
    """`path_or_bundle`, with a progress bar if a bundle has to be fetched."""
    with fetching(name) as report:
        return path_or_bundle(name, on_progress=report)


def found_rnn_lm(name: str) -> str:
    """What `--rnn-lm` names, for `read_rnn_lm`: a file or folder, also of a bundle, or `transformers:NAME`.

    Raises:
        AsrError: as for `path_or_bundle`.
    """
    return name if is_transformer(name) else str(fetched_path_or_bundle(name))


def local_rnn_lm(name: str) -> str | Path:
    """The file or folder that `--rnn-lm` names, which no output may overwrite."""
    return without_kind(name) if is_transformer(name) else local_path_or_bundle(name)


def bundle_with_network(
    args: argparse.Namespace, acoustic_model: str, lexicon: str | None, base: Bundle | None
) -> Bundle:
    """A network from elsewhere with the words and language models of the arguments; `base` has those not given.

    Raises:
        AsrError: as for `bundle_with_acoustic_model`, or a language model cannot be read.
    """
    from asr.ctc.bundles import bundle_with_acoustic_model, graph_cache

    why = f"compiling a decoding graph for the acoustic model's tokens; needed once, it is kept in {graph_cache()}"
    with notice(why) as progress:
        bundle = bundle_with_acoustic_model(acoustic_model, base, args.ngram, lexicon, progress, graph=args.graph)
    return bundle.with_language_models(args.large_ngram, args.rnn_lm and found_rnn_lm(args.rnn_lm))


@contextlib.contextmanager
def fetching(name: str) -> Iterator[hub.Progress]:
    """Shows a progress bar on stderr, or one line if stderr is not a terminal; nothing if nothing is fetched."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = None

        def report(done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = progress.add_task(f"fetching {name}", total=total)
                if not console.is_terminal:
                    print(f"asr: fetching {name}, {total / 1e6:.1f} MB.", file=sys.stderr)
            progress.update(task, completed=done)

        yield report


def add_num_jobs(parser: argparse.ArgumentParser, work: str) -> None:
    """Adds `--num-jobs`, the number of threads that do some work; `require_num_jobs` checks it."""
    parser.add_argument(
        "--num-jobs",
        type=int,
        default=min(4, os.cpu_count() or 1),
        metavar="N",
        help=f"number of threads that {work} (default: %(default)s)",
    )


def require_num_jobs(num_jobs: int) -> None:
    """Checks `--num-jobs`.

    Raises:
        AsrError: it is below 1.
    """
    if num_jobs < 1:
        raise AsrError(f"--num-jobs {num_jobs}: give 1 or more.")


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on stderr if it is a terminal; to be called with the number of items done and of all."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def notice(why: str) -> Iterator[Callable[[str], None]]:
    """Says why the user has to wait, on stderr, once the function that it yields is called with a first step.

    Terminals show each step until the block ends.
    """
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        status: Any = None

        def show(step: str) -> None:
            nonlocal status
            if status is None:
                status = console.status(why)
                if console.is_terminal:
                    stack.enter_context(status)
                else:
                    print(f"asr: {why}.", file=sys.stderr)
            status.update(f"{why} ({step})")

        yield show


def bytes_from(option: str, megabytes: float) -> int:
    """The value of an option in MB, as bytes.

    Raises:
        AsrError: it is less than a byte or not finite.
    """
    if not 1e-6 <= megabytes < math.inf:
        raise AsrError(f"{option} {megabytes}: give a number of MB above 0.")
    return int(megabytes * 1e6)


def device_from(name: str) -> torch.device:
    """A device by its name, or for `auto` a GPU if there is one that torch can use.

    Raises:
        AsrError: there is no such device here, or torch cannot use it.
    """
    if name != "auto":
        return device_named(name, "--device")
    if torch.cuda.is_available():
        try:
            return device_named("cuda", "--device")
        except AsrError as error:
            warnings.warn(f"{error} The CPU is used instead.", stacklevel=2)
    return torch.device("cpu")
