"""`asr chain`: prepares training by lattice-free MMI, from corpora and a first network."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asr.audio.fbank import Fbank
from asr.cli.options import add_num_jobs, fetched_bundle_folder, progress_bar, require_num_jobs
from asr.cli.printing import print_record
from asr.datasets.corpora import CORPORA
from asr.datasets.corpora.base import Utterance, checksum_of
from asr.errors import AsrError
from asr.serialization import output_path, require_writable, write_whole_text
from asr.text.lexicon import Lexicon

if TYPE_CHECKING:
    from asr.bundle import Bundle
    from asr.models.chain_corpus import Alignment, PreparedCorpus, PreparedUtterance

HELP = """\
Prepares the training of an acoustic model by lattice-free MMI (TDNN-F, recipes/librispeech/am_tdnnf.yaml):

  prepared/    filterbanks of all utterances at three speeds, through a telephone channel, with noise, with white
               noise, in rooms, among other voices, and in rooms with noise; and their alignments: the first from a
               bundle's network, better ones from small classifiers trained on it (--passes)
  states/      tied states of left biphones and the denominator graph, and pronunciation-scores.json for 'asr graph'

After an interruption, repeat the command: only what is missing is made. Existing features and alignments are kept, also
if the corpora are gone; those of other corpora, of transcripts or audio files that have changed since, or by another
bundle or lexicon, are refused. Put the more reliable lexicon first: all pronunciations of a word come from the first
file that has the word.

example:
  asr chain --corpus librispeech:train-clean-5=LibriSpeech an4:train=an4 --lexicon cmudict.dict lexicon.txt \\
      --bundle checkpoints/librispeech --held-out librispeech-1988 librispeech-2902 --output data/chain
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--corpus",
        nargs="+",
        required=True,
        metavar="NAME:PART=DIR",
        help="a corpus of 'asr prepare', one of its parts, and its folder",
    )
    parser.add_argument("--lexicon", nargs="+", type=Path, required=True, metavar="FILE", help="pronunciations")
    parser.add_argument(
        "--bundle", required=True, help="bundle whose network (CTC of phones, or tied states) makes the first alignment"
    )
    parser.add_argument("--output", type=output_path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--held-out",
        nargs="*",
        default=[],
        metavar="SPEAKER",
        help="speakers (CORPUS-SPEAKER) to leave out of training",
    )
    parser.add_argument(
        "--high-freq",
        type=float,
        default=5600.0,
        metavar="HZ",
        help="highest frequency of the filterbanks; 0 for the whole band (default: %(default)g)",
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=2,
        metavar="N",
        help="number of times that a classifier is trained and the speech realigned (default: %(default)s)",
    )
    parser.add_argument(
        "--max-columns",
        type=int,
        default=2000,
        metavar="N",
        help="at most this many tied states (default: %(default)s)",
    )
    parser.add_argument(
        "--long-histories",
        type=int,
        default=1200,
        metavar="N",
        help="number of histories of three phones in the phone model (default: %(default)s)",
    )
    parser.add_argument(
        "--min-score",
        nargs="*",
        default=[],
        metavar="CORPUS=SCORE",
        help="leave out utterances whose alignment has a lower mean score per frame",
    )
    add_num_jobs(parser, "decode audio and compute features")


def run(args: argparse.Namespace) -> int:
    """Prepares the training.

    Returns:
        0, or 1 if utterances were left out.
    """
    from asr.bundle import Bundle
    from asr.kernels.jit import torch_on_one_thread
    from asr.models.chain_corpus import PreparedCorpus, write_corpus
    from asr.models.chain_preparation import (
        prepare_chain,
        pronunciation_scores,
        require_corpora,
        require_names,
        usable_utterances,
    )
    from asr.models.phone_alignment import (
        align_with_bundle,
        aligned_phones,
        checksum_of_sources,
        refine_alignment,
        require_features,
    )
    from asr.models.state_tying import require_columns

    if args.passes < 0:
        raise AsrError(f"--passes {args.passes}: give 0 or more.")
    require_num_jobs(args.num_jobs)
    prepared, states_folder = args.output / "prepared", args.output / "states"
    min_score = dict(_scores(args.min_score))
    require_corpora(min_score, {name for name, _, _ in _corpora(args.corpus)}, "--min-score")
    fbank = Fbank(high_freq=args.high_freq)
    is_kept = (prepared / "utterances.json").is_file()
    if is_kept:
        corpus = PreparedCorpus(prepared)
        _check_kept(corpus, args.corpus, fbank)
        require_names(corpus, min_score, args.held_out)
    # What may not fit is found before the features are computed, and before hours of alignment.
    bundle = Bundle.load(fetched_bundle_folder(args.bundle))
    require_features(bundle, fbank.arguments)
    require_columns(aligned_phones(bundle), args.max_columns)
    if is_kept:
        lexicon = _lexicon(args.lexicon, _words(corpus.utterances), bundle)
    else:
        args.output.mkdir(parents=True, exist_ok=True)
        require_writable(args.output / "utterances.json")
        listed = _listed(_corpora(args.corpus))
        sources = {source: _checksum(part) for source, part in listed.items()}
        utterances = [(source.partition(":")[0], each) for source, part in listed.items() for each in part]
        lexicon = _lexicon(args.lexicon, _words(utterance for _, utterance in utterances), bundle)
        with progress_bar("features") as on_progress, torch_on_one_thread():
            write_corpus(
                prepared, utterances, lexicon, fbank, sources=sources, num_jobs=args.num_jobs, on_progress=on_progress
            )
        corpus = PreparedCorpus(prepared)
        require_names(corpus, min_score, args.held_out)
    made_from = checksum_of_sources(bundle, lexicon, _words(corpus.utterances), corpus.sources)
    with progress_bar("first alignment") as on_progress:
        align = partial(align_with_bundle, corpus, lexicon, bundle, on_progress)
        alignment = _kept_or_made(prepared / "alignment-bundle.npz", made_from, align)
    for number in range(1, args.passes + 1):
        refine = partial(refine_alignment, corpus, lexicon, alignment, seed=number, report=_say)
        alignment = _kept_or_made(prepared / f"alignment-{number}.npz", made_from, refine)
    train, _ = usable_utterances(corpus, alignment, min_score, args.held_out)
    states, graph = prepare_chain(corpus, alignment, train, args.max_columns, args.long_histories, states_folder)
    scores = pronunciation_scores(corpus, alignment, train, lexicon)
    write_whole_text(states_folder / "pronunciation-scores.json", json.dumps(scores))
    for reason in corpus.left_out[:5]:
        _say(f"left out: {reason}")
    summary = {
        "utterances": len(corpus),
        "trained_on": len(train),
        "left_out": len(corpus.left_out),
        "alignment": f"alignment-{args.passes}.npz" if args.passes else "alignment-bundle.npz",
        "num_tokens": states.num_columns,
        "denominator": {"states": graph.num_states, "arcs": len(graph.source)},
    }
    print_record(summary, sys.stdout)
    return int(bool(corpus.left_out))


def _words(utterances: Iterable[Utterance | PreparedUtterance]) -> list[str]:
    """The words of the transcripts, each once."""
    return sorted({word for utterance in utterances for word in utterance.text.split()})


def _lexicon(files: list[Path], words: list[str], bundle: Bundle) -> Lexicon:
    """The lexicon, in which the words of the transcripts are found in any case.

    Raises:
        AsrError: it has phones that the bundle's network does not have.
    """
    from asr.models.phone_alignment import require_phones

    lexicon = Lexicon.for_words(files, words)
    require_phones(bundle, lexicon, words)
    return lexicon


def _kept_or_made(path: Path, made_from: str, make: Callable[[], Alignment]) -> Alignment:
    """The alignment of an earlier run, or a new one, which is kept.

    Raises:
        AsrError: the kept one was made from something else.
    """
    from asr.models.chain_corpus import Alignment

    if not path.is_file():
        replace(make(), made_from=made_from).save(path)
    alignment = Alignment.load(path)
    if alignment.made_from not in ("", made_from):
        raise AsrError(
            f"{path}: the alignment kept there is by another --bundle or --lexicon, or of other features; delete "
            "the alignments in this folder, or choose another --output."
        )
    return alignment


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_kept(corpus: PreparedCorpus, wanted: list[str], fbank: Fbank) -> None:
    """Checks that features of an earlier run are those of this one.

    Raises:
        AsrError: they are of other corpora, or computed in another way.
    """
    given = list(_corpora(wanted))
    names = {_source(*part) for part in given}
    kept = corpus.sources
    reason = ""
    if kept.keys() != names if kept else corpus.corpora != {name.partition(":")[0] for name in names}:
        reason = f"of {', '.join(sorted(kept or corpus.corpora))} (--corpus)"
    elif corpus.fbank_arguments != fbank.arguments:
        reason = f"up to {corpus.fbank_arguments['high_freq']} Hz (--high-freq)"
    elif changed := _changed(given, kept):
        reason = f"of {', '.join(changed)} before transcripts or audio files changed"
    if reason:
        raise AsrError(
            f"{corpus.folder}: the features kept there are {reason}; delete them, or choose another --output."
        )


def _changed(given: list[tuple[str, str, Path]], kept: Mapping[str, str]) -> list[str]:
    """Which NAME:PART have other utterances or files than those of the features; a corpus that is gone has not."""
    there = _listed(part for part in given if part[2].exists())
    return [source for source, utterances in there.items() if kept.get(source, "") not in ("", _checksum(utterances))]


def _listed(parts: Iterable[tuple[str, str, Path]]) -> dict[str, list[Utterance]]:
    """NAME:PART -> its utterances."""
    listed: dict[str, list[Utterance]] = {}
    for name, part, folder in parts:
        listed.setdefault(_source(name, part, folder), []).extend(CORPORA[name].list_part(folder, part).utterances)
    return listed


def _checksum(utterances: list[Utterance]) -> str:
    """A checksum of what the features depend on; not of folders, which may be moved."""
    return checksum_of(utterances, lambda each: repr(replace(each, audio=Path(each.audio.name))))


def _source(name: str, part: str, _: Path) -> str:
    """NAME:PART with the name that the corpus has in manifests."""
    return f"{CORPORA[name].name}:{part}"


def _corpora(wanted: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Name, part and folder of each --corpus."""
    for each in wanted:
        where, _, folder = each.partition("=")
        name, _, part = where.partition(":")
        if name not in CORPORA or not part or not folder:
            raise AsrError(f"--corpus {each}: give NAME:PART=DIR, NAME being one of {', '.join(sorted(CORPORA))}.")
        yield name, part, Path(folder)


def _scores(pairs: list[str]) -> Iterator[tuple[str, float]]:
    for pair in pairs:
        corpus, _, score = pair.partition("=")
        try:
            yield corpus, float(score)
        except ValueError as error:
            raise AsrError(f"--min-score {pair}: give CORPUS=SCORE, such as librispeech=1.7.") from error
