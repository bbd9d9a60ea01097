"""`asr lm vocabulary`: the word list that a graph and its language models share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from asr.errors import AsrError
from asr.lm.corpus import read_word_stream
from asr.serialization import require_writable
from asr.text.normalize import read_text
from asr.text.symbols import SPECIAL_WORDS, Vocabulary

NAME = "lm vocabulary"


HELP = """Choose a vocabulary: the most frequent words of some texts, those with a pronunciation if a lexicon is given.

Prints one JSON line; `coverage` is the share of the texts' running words that the vocabulary holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument("output", type=Path, help="word list to write, most frequent first, one word a line")
    parser.add_argument("--text", nargs="+", default=[], type=Path, help="sentences, one a line")
    parser.add_argument("--transcripts", nargs="+", default=[], type=Path, help="lines 'utterance-id WORDS' (Kaldi)")
    parser.add_argument("--lexicon", type=Path, help="keep words that stand first on a line of this file")
    parser.add_argument("--max-words", type=int, help="keep this many (default: all)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if not args.text and not args.transcripts:
        raise AsrError("Give texts to choose words from: --text or --transcripts.")
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
        raise AsrError(f"{args.lexicon}: it pronounces no word of the texts; are both in the same case?")
    Vocabulary(words[i] for i in ids).save(args.output)
    coverage = count[ids].sum() / stream.num_words
    report = {"words": len(ids), "word_types": len(words) - len(SPECIAL_WORDS), "coverage": round(float(coverage), 5)}
    print(json.dumps(report))
    return 0


def _first_words(path: Path) -> set[str]:
    return {line.split(None, 1)[0] for line in read_text(path, "lexicon").splitlines() if line.strip()}
