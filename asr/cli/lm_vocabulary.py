"""`asr lm vocabulary`: chooses the vocabulary that a graph and its language models share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.serialization import atomic_path, require_writable
from asr.text.normalize import read_text
from asr.text.symbols import SPECIAL_WORDS, Vocabulary

NAME = "lm vocabulary"


HELP = """Chooses a vocabulary: the most frequent words of some texts; with a lexicon, only words that it contains.

Prints one JSON line; `coverage` is the fraction of the running words of the texts that are in the vocabulary."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("output", type=Path, help="file for the words, the most frequent first, one per line")
    parser.add_argument("--text", nargs="+", default=[], type=Path, help="files with one sentence per line")
    parser.add_argument(
        "--transcripts", nargs="+", default=[], type=Path, help="files with lines 'utterance-id WORDS', as in Kaldi"
    )
    parser.add_argument("--lexicon", type=Path, help="keep only words at the beginning of a line of this file")
    parser.add_argument("--max-words", type=int, help="maximum number of words (default: no limit)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if not args.text and not args.transcripts:
        raise AsrError("there are no texts to choose words from; give --text or --transcripts.")
    if args.max_words is not None and args.max_words < 1:
        raise AsrError(f"--max-words {args.max_words}: give 1 or more.")
    require_writable(args.output, inputs=[*args.text, *args.transcripts, args.lexicon])
    stream = read_word_stream(args.text, None, args.transcripts)
    words = stream.vocabulary.words
    count = np.bincount(stream.word_id, minlength=len(words))
    pronounced = _first_words(args.lexicon) if args.lexicon else set(words)
    ids = [i for i in range(len(SPECIAL_WORDS), len(words)) if words[i] in pronounced]
    ids = sorted(ids, key=lambda i: (-count[i], words[i]))[: args.max_words]
    if not ids:
        raise AsrError(f"{args.lexicon}: it contains no word of the texts; check that both have the same case.")
    with atomic_path(args.output) as partial:
        Vocabulary(words[i] for i in ids).save(partial)
    coverage = count[ids].sum() / stream.num_words
    report = {"words": len(ids), "word_types": len(words) - len(SPECIAL_WORDS), "coverage": round(float(coverage), 5)}
    print(json.dumps(report))
    return 0


def _first_words(path: Path) -> set[str]:
    return {line.split(None, 1)[0] for line in read_text(path, "lexicon").splitlines() if line.strip()}
