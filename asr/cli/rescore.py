"""`asr rescore`: rescores lattices and n-best lists of other recognizers with one of our language models."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asr.bundle import Bundle, local_bundle_folder, read_rnn_lm
from asr.cli.options import bytes_from, fetched_bundle_folder, found_rnn_lm, local_rnn_lm
from asr.cli.output import STANDARD_OUTPUT
from asr.decoding.k2_lattice import read_k2_lattices
from asr.decoding.kaldi_lattice import is_binary_lattice, read_kaldi_archive, read_word_ids
from asr.decoding.nbest_io import has_word_ids, read_n_best, read_n_best_folder, visible_files
from asr.decoding.slf import read_slf_lattice
from asr.decoding.word_lattice import (
    Candidate,
    Rescored,
    RescoringScales,
    WordLattice,
    rescore_lattice,
    rescore_list,
)
from asr.errors import AsrError
from asr.lm.cached.approximations import CacheOptions
from asr.lm.cached.engine import CachedRNNLM
from asr.lm.combine import LISTED_SHARE, Interpolated, mapped_to
from asr.lm.interface import LanguageModel
from asr.lm.ngram.io import read_ngram_lm
from asr.results import Word
from asr.serialization import require_writable, write_whole_text
from asr.text.documents import READING_ERRORS, open_text, unreadable
from asr.text.symbols import Vocabulary, ordinary_words
from asr.transcripts import FORMATS, Transcript, format_transcript, plain_name

_SLF = (".slf", ".lat")
_LATTICES = (*_SLF, ".pt")
_ARCHIVES = ("lat.", "lattices.")
_FRAME_SECONDS, _MAX_CONTEXTS, _RNN_WEIGHT, _CACHE_MB = 0.01, 64, 0.5, 1000
_TIMED = ("ctm", "stm")
_SCALES = {
    "--am-scale": "weight of acoustic scores (default: the file's acscale, or 1)",
    "--old-lm-scale": "weight of the other recognizer's language model (default: half of the file's lmscale, or 0.5)",
    "--lm-scale": "weight of our language model (default: half of the file's lmscale, or 0.5)",
    "--word-insertion-penalty": "added for each word (default: the file's wdpenalty, or 0)",
}

HELP = """Rescores lattices and n-best lists of other recognizers with one of our language models, and prints the words.

The type of an input is recognized by its content or suffix. Files may be compressed (.gz, .xz):
  FOLDER         its lattices (.slf, .lat, .pt, lat.*), or n-best lists of Kaldi (words_text, ac_cost, lm_cost) or SRILM
                 (a file for each utterance)
  .slf, .lat     a lattice of HTK
  .pt            a lattice of k2 or icefall, torch.save(fsa.as_dict(), ...); needs --words
  lat.1.gz, ...  a Kaldi archive, binary or text ('lattice-copy ark:... ark,t:...'), compact or not; needs --words
  .jsonl         n-best lists: {"id": ..., "nbest": [{"text": ..., "score": ...}, ...]}, also those of 'asr transcribe'
  other text     n-best lists, one sentence per line: id<TAB>words or id<TAB>score<TAB>words; or one of SRILM's
                 three formats, with the utterance's name as the file name

The total of a sentence is am-scale * acoustic score + old-lm-scale * the other recognizer's language model score +
lm-scale * our language model's score + word-insertion-penalty * words, in natural logs. If a sentence has only one
score, it is the acoustic one. Kaldi's graph costs count as language model scores. Words are looked up in the vocabulary
as spelled, then in upper case, then in lower case; unknown words are scored as <unk> and keep their spelling. Several
sentences in a row are scored one by one if the file says where they end: see docs/rescoring.md.

examples:
  asr rescore lattices/*.slf --bundle librispeech
  asr rescore lat.1.gz --words words.txt --am-scale 0.1 --rnn-lm exp/lm/last.ckpt --output-format ctm
  asr rescore nbest.jsonl --ngram 4gram.arpa --jsonl --nbest 10"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", help="files of lattices or n-best lists, or folders of them")
    parser.add_argument(
        "--words", metavar="FILE", help="Kaldi's words.txt, which maps the numbers in lattices to words"
    )
    model = parser.add_argument_group("language model", "A recurrent and an n-gram model are interpolated.")
    model.add_argument(
        "--bundle",
        metavar="BUNDLE",
        help="the large language models of this bundle (default: the preferred bundle, if no model is given)",
    )
    model.add_argument(
        "--rnn-lm",
        metavar="FOLDER",
        help="a recurrent model: exported, a checkpoint, or a bundle; or transformers:NAME, an AutoModelForCausalLM of "
        "transformers; with --bundle, instead of its own",
    )
    model.add_argument(
        "--ngram", metavar="FILE", help="an n-gram model, ARPA or binary; with --bundle, instead of its own"
    )
    model.add_argument(
        "--cache-mb",
        type=float,
        metavar="MB",
        help=f"memory for the recurrent model's caches; less is slower (default: {_CACHE_MB})",
    )
    model.add_argument(
        "--rnn-weight",
        type=float,
        metavar="NUMBER",
        help=f"interpolation weight of the recurrent model (default: {_RNN_WEIGHT})",
    )
    scales = parser.add_argument_group("scales")
    for flag, text in _SCALES.items():
        scales.add_argument(flag, type=float, metavar="NUMBER", help=text)
    lattices = parser.add_argument_group("lattices")
    lattices.add_argument(
        "--frame-seconds",
        type=float,
        metavar="SECONDS",
        help=f"time between two frames of a lattice of Kaldi or k2; chain models have 0.03 (default: {_FRAME_SECONDS})",
    )
    lattices.add_argument(
        "--max-contexts",
        type=int,
        metavar="NUMBER",
        help=f"maximum number of word histories per state (default: {_MAX_CONTEXTS})",
    )
    parser.add_argument(
        "--nbest",
        type=int,
        default=1,
        metavar="N",
        help="output the N best sentences of lists, with --jsonl (default: 1)",
    )
    parser.add_argument(
        "--jsonl", action="store_true", help="print one JSON object per utterance, with times and scores"
    )
    parser.add_argument(
        "--output-format",
        choices=[name for name, one in FORMATS.items() if one.is_joinable and name != "jsonl"],
        help="format of the output; txt: the words alone (default: lines 'id words', with _ for spaces in ids)",
    )
    parser.add_argument("--output", metavar="FILE", help="write to this file (default: -, stdout)")


def run(args: argparse.Namespace) -> int:
    frame_seconds = _FRAME_SECONDS if args.frame_seconds is None else args.frame_seconds
    max_contexts = _MAX_CONTEXTS if args.max_contexts is None else args.max_contexts
    if args.nbest < 1 or max_contexts < 1 or not 0 < frame_seconds < math.inf:
        raise AsrError("--nbest, --max-contexts and --frame-seconds must be above 0.")
    if args.nbest > 1 and not args.jsonl:
        raise AsrError("--nbest needs --jsonl: the further sentences are a JSON field.")
    if args.jsonl and args.output_format:
        raise AsrError("--jsonl and --output-format exclude each other; give one of them.")
    output = args.output if args.output != STANDARD_OUTPUT else None
    outputs = [Path(output)] if output else []
    inputs = [
        *args.inputs,
        args.words,
        args.ngram,
        args.rnn_lm and local_rnn_lm(args.rnn_lm),
        local_bundle_folder(args.bundle),
    ]
    require_writable(*outputs, inputs=inputs)
    # Everything is read before the language model is loaded, which may take longer.
    utterances, has_failed = _read_utterances(args, frame_seconds)
    if not utterances:
        raise AsrError(
            f"{' '.join(args.inputs)}: there are no lattices or n-best lists; the other recognizer wrote none."
        )
    needs_words = any(one.needs_words for one in utterances)
    has_frames = any(isinstance(one.alternatives, WordLattice) and not one.has_seconds for one in utterances)
    are_lattices = {isinstance(one.alternatives, WordLattice) for one in utterances}
    for flag, is_given, has_effect, needs in (
        ("--max-contexts", args.max_contexts is not None, True in are_lattices, "lattices"),
        ("--frame-seconds", args.frame_seconds is not None, has_frames, "lattices of Kaldi or k2"),
        ("--nbest", args.nbest > 1, False in are_lattices, "lists"),
        ("--words", args.words is not None, needs_words, "lattices and lists with numbers for words"),
    ):
        if is_given and not has_effect:
            raise AsrError(f"{flag} has no effect here: it is for {needs}, which the inputs are not; leave it out.")
    if has_frames and args.frame_seconds is None and (args.jsonl or args.output_format in _TIMED):
        print(
            f"asr: lattices of Kaldi and k2 count frames, which are taken to be {_FRAME_SECONDS} s apart; give "
            "--frame-seconds if the other recognizer's are not (chain models: 0.03).",
            file=sys.stderr,
        )
    if args.output_format in _TIMED:
        _require_times(args.output_format, utterances)
    lm = language_model(args, utterances)
    lines = []
    for utterance in utterances:
        ranked = _rescored(args, utterance, lm, max_contexts)
        if not ranked:
            print(f"asr: {utterance.name}: there is no complete sentence in the input.", file=sys.stderr)
            has_failed = True
        line = _line(args, utterance, ranked)
        if output:
            lines.append(line)
        else:
            sys.stdout.write(line)
        lm.retain(lm.start(0))  # no utterance refers to histories of an earlier one
    if output:
        write_whole_text(output, "".join(lines))
    return 1 if has_failed else 0


class _Utterance(NamedTuple):
    name: str
    alternatives: WordLattice | list[Candidate]
    has_seconds: bool = False
    needs_words: bool = False


def _read_utterances(args: argparse.Namespace, frame_seconds: float) -> tuple[list[_Utterance], bool]:
    """The utterances of all inputs that can be read, and whether there are others, whose errors are printed.

    Raises:
        AsrError: no input can be read.
    """
    words = read_word_ids(args.words) if args.words else None
    found: list[_Utterance] = []
    errors: list[AsrError] = []
    for path in itertools.chain.from_iterable(map(_expanded, map(Path, args.inputs))):
        try:
            for utterance in _utterances(path, words, frame_seconds):
                found.append(utterance)
        except AsrError as error:
            errors.append(error)
    if errors and not found:
        raise errors[0]
    for one in errors:
        print(f"asr: error: {one}", file=sys.stderr)
    return found, bool(errors)


def _utterances(path: Path, words: Mapping[int, str] | None, frame_seconds: float) -> Iterator[_Utterance]:
    if path.is_dir():
        needs_words = has_word_ids(path)
        for name, candidates in read_n_best_folder(path, words).items():
            yield _Utterance(name, candidates, needs_words=needs_words)
        return
    kind = _kind(path)
    if kind in ("kaldi", "k2") and words is None:
        raise AsrError(f"{path}: its words are numbers; give --words, the words.txt that defines them.")
    if kind == "slf":
        lattice = read_slf_lattice(path)
        yield _Utterance(lattice.name, lattice, has_seconds=True)
    elif kind == "k2":
        for lattice in read_k2_lattices(path, words or {}, frame_seconds):
            yield _Utterance(lattice.name, lattice, needs_words=True)
    elif kind == "kaldi":
        for lattice in read_kaldi_archive(path, words or {}, frame_seconds):
            yield _Utterance(lattice.name, lattice, needs_words=True)
    else:
        for name, candidates in read_n_best(path).items():
            yield _Utterance(name, candidates)


def _expanded(path: Path) -> list[Path]:
    """The lattices of a folder, as Kaldi and `asr transcribe --lattices` name them; any other path itself."""
    if not path.is_dir():
        return [path]
    files = visible_files(path)
    return [one for one in files if _suffix(one) in _LATTICES or one.name.startswith(_ARCHIVES)] or [path]


def _suffix(path: Path) -> str:
    """The suffix in lower case, without that of compression."""
    is_packed = path.suffix.lower() in (".gz", ".xz")
    return (Path(path.stem).suffix if is_packed else path.suffix).lower()


def _kind(path: Path) -> str:
    if not path.is_file():
        raise AsrError(f"{path}: there is no such file or folder.")
    with open_text(path, "lattice or list") as file:
        try:
            head = file.read(4096)
        except READING_ERRORS as error:
            raise unreadable(path, "lattice or list", error) from error
    if head.startswith(b"PK\x03\x04"):
        return "k2"
    if _suffix(path) in _SLF or head.startswith((b"VERSION=", b"# Header")):
        return "slf"
    if is_binary_lattice(head):
        return "kaldi"
    lines = head.split(b"\n")
    # After a name comes a lattice, which may be empty; a list has the words on the same line, or at least a tab.
    # A JSON object without spaces is a single word, too.
    is_name = len(lines) > 1 and len(lines[0].split()) == 1 and b"\t" not in lines[0] and not head.startswith(b"{")
    return "kaldi" if is_name and lines[1].split()[:1] in ([], [b"0"]) else "list"


def language_model(args: argparse.Namespace, utterances: Iterable[_Utterance] = ()) -> LanguageModel:
    """The language model that the arguments name; a Transformer alone has the words of the utterances.

    Raises:
        AsrError: a model cannot be read, the weight or the cache's size is out of range or has no effect, or the
            bundle has no large language model.
    """
    rnn_weight = _RNN_WEIGHT if args.rnn_weight is None else args.rnn_weight
    if not 0.0 <= rnn_weight <= 1.0:
        raise AsrError(f"--rnn-weight {rnn_weight}: give a number from 0 to 1.")
    cache_bytes = bytes_from("--cache-mb", _CACHE_MB if args.cache_mb is None else args.cache_mb)
    ngram: Any = read_ngram_lm(args.ngram) if args.ngram else None
    vocabulary: Vocabulary | None = None if ngram is None else ngram.vocabulary
    network = None
    if args.bundle or not (args.rnn_lm or args.ngram):
        bundle = Bundle.load(fetched_bundle_folder(args.bundle))
        if not args.rnn_lm and bundle.rnn_lm is not None:
            network = bundle.rnn_lm.network
        ngram = ngram or bundle.large_ngram
        vocabulary = bundle.graph.vocabulary  # alternatives of its recognizer have words that the network lacks
        if not args.rnn_lm and network is None and ngram is None:
            raise AsrError(f"bundle {bundle.name}: there is no large language model; give --rnn-lm or --ngram.")
    if args.rnn_lm:
        network = read_rnn_lm(found_rnn_lm(args.rnn_lm), vocabulary or _words_of(utterances)).network
    if args.rnn_weight is not None and (network is None or ngram is None):
        raise AsrError("--rnn-weight has no effect here: it needs a recurrent and an n-gram model; leave it out.")
    if args.cache_mb is not None and network is None:
        raise AsrError("--cache-mb has no effect here: it needs a recurrent model; leave it out.")

    def mapped(model: LanguageModel) -> LanguageModel:
        return model if vocabulary is None else mapped_to(model, vocabulary, LISTED_SHARE, warn=False)

    if network is None:
        return mapped(ngram)
    engine = CachedRNNLM(network, CacheOptions(capacity_bytes=cache_bytes))  # type: ignore[arg-type]
    if ngram is None:
        return mapped(engine)
    return Interpolated([mapped(engine), mapped(ngram)], [rnn_weight, 1.0 - rnn_weight])


def _require_times(output_format: str, utterances: Iterable[_Utterance]) -> None:
    """Refuses inputs without times before they are rescored, which may take long."""
    for name, found, *_ in utterances:
        if isinstance(found, WordLattice):
            has_times = bool(found.time) or not found.arcs
        else:
            has_times = all(one.times or not one.words for one in found)
        if not has_times:
            raise _without_times(name, output_format)


def _without_times(name: str, output_format: str) -> AsrError:
    return AsrError(
        f"{name}: {output_format} needs times, which this input does not have; choose another --output-format."
    )


def _words_of(utterances: Iterable[_Utterance]) -> Vocabulary:
    """The words of all lattices and lists."""
    words: set[str] = set()
    for found in (utterance.alternatives for utterance in utterances):
        if isinstance(found, WordLattice):
            words.update(arc.word for arc in found.arcs if arc.word)
        else:
            words.update(word for candidate in found for word in candidate.words)
    return Vocabulary(ordinary_words(sorted(words)))


def _rescored(args: argparse.Namespace, utterance: _Utterance, lm: LanguageModel, max_contexts: int) -> list[Rescored]:
    found = utterance.alternatives
    am_scale, lm_scale, penalty = found.scales if isinstance(found, WordLattice) else (1.0, 1.0, 0.0)

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    scales = RescoringScales(
        given(args.am_scale, am_scale),
        given(args.old_lm_scale, lm_scale / 2),
        given(args.lm_scale, lm_scale / 2),
        given(args.word_insertion_penalty, penalty),
    )
    if isinstance(found, WordLattice):
        best = rescore_lattice(found, lm, scales, max_contexts)
        return [] if best is None else [best]
    return rescore_list(found, lm, scales)


def _line(args: argparse.Namespace, utterance: _Utterance, ranked: list[Rescored]) -> str:
    best = ranked[0] if ranked else Rescored((), 0.0, 0.0, 0.0, 0.0)
    if args.output_format:
        words = tuple(Word(word.text, word.start or 0.0, word.end or word.start or 0.0) for word in best.words)
        if args.output_format in _TIMED and any(word.start is None for word in best.words):
            raise _without_times(utterance.name, args.output_format)
        transcript = Transcript(plain_name(utterance.name), words, words[-1].end if words else 0.0, {})
        return format_transcript(transcript, args.output_format)
    if not args.jsonl:
        # A name with spaces, such as that of a file, could not be told from the words.
        return f"{'_'.join(utterance.name.split())} {best.text}".rstrip() + "\n"
    words_as_dict = [
        {
            "word": word.text,
            **({} if word.start is None else {"start": round(word.start, 3), "end": round(word.end or 0, 3)}),
        }
        for word in best.words
    ]
    record = {"id": utterance.name, "text": best.text, "words": words_as_dict, **_details(best)}
    if args.nbest > 1:
        record["nbest"] = [{"text": one.text, **_details(one)} for one in ranked[: args.nbest]]
    return json.dumps(record, ensure_ascii=False) + "\n"


def _details(one: Rescored) -> dict[str, Any]:
    scores = {"am": one.am_score, "old_lm": one.old_lm_score, "lm": one.lm_score, "total": one.total}
    record: dict[str, Any] = {"scores": {name: round(score, 4) for name, score in scores.items()}}
    return record if not one.sentence_ends else {**record, "sentence_ends": list(one.sentence_ends)}
